"""SGLang behind the ``Engine`` protocol: its asynchronous requests as steps, its weight updates as one call."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.config_engines import Pause
from bebop.errors import UserError
from bebop.model.fingerprint import fingerprint
from bebop.rollout.engine import EngineDied, Finished, Request
from bebop.rollout.sglang_arguments import refuse_sampling, sampling_arguments
from bebop.rollout.sglang_backend import Backend
from bebop.rollout.sglang_outputs import completion, nothing, refused
from bebop.rollout.sglang_transfer import WeightTransfer
from bebop.rollout.sglang_weights import WeightWatch, update
from bebop.rollout.text import TextOf
from bebop.trajectory import Completion, SamplingParams

log = logging.getLogger(__name__)
T = TypeVar("T")
STEP_SECONDS = 0.2  # a step that finds nothing finished returns after this long
LOOK_SECONDS = 1.0  # between two looks whether an engine that owes a reply still lives
ABORT_SECONDS = 0.05  # between two tries to abort: a request may not have reached the scheduler yet


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What the adapter has to know about the model and the way it decodes."""

    system: str  # decoding.system
    drafts: int  # per cycle; 0: plain decoding
    max_length: int  # prompt + answer, tokens
    layout: str  # of the head's weights in checkpoints
    layers: int  # of the backbone
    dtype: torch.dtype  # of the engine's weights
    pause: Pause
    colocated: bool  # whether memory is given away when all answers are there, until new weights come
    rescored: bool  # whether the trainer computes rollout log-probs itself
    seeded: bool  # whether each answer has a seed of its own
    monitor_every: int
    timeout: float  # seconds in which nothing is finished
    retries: int  # answers that SGLang cuts without reason, one after another


