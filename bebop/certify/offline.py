"""Engines of other projects in this process, through their own API: vLLM's ``LLM`` and SGLang's ``Engine``.

This module imports neither of them: the caller has already made the engine. The claim is ``SamplingParams``, so
defaults of a model's ``generation_config.json`` are not applied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.certify.answers import Answer
from bebop.certify.calls import fields
from bebop.certify.function import FunctionEngine
from bebop.certify.reference import LiveEngine
from bebop.certify.sglang_server import logprobs
from bebop.errors import UserError
from bebop.rollout.engine import Request
from bebop.rollout.sglang.arguments import sampling_arguments

Ask = Callable[[list[Request]], list[Answer]]


def live_engine(engine: Any) -> LiveEngine:
    """Return an engine that can be certified: vLLM's ``LLM``, SGLang's ``Engine``, or a function of ``function.py``.

    Raises:
        UserError: It is none of these.
    """
    if hasattr(engine, "sample") and hasattr(engine, "describe"):
        found: LiveEngine = engine
        return found
    if hasattr(engine, "generate") and hasattr(engine, "get_default_sampling_params"):
        return Offline("vllm", vllm(engine), engine)
    if hasattr(engine, "generate") and hasattr(engine, "async_generate"):
        return Offline("sglang", sglang(engine), engine)
    if callable(engine):
        return FunctionEngine(engine)
    raise UserError(
        f"{type(engine).__name__} is no engine that can be certified: give vLLM's LLM, SGLang's Engine, the URL of a "
        "server, or a function (prompts, seeds, max_new_tokens)"
    )


class Offline(FunctionEngine):
    """A ``LiveEngine`` over an engine's own ``generate``; the caller keeps the engine and closes it."""

    def __init__(self, name: str, ask: Ask, engine: Any) -> None:
        super().__init__(ask)
        self.name, self.engine = name, engine

    def describe(self) -> dict[str, Any]:
        """Return the engine's class and its settings, if it exposes them."""
        settings = getattr(self.engine, "server_args", None) or getattr(
            getattr(self.engine, "llm_engine", None), "vllm_config", None
        )
        kind = type(self.engine)
        return {"class": f"{kind.__module__}.{kind.__qualname__}", "settings": str(settings)[:2000]}


def vllm(engine: Any) -> Ask:
    """Return a function that samples a cohort from vLLM's ``LLM``."""
    params_type = type(engine.get_default_sampling_params())

    def params(request: Request) -> Any:
        asked = request.params
        return params_type(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            seed=asked.seed % (1 << 31),
            max_tokens=asked.max_new_tokens,
            stop_token_ids=list(asked.stop_token_ids),
            ignore_eos=not asked.stop_token_ids,
            logprobs=0,  # the log-prob of the sampled token alone
            detokenize=False,
        )

    def ask(requests: list[Request]) -> list[Answer]:
        prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
        outputs = engine.generate(prompts, [params(request) for request in requests], use_tqdm=False)
        return [_of_vllm(request, output.outputs[0]) for request, output in zip(requests, outputs, strict=True)]

    return ask


def _of_vllm(request: Request, output: Any) -> Answer:
    ids = np.asarray(output.token_ids, dtype=np.int64)
    rows: Sequence[Any] | None = output.logprobs
    reported: NDArray[np.float64] | None = None
    if rows is not None:
        reported = np.array([row[token].logprob for row, token in zip(rows, ids.tolist(), strict=True)])
    reason = str(output.finish_reason)
    return Answer(
        **fields(request), token_ids=ids, logprobs=reported, finish_reason=reason, seed=request.params.seed % (1 << 31)
    )


def sglang(engine: Any) -> Ask:
    """Return a function that samples a cohort from SGLang's ``Engine``."""
    seeded = bool(getattr(engine.server_args, "enable_deterministic_inference", False))

    def params(request: Request) -> dict[str, Any]:
        asked = request.params
        own = {} if asked.repetition_penalty == 1.0 else {"repetition_penalty": asked.repetition_penalty}
        return sampling_arguments(asked, asked.max_new_tokens, seeded) | own

    def ask(requests: list[Request]) -> list[Answer]:
        replies = engine.generate(
            input_ids=[list(request.token_ids) for request in requests],
            sampling_params=[params(request) for request in requests],
            return_logprob=True,
        )
        return [_of_sglang(request, reply, seeded) for request, reply in zip(requests, replies, strict=True)]

    return ask


def _of_sglang(request: Request, reply: Any, seeded: bool) -> Answer:
    meta, ids = reply["meta_info"], np.asarray(reply["output_ids"], dtype=np.int64)
    return Answer(
        **fields(request),
        token_ids=ids,
        logprobs=logprobs(meta, ids, "SGLang's Engine"),
        finish_reason=str((meta.get("finish_reason") or {}).get("type")),
        seed=request.params.seed % (1 << 31) if seeded else None,
    )
