"""An environment that drives the conversation itself, turned around; a host of a few lines stands for the library.

The real one: tests/integration/agents.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from bebop.errors import UserError
from bebop.tasks.environment import EnvironmentLost, EnvStep
from bebop.tasks.environments import verifiers_episode
from bebop.tasks.environments.generate_server import Generate, TokenTrace, TraceRefused
from bebop.tasks.episodes import Episodes
from bebop.trajectory import Completion


@dataclass
class Ended:
    reward: float
    metrics: dict[str, float]


@dataclass
class Host:
    """Asks for ``turns`` turns, each after a token more; what goes wrong, if anything, goes wrong in turn 1."""

    turns: int = 3
    wrong: Callable[[list[int]], list[int]] = lambda ids: ids
    serving: int = 0
    served: int = 0
    running: int = 0
    seen: list[Any] = field(default_factory=list)

    async def __aenter__(self) -> "Host":
        self.serving += 1
        self.served += 1
        assert self.serving == 1
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.serving -= 1

    async def rollout(self, index: int, generate: Generate) -> Ended:
        self.running += 1
        try:
            trace, history = TokenTrace(generate, f"task {index}"), [7, index]
            for number in range(self.turns):
                turn = await trace.turn(self.wrong(history) if number == 1 else history, {})
                self.seen.append((turn.sampled, turn.logprobs, turn.finish))
                history = [*trace.ids, 50 + number]
            return Ended(0.5 + index, {"turns": float(self.turns)})
        finally:
            self.running -= 1


def completion(*ids: int) -> Completion:
    logp = np.array([-0.25 * at for at in range(len(ids))], dtype=np.float32)
    return Completion(token_ids=np.array(ids), logprobs=logp, versions=np.zeros(len(ids), dtype=np.int64))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    one = Host()
    monkeypatch.setattr(verifiers_episode._Shared, "_load", lambda shared: one)
    return one


def episodes() -> Episodes:
    args = {"taskset": "x", "tokenizer": "y"}
    return Episodes("verifiers", args, reset_seconds=20, step_seconds=20, processes=1)


async def test_what_a_request_adds_is_what_is_observed(host: Host) -> None:
    episode = episodes().open()
    assert await episode.reset({"index": 3}, 0) == (7, 3)
    assert await episode.step(completion(9, 1)) == EnvStep(messages=(50,))
    assert await episode.step(completion(8, 8, 1)) == EnvStep(messages=(51,))
    assert await episode.step(completion(1)) == EnvStep(reward=3.5, done=True, counts={"turns": 3.0})
    assert host.serving == 1
    await episode.close()
    assert host.serving == 0
    assert host.seen == [
        ((9, 1), (0.0, -0.25), "stop"),
        ((8, 8, 1), (0.0, -0.25, -0.5), "stop"),
        ((1,), (0.0,), "stop"),
    ]


async def test_the_host_serves_while_any_is_open(host: Host) -> None:
    made = episodes()
    one, other = made.open(), made.open()
    await asyncio.gather(one.reset({"index": 0}, 0), other.reset({"index": 0}, 0))
    assert (host.serving, host.served, host.running) == (1, 1, 2)
    await one.close()
    assert (host.serving, host.running) == (1, 1)
    assert await other.step(completion(1)) == EnvStep(messages=(50,))
    await other.close()
    assert (host.serving, host.running) == (0, 0)
    again = made.open()
    assert await again.reset({"index": 1}, 0) == (7, 1) and host.served == 2
    await again.close()
    assert host.serving == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda ids: [*ids[:2], 6, *ids[3:]], "turn 1 parts from the trace at token 2 .sampled in turn 0.: 9 there, 6"),
        (lambda ids: ids[:2], "one branch is possible"),
    ],
)
async def test_history_that_is_not_what_was_sampled_is_refused(host: Host, wrong: Any, words: str) -> None:
    host.wrong = wrong
    episode = episodes().open()
    await episode.reset({"index": 0}, 0)
    with pytest.raises(TraceRefused, match=words):
        await episode.step(completion(9, 1))
    await episode.close()
    assert (host.serving, host.running) == (0, 0)


async def test_one_that_breaks_is_lost(host: Host) -> None:
    def broken(ids: list[int]) -> list[int]:
        raise OSError("gone")

    host.wrong = broken
    episode = episodes().open()
    await episode.reset({"index": 0}, 0)
    with pytest.raises(EnvironmentLost, match="OSError: gone"):
        await episode.step(completion(9, 1))
    await episode.close()
    host.turns = 0
    silent = episodes().open()
    with pytest.raises(UserError, match="ended before the policy was asked"):
        await silent.reset({"index": 0}, 0)
    await silent.close()


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="the library is there")
async def test_without_the_library_one_line_says_so() -> None:
    episode = episodes().open()
    with pytest.raises(UserError, match=r"^environment verifiers needs .* pip install -e '.\[agents\]'$"):
        await episode.reset({"index": 0}, 0)
    await episode.close()
