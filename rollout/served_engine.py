"""Adapter from a server with asynchronous requests to an ``Engine`` that is stepped: the part that all servers share.

Requests run in an event loop of their own; ``step`` returns those that finished meanwhile. If the server cuts a
completion, for new weights or for reasons of its own, the request is sent again from there.
"""

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.model.backbone import head_weights
from bebop.model.fingerprint import fingerprint
from bebop.rollout.decoding.verify_trace import unknown
from bebop.rollout.detokenize import TextOf
from bebop.rollout.engine import EngineDied, Finished, Request, nothing
from bebop.trajectory import Completion, DecodeStats, FinishReason, SamplingParams, Trace, join_routing, join_traces

T = TypeVar("T")
STEP_SECONDS = 0.2  # a step that finds nothing finished returns after this long
LOOK_SECONDS = 1.0  # between two looks whether an engine that owes a reply still lives
ABORT_SECONDS = 0.05  # between two tries to abort: a request may not have reached the scheduler yet


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """Output of a server for one request until it ended or was cut: N tokens, perhaps none."""

    token_ids: NDArray[np.int64]  # [N]
    logprobs: NDArray[np.float32]  # [N] under the target distribution
    versions: NDArray[np.int64]  # [N] of the weights that produced each token
    reason: FinishReason  # abort: it was cut
    stats: DecodeStats
    why: object  # of a cut: the server's reason
    trace: Trace | None = None  # [N] where it was requested, and the server records it
    routing: NDArray[np.int8 | np.int16] | None = None  # as ``Completion.routing``, of all that was read and written
    cached: int | None = (
        None  # version whose keys and values a prefix cache may have given it; None: of no other weights
    )


class Server(Protocol):
    """Interface of a server. Its coroutines run in one event loop, and any of them may raise ``EngineDied``."""

    name: str  # in messages

    @property
    def recomputes(self) -> bool:
        """Return whether new weights recompute running completions' keys and values; else these stay."""

    @property
    def redrawn(self) -> int:
        """Return the number of requests so far that were lost and sent again."""

    async def start(self) -> None:
        """Make the server ready, however long that takes."""

    async def test(self) -> None:
        """Check, once the server is ready, that it decodes as configured."""

    def check(self, request: Request) -> None:
        """Raise ``UserError`` for a request that the server cannot serve."""

    async def generate(self, request: Request, written: Sequence[int]) -> OutputChunk:
        """Continue a request after the tokens ``written``, to its end or until it is cut."""

    async def abort(self, id: int) -> None:
        """Cut a request, if it has reached the server; called again until ``generate`` returns."""

    async def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace weights between two cycles, under the names of ``Policy.weights``; weights that are not sent stay."""

    async def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        """Store past completions of a prompt; a server that does not draft from them does nothing."""

    async def rest(self) -> None:
        """React to the end of all requests: new weights may come next."""

    def dead(self) -> str | None:
        """Return why the server is known to be dead; None: it is not."""

    async def close(self) -> None:
        """End the server's processes."""


