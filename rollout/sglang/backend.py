"""SGLang engines behind one interface: one inside this process, a server by its address, and several as one."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bebop.config.engines import Pause
from bebop.config.job import DecodingConfig
from bebop.errors import UserError, one_line
from bebop.rollout.engine import EngineDied
from bebop.rollout.heartbeat import Heartbeat
from bebop.rollout.http_client import Busy, HttpClient, HttpReply, NoReply, nothing_drawn, unchanged
from bebop.rollout.sglang.arguments import refuse_server, refuse_version
from bebop.runtime.processes import stopped
from bebop.runtime.watchdog import SuspendAwareClock, within

log = logging.getLogger(__name__)
Reply = dict[str, Any]
# An intermediate report would cut the plugin's entries, which are per verification step, at a number of tokens.
WHOLE_ANSWERS = {"SGLANG_FORCE_STREAM_INTERVAL": str(1 << 30)}
# Environment on a CPU. Without the third, 64 programs a row look for the largest of a few numbers: half of the time.
# Without the last, a server compiles for seconds what it calls a few times.
INTERPRETER = {
    "TRITON_INTERPRET": "1",
    "BEBOP_SGLANG_CPU": "1",
    "SGLANG_OPT_USE_GUMBEL_SAMPLE": "0",
    "TORCH_COMPILE_DISABLE": "1",
}
STRUCTS = {  # control calls, as SGLang's HTTP server names them, and their argument types
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "weights_checker": "CheckWeightsReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
METHODS = {"weights_checker": "check_weights"}  # where the engine's own name is another


class Backend(Protocol):
    """Interface for requests and control calls; every call raises ``EngineDied`` if the server is gone."""

    @property
    def redrawn(self) -> int:
        """Return the number of requests so far that were lost and sent again."""

    async def start(self) -> None:
        """Make the server ready; another call restarts it."""

    async def generate(self, payload: Mapping[str, Any]) -> Reply:
        """Return the reply to one request: ``output_ids`` and ``meta_info``."""

    async def control(self, name: str, payload: Mapping[str, Any]) -> Reply:
        """Make a call of ``STRUCTS``, or ``abort_request``; a reply with ``success`` false raises ``EngineDied``."""

    def dead(self) -> str | None:
        """Return why the server is known to be dead; None: it is not."""

    async def close(self) -> None:
        """End the processes that were started."""


class LocalBackend:
    """``sglang.Engine`` in this process, with its scheduler in child processes."""

    redrawn = 0

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], hang_after: float = 30.0) -> None:
        """Keep the arguments of ``sglang.Engine`` for ``start``.

        ``environment`` is set for SGLang's processes, and hence for this one; ``hang_after`` as in ``runtime``.
        """
        self.arguments, self.environment = dict(arguments), dict(environment)
        self.engine: Any = None
        self.children: set[int] = set()
        self.heart = Heartbeat(
            "SGLang's scheduler", lambda: self.engine.tokenizer_manager.get_internal_state(), hang_after
        )
        self._stopped: dict[int, SuspendAwareClock] = {}  # a child that is stopped, and since when

    async def start(self) -> None:
        """Load the model. This blocks the event loop, which SGLang binds to."""
        os.environ.update(WHOLE_ANSWERS | self.environment)
        import sglang

        refuse_version(sglang.__version__)
        before = _children()
        try:
            self.engine = sglang.Engine(**self.arguments)
        except (ValueError, AssertionError) as error:  # arguments that do not fit together, or not the model
            raise UserError(f"SGLang refuses its arguments: {one_line(error)}") from error
        except (RuntimeError, OSError) as error:
            raise EngineDied(f"SGLang did not start: {one_line(error)}") from error
        self.children = _children() - before
        # SGLang's own watchdog would end this process; here a dead child is noticed by ``dead``.
        watchdog = getattr(self.engine.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        self.heart.start()

    async def generate(self, payload: Mapping[str, Any]) -> Reply:
        """Return the reply to one request, without ``Engine.async_generate``, which does not pass every field on."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = self.engine.tokenizer_manager.generate_request(GenerateReqInput(**payload), None)

        async def answer() -> Reply:
            output: Reply = await anext(request)
            return output

        return await self.heart.answer(answer())

    async def control(self, name: str, payload: Mapping[str, Any]) -> Reply:
        """Make a control call within its deadline."""
        manager = self.engine.tokenizer_manager
        if name == "abort_request":
            manager.abort_request(**payload)
            return {"success": True}
        from sglang.srt.managers import io_struct

        call = getattr(manager, METHODS.get(name, name))(getattr(io_struct, STRUCTS[name])(**payload))
        found = await self.heart.control(name, call)
        values = found if isinstance(found, tuple) else ()
        reply = dict(zip(("success", "message", "ranks"), values, strict=False)) or {"success": True}
        return checked(name, reply)

    def dead(self) -> str | None:
        """Return why one of SGLang's processes counts as dead; None: none does."""
        if gone := self.children - _children():
            return f"SGLang's process {min(gone)} ended"
        self._stopped = {pid: self._stopped.get(pid, SuspendAwareClock()) for pid in self.children if stopped(pid)}
        for pid, clock in self._stopped.items():
            clock.tick()
            if clock.read() > self.heart.floor:
                return f"SGLang's process {pid} is stopped for {clock.read():.0f} s"
        return self.heart.why

    async def close(self) -> None:
        """End SGLang's processes; SGLang ends every child of this process with them."""
        self.heart.close()
        if self.engine is not None:
            await asyncio.to_thread(self.engine.shutdown)
            self.engine = None


