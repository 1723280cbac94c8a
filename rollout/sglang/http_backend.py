"""SGLang servers by address: retries with backoff, and several of them behind one."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.engine import EngineDied
from bebop.rollout.heartbeat import Heartbeat
from bebop.rollout.http_client import Busy, HttpClient, HttpReply, NoReply
from bebop.rollout.sglang.arguments import refuse_server
from bebop.rollout.sglang.backend import Backend, Reply, checked
from bebop.runtime.watchdog import SuspendAwareClock, within

log = logging.getLogger(__name__)
BUSY = (429, 500, 502, 503, 504)  # worth another try
REVIVE_SECONDS = 5.0  # for a look whether a server that was out is back: the others wait for it
ONCE = ("begin_weight_update", "end_weight_update", "update_weights_from_distributed")  # not to be said twice


class HttpBackend:
    """One server, or one behind a router that forwards control calls too."""

    def __init__(
        self,
        url: str,
        key: str | None,
        decoding: DecodingConfig,
        *,
        timeout: float,
        retries: int,
        hang_after: float = 30.0,
    ) -> None:
        """``timeout`` bounds one call, in seconds: a completion may take as long as that.

        ``hang_after``: as in ``runtime.hang_after``; the server is asked for its state meanwhile.
        """
        self.client = HttpClient(url, key, timeout=timeout)
        self.url, self.decoding, self.retries = self.client.url, decoding, retries
        self.heart = Heartbeat(self.url, self._ping, hang_after)

    async def start(self) -> None:
        """Check that the server is there and decodes as asked for; end what a job that died may have left in it."""
        info = await self.heart.control("server_info", self._call("GET", "server_info", None))
        refuse_server(info, self.decoding, self.url)
        model = await self.heart.control("model_info", self._call("GET", "model_info", None))
        if not str(model.get("weight_version")).isdigit():
            await self.control("update_weight_version", {"new_version": "0", "abort_all_requests": False})
        with contextlib.suppress(EngineDied):  # no session is open
            await self.control("end_weight_update", {})
        await self.control("abort_request", {"abort_all": True})
        await self.control("continue_generation", {"torch_empty_cache": False})
        self.heart.start()

    async def generate(self, payload: Mapping[str, Any]) -> Reply:
        """Answer one request."""
        return await self.heart.answer(self._call("POST", "generate", payload))

    async def control(self, name: str, payload: Mapping[str, Any]) -> Reply:
        """Make a control call within its deadline."""
        return checked(name, await self.heart.control(name, self._call("POST", name, payload)))

    def dead(self) -> str | None:
        """Return why the server counts as dead; None: it does not."""
        return self.heart.why

    async def close(self) -> None:
        """Drop connections; the server stays."""
        self.heart.close()
        await self.client.close()

    async def _ping(self) -> None:
        with contextlib.suppress(Busy):  # a server that says so is there
            self._read(await self.client.call_once("GET", "server_info", None, BUSY), "server_info")

    async def _call(self, method: str, name: str, payload: Mapping[str, Any] | None) -> Reply:
        """Return the reply to a call; a call that fails in transit is tried again, each time after a longer wait."""
        tries = 1 if name in ONCE else self.retries + 1
        try:
            reply = await self.client.call(method, name, payload, tries=tries, busy=BUSY)
        except NoReply as failure:
            problem = str(failure.error) or type(failure.error).__name__
            raise EngineDied(f"{self.url}/{name}: {problem} ({failure.tries} tries)") from None
        return self._read(reply, name)

    def _read(self, reply: HttpReply, name: str) -> Reply:
        if reply.status in (401, 403):
            raise UserError(f"{self.url} refuses the key: set the variable that rollout.sglang.api_key_env names")
        if reply.status == 404:
            raise UserError(f"{self.url} has no /{name}: it is no SGLang server of 0.5.14 or newer")
        if reply.content_type != "application/json":
            return {"success": reply.status < 400, "message": reply.text[:300]}
        content: Reply = reply.json()
        if name == "generate" and reply.status >= 400:
            raise UserError(f"{self.url} refuses a request: {content.get('error', content)}")
        return content


class Fleet:
    """Several engines: each request to the least busy, control calls to all.

    A member that died gets no more requests; those that it had go to the others. It may come back when new weights
    are sent, which it needs before anything else.
    """

    def __init__(self, members: Sequence[Backend]) -> None:
        self.members = list(members)
        self.busy = [0] * len(members)
        self.out: dict[int, str] = {}  # member -> why
        self._last: tuple[object, int] = (None, 0)  # the last prompt, and who got it

    async def start(self) -> None:
        """Start all; every one must be there at first."""
        await asyncio.gather(*[member.start() for member in self.members])

    async def generate(self, payload: Mapping[str, Any]) -> Reply:
        """Answer one request; ask elsewhere again if a member dies over it."""
        while True:
            chosen = self._choose(payload.get("input_ids"))
            self.busy[chosen] += 1
            try:
                return await self.members[chosen].generate(payload)
            except EngineDied as death:
                self._drop(chosen, death)
            finally:
                self.busy[chosen] -= 1

    async def control(self, name: str, payload: Mapping[str, Any]) -> Reply:
        """Call all; return the first member's reply. A pause for new weights brings dead members back."""
        if name == "pause_generation":
            await self._revive()
        alive = self._alive()
        replies = await asyncio.gather(*[self.members[i].control(name, payload) for i in alive], return_exceptions=True)
        good: list[Reply] = []
        for i, reply in zip(alive, replies, strict=True):
            if isinstance(reply, EngineDied):
                self._drop(i, reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                good.append(reply)
        if name == "weights_checker" and any(reply.get("ranks") != good[0].get("ranks") for reply in good):
            raise EngineDied("the engines hold different weights after the same update")
        return good[0]

    def dead(self) -> str | None:
        """Return why all members are dead; None while one lives."""
        for i, member in enumerate(self.members):
            if i not in self.out and (why := member.dead()):
                self._mark(i, why)
        return "; ".join(self.out.values()) if len(self.out) == len(self.members) else None

    async def close(self) -> None:
        """Close all."""
        await asyncio.gather(*[member.close() for member in self.members])

    def _choose(self, prompt: object) -> int:
        """Return the least busy member; a prompt asked again at once goes where it is cached already."""
        alive = self._alive()
        before, chosen = self._last
        if prompt != before or chosen not in alive:
            chosen = min(alive, key=lambda i: self.busy[i])
        self._last = (prompt, chosen)
        return chosen

    def _alive(self) -> list[int]:
        alive = [i for i in range(len(self.members)) if i not in self.out]
        if not alive:
            raise EngineDied("; ".join(self.out.values()))
        return alive

    def _drop(self, i: int, death: EngineDied) -> None:
        self._mark(i, str(death))
        self._alive()

    def _mark(self, i: int, why: str) -> None:
        log.warning("engine %d of %d is out: %s", i + 1, len(self.members), why)
        self.out[i] = why

    async def _revive(self) -> None:
        for i in list(self.out):
            try:
                await within(self.members[i].start(), REVIVE_SECONDS, SuspendAwareClock())
            except (EngineDied, TimeoutError):
                continue
            del self.out[i]
            log.warning("engine %d is back", i + 1)