class ServedEngine:
    """An ``Engine`` whose requests a server decodes."""

    def __init__(
        self,
        server: Server,
        text: TextOf,
        head: Mapping[str, Tensor],
        *,
        system: str,
        dtype: torch.dtype,
        max_length: int,
        timeout: float,
        retries: int,
    ) -> None:
        """Start the server and test it.

        Args:
            server: that decodes.
            text: turns tokens into text.
            head: the checkpoint's head, under its own names.
            system: the decoding system that the server was started with.
            dtype: of the server's weights.
            max_length: tokens of prompt and completion.
            timeout: seconds without a finished request after which the server counts as dead.
            retries: cuts of a completion, one after another without a new token.
        """
        self.server, self.text, self.system, self.dtype = server, text, system, dtype
        self.max_length, self.timeout, self.retries = max_length, timeout, retries
        self.version = 0
        self.head = fingerprint(head, dtype) if head else ""
        self._open: dict[int, Future[Completion]] = {}
        self._done: SimpleQueue[tuple[int, Future[Completion]]] = SimpleQueue()
        self._aborted: set[int] = set()
        self._moved = time.monotonic()  # when something was finished or added last
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=server.name, daemon=True).start()
        self.run(server.start(), limit=math.inf)
        self.run(server.test())

    @property
    def unfinished(self) -> int:
        """Return the number of requests queued or running."""
        return len(self._open)

    @property
    def redrawn(self) -> int:
        """Return the number of completions so far that were lost and drawn again."""
        return self.server.redrawn

    def add(self, request: Request) -> None:
        """Queue a request."""
        length = len(request.token_ids)
        self.server.check(request)
        if not length:
            raise UserError("an empty prompt cannot be continued: give at least one token")
        if length + request.params.max_new_tokens > self.max_length:
            raise UserError(f"a prompt of {length} tokens + max_new_tokens exceeds max_length={self.max_length}")
        self._moved = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(self._serve(request), self._loop)
        self._open[request.id] = future
        future.add_done_callback(lambda ended: self._done.put((request.id, ended)))

    def step(self) -> list[Finished]:
        """Return the requests finished since the last step, as soon as there are any or after a short while."""
        ended: list[tuple[int, Future[Completion]]] = []
        with suppress(Empty):
            ended.append(self._done.get(timeout=STEP_SECONDS if self._open else 0))
            while True:
                ended.append(self._done.get_nowait())
        # A notice may come late, when its request was aborted and perhaps asked again.
        ids = [id for id, future in ended if self._open.get(id) is future]
        finished = [Finished(id=id, completion=self._open.pop(id).result()) for id in ids]
        now = time.monotonic()
        if finished or not self._open:
            self._moved = now
        why = self.server.dead()
        if why is None and now - self._moved > self.timeout:
            why = f"{len(self._open)} requests are open and nothing was finished for {self.timeout:.0f} s"
        if why is not None and self._open:
            raise EngineDied(why)
        if finished and not self._open:
            self.run(self.server.rest())
        return finished

    def abort(self, ids: Sequence[int] | None = None) -> list[Finished]:
        """End requests now, all of them if ``ids`` is None; return them."""
        chosen = [id for id in (self._open if ids is None else ids) if id in self._open]
        self._aborted.update(chosen)
        self.run(self._abort(chosen))
        finished = [Finished(id=id, completion=self._open.pop(id).result()) for id in chosen]
        self._aborted.clear()
        return finished

    def stage(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights unchanged: a server goes on decoding while ``load_weights`` prepares them."""
        return weights

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace weights in flight. After a failure the server's weights are unknown."""
        self.run(self.server.load(weights, version))
        self.version = version
        if head := head_weights(weights):
            self.head = fingerprint(head, self.dtype)
        self._moved = time.monotonic()

    def configure(self, decoding: DecodingConfig) -> None:
        """Raise ``UserError`` for another system: a server keeps the system that it was started with."""
        if decoding.system != self.system:
            why = f"{self.server.name} runs {self.system!r}"
            raise UserError(f"decoding.system={decoding.system!r} is not possible now: {why}")

    def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        """Send past completions of a prompt to the server."""
        self.run(self.server.remember(prompt, answers))

    def close(self) -> None:
        """End the server and its processes, dead or alive."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(self.timeout)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def run(self, work: Coroutine[Any, Any, T], limit: float | None = None) -> T:
        """Wait for ``work`` in the event loop, as long as the server lives."""
        future, limit = asyncio.run_coroutine_threadsafe(work, self._loop), limit or self.timeout
        deadline = time.monotonic() + limit
        while not wait([future], LOOK_SECONDS).done:
            why = self.server.dead()
            if why is None and time.monotonic() > deadline:
                why = f"{self.server.name} did not reply for {limit:.0f} s"
            if why is not None:
                future.cancel()
                raise EngineDied(why)
        return future.result()

    async def _serve(self, request: Request) -> Completion:
        """Return a request's completion once it ended; continue one that is cut, unless it was aborted."""
        answer, cuts = request.partial or nothing(), 0
        while request.id not in self._aborted:
            chunk = await self.server.generate(request, answer.token_ids.tolist())
            answer = appended(answer, chunk, request.params, self.text, self.server.recomputes)
            if chunk.reason != "abort":
                return answer
            cuts = 0 if len(chunk.token_ids) else cuts + 1
            if cuts > self.retries:
                raise EngineDied(f"a completion was cut {cuts} times without a new token: {chunk.why}")
        return answer

    async def _abort(self, ids: Sequence[int]) -> None:
        while waiting := [id for id in ids if not self._open[id].done()]:
            if (why := self.server.dead()) is not None:
                raise EngineDied(why)
            for id in waiting:
                await self.server.abort(id)
            await asyncio.sleep(ABORT_SECONDS)

    async def _end(self) -> None:
        await self.server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def appended(
    before: Completion, chunk: OutputChunk, params: SamplingParams, text: TextOf, recomputed: bool
) -> Completion:
    """Return a completion with the tokens decoded after it; ``recomputed`` as ``Server.recomputes``.

    A continuation begins with a prefill of all tokens before it. So the versions of its context are those of the chunk.
    A request that waited in the server while weights changed may find its prompt in the cache of the older ones.
    """
    ids = np.concatenate([before.token_ids, chunk.token_ids])
    contexts = chunk.versions if recomputed else np.minimum.accumulate(chunk.versions)
    if not recomputed and chunk.cached is not None:
        contexts = np.minimum(contexts, chunk.cached)
    return Completion(
        token_ids=ids,
        logprobs=np.concatenate([before.logprobs, chunk.logprobs]),
        versions=np.concatenate([before.versions, chunk.versions]),
        contexts=np.concatenate([before.oldest, contexts]),
        text=text(ids.tolist(), params, chunk.reason),
        finish_reason=chunk.reason,
        stats=before.stats + chunk.stats,
        exact=before.exact,
        trace=_joined(before, chunk),
        routing=join_routing(before.routing, chunk.routing, len(chunk.token_ids)),
    )


def _joined(before: Completion, chunk: OutputChunk) -> Trace | None:
    """Join both traces; return None if neither has one. Tokens without a trace count as unknown."""
    traces = [(before.trace, len(before.token_ids)), (chunk.trace, len(chunk.token_ids))]
    tops = [trace.target_ids.shape[1] for trace, _ in traces if trace is not None]
    return join_traces([trace or unknown(count, tops[0]) for trace, count in traces]) if tops else None
