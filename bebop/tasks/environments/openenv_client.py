"""Episodes on an OpenEnv 0.3 server, by its address.

A connection is a session of the server with its own environment. Requests carry no number, so the next reader gets the
reply: a call that ended early (a time limit, a cancellation) would leave its reply to the next step. A connection is
therefore kept only while every reply has been read. The wire is JSON over a WebSocket at ``<address>/ws``; the
``openenv`` library is not needed here.

- The question: ``reset`` receives the contents of the item, including ``seed``.
- The policy's text becomes the field ``action`` of the server's action; with ``action=""`` it has to be the whole
  action, a JSON object. If the server's action class refuses it, the policy gets a message with the reason.
- The policy reads the field ``observation`` of the server's observation; with ``observation=""`` its only field, or all
  of them as a JSON object. Text stays as it is, everything else is written as JSON with sorted keys.
- Every other failure is ``EnvironmentLost``: an environment that raises, a server that is full, gone or sends something
  else, a reward that is not finite.
"""

import asyncio
import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from bebop.errors import UserError
from bebop.tasks.environment import EnvironmentLost, EnvStep, Message

CONNECT_SECONDS = 10.0
MESSAGE_BYTES = 100 << 20  # the longest message that OpenEnv's own client accepts
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
ROLES = ("user", "tool")
SHOWN = 300  # characters of an error message
# Pydantic's error types for missing and unknown fields: these mean a wrong setting, not a wrong text.
MISNAMED = ("missing", "extra_forbidden")


class _Connection:
    """A connection that is always read: a client that does not read answers no pings, and servers close it.

    Between two steps lies a turn of the policy, which may take minutes.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self._inbox: asyncio.Queue[aiohttp.WSMessage | Exception] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Collect messages until the connection ends."""
        try:
            while True:
                message = await self.socket.receive()
                self._inbox.put_nowait(message)
                if message.type is not aiohttp.WSMsgType.TEXT:
                    return
        except (aiohttp.ClientError, OSError) as error:
            self._inbox.put_nowait(error)

    async def ask(self, text: str) -> aiohttp.WSMessage:
        """Send a text and return the next message; raise what reading raised."""
        await self.socket.send_str(text)
        found = await self._inbox.get()
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """Stop reading."""
        self._reader.cancel()


class OpenEnv:
    """Episode on the server at ``address``; an ``Environment``. One call at a time."""

    def __init__(
        self, *, address: str, action: str = "text", observation: str = "", role: str = "user", system: str = ""
    ) -> None:
        """Check the settings without connecting.

        address: http, https, ws or wss; role: of the messages, user or tool; system: a message before the first.
        Raises ``UserError`` for an impossible address or role.
        """
        if role not in ROLES:
            raise UserError(f"role={role!r} of an OpenEnv environment is not possible: give one of {', '.join(ROLES)}")
        self.url = socket_url(address)
        self.action, self.observation, self.role, self.system = action, observation, role, system
        self._session: aiohttp.ClientSession | None = None
        self._open: _Connection | None = None  # the connection, also during a call
        self._free: _Connection | None = None  # the same between two calls

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Return the first messages of a new session; the server's ``reset`` receives ``item``, which may override
        ``seed``.
        """
        await self.close()
        await self._connect()
        with self._connection("reset") as connection:
            answer = await self._ask(connection, "reset", {"seed": seed, **item})
            if answer["type"] == "error":
                raise self._lost(f"refused to reset: {_complaint(answer)}")
            first = self._message(self._read(answer)[0])
        return ({"role": "system", "content": self.system}, first) if self.system else (first,)

    async def step(self, text: str) -> EnvStep:
        """Return the server's reply to ``text``."""
        action = {self.action: text} if self.action else _object(text)
        if action is None:
            return self._invalid("not an action: a JSON object is wanted")
        with self._connection("step") as connection:
            answer = await self._ask(connection, "step", action)
            if answer["type"] == "error":
                return self._invalid(self._refusal(answer))
            observation, reward, done = self._read(answer)
        return EnvStep(messages=() if done else (self._message(observation),), reward=reward, done=done)

    async def close(self) -> None:
        """Close the connection, which ends the session on the server."""
        session, connection = self._session, self._open
        self._session = self._open = self._free = None
        if connection is not None:
            connection.close()
        if session is not None:
            await session.close()

    async def _connect(self) -> None:
        """Open a new connection: a pooled one could hold the reply to another episode."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                socket = await self._session.ws_connect(self.url, max_msg_size=MESSAGE_BYTES)
                self._open = self._free = _Connection(socket)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            await self.close()
            raise self._lost(f"cannot be reached: {_words(error)}") from error
        except BaseException:
            await self.close()
            raise

    @contextlib.contextmanager
    def _connection(self, kind: str) -> Iterator[_Connection]:
        """Lend the connection for one call. It is kept only if the call returns, so no other reads a late reply."""
        connection, self._free = self._free, None
        if connection is None:
            raise self._lost(f"has no session for this {kind}: the one before it ended early")
        yield connection
        self._free = connection

    async def _ask(self, connection: _Connection, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's reply to one request."""
        try:
            message = await connection.ask(json.dumps({"type": kind, "data": data}))
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise self._lost(f"closed the connection in a {kind}")
            return _answer(message.data)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._lost(f"failed in a {kind}: {_words(error)}") from error

    def _read(self, answer: Mapping[str, Any]) -> tuple[str, float, bool]:
        """Return the observation's text, the reward and whether the episode is over."""
        data = answer["data"]
        observation, reward = data["observation"], data.get("reward")
        value = 0.0 if reward is None else float(reward)
        if not math.isfinite(value):
            raise self._lost(f"gave a reward of {reward}")
        if self.observation and self.observation not in observation:
            raise UserError(
                f"observation={self.observation!r} is no field of the observations of {self.url}: "
                f"they have {', '.join(observation) or 'none'}"
            )
        return _text(observation, self.observation), value, bool(data.get("done"))

    def _refusal(self, answer: Mapping[str, Any]) -> str:
        """Return the policy's message for a refused action; raise ``EnvironmentLost`` or ``UserError`` for all other
        failures.
        """
        data = answer["data"]
        if data.get("code") != "VALIDATION_ERROR":
            raise self._lost(f"failed in a step: {_complaint(answer)}")
        errors = data.get("errors") or [{"msg": data.get("message"), "loc": ()}]
        if self.action and any(error.get("type") in MISNAMED for error in errors):
            raise UserError(f"action={self.action!r} does not fit the actions of {self.url}: {_each(errors)}")
        return f"not an action: {_each(errors)}"[:SHOWN]

    def _invalid(self, why: str) -> EnvStep:
        return EnvStep(messages=(self._message(why),), counts={"invalid_actions": 1.0})

    def _message(self, text: str) -> Message:
        return {"role": self.role, "content": text}

    def _lost(self, what: str) -> EnvironmentLost:
        return EnvironmentLost(f"the OpenEnv server {self.url} {what}")


