"""Text generation in this process, by the embedded engine with drafts: ``bebop.LLM``, modelled on vLLM's class.

Exact decoding systems leave the distribution of completions unchanged, whatever is drafted.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bebop.config.fields import MAX_SEED, check, from_dict
from bebop.config.job import DecodingConfig, ModelConfig, SamplingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.tasks.source import chat_encoder, open_text
from bebop.trajectory import Completion, FinishReason, SamplingParams

Message = Mapping[str, str]  # with role and content
Prompt = str | Sequence[int] | Sequence[Message]  # a raw text, token ids [P], or messages for the chat template
SAMPLED = tuple(field.name for field in dataclasses.fields(SamplingConfig))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One completion with its prompt, tokens and log-probs.

    >>> RequestOutput(prompt="1+1=", prompt_token_ids=(5, 9), text="2", token_ids=(7, 2), logprobs=(-0.1, -0.01),
    ...     finish_reason="stop", accept_length=2.0)  # doctest: +SKIP
    """

    prompt: str  # the text, after the chat template for messages; decoded for token ids
    prompt_token_ids: tuple[int, ...]  # [P]
    text: str  # without the stop token or stop text
    token_ids: tuple[int, ...]  # [T], the stop token included
    logprobs: tuple[float, ...]  # [T] log p under the target's distribution at this temperature and truncation
    finish_reason: FinishReason  # "stop": a stop token or a stop text; "length": max_new_tokens
    accept_length: float  # tokens per cycle of draft and verification; 1 without drafts, NaN without a cycle


