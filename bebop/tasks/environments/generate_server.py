"""Generate endpoint on loopback, tokens in and tokens out, that keeps every trajectory's tokens exact.

Request and response are those of vLLM's ``/inference/v1/generate`` as verifiers 0.4 uses it. The request has
``token_ids`` and ``sampling_params``, with the trajectory's name in ``X-Session-ID``. The response has
``choices[0].token_ids`` and one log-prob each.

A trajectory is one growing list of tokens. Each request begins with all tokens fed and sampled before, and the rest of
it is the observation. Any other request is refused before anything is sampled: re-tokenised history, a second branch,
two requests at once, a turn after a truncated one.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from bebop.errors import UserError

# (token ids, sampling parameters of the request) -> (sampled ids, a log-prob each, "stop" or "length").
Generate = Callable[[Sequence[int], Mapping[str, Any]], Awaitable[tuple[Sequence[int], Sequence[float], str]]]
SESSION = "X-Session-ID"
BODY_BYTES = 64 << 20  # a request of a million tokens is 8 MB
FINISHES = ("stop", "length")


class TraceRefused(UserError):
    """Trajectory whose tokens are not one growing list; the message names the first difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Tokens that the policy read since its last turn, and those that it sampled.

    For instance ``observation=(2, 57), sampled=(61, 1)``.
    """

    observation: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the sampled tokens
    finish: str  # stop or length


@dataclass(slots=True)
class TokenTrace:
    """Tokens of one trajectory so far."""

    generate: Generate
    name: str
    turns: list[SampledTurn] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # all of them: fed and sampled
    error: Exception | None = None  # the first error, after which nothing is sampled
    busy: bool = False

    async def turn(self, ids: Sequence[int], params: Mapping[str, Any]) -> SampledTurn:
        """Sample the next turn after ``ids``; raise ``TraceRefused``, or the error of ``generate``, in this and all
        later calls.
        """
        if self.error is not None:
            raise self.error
        try:
            self._check(ids)
            self.busy = True
            sampled, logprobs, finish = await self.generate(ids, params)
            if len(sampled) != len(logprobs) or finish not in FINISHES or not sampled:
                raise RuntimeError(
                    f"generate gave {len(sampled)} tokens, {len(logprobs)} log-probs and finish={finish!r}: "
                    f"at least one token, a log-prob each and one of {', '.join(FINISHES)} are wanted"
                )
        except Exception as error:
            self.error = error
            raise
        finally:
            self.busy = False
        turn = SampledTurn(
            observation=tuple(ids[len(self.ids) :]),
            sampled=tuple(sampled),
            logprobs=tuple(logprobs),
            finish=finish,
        )
        self.turns.append(turn)
        self.ids = [*ids, *sampled]
        return turn

    def _check(self, ids: Sequence[int]) -> None:
        """Raise ``TraceRefused`` unless ``ids`` continue the trace."""
        turn = f"{self.name}: turn {len(self.turns)}"
        if self.busy:
            raise TraceRefused(f"{turn} was asked for twice at once: one branch is possible")
        where = next((at for at, (old, new) in enumerate(zip(self.ids, ids, strict=False)) if old != new), None)
        if where is not None:
            raise TraceRefused(
                f"{turn} parts from the trace at token {where} ({self._origin(where)}): {self.ids[where]} there, "
                f"{ids[where]} in the request: history has to stay as it was sampled, in one branch"
            )
        if len(ids) < len(self.ids):
            raise TraceRefused(
                f"{turn} parts from the trace at token {len(ids)} ({self._origin(len(ids))}), where the request ends: "
                "one branch is possible"
            )
        if self.turns and self.turns[-1].finish == "length":
            raise TraceRefused(f"{turn} follows one that was cut off: a stop token would have to be made up")

    def _origin(self, where: int) -> str:
        """Return in words whether a token of the trace was observed or sampled, and when: ``sampled in turn 2``."""
        end = 0
        for number, turn in enumerate(self.turns):
            for kind, tokens in (("observed", turn.observation), ("sampled", turn.sampled)):
                end += len(tokens)
                if where < end:
                    return f"{kind} in turn {number}"
        raise AssertionError(f"token {where} of {end}")


class GenerateServer:
    """Endpoint on 127.0.0.1 at a free port, for clients with its key; an async context manager."""

    def __init__(self) -> None:
        """Create a key; the server does not listen yet."""
        self.key = secrets.token_urlsafe(24)
        self.address = ""
        self._traces: dict[str, TokenTrace] = {}
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "GenerateServer":
        """Start to listen."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_post("/inference/v1/generate", self._generate)
        # Cancelling a rollout also cancels its sampling.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop listening and cancel requests in flight."""
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: str, name: str, generate: Generate) -> TokenTrace:
        """Answer requests of ``session`` with ``generate``; error messages call the trajectory ``name``."""
        trace = self._traces[session] = TokenTrace(generate, name)
        return trace

    def close(self, session: str) -> None:
        """Stop answering requests of ``session``."""
        self._traces.pop(session, None)

    def _admitted(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode())

    async def _generate(self, request: web.Request) -> web.Response:
        if not self._admitted(request):
            return _refused(401, "this endpoint wants its key")
        session = request.headers.get(SESSION, "")
        trace = self._traces.get(session)
        if trace is None:
            return _refused(404, f"{SESSION}={session!r} is no trajectory that is open")
        try:
            ids, params = _request(await request.json())
        except ValueError as error:
            return _refused(400, str(error))
        try:
            turn = await trace.turn(ids, params)
        except Exception as error:  # kept in the trace, for the rollout to raise
            return _refused(422, str(error))
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(turn.sampled, turn.logprobs, strict=True)
        ]
        choice = {"index": 0, "token_ids": turn.sampled, "finish_reason": turn.finish, "logprobs": {"content": content}}
        return web.json_response({"request_id": f"{session}-{len(trace.turns) - 1}", "choices": [choice]})


def _request(body: Any) -> tuple[list[int], dict[str, Any]]:
    """Return the tokens and parameters of a request; raise ``ValueError`` that names the required fields."""
    ids = body.get("token_ids") if isinstance(body, dict) else None
    params = body.get("sampling_params", {}) if isinstance(body, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("token_ids: a list of at least one token id is wanted")
    if not isinstance(params, dict):
        raise ValueError("sampling_params: an object is wanted")
    if "features" in body:
        raise ValueError("features: images and the like are not possible, only tokens")
    return ids, params


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
