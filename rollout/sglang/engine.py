"""SGLang as a ``Server`` of the ``ServedEngine``: its requests, its weight updates, its memory."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from bebop.config.engines import SglangConfig
from bebop.errors import UserError
from bebop.model.routing import Routers
from bebop.rollout.engine import Request
from bebop.rollout.served_engine import OutputChunk
from bebop.rollout.served_weights import Sums, ToUpdate, WeightWatch
from bebop.rollout.sglang.arguments import refuse_sampling, sampling_arguments
from bebop.rollout.sglang.backend import Backend
from bebop.rollout.sglang.outputs import by_role, output_chunk, parse_routing, refused
from bebop.rollout.sglang.tracing import PREFIX, parse_trace
from bebop.rollout.sglang.transfer import WeightTransfer
from bebop.trajectory import SamplingParams


class SglangServer:
    """SGLang as a ``Server``.

    Completions are replayable only if ``deterministic``: else all requests share one generator.
    """

    name = "SGLang"

    def __init__(
        self,
        backend: Backend,
        transfer: WeightTransfer,
        head: Mapping[str, Tensor],
        own: SglangConfig,
        *,
        drafts: int,
        drafter: str,
        to_update: ToUpdate,
        dtype: torch.dtype,
        rescored: bool,
        routers: Routers | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Keep the arguments for serving a job; ``start`` makes the engine ready.

        Args:
            backend: SGLang, wherever it runs.
            transfer: how weights travel.
            head: the checkpoint's MTP head, under the names of ``MTPHead``; empty if it has none.
            own: settings, of which ``pause`` is given.
            drafts: per cycle, 0 for plain decoding.
            drafter: what drafts, for traces.
            to_update: gives weights the names that SGLang reads.
            dtype: of the engine's weights.
            rescored: whether the trainer computes rollout log-probs itself.
            routers: of the model, if their choices are recorded.
            tokenizer: of the model; finds stop strings in completions that were cut.
        """
        self.backend, self.transfer, self.own, self.drafts, self.rescored = backend, transfer, own, drafts, rescored
        self.drafter, self.routers, self.tokenizer = drafter, routers, tokenizer
        self.start, self.dead, self.close = backend.start, backend.dead, backend.close
        self._to_update = to_update
        self._stored = {f"mtp.{name}": tensor for name, tensor in head.items()}
        self._rids: dict[int, str] = {}  # the current name of each request in SGLang
        self._count = 0
        self._awake, self._waking = True, asyncio.Lock()  # whether the GPU's memory is ours
        # Keys and values are found again under this name alone: never those of other weights, or of another job.
        self._cache, self._cached = uuid4().hex, 0  # that name, and the version of its weights
        self._watch = WeightWatch(dtype)

    @property
    def recomputes(self) -> bool:
        """Return whether new weights recompute running completions' keys and values; else these stay."""
        return self.own.pause != "in_place"

    @property
    def redrawn(self) -> int:
        """Return the number of requests so far that a server lost and that were sent again."""
        return self.backend.redrawn

    async def test(self) -> None:
        """Keep the current checksums, and look for the plugin's statistics in a completion.

        SGLang swallows errors in a plugin.
        """
        self._watch.begin(await self._checksums(), self._to_update(self._stored, 0).draft if self.drafts else {})
        if not self.drafts or not self.own.monitor_every:
            return
        params = SamplingParams(max_new_tokens=2 + self.drafts)
        arguments = sampling_arguments(params, params.max_new_tokens, False)
        payload = {"input_ids": [1, 1], "sampling_params": arguments}
        for _ in range(self.own.monitor_every):
            if (await self.backend.generate(payload))["meta_info"].get("bebop_verify"):
                return
        raise UserError(
            "SGLang reports no overlap of drafts: bebop must be installed beside it, and BEBOP_VERIFY_EVERY set "
            "(see recipes/sglang); or set rollout.sglang.monitor_every=0"
        )

    def check(self, request: Request) -> None:
        """Raise ``UserError`` for a request that SGLang cannot serve."""
        refuse_sampling(request.params, self.drafts > 0, self.rescored)

    async def generate(self, request: Request, written: Sequence[int]) -> OutputChunk:
        """Continue a request after the tokens ``written``, to its end or until it is cut."""
        await self._wake()
        cached = self._cached
        try:
            output = await self.backend.generate(self.payload(request, written))
        finally:
            self._rids.pop(request.id, None)
        if (problem := refused(output)) is not None:
            raise UserError(f"SGLang refuses a request: {problem}")
        found = output_chunk(output, request.params, self.drafts, written, self.tokenizer)
        trace = parse_trace(output["meta_info"], found.token_ids, self.drafter) if request.trace else None
        routing = None
        if self.routers is not None:
            routing = parse_routing(output["meta_info"], found, self.routers)
        return replace(found, trace=trace, routing=routing, cached=cached)

    def payload(self, request: Request, written: Sequence[int]) -> dict[str, Any]:
        """Return SGLang's payload of a request, under a new name."""
        self._count += 1
        kind = PREFIX if request.trace else "bebop-"
        self._rids[request.id] = rid = f"{kind}{id(self):x}-{self._count:x}."  # SGLang aborts by prefix: end it
        fresh = request.params.max_new_tokens - len(written)
        return {
            "rid": rid,
            "input_ids": [*request.token_ids, *written],
            "sampling_params": sampling_arguments(request.params, fresh, self.own.deterministic),
            "return_logprob": True,
            "logprob_start_len": -1,
            "extra_key": self._cache,
        } | ({} if self.routers is None else {"return_routed_experts": True})

    async def abort(self, id: int) -> None:
        """Cut a request, if it has reached SGLang."""
        if id in self._rids:
            await self.backend.control("abort_request", {"rid": self._rids[id]})

    async def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace weights between two cycles. After a failure SGLang stays paused, with unknown weights."""
        await self._wake()
        load = self._to_update(weights, version)
        marks = self._watch.marks(load)
        send = await self.transfer.prepare(self.backend, load, flush=self.recomputes)
        await self.backend.control("pause_generation", {"mode": self.own.pause})
        await send()
        self._watch.verify(await self._checksums(), load, marks)
        # Before completions go on: those that were cut are asked again.
        self._cache, self._cached = uuid4().hex, version
        await self.backend.control("continue_generation", {"torch_empty_cache": torch.cuda.is_available()})

    async def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        """Do nothing: no system that SGLang hosts drafts from past completions."""

    async def rest(self) -> None:
        """Release the GPU's memory of weights, keys and values to the trainer, if the GPU is shared."""
        if self.own.colocated:
            async with self._waking:
                self._awake = False
                await self.backend.control("release_memory_occupation", {})

    async def _wake(self) -> None:
        """Take the GPU's memory back if it was released, and check that all weights came back as they were."""
        async with self._waking:  # requests that come together wake SGLang once
            if not self._awake:
                await self.backend.control("resume_memory_occupation", {})
                self._watch.check_kept(await self._checksums())
                self._awake = True

    async def _checksums(self) -> Sums:
        return by_role(await self.backend.control("weights_checker", {"action": "checksum", "selector": "all"}))
