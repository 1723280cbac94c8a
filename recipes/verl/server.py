"""One embedded engine for verl's agent loops: token ids in, token ids with log-probs and statistics out.

It is a Ray actor in the job. Nothing here needs Ray or verl, so tests need neither.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig, ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.rollout.engine import Request
from bebop.rollout.engine_thread import EngineThread
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems import SYSTEMS
from bebop.trajectory import Completion, SamplingParams
from bebop.verl_job.names import checkpoint_to_engine
from bebop.verl_job.settings import EngineConfig
from bebop.verl_job.stats import fields

REASONS = {"stop": "completed", "length": "length", "abort": "aborted"}
IGNORED = ("logprobs", "n", "detokenize", "skip_special_tokens", "spaces_between_special_tokens")
LIMITS = ("max_tokens", "max_new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the engine and of completions, from verl's configuration."""

    path: str  # of the checkpoint
    dtype: str
    device: str
    prompt_length: int
    response_length: int
    max_length: int  # prompt + response
    seed: int
    engine: EngineConfig


class EmbeddedServer:
    """Rollout server with the methods that verl calls."""

    def __init__(self, config: ServerConfig) -> None:
        torch.set_num_threads(config.engine.threads)
        engine = config.engine
        decoding = DecodingConfig(system=engine.system, draft_tokens=engine.draft_tokens)
        names: dict[str, Any] = {"dtype": config.dtype, "device": config.device}
        model = ModelConfig(path=config.path, init_mtp=engine.init_head, **names)
        self.config = config
        self.policy = load_policy(model, need_head=SYSTEMS[decoding.system].head)
        torch_engine = TorchEngine(
            self.policy, decoding, slots=engine.slots, max_length=config.max_length, on_update=engine.on_update
        )
        self.thread = EngineThread(torch_engine)
        self.thread.start()
        self.drafts = decoding.limit if SYSTEMS[decoding.system].drafts else 0
        self.version = 0
        self._open = asyncio.Event()
        self._open.set()
        self._rejects = False

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **inputs: Any
    ) -> dict[str, Any]:
        """Return one completion, or the part of it before an abort, as the arguments of a ``TokenOutput``."""
        given = sorted(name for name, value in inputs.items() if value is not None)
        if given:
            raise UserError(f"the embedded engine takes text alone, and was given {', '.join(given)}")
        if not self._open.is_set() and self._rejects:
            return self._output(None)
        await self._open.wait()
        params = self._params(request_id, len(prompt_ids), sampling_params)
        if params.max_new_tokens <= 0:
            return self._output(None, "length")
        request = Request(id=0, token_ids=tuple(prompt_ids), params=params, park=True)
        completion = await asyncio.wrap_future(self.thread.submit([request])[0])
        return self._output(completion)

    async def load(self, weights: Mapping[str, Tensor], version: int | None) -> str:
        """Load weights under the names of the checkpoint and return the fingerprint of the head."""
        self.version = self.version if version is None else version
        own = checkpoint_to_engine(weights, self.policy)
        await asyncio.wrap_future(self.thread.load(own, self.version))
        return self.thread.engine.head

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests with the tokens so far. Later requests wait for ``resume_generation``, or are rejected."""
        self._open.clear()
        self._rejects = reject_request
        await asyncio.wrap_future(self.thread.abort())

    async def resume_generation(self) -> None:
        """Accept requests again."""
        self._open.set()

    async def ready(self) -> str:
        """Return the fingerprint of the head, once the engine has started."""
        return self.thread.engine.head

    async def nothing(self) -> None:
        """Do nothing, for calls that release memory in other engines: this engine keeps its memory."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing

    def _params(self, request_id: str, prompt: int, given: Mapping[str, Any]) -> SamplingParams:
        """Translate verl's sampling parameters; raise ``UserError`` for a parameter that the engine lacks."""
        left = {name: value for name, value in given.items() if name not in IGNORED and value is not None}
        limit = self.config.max_length - prompt
        asked = [int(left.pop(name)) for name in LIMITS if name in left]
        # A later turn shares the length of one response with all turns before it.
        total = self.config.prompt_length + self.config.response_length - prompt
        default = min(self.config.response_length, total)
        # Keyed by verl's own request id, which is stable if the job asks for determinism, else new each time.
        digest = hashlib.sha256(f"{self.config.seed}/{request_id}".encode()).digest()
        stops = () if left.pop("ignore_eos", False) else self.policy.eos_token_ids
        params = SamplingParams(
            temperature=float(left.pop("temperature", 1.0)),
            top_k=max(0, int(left.pop("top_k", 0))),
            top_p=float(left.pop("top_p", 1.0)),
            min_p=float(left.pop("min_p", 0.0)),
            repetition_penalty=float(left.pop("repetition_penalty", 1.0)),
            max_new_tokens=min([limit, *(asked or [default])]),
            stop_token_ids=(*stops, *left.pop("stop_token_ids", ())),
            stop=_texts(left.pop("stop", ())),
            seed=int.from_bytes(digest[:8], "big") >> 1,
        )
        if left:
            raise UserError(f"the embedded engine has no sampling parameter {', '.join(sorted(left))}")
        return params

    def _output(self, completion: Completion | None, reason: str = "aborted") -> dict[str, Any]:
        """Return a ``TokenOutput`` as plain data; None stands for a request that never started."""
        versions = {"global_steps": self.version}
        if completion is None:
            return {"token_ids": [], "log_probs": [], "stop_reason": reason, "extra_fields": versions}
        if len(completion.versions):
            oldest, newest = int(completion.versions.min()), int(completion.versions.max())
            versions = {"global_steps": newest, "min_global_steps": oldest, "max_global_steps": newest}
        return {
            "token_ids": completion.token_ids.tolist(),
            "log_probs": completion.logprobs.tolist(),
            "stop_reason": REASONS[completion.finish_reason],
            "extra_fields": versions | self._drafted(completion),
        }

    def _drafted(self, completion: Completion) -> dict[str, Any]:
        """Return the statistics of drafts, and the fingerprint of the head that made them."""
        if not self.drafts:
            return {}
        return fields(completion.stats, self.drafts) | {"bebop_head": self.thread.engine.head}


def _texts(stop: Any) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)