class LLM:
    """Model with a decoding system, ready to generate. Not thread-safe."""

    def __init__(
        self,
        model: str | Policy = "tiny",
        *,
        decoding: str = "bebop",
        draft_tokens: int | Literal["auto"] | None = None,
        draft_temperature: float | Literal["auto"] | None = None,
        options: Mapping[str, Any] | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        device: str = "auto",
        init_mtp: bool = False,
        draft: str | None = None,
        slots: int = 32,
        max_length: int = 512,
    ) -> None:
        """Load the model; raise ``UserError`` for an impossible argument.

        Args:
            model: ``tiny``, ``smollm2``, a Hugging Face folder, or a loaded policy.
            decoding: a decoding system, as in ``decoding=NAME`` of a job.
            draft_tokens: K, drafts per cycle; None: the system's default.
            draft_temperature: None: the target's; 0: greedy drafts.
            options: options specific to the system, by name.
            dtype: data type of the weights; auto: that of the folder, float32 or bfloat16.
            device: auto, cpu, cuda or cuda:NUMBER.
            init_mtp: add a fresh head to a checkpoint that has none; ``smollm2`` always gets its trained one.
            draft: for ``decoding="draft_model"``: a smaller model with the same tokenizer, named like ``model``.
            slots: requests that are decoded in parallel.
            max_length: maximum tokens of prompt and completion.
        """
        check(decoding in SYSTEMS, "decoding", decoding, f"choose one of {', '.join(SYSTEMS)}")
        for name, value in (("slots", slots), ("max_length", max_length)):
            check(type(value) is int and value >= 1, name, value, "give 1 or more")
        system = SYSTEMS[decoding]
        chosen = {
            "system": decoding,
            "draft_tokens": system.draft_tokens if draft_tokens is None else draft_tokens,
            "draft_temperature": draft_temperature,
            "options": dict(options or {}),
        }
        self.decoding = from_dict(DecodingConfig, chosen, "decoding.")
        self.policy = model if isinstance(model, Policy) else self._load(model, dtype, device, init_mtp, draft)
        self.engine = TorchEngine(self.policy, self.decoding, slots=slots, max_length=max_length, measure=False)
        self._encode = chat_encoder(self.policy.tokenizer)

    def _load(self, path: str, dtype: Any, device: str, init_mtp: bool, draft: str | None) -> Policy:
        system = SYSTEMS[self.decoding.system]
        add = init_mtp or path == "smollm2"  # as in conf/model/smollm2.yaml
        given = {"path": path, "dtype": dtype, "device": device, "init_mtp": add, "draft": draft}
        config = from_dict(ModelConfig, given, "model.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # makes a fresh head reproducible
            return load_policy(config, need_head=system.head, needs=system.needs, need_draft=system.separate)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Return one completion for each prompt, in their order; raise ``UserError`` before any of them is decoded.

        The same call gives the same completions, except with ``draft_tokens="auto"``, which depends on measured time.
        Each prompt of a call has its own random numbers, so a repeated prompt has several completions. Another
        ``params.seed`` gives other completions.

        Args:
            prompts: one or several. A text is used as it is, lists of messages go through the chat template.
            params: for all prompts, or for each; None: temperature 1, 128 new tokens. The model's own stop tokens are
            added to
                ``stop_token_ids``.
        """
        asked: list[Any] = list(prompts) if _several(prompts) else [prompts]
        each = [params or SamplingParams()] * len(asked) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(asked):
            raise UserError(f"params has {len(each)} entries for {len(asked)} prompts: give one, or one for each")
        encoded = [self._tokens(prompt, place) for place, prompt in enumerate(asked)]
        requests = [
            Request(id=i, token_ids=ids, params=self._params(own, i))
            for i, ((_, ids), own) in enumerate(zip(encoded, each, strict=True))
        ]
        try:
            done = generate(self.engine, requests)
        except BaseException:  # also an interrupt: queued requests must not run in the next call
            self.engine.abort()
            raise
        return [_output(text, ids, one) for (text, ids), one in zip(encoded, done, strict=True)]

    def _tokens(self, prompt: Prompt, place: int) -> tuple[str, tuple[int, ...]]:
        """Return the text and the token ids of a prompt; ``UserError`` names its index in the call."""
        if isinstance(prompt, str):
            return prompt, open_text(self.policy.tokenizer, prompt)
        parts: list[Any] = list(prompt) if isinstance(prompt, Sequence) else []
        if parts and all(type(part) is int for part in parts):
            return str(self.policy.tokenizer.decode(parts)), tuple(parts)
        if parts and all(isinstance(part, Mapping) and {"role", "content"} <= part.keys() for part in parts):
            if all(isinstance(part[key], str) for part in parts for key in ("role", "content")):
                return self._encode([dict(part) for part in parts])
        raise UserError(
            f"prompt {place} is {str(prompt)[:80]!r}: give a text, token ids, or messages with role and content"
        )

    def _params(self, params: SamplingParams, place: int) -> SamplingParams:
        """Return the checked parameters of one request, with its own seed and the model's stop tokens."""
        if not isinstance(params, SamplingParams):
            raise UserError(f"params={str(params)[:80]!r} is not possible: give bebop.SamplingParams")
        from_dict(SamplingConfig, {name: getattr(params, name) for name in SAMPLED}, "sampling.")  # checks
        whole = type(params.seed) is int and 0 <= params.seed < MAX_SEED
        check(whole, "sampling.seed", params.seed, f"give a number from 0 to {MAX_SEED - 1}")
        stops = dict.fromkeys((*params.stop_token_ids, *self.policy.eos_token_ids))
        return dataclasses.replace(params, seed=(params.seed << 40) + place, stop_token_ids=tuple(stops))


def _several(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return whether these are several prompts: neither a text, nor token ids, nor messages."""
    return not isinstance(prompts, str) and not any(isinstance(part, int | Mapping) for part in prompts)


def _output(text: str, ids: tuple[int, ...], done: Completion) -> RequestOutput:
    return RequestOutput(
        prompt=text,
        prompt_token_ids=ids,
        text=done.text,
        token_ids=tuple(done.token_ids.tolist()),
        logprobs=tuple(done.logprobs.tolist()),
        finish_reason=done.finish_reason,
        accept_length=done.stats.accept_length,
    )
