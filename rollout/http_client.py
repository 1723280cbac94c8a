"""JSON calls to one server by address. Who calls says which failures are worth another try."""

import json
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

FIRST_WAIT = 0.5  # seconds before the second try; doubled each time, plus up to as much again by chance
CONNECT_SECONDS = 10.0  # at most, until a connection is there


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What a server replied, read to its end."""

    status: int
    content_type: str
    text: str

    def json(self) -> Any:
        """Return the body's value, None for an empty body; raise ``ValueError`` if it is no JSON."""
        return json.loads(self.text) if self.text.strip() else None


class Busy(Exception):
    """A status that asks for patience."""


FAILURES = (Busy, aiohttp.ClientError, TimeoutError, ConnectionError)


class NoReply(Exception):
    """The last of some tries failed with ``error``, which is one of ``FAILURES``."""

    def __init__(self, error: Exception, tries: int) -> None:
        super().__init__(str(error))
        self.error, self.tries = error, tries


class HttpClient:
    """One address. Connections are opened when they are needed, also again after ``close``."""

    def __init__(self, url: str, key: str | None, *, timeout: float, keep_alive: bool = True) -> None:
        """``timeout`` of one call from its beginning to its end, in seconds; ``keep_alive``: use connections again."""
        self.url, self.keep_alive = url.rstrip("/"), keep_alive
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT_SECONDS))
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        method: str,
        name: str,
        payload: Mapping[str, Any] | None,
        *,
        tries: int,
        busy: Collection[int],
        retry: Callable[[Exception], bool] = lambda error: True,
    ) -> HttpReply:
        """Return the reply to a call; raise ``NoReply`` when it failed and may not be tried again.

        There are at most so many ``tries``, each after a longer wait. Statuses in ``busy`` count as failures; every
        other one is a reply. ``retry`` says whether a failure, one of ``FAILURES``, is worth another try.
        """
        retrying = AsyncRetrying(
            stop=stop_after_attempt(tries),
            wait=_wait,
            retry=retry_if_exception(lambda error: isinstance(error, FAILURES) and retry(error)),
            reraise=True,
        )
        try:
            return await retrying(self.call_once, method, name, payload, busy)
        except FAILURES as error:
            raise NoReply(error, retrying.statistics["attempt_number"]) from error

    async def call_once(
        self, method: str, name: str, payload: Mapping[str, Any] | None, busy: Collection[int]
    ) -> HttpReply:
        """Return the reply to a call that is not tried again; raise ``Busy`` for a status in ``busy``."""
        if self._session is None:
            # A connection that is kept may be closed just as it is used again: the call may have come through or not.
            connector = aiohttp.TCPConnector(limit=0, force_close=not self.keep_alive)
            self._session = aiohttp.ClientSession(headers=self.headers, timeout=self.timeout, connector=connector)
        async with self._session.request(method, f"{self.url}/{name}", json=payload) as response:
            if response.status in busy:
                raise Busy(f"status {response.status}")
            return HttpReply(response.status, response.content_type, await response.text())

    async def close(self) -> None:
        """Drop connections; the server stays."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _wait(state: RetryCallState) -> float:
    """Return the seconds until the next try."""
    return FIRST_WAIT * 2.0 ** (state.attempt_number - 1) * (1 + random.random())
