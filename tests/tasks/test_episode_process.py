"""Environments that block, in processes that are ended with all that they started: killed, hanging, or left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import bebop.tasks.episode_process as process_module
import bebop.tasks.episodes as module
from bebop.errors import UserError
from bebop.runtime.processes import descendants, lives, zombies
from bebop.tasks.environment import EnvironmentKind, EnvironmentLost
from bebop.tasks.episodes import Episode, Episodes
from tests.cases import slow_but
from tests.tasks.unruly import FILE

APART = f"{FILE}:Apart"


@asynccontextmanager
async def opened(seconds: float = 20.0, processes: int = 1, name: Any = APART, **args: Any) -> AsyncIterator[Episodes]:
    before = {*descendants(os.getpid())}
    episodes = Episodes(name, args, reset_seconds=seconds, step_seconds=seconds, processes=processes)
    try:
        yield episodes
    finally:
        await episodes.shutdown()
        assert {*descendants(os.getpid())} <= before, "no process is left"


async def begun(episodes: Episodes, text: str = "x") -> tuple[Episode, int, int]:
    """An episode, its process, and how many this process has played."""
    episode = episodes.open()
    first, second = await episode.reset({"text": text}, 1)
    assert second == {"role": "user", "content": text}
    pid, resets = map(int, first["content"].split())
    return episode, pid, resets


def running(pid: int) -> bool:
    return lives(pid)


def gone(pids: list[int]) -> bool:
    """Whether all of them are, soon: a process that was killed takes a moment."""
    deadline = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(running, pids))


async def test_a_process_is_kept_and_its_module_remembers() -> None:
    async with opened() as episodes:
        one, pid, resets = await begun(episodes, "a \udcff \U0001f600\n" + "x" * 1_000_000)
        step = await one.step("y" * 1_000_000 + "\udcff")
        assert step.messages == ({"role": "tool", "content": "y" * 1_000_000 + "\udcff"},)
        assert (step.reward, step.done, step.counts) == (0.25, False, {"steps": 1.0})
        await one.close()
        other, same, more = await begun(episodes)
        assert same == pid != os.getpid() and (resets, more) == (1, 2)
        await other.close()
        os.kill(pid, signal.SIGKILL)  # idle: costs nothing
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        third, another, _ = await begun(episodes)
        assert another != pid and (await third.step("x")).reward == 0.25
        await third.close()


async def test_a_process_with_many_zombies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step starts something in the background, which ends and becomes a zombie child of the process."""
    monkeypatch.setattr(process_module, "MAX_ZOMBIES", 2)
    processes: list[int] = []
    async with opened() as episodes:
        for _ in range(5):
            episode, pid, _ = await begun(episodes)
            before = zombies(pid)
            assert before == processes.count(pid) <= 2
            await episode.step("orphan")
            deadline = time.monotonic() + 10
            while zombies(pid) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert zombies(pid) == before + 1
            processes.append(pid)
            await episode.close()
    assert [processes.count(pid) for pid in dict.fromkeys(processes)] == [3, 2]
    assert gone(processes)


LOST = [
    ("hang", "step took more than task.environment.step_seconds=0.5"),
    ("spin", "step took more than task.environment.step_seconds=0.5"),
    ("die", "its process ended with exit code 3 in step"),
    ("kill", "its process was ended by signal 9 (SIGKILL), as when memory is short, in step"),
    ("raise", "step raised ValueError: two lines"),
    ("exit", "step raised SystemExit: 4"),
    ("lost", "the server is gone"),
]


@pytest.mark.parametrize(
    ("text", "words"), slow_but([one for one in LOST if one[0] in ("die", "raise")], LOST, several=True)
)
async def test_what_is_lost(tmp_path: Path, text: str, words: str) -> None:
    """Its process is gone with all that it started, also where it has died of itself; the next has a new one."""
    log = tmp_path / "log"
    async with opened(log=str(log)) as episodes:
        episode, pid, _ = await begun(episodes)
        episodes.limits["step"] = 0.5 if text in ("hang", "spin") else 20.0
        with pytest.raises(EnvironmentLost) as error:
            await episode.step(text)
        assert str(error.value) == f"environment {APART}: {words}"
        started = [int(line) for line in log.read_text().split()] if log.exists() else []
        if text == "die":  # one hid: it has left its session and its environment, and its parent died before the kill
            os.kill(started.pop(2), signal.SIGKILL)
            assert len(started) == 3
        assert gone([pid, *started])
        await episode.close()
        episodes.limits["step"] = 60.0
        other, another, resets = await begun(episodes)
        assert another != pid and resets == 1 and (await other.step("x")).reward == 0.25
        await other.close()


@pytest.mark.parametrize("text", slow_but(["wrong"], ["wrong", "nonsense"]))
async def test_what_the_user_can_put_right_is_not_lost(text: str) -> None:
    async with opened() as episodes:
        episode, _, _ = await begun(episodes)
        with pytest.raises(UserError):
            await episode.step(text)
        await episode.close()
        await (await begun(episodes))[0].close()


async def test_a_constructor_that_refuses() -> None:
    async with opened(wrong=True) as episodes:
        with pytest.raises(UserError, match=r"^wrong=True is not possible$"):
            await begun(episodes)


async def test_no_more_than_so_many_and_the_wait_counts_nowhere() -> None:
    async with opened(processes=2) as episodes:
        one, two = await begun(episodes), await begun(episodes)
        episodes.limits["reset"] = 0.05
        began = time.monotonic()
        third, fourth = asyncio.create_task(begun(episodes)), asyncio.create_task(begun(episodes))
        done, _ = await asyncio.wait({third, fourth}, timeout=0.3)
        assert not done
        episodes.limits["reset"] = 60.0
        await two[0].close()
        assert (await third)[1] == two[1] and not fourth.done()  # in the order in which they came
        assert (await third)[0].seconds < time.monotonic() - began - 0.25
        fourth.cancel()
        await one[0].close()
        await (await third)[0].close()
        episode, pid, _ = await begun(episodes)
        assert pid in (one[1], two[1])
        await episode.close()


