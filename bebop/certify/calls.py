"""A server by address, asked by a certificate: many calls side by side, retries where they change nothing, Ctrl-C.

A sample is asked for again only where nothing can have been drawn yet: whoever asks again after a timeout prefers short
answers, and a certificate would be about those.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp

from bebop.errors import UserError

REFUSED = (429, 503)  # before anything was drawn
FAILED = (500, 502, 504)  # worth another try if asking twice is harmless
FIRST_WAIT = 0.5  # seconds before the second try; doubled each time, plus up to as much again by chance
GRACE = 10.0  # seconds for answers that were ended to come back
Result = TypeVar("Result")
End = Callable[[], Awaitable[None]]


class Server:
    """One address; its calls raise ``UserError`` in one line that names it."""

    def __init__(
        self, url: str, *, key: str | None = None, key_name: str = "", timeout: float = 600.0, retries: int = 4
    ) -> None:
        """``key_name``: the environment variable of the key, for messages; ``timeout`` of one call, in seconds."""
        self.url, self.key_name, self.retries, self.timeout = url.rstrip("/"), key_name, retries, timeout
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """One call from code that is not asynchronous."""
        return self._runner.run(call)

    def together(self, calls: Sequence[Coroutine[Any, Any, Result]], end: End | None = None) -> list[Result | None]:
        """Results of calls side by side, in their order; the first error ends all.

        Interrupted (``KeyboardInterrupt``), it lets ``end`` end what is running, waits ``GRACE`` seconds at most and
        gives what is there: None for a call without a result.
        """
        tasks: list[asyncio.Task[Result]] = []
        try:
            return [*self._runner.run(_all(calls, tasks))]
        except KeyboardInterrupt:
            return self._runner.run(_rest(tasks, end))

    async def get(self, name: str) -> Any:
        """What is at an address; None where there is nothing (404)."""
        return await self.ask("GET", name, None, again=True)

    async def ask(self, method: str, name: str, payload: Mapping[str, Any] | None, *, again: bool) -> Any:
        """The JSON that a call gives, None for 404. ``again``: asking twice is harmless, as nothing is drawn."""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_WAIT * 2 ** (attempt - 1) * (1 + random.random()))
            try:
                async with self._opened().request(method, f"{self.url}/{name}", json=payload) as response:
                    if response.status not in (REFUSED + FAILED if again else REFUSED):
                        return await self._read(response, name)
                    problem = f"is not ready: status {response.status}"
            except aiohttp.ClientConnectorError as error:
                problem = f"is not there: {error.strerror or error}"
            except aiohttp.ConnectionTimeoutError:
                problem = "is not there: nobody answers"
            except TimeoutError:
                raise UserError(
                    f"{self.url}/{name} gave no answer in engine.timeout={self.timeout:g} seconds: raise it, or ask "
                    "for shorter answers (sampling.max_new_tokens)"
                ) from None
            except (aiohttp.ClientError, ConnectionError) as error:
                problem = f"dropped the connection: {str(error) or type(error).__name__}"
                if not again:
                    break
        raise UserError(f"{self.url} {problem} (asked {attempt + 1} times): start the server, or set engine.url")

    def close(self) -> None:
        """Drop connections; the server stays."""
        if self._session is not None:
            self._runner.run(self._session.close())
            self._session = None
        self._runner.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A connection that is kept may be closed by the server just as it is used again: whether the request came
            # through, nobody knows, and a sample must not be asked for twice.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            limits = aiohttp.ClientTimeout(total=self.timeout, sock_connect=min(self.timeout, 10.0))
            self._session = aiohttp.ClientSession(headers=self.headers, timeout=limits, connector=connector)
        return self._session

    async def _read(self, response: aiohttp.ClientResponse, name: str) -> Any:
        if response.status in (401, 403):
            raise UserError(f"{self.url} refuses the key: set the variable {self.key_name} (engine.api_key_env) to it")
        if response.status == 404:
            return None
        if response.status >= 400:
            raise UserError(f"{self.url}/{name} refuses a request: {_line(await response.text())}")
        try:
            return await response.json(content_type=None)
        except ValueError:
            found = _line(await response.text())
            raise UserError(f"{self.url}/{name} answers no JSON, but {found!r}: is engine.url right?") from None


async def _all(calls: Sequence[Coroutine[Any, Any, Result]], tasks: list[asyncio.Task[Result]]) -> list[Result]:
    """Results of all, while ``tasks`` shows them to whoever has to clean up."""
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


async def _rest(
    tasks: Sequence[asyncio.Task[Result]], end: Callable[[], Awaitable[None]] | None
) -> list[Result | None]:
    """What is there soon after an interruption."""
    if end is not None:
        await end()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [None if task.cancelled() or task.exception() is not None else task.result() for task in tasks]


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
