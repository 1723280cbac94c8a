"""Define the settings of each rollout engine: ``rollout.torch.*``, ``rollout.sglang.*``, ``rollout.vllm.*``."""

import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from bebop.config.fields import (
    BETWEEN_0_AND_1,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    Settings,
    above,
    at_least,
    check,
    setting,
)

Pause = Literal["in_place", "retract", "abort"]
ModelRunner = Literal["v1", "v2"]
WeightTransfer = Literal["tensor", "distributed", "disk"]
# Jobs on a laptop read all prompts in one pass of this size. A mask of its attention has at most 8192 ** 2 entries
# for each query head of a group: 400 MB in SmolLM2's shape and bfloat16, for one prompt of 8,192 tokens.
PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConfig(Settings):
    """Settings of the embedded engine."""

    SECTION = "rollout.torch."
    # Off until a run on a GPU has compared its tokens with those of eager cycles (benchmarks/gpu/NEXT.md).
    cuda_graphs: bool = setting(
        False,
        "launch a cycle as one CUDA graph; of systems that draft on the host the verification alone, of some and of "
        "traced requests nothing (docs/guides/engines.md)",
    )
    overlap: bool | None = setting(
        None,
        "launch a cycle before the results of the one before are read, where the host need not know them; "
        "null: on a GPU alone",
    )
    batch_invariant: bool = setting(
        False,
        "compute every cycle, but no prompt, for all slots and rollout.max_length, and from probabilities in place of "
        "logits, so that the rounding of a row does not depend on those beside it, traced or not; slower; for systems "
        "whose cycle is one CUDA graph (docs/guides/engines.md), without auto in decoding",
    )
    # On a CPU attention copies the pages that it reads, which costs a quarter to a third of the tokens a second.
    paged_cache: bool | Literal["auto"] = setting(
        "auto",
        "keep keys and values in pages that all requests of a worker share; auto: on a CUDA device",
        Limit(lambda given: given in (True, False, "auto"), "give true, false or auto"),
    )
    cache_tokens: int | None = setting(
        None,
        "that the pages of one worker hold, rollout.max_length or more; rollout.slots may be far more then: a request "
        "starts once there are pages for it, and the latest waits again if there are none; null: slots * max_length",
        POSITIVE,
    )
    prefill_tokens: int = setting(
        PREFILL_TOKENS,
        "that a pass over new prompts computes at most, padding included; it bounds the memory of the pass",
        at_least(16),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig(Settings):
    """Settings of an SGLang engine inside the worker's process, or of existing servers.

    ``pause`` decides the fate of running requests while weights change. ``in_place``: they keep their old keys and
    values, and nothing is computed again. SGLang's overlapped scheduler is off then. ``retract``: keys and values are
    computed again from the new weights, which costs a prefill of all that was written so far. ``abort``: requests are
    cut, handed back and taken up again, which costs the same prefill and holds no memory meanwhile. None follows
    ``rollout.on_update``.
    """

    SECTION = "rollout.sglang."
    urls: tuple[str, ...] = setting(
        (),
        "servers that are there already; requests are spread over them",
        Limit(
            lambda urls: all(re.match(r"https?://[^/\s]", url) for url in urls),
            "addresses start with http:// or https:// and name a host",
        ),
    )
    api_key_env: str = setting("SGLANG_API_KEY", "the environment variable with their key, if they want one", NOT_EMPTY)
    tensor_parallel: int = setting(1, "GPUs of one replica", POSITIVE)
    data_parallel: int = setting(1, "replicas behind one address; weights then travel by disk", POSITIVE)
    memory_fraction: float | None = setting(
        None,
        "of the GPU, for weights and keys and values; null: SGLang decides, beside a trainer what that leaves",
        BETWEEN_0_AND_1,
    )
    cache_tokens: int | None = setting(
        None,
        "keys and values of that many tokens; null: what fits",
        Limit(lambda tokens: tokens >= 1, "give 1 or more, or null"),
    )
    attention_backend: str | None = setting(None, "SGLang's name of one; null: SGLang decides", NOT_EMPTY)
    deterministic: bool = setting(False, "batch-invariant kernels and seeds per request; slower")
    block_verification: bool = setting(False, "verify the drafts of a cycle as a whole; CUDA only")
    adaptive_steps: str | None = setting(
        None,
        "an existing file for decoding.system=bebop_adaptive; null: SGLang's own table",
        Limit(os.path.isfile, "there is no such file"),
    )
    draft: str | None = setting(
        None,
        "for drafts of whole blocks: the folder of the drafter, which python -m bebop.export wrote",
        NOT_EMPTY,
    )
    pause: Pause | None = setting(None, "of running requests while weights change; null follows rollout.on_update")
    transfer: WeightTransfer = setting(
        "tensor", "distributed: NCCL, servers on other GPUs; disk: a folder that both sides see"
    )
    folder: str | None = setting(None, "for transfer=disk", NOT_EMPTY)
    address: str = setting("127.0.0.1", "for transfer=distributed: this machine's, as the server sees it", NOT_EMPTY)
    colocated: bool = setting(False, "memory can be given to the trainer and taken back; the CPU keeps weights")
    monitor_every: int = setting(
        4, "verification steps of which one is measured (overlap, entropies)", at_least(0, "never")
    )
    timeout: float = setting(600.0, "seconds in which nothing is finished before an engine counts as dead", above(0))
    retries: int = setting(4, "of a call that failed in transit, each after twice as long a wait", NOT_NEGATIVE)
    extra: dict[str, Any] = setting(
        dict,
        "further arguments of sglang.ServerArgs",
        Limit(
            lambda extra: not any(name.startswith("speculative_") for name in extra),
            "drafting is set by decoding.* and rollout.sglang.*",
        ),
    )

    def _validate(self) -> None:
        self.require(self.transfer != "disk" or bool(self.folder), "folder", "transfer=disk needs a folder")
        several = self.data_parallel > 1 and self.transfer != "disk"
        self.require(not several, "data_parallel", "SGLang takes weights for 1 replica; use transfer=disk")
        one = self.transfer != "distributed" or len(self.urls) < 2
        self.require(one, "transfer", "a process group joins one server; use disk for several")


# Arguments of vLLM that follow from other settings, or that are untested with drafts and weight updates in flight.
VLLM_OWN = {
    "speculative_config": "drafting is set by decoding.*",
    "logprobs_mode": "only those of what tokens are drawn from (processed_logprobs) can be trained on",
    "async_scheduling": "give rollout.vllm.async_scheduling",
    "tensor_parallel_size": "more ranks than 1 have not been tested",
    "pipeline_parallel_size": "more ranks than 1 have not been tested",
    "data_parallel_size": "give rollout.workers",
    "enable_sleep_mode": "sleep has not been tested, and a CPU has none",
    "weight_transfer_config": "give rollout.vllm.transfer",
    "worker_extension_cls": "Bebop needs no extension, and weights are checked by their digests",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(Settings):
    """Settings of a vLLM engine inside the worker's process.

    While weights change, ``rollout.on_update`` decides the fate of running requests.
    """

    SECTION = "rollout.vllm."
    cache_bytes: int | None = setting(
        None,
        "for keys and values; null: room for all slots on a CPU, what vLLM finds on a GPU",
        Limit(lambda size: size >= 1, "give 1 or more, or null"),
    )
    memory_fraction: float | None = setting(
        None,
        "of the GPU, for weights and keys and values; null: vLLM decides, beside a trainer what that leaves",
        BETWEEN_0_AND_1,
    )
    eager: bool | None = setting(None, "no compiled graphs; null: on a CPU alone")
    draft: str | None = setting(
        None,
        "for drafts of whole blocks: the folder of the drafter, which python -m bebop.export wrote",
        NOT_EMPTY,
    )
    model_runner: ModelRunner | None = setting(
        None,
        "which of vLLM's two model runners; null: v1 on a CPU and for decoding=history, which v2 lacks; else v2",
    )
    async_scheduling: bool | None = setting(
        None,
        "launch a step before the tokens of the one before are read, which takes model_runner=v2; null: with v2, but "
        "not with decoding=ngram",
    )
    transfer: Literal["memory", "file"] = setting("memory", "file: weights go through a folder, which keeps the newest")
    folder: str | None = setting(None, "for transfer=file", NOT_EMPTY)
    monitor_every: int = setting(
        4, "verification steps of which one is measured (overlap, entropies)", at_least(0, "never")
    )
    timeout: float = setting(600.0, "seconds in which nothing is finished before an engine counts as dead", above(0))
    extra: dict[str, Any] = setting(dict, "further arguments of vllm.EngineArgs")

    def _validate(self) -> None:
        self.require(self.transfer != "file" or bool(self.folder), "folder", "transfer=file needs a folder")
        steps = not self.async_scheduling or self.model_runner != "v1"
        self.require(steps, "async_scheduling", "model_runner=v1 makes one step after another; give null")
        for name, value in self.extra.items():
            check(name not in VLLM_OWN, f"rollout.vllm.extra.{name}", value, VLLM_OWN.get(name, ""))
