"""Calls of a certificate to a server by address: concurrent calls, safe retries, Ctrl-C.

A sample is retried only if the server cannot have drawn anything yet. Retries after a timeout would favor short
completions, and would bias the certificate.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import numpy as np

from bebop.certify.answers import Answer
from bebop.errors import UserError, one_line
from bebop.rollout.engine import Request
from bebop.rollout.http_client import REFUSED, Busy, HttpClient, HttpReply, NoReply, nothing_drawn

FAILED = (500, 502, 504)  # worth a retry if a retry is harmless
GRACE = 10.0  # seconds to wait for aborted completions
Result = TypeVar("Result")
End = Callable[[], Awaitable[None]]


class Server:
    """A server at one address; its calls raise ``UserError`` in one line that names it."""

    def __init__(
        self, url: str, *, key: str | None = None, key_name: str = "", timeout: float = 600.0, retries: int = 4
    ) -> None:
        """Prepare the client; this makes no call.

        Args:
            key_name: the environment variable of the key, for messages.
            timeout: limit of one call, in seconds.
        """
        # Connections are not reused: a sample that the server may have drawn must not be requested twice.
        self.client = HttpClient(url, key, timeout=timeout, keep_alive=False)
        self.url, self.key_name, self.retries, self.timeout = self.client.url, key_name, retries, timeout
        self._runner = asyncio.Runner()

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Wait for one call from synchronous code and return its result."""
        return self._runner.run(call)

    def together(self, calls: Sequence[Coroutine[Any, Any, Result]], end: End | None = None) -> list[Result | None]:
        """Return the results of concurrent calls, in their order; the first error ends all.

        On ``KeyboardInterrupt`` it calls ``end`` to end the running calls, waits at most ``GRACE`` seconds, and returns
        the results so far: None for a call without one.
        """
        tasks: list[asyncio.Task[Result]] = []
        try:
            return [*self._runner.run(_all(calls, tasks))]
        except KeyboardInterrupt:
            return self._runner.run(_rest(tasks, end))

    async def get(self, name: str) -> Any:
        """Return the JSON at an address; None if the server has nothing there (404)."""
        return await self.ask("GET", name, None, again=True)

    async def ask(self, method: str, name: str, payload: Mapping[str, Any] | None, *, again: bool) -> Any:
        """Return the JSON result of a call, None for 404. ``again``: a retry is harmless, because nothing is drawn."""

        def retry(error: Exception) -> bool:
            return nothing_drawn(error) or (again and not isinstance(error, TimeoutError))

        busy = REFUSED + FAILED if again else REFUSED
        try:
            reply = await self.client.call(method, name, payload, tries=self.retries + 1, busy=busy, retry=retry)
        except NoReply as failure:
            raise UserError(self._explain(name, failure)) from None
        return self._read(reply, name)

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._runner.run(self.client.close())
        self._runner.close()

    def _explain(self, name: str, failure: NoReply) -> str:
        error = failure.error
        match error:
            case aiohttp.ClientConnectorError():
                problem = f"is not there: {error.strerror or error}"
            case aiohttp.ConnectionTimeoutError():
                problem = "is not there: nobody answers"
            case TimeoutError():
                return (
                    f"{self.url}/{name} gave no answer in engine.timeout={self.timeout:g} seconds: raise it, or ask "
                    "for shorter completions (sampling.max_new_tokens)"
                )
            case Busy():
                problem = f"is not ready: {error}"
            case _:
                problem = f"dropped the connection: {str(error) or type(error).__name__}"
        return f"{self.url} {problem} (asked {failure.tries} times): start the server, or set engine.url"

    def _read(self, reply: HttpReply, name: str) -> Any:
        if reply.status in (401, 403):
            raise UserError(f"{self.url} refuses the key: set the variable {self.key_name} (engine.api_key_env) to it")
        if reply.status == 404:
            return None
        if reply.status >= 400:
            raise UserError(f"{self.url}/{name} refuses a request: {one_line(reply.text)}")
        try:
            return reply.json()
        except ValueError:
            found = one_line(reply.text)
            raise UserError(f"{self.url}/{name} answers no JSON, but {found!r}: is engine.url right?") from None


async def _all(calls: Sequence[Coroutine[Any, Any, Result]], tasks: list[asyncio.Task[Result]]) -> list[Result]:
    """Return the results of all calls; ``tasks`` lets the caller clean up after an interruption."""
    tasks += [asyncio.create_task(call) for call in calls]
    if not tasks:
        return []
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    errors = [task.exception() for task in tasks if not task.cancelled()]  # asked of all: none may go unheard
    for error in errors:
        if error is not None:
            raise error
    return [task.result() for task in tasks]


async def _rest(tasks: Sequence[asyncio.Task[Result]], end: End | None) -> list[Result | None]:
    """Return the results that arrive soon after an interruption."""
    if end is not None:
        await end()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [None if task.cancelled() or task.exception() is not None else task.result() for task in tasks]


# ---- requests to servers, and their completions


def refuse(request: Request, vocabulary: int | None) -> None:
    """Raise ``UserError`` for stop strings, and for prompts that do not fit the served model.

    ``vocabulary``: the server's vocabulary size; None: the server checks this itself.
    """
    if request.params.stop:
        raise UserError(
            f"sampling.stop={list(request.params.stop)} is not possible: a served completion is certified by its "
            "tokens, and ends with stop tokens alone"
        )
    ids = request.token_ids
    if not ids or min(ids) < 0:
        raise UserError(f"prompt {list(ids)[:8]} is not possible: give one or more token ids, 0 or above")
    if vocabulary is not None and max(ids) >= vocabulary:
        raise UserError(
            f"a prompt has token {max(ids)}, but the server's vocabulary has {vocabulary}: is model.path the model "
            "that it serves?"
        )


def fields(request: Request) -> dict[str, Any]:
    """Return the fields of an ``Answer`` that are known before the request is sent."""
    params = request.params
    return {
        "request": request.id,
        "prompt": request.token_ids,
        "stops": params.stop_token_ids,
        "limit": params.max_new_tokens,
    }


def unanswered(request: Request) -> Answer:
    """Return the ``Answer`` to a request that was interrupted before any token came back."""
    return Answer(**fields(request), token_ids=np.zeros(0, dtype=np.int64), finish_reason="abort")
