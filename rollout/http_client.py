"""JSON calls to one server by address. The caller says which failures are worth another try."""

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
    """The complete reply of a server."""

    status: int
    content_type: str
    text: str

    def json(self) -> Any:
        """Return the value of the body, None for an empty body; raise ``ValueError`` if it is no JSON."""
        return json.loads(self.text) if self.text.strip() else None


class Busy(Exception):
    """Error: the server replied with a status that means it is busy."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


FAILURES = (Busy, aiohttp.ClientError, TimeoutError, ConnectionError)
REFUSED = (429, 503)  # statuses of a server that refused a call before it drew anything
NOT_THERE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


def nothing_drawn(error: Exception) -> bool:
    """Return whether the server cannot have drawn anything for a call that failed so."""
    return error.status in REFUSED if isinstance(error, Busy) else isinstance(error, NOT_THERE)


class NoReply(Exception):
    """Error: the last try failed with ``error``, which is one of ``FAILURES``."""

    def __init__(self, error: Exception, tries: int) -> None:
        super().__init__(str(error))
        self.error, self.tries = error, tries


def unchanged(payload: Mapping[str, Any], attempt: int) -> Mapping[str, Any]:
    """Return the payload of any try of a call."""
    return payload


class HttpClient:
    """Client for one address. Connections are opened when they are needed, also again after ``close``."""

    def __init__(self, url: str, key: str | None, *, timeout: float, keep_alive: bool = True) -> None:
        """Make a client without connections.

        Args:
            url: the address.
            key: sent as a bearer token; None: no key.
            timeout: seconds of one call from its beginning to its end.
            keep_alive: use connections again.
        """
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
        renewed: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = unchanged,
    ) -> HttpReply:
        """Return the reply to a call; raise ``NoReply`` when it failed and may not be tried again.

        There are at most ``tries`` tries, each after a longer wait. Statuses in ``busy`` count as failures; every other
        status is a reply. ``retry`` decides whether a failure, one of ``FAILURES``, is worth another try. ``renewed``
        changes the payload of a later try, from 2 on: the server may still be at work on the one before.
        """
        retrying = AsyncRetrying(
            stop=stop_after_attempt(tries),
            wait=_wait,
            retry=retry_if_exception(lambda error: isinstance(error, FAILURES) and retry(error)),
            reraise=True,
        )

        async def once() -> HttpReply:
            attempt = int(retrying.statistics["attempt_number"])
            own = renewed(payload, attempt) if payload is not None and attempt > 1 else payload
            return await self.call_once(method, name, own, busy)

        try:
            return await retrying(once)
        except FAILURES as error:
            raise NoReply(error, retrying.statistics["attempt_number"]) from error

    async def call_once(
        self, method: str, name: str, payload: Mapping[str, Any] | None, busy: Collection[int]
    ) -> HttpReply:
        """Return the reply to a single try of a call; raise ``Busy`` for a status in ``busy``."""
        if self._session is None:
            # A connection that is kept may be closed just as it is used again: the call may have come through or not.
            connector = aiohttp.TCPConnector(limit=0, force_close=not self.keep_alive)
            self._session = aiohttp.ClientSession(headers=self.headers, timeout=self.timeout, connector=connector)
        async with self._session.request(method, f"{self.url}/{name}", json=payload) as response:
            if response.status in busy:
                raise Busy(response.status)
            return HttpReply(response.status, response.content_type, await response.text())

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _wait(state: RetryCallState) -> float:
    """Return the seconds to wait before the next try."""
    return FIRST_WAIT * 2.0 ** (state.attempt_number - 1) * (1 + random.random())
