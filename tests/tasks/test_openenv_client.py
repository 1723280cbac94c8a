"""The OpenEnv adapter against answers that a real server gives late, or never should: a few lines speak its wire.

Real servers: tests/integration/agents.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from bebop.errors import UserError
from bebop.tasks.environment import EnvironmentLost
from bebop.tasks.environments.openenv_client import OpenEnv, item, socket_url


def said(text: Any, **data: Any) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": text}, **data}})


def failed(code: str, **data: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": "no", "code": code, **data}})


@asynccontextmanager
async def serving(
    answer: Callable[[str, Any], Awaitable[str]], ended: asyncio.Event | None = None
) -> AsyncIterator[tuple[str, list[int]]]:
    """A server's address, and how many connections it has ([0] open, [1] ever); ``ended``: set when one is closed."""
    counts = [0, 0]

    async def session(request: web.Request) -> web.WebSocketResponse:
        counts[0] += 1
        counts[1] += 1
        socket = web.WebSocketResponse()
        try:
            await socket.prepare(request)
            async for message in socket:
                assert message.type is WSMsgType.TEXT
                asked = json.loads(message.data)
                reply = await answer(asked["type"], asked["data"])
                if reply == "hang up":
                    break
                await socket.send_str(reply)
        finally:
            counts[0] -= 1
            if ended is not None:
                ended.set()
        return socket

    app = web.Application()
    app.router.add_get("/ws", session)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2]), counts
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
async def test_an_answer_that_comes_late_is_nobodys(how: str) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def answer(kind: str, data: Any) -> str:
        if data.get("text") == "wait":
            asked.set()
            await go_on.wait()
        return said(data.get("text", kind))

    async with serving(answer) as (address, counts):
        environment = OpenEnv(address=address)
        await environment.reset({}, 0)
        step = asyncio.create_task(environment.step("wait"))
        await asked.wait()
        if how == "cancelled":
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(step, 0.01)
        go_on.set()
        with pytest.raises(EnvironmentLost, match="ended early"):
            await environment.step("next")
        await environment.reset({}, 0)
        assert (await environment.step("next")).messages == ({"role": "user", "content": "next"},)
        await environment.close()
        await environment.close()
        assert counts[1] == 2


@pytest.mark.parametrize("lost", [False, True])
async def test_sessions_end_with_their_episodes(lost: bool) -> None:
    """Else the server keeps its environment for ever."""
    ended = asyncio.Event()

    async def answer(kind: str, data: Any) -> str:
        return "{" if data.get("text") == "wrong" else said("fine")

    async with serving(answer, ended) as (address, counts):
        environment = OpenEnv(address=address)
        await environment.reset({}, 0)
        if lost:
            with pytest.raises(EnvironmentLost):
                await environment.step("wrong")
        await environment.close()
        await asyncio.wait_for(ended.wait(), 10)
        assert counts == [0, 1]


async def test_two_steps_at_once_do_not_read_one_anothers_answers() -> None:
    async def answer(kind: str, data: Any) -> str:
        return said(data.get("text", kind))

    async with serving(answer) as (address, _):
        environment = OpenEnv(address=address)
        await environment.reset({}, 0)
        found = await asyncio.gather(environment.step("a"), environment.step("b"), return_exceptions=True)
        assert found[0].messages[0]["content"] == "a" and isinstance(found[1], EnvironmentLost)
        await environment.close()


@pytest.mark.parametrize(
    ("reply", "said_of_it"),
    [
        ("hang up", "closed the connection"),
        ("{", "failed in a step"),
        ("[]", "does not give"),
        (json.dumps({"type": "state", "data": {}}), "does not give"),
        (json.dumps({"type": "observation", "data": {"observation": "text"}}), "does not give"),
        (said("a", reward="much"), "does not give"),
        (said("a", reward=float("nan")), "reward of nan"),
        (failed("EXECUTION_ERROR"), "EXECUTION_ERROR: no"),
        (failed("SESSION_ERROR"), "SESSION_ERROR: no"),
    ],
)
async def test_what_is_not_the_models_fault_is_lost(reply: str, said_of_it: str) -> None:
    async def answer(kind: str, data: Any) -> str:
        return reply if kind == "step" else said("first")

    async with serving(answer) as (address, _):
        environment = OpenEnv(address=address)
        await environment.reset({}, 0)
        with pytest.raises(EnvironmentLost, match=said_of_it):
            await environment.step("a")
        with pytest.raises(EnvironmentLost, match="ended early"):
            await environment.step("a")
        await environment.close()


async def test_a_refused_action_is_read_and_a_setting_that_does_not_fit_is_named() -> None:
    async def answer(kind: str, data: Any) -> str:
        kinds = {"long": "string_too_long", "misnamed": "extra_forbidden"}
        if kind == "reset" or data["text"] not in kinds:
            return said(["a", {"b": 1}], reward=True, done=kind == "step")
        error = {"type": kinds[data["text"]], "loc": ["text"], "msg": "is wrong"}
        return failed("VALIDATION_ERROR", errors=[error])

    async with serving(answer) as (address, _):
        environment = OpenEnv(address=address, role="tool")
        assert await environment.reset({}, 0) == ({"role": "tool", "content": '["a", {"b": 1}]'},)
        step = await environment.step("long")
        assert step.messages == ({"role": "tool", "content": "not an action: text: is wrong"},)
        assert step.counts == {"invalid_actions": 1.0} and not step.done and step.reward == 0.0
        step = await environment.step("fine")
        assert step.done and step.messages == () and step.reward == 1.0
        with pytest.raises(UserError, match=r"action='text' does not fit .* text: is wrong"):
            await environment.step("misnamed")


async def test_the_item_is_what_reset_is_given() -> None:
    async def answer(kind: str, data: Any) -> str:
        return json.dumps({"type": "observation", "data": {"observation": data}})

    async with serving(answer) as (address, _):
        environment = OpenEnv(address=address)
        assert (await environment.reset({}, 3))[0]["content"] == "3"
        assert (await environment.reset({"level": 2}, 3))[0]["content"] == '{"level": 2, "seed": 3}'
        assert (await environment.reset({"seed": 4}, 3))[0]["content"] == "4"
        await environment.close()
    seeds = {item(index, seed)["seed"] for index in range(50) for seed in range(4)}
    assert len(seeds) == 200 and all(0 <= seed < 2**31 for seed in seeds)
    assert item(7, 1) == item(7, 1)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/ws"),
        ("https://host/env/", "wss://host/env/ws"),
        ("ws://[::1]:9/ws", "ws://[::1]:9/ws"),
        ("wss://host", "wss://host/ws"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert socket_url(address) == url


@pytest.mark.parametrize(
    "address",
    ["", "localhost:8000", "ftp://host", "http://", "http://host:0", "http://host:99999", "http://a:b@host", "ws://h?x=1",
     "http://[::1", "file:///etc"],
)  # fmt: skip
def test_what_is_no_address_is_named_in_one_line(address: str) -> None:
    with pytest.raises(UserError, match="names no OpenEnv server: give http, https, ws or wss") as caught:
        OpenEnv(address=address)
    assert repr(address) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="role='assistant'"):
        OpenEnv(address="http://host", role="assistant")
