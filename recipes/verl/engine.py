"""The embedded engine in a thread of its own: requests in from anywhere, futures out.

Everything that touches the engine happens in the thread, in the order in which it was asked for; so a request that was
submitted before a pause is aborted by it, and one that comes after new weights is decoded with them.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from bebop.rollout.engine import Engine, Request
from bebop.trajectory import Completion

T = TypeVar("T")


class EngineThread:
    """Drives an engine; every method may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._news = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._open: dict[int, Future[Completion]] = {}
        self._next = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Completion]:
        """Queue a request; its id is chosen here. The future raises ``UserError`` if it can never fit."""
        future: Future[Completion] = Future()

        def begin() -> None:
            self._next += 1
            try:
                self.engine.add(replace(request, id=self._next))
            except ValueError as error:
                future.set_exception(error)
                return
            self._open[self._next] = future

        self._post(begin, future)
        return future

    def abort(self) -> Future[int]:
        """End all requests; their futures get what there is of an answer (reason ``abort``). Yields how many."""
        return self._call(self._abort)

    def load(self, weights: Mapping[str, Tensor], version: int) -> Future[None]:
        """New weights, in place; requests in progress go on with them."""
        return self._call(lambda: self.engine.load_weights(weights, version))

    def stop(self) -> None:
        """End the thread after the cycle in progress."""
        with self._news:
            self._stopped = True
            self._news.notify_all()
        self._thread.join(timeout=60)

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def do() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # whoever asked gets it
                future.set_exception(error)

        self._post(do, future)
        return future

    def _post(self, action: Callable[[], None], future: Future[T]) -> None:
        with self._news:
            if self._error is not None:
                future.set_exception(self._error)
                return
            self._inbox.append(action)
            self._news.notify_all()

    def _abort(self) -> int:
        finished = self.engine.abort()
        for each in finished:
            self._open.pop(each.id).set_result(each.completion)
        return len(finished)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            with self._news:
                self._error = error
                waiting, self._open = list(self._open.values()), {}
            for future in waiting:
                future.set_exception(error)
            raise

    def _turn(self) -> bool:
        with self._news:
            self._news.wait_for(lambda: self._stopped or self._inbox or self.engine.unfinished)
            if self._stopped:
                return False
            actions, self._inbox = list(self._inbox), deque()
        for action in actions:
            action()
        for finished in self.engine.step():
            self._open.pop(finished.id).set_result(finished.completion)
        return True