def item(index: int, seed: int) -> dict[str, Any]:
    """Return question ``index``: the seed for the server's ``reset``, 31 bits of both numbers."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return {"seed": int.from_bytes(digest[:4], "big") >> 1}


def socket_url(address: str) -> str:
    """Return the WebSocket address of a server; raise ``UserError`` if ``address`` is invalid."""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a non-numeric port, an unclosed bracket
        usable = False
    if not usable or "@" in parts.netloc or parts.query or parts.fragment:
        raise UserError(
            f"address={address!r} names no OpenEnv server: give http, https, ws or wss, a host and a port, "
            "such as http://127.0.0.1:8000, without a user, a query or a fragment"
        )
    path = parts.path.rstrip("/").removesuffix("/ws")
    return f"{SCHEMES[parts.scheme]}://{parts.netloc}{path}/ws"


def _answer(text: str) -> dict[str, Any]:
    """Parse a reply in OpenEnv 0.3's format; raise ``ValueError`` for any other."""
    answer = json.loads(text)
    kind = answer.get("type") if isinstance(answer, dict) else None
    data = answer.get("data") if kind in ("observation", "error") else None
    if isinstance(data, dict) and isinstance(data.get("reward", 0.0), int | float | None):
        if kind == "error" or isinstance(data.get("observation"), dict):
            return dict(answer)
    raise ValueError(f"an answer that OpenEnv 0.3 does not give: {text[:SHOWN]}")


def _text(observation: Mapping[str, Any], field: str) -> str:
    """Return an observation as the policy reads it: one field, or all of them as JSON."""
    only = field or (next(iter(observation)) if len(observation) == 1 else "")
    value = observation[only] if only else observation
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _each(errors: list[dict[str, Any]]) -> str:
    """Join the errors of an action: ``text: String should have at most 8 characters``."""
    return "; ".join(": ".join([*map(str, error.get("loc", ())), str(error.get("msg"))]) for error in errors)


def _complaint(answer: Mapping[str, Any]) -> str:
    data = answer["data"]
    words = f"{data.get('code')}: {data.get('message')}"[:SHOWN]
    return f"{words} (see max_concurrent_envs there)" if data.get("code") == "CAPACITY_REACHED" else words


def _words(error: BaseException) -> str:
    return str(error)[:SHOWN] or type(error).__name__
