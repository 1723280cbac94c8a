"""Settings of SGLang as the rollout engine: ``rollout.sglang.*``."""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bebop.errors import UserError

Pause = Literal["in_place", "retract", "abort"]
WeightTransfer = Literal["tensor", "distributed", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """An engine inside the worker's process, or existing servers.

    ``pause`` says what becomes of running answers while weights change. ``in_place``: they keep their old keys and
    values, nothing is computed again. ``retract``: keys and values are computed again from the new weights, which
    costs a prefill of all that was written so far. ``abort``: answers are cut, handed back and taken up again, which
    costs the same prefill and holds no memory meanwhile. None follows ``rollout.on_update``.
    """

    urls: tuple[str, ...] = ()  # servers that are there already; answers are spread over them
    api_key_env: str = "SGLANG_API_KEY"  # the environment variable with their key, if they want one
    tensor_parallel: int = 1
    data_parallel: int = 1  # replicas behind one address; weights then travel by disk
    memory_fraction: float | None = None  # of the GPU, for weights and keys and values; None: SGLang decides
    cache_tokens: int | None = None  # keys and values of that many tokens; None: what fits
    attention_backend: str | None = None
    deterministic: bool = False  # batch-invariant kernels and seeds per answer; slower
    block_verification: bool = False  # CUDA only
    adaptive_steps: str | None = None  # file for decoding.system=bebop_adaptive; None: SGLang's own table
    pause: Pause | None = None
    transfer: WeightTransfer = "tensor"  # distributed: NCCL, servers on other GPUs; disk: a folder that both sides see
    folder: str | None = None  # for transfer=disk
    address: str = "127.0.0.1"  # for transfer=distributed: this machine's, as the server sees it
    colocated: bool = False  # memory can be given to the trainer and taken back; the draft's weights are kept
    monitor_every: int = 4  # every how many verification steps overlap and entropies are measured; 0: never
    timeout: float = 600.0  # seconds in which nothing is finished before an engine counts as dead
    retries: int = 4  # of a call that failed on its way, each after twice as long a wait
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of sglang.ServerArgs

    def __post_init__(self) -> None:
        for name, choices in (("pause", Pause), ("transfer", WeightTransfer)):
            value = getattr(self, name)
            allowed = value in get_args(choices) or (name == "pause" and value is None)
            _check(allowed, name, value, "choose one of " + ", ".join(get_args(choices)))
        for name in ("tensor_parallel", "data_parallel"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "give 1 or more")
        for name in ("monitor_every", "retries"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "give 0 or more")
        _check(0 < self.timeout < math.inf, "timeout", self.timeout, "give a number above 0")
        cache, steps = self.cache_tokens, self.adaptive_steps
        _check(cache is None or cache >= 1, "cache_tokens", cache, "give 1 or more, or null")
        _check(steps is None or os.path.isfile(steps), "adaptive_steps", steps, "there is no such file")
        for name in ("api_key_env", "address", "attention_backend", "folder"):
            text = getattr(self, name)
            _check(text is None or bool(text.strip()), name, text, "give a text, or leave it out")
        fraction = self.memory_fraction
        _check(fraction is None or 0 < fraction < 1, "memory_fraction", fraction, "give a number between 0 and 1")
        web = all(re.match(r"https?://[^/\s]", url) for url in self.urls)
        _check(web, "urls", list(self.urls), "addresses start with http:// or https:// and name a host")
        _check(self.transfer != "disk" or bool(self.folder), "folder", self.folder, "transfer=disk needs a folder")
        several = self.data_parallel > 1 and self.transfer != "disk"
        _check(
            not several, "data_parallel", self.data_parallel, "SGLang takes weights for 1 replica; use transfer=disk"
        )
        one = self.transfer != "distributed" or len(self.urls) < 2
        _check(one, "transfer", self.transfer, "a process group joins one server; use disk for several")
        owned = sorted(name for name in self.extra if name.startswith("speculative_"))
        _check(not owned, "extra", owned, "drafting is set by decoding.* and rollout.sglang.*")


def _check(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise UserError(f"rollout.sglang.{name}={value!r} is not possible: {allowed}")