def checked(name: str, reply: Reply) -> Reply:
    """Return the reply of a control call; raise ``EngineDied`` unless it reports success."""
    if not reply.get("success", True):
        raise EngineDied(f"{name} failed: {one_line(reply.get('message'))}")
    return reply


def _children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


# ---- servers by address: calls are tried again, each time after a longer wait

BUSY = (429, 500, 502, 503, 504)  # worth another try
REVIVE_SECONDS = 5.0  # for a look whether a server that was out is back: the others wait for it
ONCE = ("begin_weight_update", "end_weight_update", "update_weights_from_distributed")  # never sent twice


class HttpBackend:
    """One server, or several behind a router that forwards control calls too."""

    def __init__(
        self,
        url: str,
        key: str | None,
        decoding: DecodingConfig,
        *,
        pause: Pause,
        timeout: float,
        retries: int,
        hang_after: float = 30.0,
    ) -> None:
        """Make a client; ``start`` connects it.

        ``pause`` is what happens to running completions while weights change. ``timeout`` bounds one call, in seconds:
        a completion may take as long as that. ``hang_after`` is as in ``runtime.hang_after``; the server is asked for
        its state meanwhile.
        """
        self.client = HttpClient(url, key, timeout=timeout)
        self.url, self.decoding, self.pause, self.retries = self.client.url, decoding, pause, retries
        self.heart = Heartbeat(self.url, self._ping, hang_after)
        self.redrawn = 0

    async def start(self) -> None:
        """Check that the server is alive and decodes as configured; end requests and updates left by a dead job."""
        info = await self.heart.control("server_info", self._call("GET", "server_info", None))
        refuse_server(info, self.decoding, self.pause, self.url)
        model = await self.heart.control("model_info", self._call("GET", "model_info", None))
        if not str(model.get("weight_version")).isdigit():
            await self.control("update_weight_version", {"new_version": "0", "abort_all_requests": False})
        with contextlib.suppress(EngineDied):  # no session is open
            await self.control("end_weight_update", {})
        await self.control("abort_request", {"abort_all": True})
        await self.control("continue_generation", {"torch_empty_cache": False})
        self.heart.start()

    async def generate(self, payload: Mapping[str, Any]) -> Reply:
        """Return the reply to one request."""
        return await self.heart.answer(self._call("POST", "generate", payload))

    async def control(self, name: str, payload: Mapping[str, Any]) -> Reply:
        """Make a control call within its deadline."""
        return checked(name, await self.heart.control(name, self._call("POST", name, payload)))

    def dead(self) -> str | None:
        """Return why the server counts as dead; None: it does not."""
        return self.heart.why

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        self.heart.close()
        await self.client.close()

    async def _ping(self) -> None:
        with contextlib.suppress(Busy):  # a server that replies so is alive
            self._read(await self.client.call_once("GET", "server_info", None, BUSY), "server_info")

    async def _call(self, method: str, name: str, payload: Mapping[str, Any] | None) -> Reply:
        """Return the reply to a call; after a network failure it is tried again, each time after a longer wait."""
        tries = 1 if name in ONCE else self.retries + 1
        renewed = _renamed if name == "generate" else unchanged

        def retry(error: Exception) -> bool:
            self.redrawn += name == "generate" and not nothing_drawn(error)
            return True

        try:
            reply = await self.client.call(method, name, payload, tries=tries, busy=BUSY, retry=retry, renewed=renewed)
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


