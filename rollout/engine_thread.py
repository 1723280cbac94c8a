"""The decoding thread: an engine that any thread may call, and that returns futures.

Invariant: everything that touches the engine happens in this thread, between two steps, in the order of the calls. So
new weights reach every request that is submitted after them, and an abort ends those that were submitted before it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.driver.protocols import Pace
from bebop.rollout.engine import Engine, Finished, Request
from bebop.trajectory import Completion

Call = Callable[[Future[Any]], None]
STOP_SECONDS = 60.0  # for the step in progress, when the thread is to end


class Stopped(RuntimeError):
    """Error: the thread ended before it served a call."""


class Progress(NamedTuple):
    """Work of the thread since the last call of ``progress``, and the weights in use."""

    busy: float  # seconds in steps
    swap: float  # seconds in loads of weights
    version: int  # of the weights that were loaded last
    head: str  # fingerprint of the head, of the same moment
    redrawn: int  # see ``Engine.redrawn``


class EngineThread:
    """Drives an engine; every method but ``turn`` may be called from any thread.

    A future raises the engine's error for its call (``UserError`` for a request that can never fit). An error in a step
    ends the thread. All open, queued and later calls raise it as well, or ``Stopped`` after ``stop``.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._changed = threading.Condition()
        self._calls: list[tuple[Call, Future[Any]]] = []
        self._open: dict[int, Future[Completion]] = {}
        self._next = 0
        self._busy = self._swap = 0.0
        self._slowest = 0.0  # seconds of the slowest turn
        self._since: float | None = None  # when it last made progress; None: there is nothing to do
        self._loaded = (engine.version, engine.head)
        self._stopping = False
        self._error: BaseException | None = None  # what ended the thread
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        """Start the thread; without it, the caller calls ``turn``."""
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Queue requests, which enter the engine together; this thread chooses their ids."""
        return self._post([partial(self._add, request) for request in requests])

    def abort(self) -> Future[int]:
        """End all requests, whose futures get partial completions (reason ``abort``); return their number."""
        return self._post([self._abort])[0]

    def load(self, weights: Mapping[str, Tensor], version: int) -> Future[None]:
        """Load weights between two steps; requests in progress go on with them."""
        return self._post([partial(self._load, weights, version)])[0]

    def configure(self, decoding: DecodingConfig) -> Future[None]:
        """Change the decoding configuration between two steps; requests in progress go on with the new one."""
        return self._post([partial(self._configure, decoding)])[0]

    def remember(self, prompt: Sequence[int], completions: Sequence[Iterable[int]]) -> Future[None]:
        """Give the engine past completions of a prompt, before any request that is submitted later."""
        return self._post([partial(self._remember, prompt, completions)])[0]

    def progress(self) -> Progress:
        """Return the seconds in steps and in loads since the last call, and the current version and head."""
        with self._changed:
            progress = Progress(self._busy, self._swap, *self._loaded, self.engine.redrawn)
            self._busy = self._swap = 0.0
        return progress

    def pace(self) -> Pace:
        """Return for how many seconds the thread made no progress, and the seconds of its slowest turn."""
        with self._changed:
            silent = 0.0 if self._since is None else time.monotonic() - self._since
            return Pace(name="decoding", silent=silent, slowest=self._slowest)

    def stop(self) -> None:
        """End the thread after the step in progress, whose completions are still returned."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is None:  # never started
            self._end(Stopped("the decoding thread was stopped"))
        elif self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def turn(self) -> None:
        """Serve the queued calls, run one step of the engine, and resolve the futures of finished requests."""
        with self._changed:
            begun = self._since = time.monotonic()
            calls, self._calls = self._calls, []
        for call, future in calls:
            try:
                call(future)
            except Exception as error:  # the caller gets it
                future.set_exception(error)
        started = time.perf_counter()
        ended = self.engine.step()
        with self._changed:
            self._busy += time.perf_counter() - started
        self._resolve(ended)
        with self._changed:
            now = time.monotonic()
            self._slowest = max(self._slowest, now - begun)
            self._since = now if self._calls or self.engine.unfinished else None

    def _run(self) -> None:
        error: BaseException = Stopped("the decoding thread was stopped")
        device = getattr(getattr(self.engine, "policy", None), "device", None)
        try:
            if isinstance(device, torch.device) and device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread begins with the first GPU
            while self._wait():
                self.turn()
        except BaseException as broken:  # not swallowed: everybody who waits gets it
            error = broken
        self._end(error)

    def _wait(self) -> bool:
        """Sleep until there is something to do; return False if the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._calls or self.engine.unfinished)
            return not self._stopping

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._error, self._since = error, None
            waiting = [*self._open.values(), *(future for _, future in self._calls)]
            self._open, self._calls = {}, []
        for future in waiting:
            future.set_exception(error)

    def _post(self, calls: Sequence[Call]) -> list[Future[Any]]:
        """Queue calls that are served together; each call resolves its future, now or later."""
        futures: list[Future[Any]] = [Future() for _ in calls]
        for future in futures:
            future.set_running_or_notify_cancel()  # a future that a waiter has cancelled would refuse its result
        with self._changed:
            if self._error is None:
                self._calls += zip(calls, futures, strict=True)
                self._since = self._since or time.monotonic()
                self._changed.notify_all()
                return futures
        for future in futures:
            future.set_exception(self._error)
        return futures

    def _add(self, request: Request, future: Future[Completion]) -> None:
        self._next += 1
        self.engine.add(replace(request, id=self._next))
        self._open[self._next] = future

    def _abort(self, future: Future[int]) -> None:
        ended = self.engine.abort()
        self._resolve(ended)
        future.set_result(len(ended))

    def _load(self, weights: Mapping[str, Tensor], version: int, future: Future[None]) -> None:
        started = time.perf_counter()
        self.engine.load_weights(weights, version)
        with self._changed:
            self._swap += time.perf_counter() - started
            self._loaded = (self.engine.version, self.engine.head)
        future.set_result(None)

    def _configure(self, decoding: DecodingConfig, future: Future[None]) -> None:
        self.engine.configure(decoding)
        future.set_result(None)

    def _remember(self, prompt: Sequence[int], completions: Sequence[Iterable[int]], future: Future[None]) -> None:
        self.engine.remember(prompt, completions)
        future.set_result(None)

    def _resolve(self, ended: Sequence[Finished]) -> None:
        for finished in ended:
            self._open.pop(finished.id).set_result(finished.completion)
