"""vLLM as a ``Server`` of the ``ServedEngine``: a thread that steps it while requests are open."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from bebop.errors import one_line
from bebop.rollout.engine import EngineDied, Request
from bebop.rollout.heartbeat import PATIENCE
from bebop.rollout.served_engine import OutputChunk
from bebop.rollout.served_weights import ToUpdate, WeightWatch
from bebop.rollout.vllm.arguments import refuse_sampling
from bebop.rollout.vllm.core import Core
from bebop.rollout.vllm.startup import self_test
from bebop.rollout.vllm.transfer import WeightTransfer
from bebop.runtime.watchdog import Deadline, SuspendAwareClock

T = TypeVar("T")


class VllmServer:
    """vLLM as a ``Server``. Not replayable: all requests share one generator, whatever their seeds."""

    name = "vLLM"

    def __init__(
        self,
        core: Core,
        transfer: WeightTransfer,
        head: Mapping[str, Tensor],
        *,
        sampled: bool,
        recompute: bool,
        to_update: ToUpdate,
        dtype: torch.dtype,
        threads: int,
        hang_after: float,
    ) -> None:
        """Keep the arguments for serving a job; ``start`` makes the engine ready.

        Args:
            core: vLLM's engine.
            transfer: how weights travel.
            head: the checkpoint's MTP head, under the names of ``MTPHead``, if it drafts; else empty.
            sampled: whether drafts are draws.
            recompute: as ``rollout.on_update``.
            to_update: gives weights the names that vLLM reads.
            dtype: of the engine's weights.
            threads: that it computes with.
            hang_after: as in ``runtime``.
        """
        self.core, self.transfer, self.sampled, self.recompute = core, transfer, sampled, recompute
        self._to_update = to_update
        self._stored = {f"mtp.{name}": tensor for name, tensor in head.items()}
        self._watch = WeightWatch(dtype)
        self._thread = ThreadPoolExecutor(1, "vllm", lambda: torch.set_num_threads(threads))
        self._answers: dict[str, asyncio.Future[OutputChunk]] = {}
        self._keys: dict[int, str] = {}  # what a request is called in vLLM now
        self._steps: asyncio.Task[None] | None = None
        self._deadline = Deadline(PATIENCE * hang_after)
        self._call: tuple[str, SuspendAwareClock] | None = None  # in progress, and for how long
        self._why: str | None = None  # it is dead

    @property
    def recomputes(self) -> bool:
        """Return whether new weights recompute running completions' keys and values; else they stay."""
        return self.recompute

    async def start(self) -> None:
        """Load the model."""
        await self._run("start", self.core.start)

    async def test(self) -> None:
        """Run the self-test, then take the checksums of now."""
        await self._run("test", lambda: self_test(self.core, sampled=self.sampled))
        draft = self._to_update(self._stored, 0).draft if self._stored else {}
        self._watch.begin(await self._run("checksums", self.core.checksums), draft)

    def check(self, request: Request) -> None:
        """Raise ``UserError`` for a request that vLLM cannot serve."""
        refuse_sampling(request.params, self.core.drafts > 0)

    async def generate(self, request: Request, written: Sequence[int]) -> OutputChunk:
        """Go on with a request after the tokens that are ``written``, to its end or until it is cut."""
        fresh = request.params.max_new_tokens - len(written)
        add = partial(self.core.add, [*request.token_ids, *written], request.params, fresh)
        key = await self._run("add", add)
        self._keys[request.id] = key
        self._answers[key] = asyncio.get_running_loop().create_future()
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._stepping())
        try:
            return await self._answers[key]
        finally:
            self._keys.pop(request.id, None)
            self._answers.pop(key, None)

    async def _stepping(self) -> None:
        """Step while there are requests; all of them get what a step raises."""
        try:
            while self._answers:
                for key, part in await self._run("step", self.core.step):
                    self._answers[key].set_result(part)
                await asyncio.sleep(0)  # those that ended are taken out before the next look
        except BaseException as error:
            self._why = self._why or one_line(error)
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(error if isinstance(error, Exception) else EngineDied("vLLM was ended"))
            if not isinstance(error, Exception):
                raise

    async def abort(self, id: int) -> None:
        """Cut a request, if it has got there."""
        key = self._keys.get(id)
        part = None if key is None else await self._run("abort", partial(self.core.abort, key))
        if key in self._answers and part is not None and not self._answers[key].done():
            self._answers[key].set_result(part)

    async def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace weights between two steps. All of a load is one call, so that no step sees a half of it."""
        load = self._to_update(weights, version)
        self.transfer.refuse(load)

        def replace() -> None:
            self.transfer.send(self.core, load)
            self._watch.verify(self.core.checksums(), load)
            self.core.loaded(version, self.recompute)

        await self._run("load", replace)

    async def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        """Put past completions of a prompt where vLLM's suffix decoding finds them."""
        if (past := self.core.past) is not None:
            await self._run("remember", partial(past.remember, prompt, answers))

    async def rest(self) -> None:
        """Do nothing: vLLM keeps its memory."""

    def dead(self) -> str | None:
        """Return why vLLM counts as dead: a step that failed, or a call that takes too long; None: it does not."""
        call = self._call
        if self._why is None and call is not None:
            name, clock = call
            clock.tick()
            if (seconds := clock.read()) > self._deadline.limit(name):
                self._why = f"a {name} of vLLM takes {seconds:.0f} s"
        return self._why

    async def close(self) -> None:
        """End vLLM. A call that hangs keeps what it has until this process ends."""
        if self._steps is not None:
            self._steps.cancel()
        if self._call is None or self.dead() is None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.core.close)
        self._thread.shutdown(wait=False)

    async def _run(self, name: str, call: Callable[[], T]) -> T:
        """Call in vLLM's thread, one after another."""

        def timed() -> T:
            clock = SuspendAwareClock()
            self._call = (name, clock)
            try:
                return call()
            finally:
                self._deadline.record(name, clock.read())
                self._call = None

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)