def _renamed(payload: Mapping[str, Any], attempt: int) -> Mapping[str, Any]:
    """Return the payload of a later try, whose request has a name of its own if the first one has a name.

    SGLang refuses a second request of one name while the first one lives, and notices a closed connection late. It
    aborts by prefix, so that an abort of the first name ends both.
    """
    return {**payload, "rid": f"{payload['rid']}{attempt}."} if "rid" in payload else payload


class Fleet:
    """Several engines as one: each request goes to the least busy, control calls to all.

    A member that died, or failed in a control call, gets no more requests; its open requests go to the others. It may
    come back when new weights are sent, which it needs before anything else.
    """

    def __init__(self, members: Sequence[Backend]) -> None:
        self.members = list(members)
        self.open: list[set[asyncio.Task[Reply]]] = [set() for _ in members]  # requests of each member
        self.out: dict[int, str] = {}  # member -> why
        self._last: tuple[object, int] = (None, 0)  # the last prompt, and who got it
        self._moved = 0  # requests that went to another member

    @property
    def redrawn(self) -> int:
        """Return the number of requests so far that were lost and sent again, to the same member or to another."""
        return self._moved + sum(member.redrawn for member in self.members)

    async def start(self) -> None:
        """Start all members; each must be alive at first."""
        await asyncio.gather(*[member.start() for member in self.members])

    async def generate(self, payload: Mapping[str, Any]) -> Reply:
        """Return the reply to one request; send it to another member if its own one is out meanwhile."""
        while True:
            chosen = self._choose(payload.get("input_ids"))
            work = asyncio.ensure_future(self.members[chosen].generate(payload))
            self.open[chosen].add(work)
            try:
                await asyncio.wait([work])
                if not work.cancelled():
                    return work.result()
            except EngineDied as death:
                self._drop(chosen, death)
            finally:
                work.cancel()
                self.open[chosen].discard(work)
            self._moved += 1

    async def control(self, name: str, payload: Mapping[str, Any]) -> Reply:
        """Call all members and return the first one's reply. A pause for new weights brings dead members back."""
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
        """Close all members."""
        await asyncio.gather(*[member.close() for member in self.members])

    def _choose(self, prompt: object) -> int:
        """Return the least busy member; a prompt that was the last one too goes where it is cached already."""
        alive = self._alive()
        before, chosen = self._last
        if prompt != before or chosen not in alive:
            chosen = min(alive, key=lambda i: len(self.open[i]))
        self._last = (prompt, chosen)
        return chosen

    def _alive(self) -> list[int]:
        alive = [i for i in range(len(self.members)) if i not in self.out]
        if not alive:
            raise EngineDied("; ".join(self.out.values()))
        return alive

    def _drop(self, i: int, death: EngineDied) -> None:
        """Give a member no more requests and end its open ones, which it may never answer: it may be paused."""
        self._mark(i, str(death))
        for work in self.open[i]:
            work.cancel()
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
