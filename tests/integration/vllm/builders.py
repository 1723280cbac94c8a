"""Real vLLM on a small model, with the model runner that ``BEBOP_VLLM_RUNNER`` names: v1, or v2.

They cannot be in one process: the second takes Triton's interpreter, which vLLM looks for as it is imported. Since its
kernels are interpreted, it decodes some 40 tokens a second, and its tests take ``fewer`` of them.
"""

import dataclasses
import inspect
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any, TypeVar

import torch
from torch import Tensor

from bebop.certify.certificate import Certificate
from bebop.certify.function import FunctionEngine
from bebop.certify.model_reference import ModelReference
from bebop.certify.run import Plan, Run, plan_settings
from bebop.config.engines import VllmConfig
from bebop.config.job import JobConfig
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.served_engine import OutputChunk, ServedEngine
from bebop.rollout.vllm.builder import make
from bebop.rollout.vllm.core import Core, _Answer
from bebop.rollout.vllm.engine import VllmServer
from bebop.rollout.vllm.steps import StepRecord, Verified
from bebop.trajectory import Completion, SamplingParams
from tests.served_models import VOCAB, answers

Number = TypeVar("Number", int, float)
SLOTS = 256
ALPHA = 1e-4  # of certificates
FEW = 1500  # tokens of the second runner, some 40 s; a residual that is the target shows in 1,400
RUNNER = os.environ.get("BEBOP_VLLM_RUNNER", "v1")


def fewer(many: Number, few: Number) -> Number:
    """Tokens, completions or rounds of a test with the first runner, and with the second."""
    return many if RUNNER == "v1" else few


def with_vllm(config: JobConfig, on_update: str = "keep", **own: Any) -> JobConfig:
    settings = VllmConfig(**{"monitor_every": 1, "model_runner": RUNNER, **own})
    rollout = dataclasses.replace(
        config.rollout, engine="vllm", vllm=settings, slots=SLOTS, on_update=on_update
    )  # fmt: skip
    return dataclasses.replace(config, rollout=rollout)


@contextmanager
def engine(config: JobConfig, on_update: str = "keep", **own: Any) -> Iterator[ServedEngine]:
    """A real vLLM, always ended."""
    found, _ = make(with_vllm(config, on_update, **own))
    try:
        yield found
    finally:
        found.close()


def core(engine: ServedEngine) -> Core:
    """What touches vLLM; its thread rests while no request is open."""
    assert isinstance(engine.server, VllmServer)
    return engine.server.core


def with_update(engine: ServedEngine, recompute: bool) -> None:
    """What becomes of running answers while weights change, on an engine that is there."""
    assert isinstance(engine.server, VllmServer)
    engine.server.recompute = recompute


@contextmanager
def held(engine: ServedEngine, tokens: int) -> Iterator[None]:
    """Once an answer has so many tokens, or more, nothing is decoded until the block ends."""
    one, reached = core(engine), Event()
    step = one.step

    def hold() -> list[tuple[str, OutputChunk]]:
        longest = max((len(answer.token_ids) for answer in one._open.values()), default=0)
        if longest < tokens and not reached.is_set():
            return step()
        reached.set()
        time.sleep(0.005)
        return []

    one.step = hold  # type: ignore[method-assign]
    try:
        assert reached.wait(60)
        yield
    finally:
        one.step = step  # type: ignore[method-assign]


def verification() -> Any:
    """The module whose ``rejection_sample`` the runner calls."""
    if RUNNER == "v2":
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler as second

        return second
    from vllm.v1.sample import rejection_sampler as first

    return first


def verified_cycles(engine: ServedEngine, requests: Sequence[Request]) -> list[tuple[Request, list[int], Verified]]:
    """Decode, and return each verified cycle: its request, the tokens before it, what became of its drafts."""
    one, seen = core(engine), list[tuple[_Answer, int, Verified]]()
    take = one._take

    def recording(answer: _Answer, given: Any, record: StepRecord) -> None:
        if (verified := record.verified().get(answer.name)) is not None:
            seen.append((answer, len(answer.token_ids), verified))
        take(answer, given, record)

    one._take = recording  # type: ignore[method-assign]
    try:
        found = answers(engine, requests)
    finally:
        one._take = take  # type: ignore[method-assign]
    by_text = {tuple(c.token_ids.tolist()): request for c, request in zip(found, requests, strict=True)}
    assert len(by_text) == len(found), "two completions are equal"
    return [(by_text[tuple(answer.token_ids)], answer.token_ids[:before], one) for answer, before, one in seen]


@contextmanager
def recorded_drafts() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record every verification: drafts [N] of requests above temperature 0, and q [N, V] as it is taken for them."""
    module, seen = verification(), list[tuple[Tensor, Tensor]]()
    own = module.rejection_sample
    names = inspect.signature(inspect.unwrap(own))

    def recording(*args: Any, **named: Any) -> Any:
        given = names.bind(*args, **named).arguments
        if RUNNER == "v2":
            seen.append(_drafts_of_v2(given))
        elif given["draft_token_ids"].numel():  # a step that verifies no draft has no q
            seen.append(_drafts_of_v1(given))
        return own(*args, **named)

    module.rejection_sample = recording
    try:
        yield seen
    finally:
        module.rejection_sample = own


def _drafts_of_v1(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    return given["draft_token_ids"].clone(), given["draft_probs"].clone()


def _drafts_of_v2(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The last of each request's K + 1 rows has no draft; the draft of a row is the token of the next row."""
    begins, slots = given["cu_num_logits"].tolist(), given["expanded_idx_mapping"].long()
    rows = torch.tensor([row for a, b in itertools.pairwise(begins) for row in range(a, b - 1)]).long()
    slots, heat = slots[rows], given["temperature"][slots[rows]].float()
    q = given["draft_logits"][slots, given["expanded_local_pos"][rows].long()].float() / heat[:, None]
    return given["draft_sampled"][rows + 1].clone(), q.softmax(-1)


def assert_draws(seen: Sequence[tuple[Tensor, Tensor]], least: int) -> None:
    """Assert that drafts are draws from the q that verification takes for them; of flatter ones they are not."""
    drafts, q = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert len(drafts) >= least

    def deviation(q: Tensor) -> float:
        surprise = -q.clamp_min(1e-30).log()
        entropy = (q * surprise).sum(-1)
        variance = (q * surprise**2).sum(-1) - entropy**2
        found = surprise.gather(1, drafts.long()[:, None])[:, 0]
        return float((found - entropy).sum() / variance.sum().sqrt())

    assert abs(deviation(q)) < 4
    flatter = torch.where(q > 0, q**0.5, q)
    assert abs(deviation(flatter / flatter.sum(-1, keepdim=True))) > 6


def examined(engine: ServedEngine, policy: Policy, params: SamplingParams) -> Certificate:
    """Return the certificate of an engine in this process, asked for ``FEW`` tokens of a policy."""

    def ask(requests: list[Request]) -> list[Completion]:
        for request in requests:
            engine.add(request)
        done: dict[int, Completion] = {}
        while engine.unfinished:
            done |= {one.id: one.completion for one in engine.step()}
        return [done[request.id] for request in requests]

    settings, weight = plan_settings(params, 0.0, False)
    plan = Plan(
        settings=settings, white_box_weight=weight, vocabulary=VOCAB, tokens=FEW, cohort=64, alpha=ALPHA, limit_tv=0.5
    )
    return Run(FunctionEngine(ask), ModelReference(policy), certified_prompt, plan).run()


def certified_prompt(index: int) -> Sequence[int]:
    return 3, 1, 4, 1 + index % 9
