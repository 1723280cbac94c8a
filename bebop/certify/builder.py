"""From the configuration of a certificate to the run that makes it."""

import contextlib
import dataclasses
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

import torch
from transformers import AutoConfig

from bebop.certify.plan import Plan, plan_settings
from bebop.certify.reference import LiveEngine, Reference
from bebop.certify.run import Run
from bebop.config_certify import CertifyConfig
from bebop.config_decoding import DecodingConfig
from bebop.model.checkpoint import load_tokenizer, resolve, stop_tokens
from bebop.preflight import check_model, prompts
from bebop.trajectory import SamplingParams

PLAIN = DecodingConfig(system="autoregressive", draft_tokens=0)  # what speculation is held against


class EngineModule(Protocol):
    """What the module of an engine offers."""

    def make(self, config: CertifyConfig) -> LiveEngine:
        """Reach it or start it; ``UserError`` if that cannot be."""


class ReferenceModule(Protocol):
    """What the module of a reference offers."""

    def make(self, config: CertifyConfig, engine: LiveEngine) -> Reference:
        """Load it; ``UserError`` if that cannot be."""


ENGINES = {
    "embedded": "bebop.certify.embedded",
    "sglang": "bebop.certify.sglang_server",
    "openai": "bebop.certify.openai_server",
    "function": "bebop.certify.function",
}
REFERENCES = {"model": "bebop.certify.model_reference", "server": "bebop.certify.served_reference"}


def made(config: CertifyConfig, stack: contextlib.ExitStack) -> Run:
    """The run; what it starts is given back when ``stack`` is left."""
    torch.set_num_threads(config.threads)
    check_model(config.model)
    source = prompts(config.model, config.task, config.max_length - config.sampling.max_new_tokens)
    source.prompt(config.first_prompt)
    engine = cast(EngineModule, import_module(ENGINES[config.engine.name])).make(config)
    stack.callback(engine.close)
    reference = None
    if config.reference in REFERENCES:
        module = cast(ReferenceModule, import_module(REFERENCES[config.reference]))
        reference = module.make(config, engine)
    other = _without_drafts(config, stack) if reference is None else None
    tokenizer = load_tokenizer(config.model)

    def prompt(index: int) -> Sequence[int]:
        return source.prompt(index).token_ids

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    return Run(engine, reference, prompt, plan(config, engine.white_box is not None), other, decode)


def plan(config: CertifyConfig, white_box: bool) -> Plan:
    """What is asked, and how much of it."""
    settings, weight = plan_settings(params(config), config.stress, white_box)
    vocabulary = AutoConfig.from_pretrained(resolve(config.model.path), local_files_only=True).vocab_size
    return Plan(
        settings=settings,
        white_box_weight=weight,
        vocabulary=int(vocabulary),
        tokens=config.tokens,
        cohort=config.cohort,
        alpha=config.alpha,
        limit_tv=config.limit_tv,
        logprobs=config.logprobs,
        dtype=config.model.dtype,
        seed=config.seed,
        first_prompt=config.first_prompt,
        stop_when_found=config.stop_when_found,
        progress=config.progress,
    )


def params(config: CertifyConfig) -> SamplingParams:
    """The claim: what every answer is asked for with, but for its seed."""
    asked = {field.name: getattr(config.sampling, field.name) for field in dataclasses.fields(config.sampling)}
    return SamplingParams(**asked, stop_token_ids=stop_tokens(config.model))


def _without_drafts(config: CertifyConfig, stack: contextlib.ExitStack) -> LiveEngine | None:
    """The engine that answers are held against where there is no reference; None: only repeats can be looked at."""
    if config.engine.name == "embedded":
        plain = dataclasses.replace(config, decoding=PLAIN, white_box=False)
    elif config.engine.other_url is not None:
        plain = dataclasses.replace(config, engine=dataclasses.replace(config.engine, url=config.engine.other_url))
    else:
        return None
    other = cast(EngineModule, import_module(ENGINES[plain.engine.name])).make(plain)
    stack.callback(other.close)
    return other