class SglangEngine:
    """See ``Engine``. Requests run in an event loop of their own; ``step`` hands out what was finished meanwhile.

    Not replayable unless ``seeded``: SGLang draws from one generator for all requests.
    """

    def __init__(
        self, backend: Backend, transfer: WeightTransfer, spec: EngineSpec, text: TextOf, head: Mapping[str, Tensor]
    ) -> None:
        """``head``: the checkpoint's MTP head, under the names of ``MTPHead``; empty if it has none."""
        self.backend, self.transfer, self.spec, self.text = backend, transfer, spec, text
        self.version = 0
        self.head = fingerprint(head, spec.dtype) if head else ""
        self._news = threading.Condition()
        self._open: dict[int, Future[Completion]] = {}
        self._done: list[tuple[int, Future[Completion]]] = []
        self._rids: dict[int, str] = {}  # what a request is called in SGLang now
        self._aborted: set[int] = set()
        self._count = 0
        self._moved = time.monotonic()  # when something was finished or added last
        self._awake = True  # whether the GPU's memory is ours
        # Keys and values are found again under this name alone: never those of other weights, or of another job.
        self._cache = uuid4().hex
        self._watch = WeightWatch(spec.dtype)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True).start()
        self._run(backend.start(), limit=math.inf)
        draft = {f"mtp.{name}": tensor for name, tensor in head.items()}
        load = update(draft, 0, spec.layout, spec.layers)
        self._watch.begin(self._run(self._checksums()), load.draft if spec.drafts else {})
        if spec.drafts and spec.monitor_every:
            self._run(self._test_plugin())

    @property
    def unfinished(self) -> int:
        """Requests queued or running."""
        return len(self._open)

    def add(self, request: Request) -> None:
        """Queue a request."""
        assert self._awake, "the weights are not there: new ones have to come first"
        spec, params = self.spec, request.params
        refuse_sampling(params, spec.drafts > 0, spec.rescored)
        if not request.token_ids:
            raise UserError("an empty prompt cannot be continued: give at least one token")
        if len(request.token_ids) + params.max_new_tokens > spec.max_length:
            length = len(request.token_ids)
            raise UserError(f"a prompt of {length} tokens + max_new_tokens exceeds max_length={spec.max_length}")
        self._moved = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(self._serve(request), self._loop)
        self._open[request.id] = future
        future.add_done_callback(lambda ended: self._notice(request.id, ended))

    def step(self) -> list[Finished]:
        """What was finished since the last step, as soon as there is something or after a short while."""
        with self._news:
            self._news.wait_for(lambda: self._done, STEP_SECONDS if self._open else 0)
            ended, self._done = self._done, []
        # A notice may come late, when its request was aborted and perhaps asked again.
        ids = [id for id, future in ended if self._open.get(id) is future]
        finished = [Finished(id=id, completion=self._open.pop(id).result()) for id in ids]
        now = time.monotonic()
        if finished or not self._open:
            self._moved = now
        why = self.backend.dead()
        if why is None and now - self._moved > self.spec.timeout:
            why = f"{len(self._open)} answers are open and nothing was finished for {self.spec.timeout:.0f} s"
        if why is not None and self._open:
            raise EngineDied(why)
        if self.spec.colocated and finished and not self._open:
            self.release_memory()
        return finished

    def abort(self, ids: Sequence[int] | None = None) -> list[Finished]:
        """End requests now, all of them if ``ids`` is None."""
        chosen = [id for id in (self._open if ids is None else ids) if id in self._open]
        self._aborted.update(chosen)
        self._run(self._abort(chosen))
        finished = [Finished(id=id, completion=self._open.pop(id).result()) for id in chosen]
        self._aborted.clear()
        return finished

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace weights between two cycles; running answers go on as ``pause`` says."""
        if not self._awake:
            self.resume_memory()
        self._run(self._update(weights, version))
        self.version = version
        head = {name.removeprefix("mtp."): tensor for name, tensor in weights.items() if name.startswith("mtp.")}
        if head:
            self.head = fingerprint(head, self.spec.dtype)
        self._moved = time.monotonic()

    def configure(self, decoding: DecodingConfig) -> None:
        """SGLang decodes as it was started; adaptive steps are its own."""
        if decoding.system != self.spec.system:
            raise UserError(
                f"decoding.system={decoding.system!r} is not possible now: SGLang runs {self.spec.system!r}"
            )

    def release_memory(self) -> None:
        """Give the GPU to the trainer, with no request open: weights and keys and values leave it."""
        assert not self._open, "answers are open"
        self._run(self.backend.control("release_memory_occupation", {}))
        self._awake = False

    def resume_memory(self) -> None:
        """Take the GPU back. Target weights have to be loaded before the next request; the draft's must have stayed."""
        self._run(self.backend.control("resume_memory_occupation", {}))
        self._awake = True
        self._watch.check_draft(self._run(self._checksums()))

    def close(self) -> None:
        """End the engine and its processes, dead or alive."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(self.spec.timeout)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, T], limit: float | None = None) -> T:
        """Wait for something in the event loop, as long as there is somebody to wait for."""
        future, limit = asyncio.run_coroutine_threadsafe(work, self._loop), limit or self.spec.timeout
        deadline = time.monotonic() + limit
        while not wait([future], LOOK_SECONDS).done:
            why = self.backend.dead()
            if why is None and time.monotonic() > deadline:
                why = f"SGLang did not reply for {limit:.0f} s"
            if why is not None:
                future.cancel()
                raise EngineDied(why)
        return future.result()

    def _notice(self, id: int, ended: Future[Completion]) -> None:
        with self._news:
            self._done.append((id, ended))
            self._news.notify_all()

    async def _serve(self, request: Request) -> Completion:
        """One answer to its end; one that is cut for new weights, or by SGLang itself, goes on where it was."""
        answer, cuts = request.partial, 0
        while request.id not in self._aborted:
            done = len(answer.token_ids) if answer is not None else 0
            output = await self.backend.generate(self._payload(request, answer))
            if (problem := refused(output)) is not None:
                raise UserError(f"SGLang refuses a request: {problem}")
            recomputed = self.spec.pause != "in_place"
            answer = completion(output, request.params, self.text, self.spec.drafts, answer, recomputed)
            if answer.finish_reason != "abort":
                return answer
            cuts = 0 if len(answer.token_ids) > done else cuts + 1
            if cuts > self.spec.retries:
                raise EngineDied(f"an answer was cut {cuts} times without a new token: {output['meta_info']}")
        return answer if answer is not None else nothing()

    def _payload(self, request: Request, answer: Completion | None) -> dict[str, Any]:
        written = answer.token_ids.tolist() if answer is not None else []
        self._count += 1
        self._rids[request.id] = rid = f"bebop-{id(self):x}-{self._count:x}."  # SGLang aborts by prefix: end it
        return {
            "rid": rid,
            "input_ids": [*request.token_ids, *written],
            "sampling_params": sampling_arguments(
                request.params, request.params.max_new_tokens - len(written), self.spec.seeded
            ),
            "return_logprob": True,
            "logprob_start_len": -1,
            "extra_key": self._cache,
        }

    async def _abort(self, ids: Sequence[int]) -> None:
        while waiting := [id for id in ids if not self._open[id].done()]:
            if (why := self.backend.dead()) is not None:
                raise EngineDied(why)
            for id in waiting:
                if id in self._rids:
                    await self.backend.control("abort_request", {"rid": self._rids[id]})
            await asyncio.sleep(ABORT_SECONDS)

    async def _update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """A failure leaves the engine paused: nobody knows its weights."""
        load = update(weights, version, self.spec.layout, self.spec.layers)
        await self.backend.control("pause_generation", {"mode": self.spec.pause})
        await self.transfer.send(self.backend, load, flush=self.spec.pause != "in_place")
        self._watch.verify(await self._checksums(), load)
        self.version, self._cache = version, uuid4().hex  # before answers go on: those that were cut are asked again
        await self.backend.control("continue_generation", {"torch_empty_cache": torch.cuda.is_available()})

    async def _end(self) -> None:
        await self.backend.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _checksums(self) -> Mapping[str, Any]:
        return await self.backend.control("weights_checker", {"action": "checksum", "selector": "all"})

    async def _test_plugin(self) -> None:
        """SGLang swallows what goes wrong in a plugin: look for its trace in a short answer."""
        params = SamplingParams(max_new_tokens=2 + self.spec.drafts)
        arguments = sampling_arguments(params, params.max_new_tokens, False)
        payload = {"input_ids": [1, 1], "sampling_params": arguments}
        for _ in range(self.spec.monitor_every):
            if (await self.backend.generate(payload))["meta_info"].get("bebop_verify"):
                return
        raise UserError(
            "SGLang reports no overlap of drafts: bebop must be installed beside it, and BEBOP_VERIFY_EVERY set "
            "(see recipes/sglang); or set rollout.sglang.monitor_every=0"
        )