@pytest.mark.slow
async def test_a_process_that_hangs_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with opened(processes=4, log=str(tmp_path / "log")) as episodes:

        async def one(text: str) -> float:
            episode, _, _ = await begun(episodes)
            total = sum([(await episode.step("x")).reward for _ in range(40)])
            await episode.step(text)
            await episode.close()
            return total

        hanging, *others = [asyncio.create_task(one(text)) for text in ("hang", "x", "x", "x")]
        assert await asyncio.wait_for(asyncio.gather(*others), 60) == [10.0] * 3
        assert not hanging.done()
        hanging.cancel()
        await asyncio.wait({hanging})


async def test_a_call_that_is_cancelled_leaves_no_reply_to_the_next(tmp_path: Path) -> None:
    async with opened(log=str(tmp_path / "log")) as episodes:
        episode, pid, _ = await begun(episodes)
        step = asyncio.create_task(episode.step("hang"))
        while len((tmp_path / "log").read_text().split() if (tmp_path / "log").exists() else []) < 4:
            await asyncio.sleep(0.01)
        step.cancel()
        await asyncio.wait({step})
        assert step.cancelled() and gone([pid, *map(int, (tmp_path / "log").read_text().split())])
        await episode.close()
        other, another, _ = await begun(episodes)
        assert another != pid and (await other.step("mine")).messages[0]["content"] == "mine"
        await other.close()


async def test_a_close_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.1)
    async with opened(log=str(tmp_path / "hang")) as episodes:
        episode, pid, _ = await begun(episodes)
        await episode.close()
        assert gone([pid])
        assert (await begun(episodes))[1] != pid


async def test_shutdown_ends_what_is_open_and_what_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened(log=str(log)) as episodes:
        episode, pid, _ = await begun(episodes)
        await episode.step("litter")
        pids = [pid, *map(int, log.read_text().split())]
    assert len(pids) == 5 and gone(pids)


IMPORTS = [
    ("raise ValueError(5)", UserError, "cannot be imported: ValueError: 5"),
    ("os._exit(6)", EnvironmentLost, "its process ended with exit code 6 in load"),
    ("import time; time.sleep(1000)", EnvironmentLost, "takes more than 0.3 s to import"),
]


@pytest.mark.parametrize(("source", "error", "words"), slow_but(IMPORTS[:2], IMPORTS, several=True))
async def test_imports_that_fail_over_there_alone(
    tmp_path: Path, source: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "LOAD_SECONDS", 0.3 if "sleep" in source else 60.0)
    (tmp_path / "mine.py").write_text(
        f"import os\nif 'BEBOP_ENVIRONMENT' in os.environ:\n    {source}\n"
        f"import sys\nsys.path.insert(0, {str(FILE.parent)!r})\nfrom unruly import Apart\n"
    )
    async with opened(name=EnvironmentKind(make=f"{tmp_path}/mine.py:Apart", blocking=True)) as episodes:
        for _ in range(2):  # the room is given back
            with pytest.raises(error) as said:
                await asyncio.wait_for(begun(episodes), 20)
            assert words in str(said.value) and "\n" not in str(said.value)


async def test_a_reply_out_of_proportion_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "MESSAGE_BYTES", 1000)
    async with opened() as episodes:
        episode, pid, _ = await begun(episodes)
        with pytest.raises(EnvironmentLost, match="sent a message of 1"):
            await episode.step("x" * 1000)
        assert gone([pid])


@pytest.mark.parametrize("text", slow_but(["hang"], ["hang", "litter"]))
def test_it_does_not_outlive_its_parent(tmp_path: Path, text: str) -> None:
    """Neither where it hangs while the parent is killed, nor where it waits for the next turn; nor what it started."""
    log = tmp_path / "log"
    code = (
        "import asyncio, sys\n"
        "from bebop.tasks.episodes import Episodes\n"
        "async def act():\n"
        "    e = Episodes(sys.argv[1], {'log': sys.argv[2]}, reset_seconds=60, step_seconds=1000, processes=1).open()\n"
        "    print((await e.reset({'text': ''}, 1))[0]['content'].split()[0], flush=True)\n"
        "    await e.step(sys.argv[3])\n"
        "    print('idle', flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(act())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, APART, str(log), text], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline())]
    assert text == "hang" or parent.stdout.readline() == b"idle\n"
    while len(started := log.read_text().split() if log.exists() else []) < 4:
        time.sleep(0.01)
    pids += map(int, started)
    assert all(map(running, pids))
    parent.kill()
    parent.wait()
    assert gone(pids)


async def test_what_it_prints_goes_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "print('made')\nclass Here:\n"
        "    async def reset(self, item, seed):\n        print('reset', seed)\n        return ()\n"
        "    async def step(self, text): ...\n    async def close(self): ...\n"
    )
    limits = {"reset_seconds": 20.0, "step_seconds": 20.0, "processes": 1, "output": tmp_path / "output.log"}
    episodes = Episodes(f"{tmp_path}/env.py:Here", {}, **limits)  # type: ignore[arg-type]
    episode = episodes.open()
    await episode.reset({}, 3)
    await episode.close()
    await episodes.shutdown()
    deadline = time.monotonic() + 10
    while "reset" not in (tmp_path / "output.log").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "output.log").read_text() == "made\nreset 3\n"
