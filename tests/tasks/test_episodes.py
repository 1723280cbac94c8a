"""Environments that crash, hang, ignore their limit or block: lost for their own trajectory alone."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import bebop.tasks.episodes as module
from bebop.errors import UserError
from bebop.tasks.environment import EnvironmentLost
from bebop.tasks.episodes import Episode, Episodes
from tests.tasks.unruly import FILE

HERE = f"{FILE}:Here"


@asynccontextmanager
async def opened(name: str = HERE, seconds: float = 30.0, **args: Any) -> AsyncIterator[Episodes]:
    episodes = Episodes(name, args, reset_seconds=seconds, step_seconds=seconds, processes=2)
    try:
        yield episodes
    finally:
        await episodes.shutdown()


async def begun(episodes: Episodes, index: int = 0) -> Episode:
    episode = episodes.open()
    await episode.reset({"index": index}, 1)
    return episode


async def test_an_episode_as_it_should_be() -> None:
    async with opened("guess") as episodes:
        episode = episodes.open()
        assert episode.seconds == 0.0
        messages = await episode.reset({"number": 5, "numbers": 64, "tries": 3}, 0)
        assert messages == ({"role": "user", "content": "number 1 to 64, 3 tries"},)
        first = await episode.step("1 64 32")
        assert [m["content"] for m in first.messages] == ["less"] and not first.done and first.reward == 0
        second = await episode.step("1 31 5")
        assert second.done and second.reward == 1.0
        await episode.close()
        await episode.close()
        assert 0 < episode.seconds < 60


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hang", "step took more than task.environment.step_seconds=0.05"),
        ("ignore", "step took more than task.environment.step_seconds=0.05"),
        ("return late", "step took more than task.environment.step_seconds=0.05"),
        ("raise", "raised ValueError: two lines"),
        ("exit", "raised SystemExit: 4"),
        ("lost", "the server is gone"),
        ("cancel", "step was cancelled by itself"),
    ],
)
async def test_what_is_lost(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in one line; nothing but close is possible then, and that reaches the environment, once."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.05)
    chosen = module.load_class(HERE)
    before = chosen.closed  # type: ignore[attr-defined]
    async with opened(seconds=0.05) as episodes:
        episode = await begun(episodes)
        with pytest.raises(EnvironmentLost) as error:
            await episode.step(text)
        with pytest.raises(AssertionError):
            await episode.step("x")
        await episode.close()
        await episode.close()
        other = await begun(episodes)
        assert (await other.step("x")).reward == 0.25
        assert episode.seconds > (0.04 if "took" in words else 0)
        await other.close()
    assert str(error.value) == f"environment {HERE}: {words}"
    assert chosen.closed == before + 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["wrong", "nonsense", "bad role", "bad count"])
async def test_what_the_user_can_put_right_is_not_lost(text: str) -> None:
    async with opened() as episodes:
        episode = await begun(episodes)
        with pytest.raises(UserError) as error:
            await episode.step(text)
        assert "\n" not in str(error.value)
        await episode.close()


async def test_those_that_sleep_do_not_slow_the_others() -> None:
    """A quarter hangs for as long as its limit allows; all others are through before any of them is lost."""
    async with opened() as episodes:

        async def one(index: int) -> int:
            episode = await begun(episodes, index)
            for turn in range(20):
                await episode.step("hang" if index % 4 == 0 and turn == 10 else "x")
            await episode.close()
            return index

        tasks = [asyncio.create_task(one(index)) for index in range(64)]
        others = [task for index, task in enumerate(tasks) if index % 4]
        assert await asyncio.wait_for(asyncio.gather(*others), 20) == [i for i in range(64) if i % 4]
        hanging = tasks[::4]
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        ended = await asyncio.gather(*hanging, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)


async def test_one_that_blocks_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """And one that waits as it should is not; it is said once. The clock stands still but where an hour passes."""
    clock = itertools.count(3600.0, 3600.0)
    now = [0.0]

    def hour() -> None:
        now[0] = next(clock)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module.load_class(HERE), "hour", staticmethod(hour))
    async with opened() as episodes:
        episode = await begun(episodes)
        for text, longest in (("wait", 0.0), ("block", 3600.0), ("block", 3600.0)):
            await episode.step(text)
            assert episodes.longest_block == longest
        await episode.close()
        assert episode.seconds == 3 * 3600.0
    text = "held up all others for 3600.0 s: it waits without await, so it needs 'blocking = True'"
    assert [r.getMessage() for r in caplog.records] == [f"environment {HERE} {text}"]


async def test_a_close_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(module.load_class(HERE), "closed", -10)
    async with opened() as episodes:
        await (await begun(episodes)).close()
    said = f"environment {HERE}: took more than 0.05 s, as it was closed"
    assert [r.getMessage() for r in caplog.records] == [said]


async def test_settings_that_cannot_be_are_said_at_once() -> None:
    for name, args, words in (
        ("gess", {}, "did you mean guess?"),
        ("calc", {"turn": 3}, "did you mean turns?"),
        (f"{FILE}:NotAll", {}, "async def step"),
    ):
        with pytest.raises(UserError, match=words):
            Episodes(name, args, reset_seconds=1, step_seconds=1, processes=1)
    async with opened("calc", turns=0) as episodes:
        with pytest.raises(UserError, match="turns=0"):
            await begun(episodes)
