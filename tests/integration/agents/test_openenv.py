"""Episodes on a real OpenEnv 0.3 server."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openenv.core import GenericEnvClient

from bebop.errors import UserError
from bebop.tasks.environment import EnvironmentLost
from bebop.tasks.environments.openenv_client import OpenEnv, item
from tests.integration.agents.openenv_server import GO_ON, TURNS, serving


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as where:
        yield where


async def played(environment: OpenEnv, texts: list[str], question: dict[str, Any]) -> list[Any]:
    """What an episode of these texts gives: the first messages, then every step."""
    try:
        seen: list[Any] = [await environment.reset(question, 0)]
        return seen + [await environment.step(text) for text in texts]
    finally:
        await environment.close()


@pytest.mark.smoke("openenv")
def test_an_episode(address: str) -> None:
    texts = ["a", "b", "c", "d"]
    first, *steps = asyncio.run(played(OpenEnv(address=address, system="be brief"), texts, {"seed": 7}))
    assert first == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hello 7"})
    assert [step.messages for step in steps] == [*(({"role": "user", "content": f"{t}!"},) for t in "abc"), ()]
    assert [step.reward for step in steps] == [0.25, 0.25, 0.25, 0.5]
    assert [step.done for step in steps] == [False] * (TURNS - 1) + [True]


def test_members_of_a_group_play_alike_and_apart(address: str) -> None:
    async def group() -> list[list[Any]]:
        question = {**item(5, 0), "greeting": "hi"}
        return await asyncio.gather(*(played(OpenEnv(address=address), ["x", str(n)], question) for n in range(16)))

    episodes = asyncio.run(group())
    assert len({episode[0] for episode in map(tuple, [[str(e[0])] for e in episodes])}) == 1
    assert episodes[0][0][0]["content"] == f"hi {item(5, 0)['seed']}"
    assert [episode[2].messages[0]["content"] for episode in episodes] == [f"{n}!" for n in range(16)]


@pytest.mark.smoke("stale")
def test_a_late_answer_is_never_read_by_a_later_step(address: str) -> None:
    async def kept() -> str:
        """OpenEnv's own client, which keeps its connection."""
        GO_ON.clear()
        async with GenericEnvClient(base_url=address, message_timeout_s=0.2) as client:
            await client.reset()
            with pytest.raises(TimeoutError):
                await client.step({"text": "wait"})
            GO_ON.set()
            return (await asyncio.wait_for(client.step({"text": "next"}), 30)).observation["text"]

    async def ours(cancelled: bool) -> list[str]:
        GO_ON.clear()
        environment = OpenEnv(address=address)
        await environment.reset({}, 0)
        step = asyncio.create_task(environment.step("wait"))
        done, _ = await asyncio.wait({step}, timeout=0.2)
        assert not done
        if cancelled:
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await step
        GO_ON.set()
        with pytest.raises(EnvironmentLost, match="ended early"):
            await environment.step("next")
        await environment.reset({}, 0)
        texts = [(await environment.step(text)).messages[0]["content"] for text in ("next", "more")]
        await environment.close()
        return texts

    assert asyncio.run(kept()) == "wait!", "the answer to the step before: what a kept connection does"
    assert asyncio.run(ours(cancelled=True)) == ["next!", "more!"]
    assert asyncio.run(ours(cancelled=False)) == ["next!", "more!"]


def test_what_breaks_is_lost_and_what_the_model_gets_wrong_is_read(address: str) -> None:
    async def broken() -> None:
        environment = OpenEnv(address=address)
        await environment.reset({}, 0)
        with pytest.raises(EnvironmentLost, match="boom"):
            await environment.step("crash")
        with pytest.raises(EnvironmentLost, match="ended early"):
            await environment.step("on")
        await environment.close()
        await environment.close()

    asyncio.run(broken())
    [first], long, fine = asyncio.run(played(OpenEnv(address=address, role="tool"), ["x" * 41, "y"], {}))
    assert first["role"] == "tool" and "at most 40" in long.messages[0]["content"] and not long.done
    assert long.counts == {"invalid_actions": 1.0} and fine.messages[0]["content"] == "y!"
    whole = OpenEnv(address=address, action="")
    _, prose, unknown, good = asyncio.run(played(whole, ["hm", '{"tex": "a"}', '{"text": "a"}'], {}))
    assert "JSON" in prose.messages[0]["content"] and "tex" in unknown.messages[0]["content"]
    assert good.messages[0]["content"] == "a!" and good.counts == {}


def test_settings_that_do_not_fit_the_server_are_named(address: str) -> None:
    with pytest.raises(UserError, match="action='guess' does not fit"):
        asyncio.run(played(OpenEnv(address=address, action="guess"), ["a"], {}))
    with pytest.raises(UserError, match=r"observation='board' is no field .* they have text"):
        asyncio.run(played(OpenEnv(address=address, observation="board"), [], {}))


def test_a_server_that_is_full_or_gone_is_lost() -> None:
    async def third() -> None:
        environments = [OpenEnv(address=address) for _ in range(3)]
        await environments[0].reset({}, 0)
        await environments[1].reset({}, 0)
        with pytest.raises(EnvironmentLost, match=r"CAPACITY_REACHED.*max_concurrent_envs"):
            await environments[2].reset({}, 0)
        for environment in environments:
            await environment.close()

    with serving(sessions=2) as address:
        asyncio.run(third())
    with pytest.raises(EnvironmentLost, match="cannot be reached"):
        asyncio.run(played(OpenEnv(address=address), [], {}))
