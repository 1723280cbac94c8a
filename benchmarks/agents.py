"""Trajectories of several turns: parked KV caches against contexts read again, and slow environments.

``context N``: 16 conversations of N distinct tokens continue with 16 more. Timed is the engine's step that reads them
and decodes one cycle, with and without parked caches, in turns.

``kept``: 16 trajectories of ``store`` with 30 turns each, side by side, with and without parked caches
(``rollout.parked_bytes=0``), in turns. The policy is the built-in model, which cannot play ``store``: its turns end at
the first digit, so they have some ten tokens, and the environment plays on whatever it writes. Both ways sample the
same tokens, and the share that agrees is counted; a difference is rounding, since a context is read in other pieces.

``slow``: 64 trajectories of ``STEPS`` turns on 64 slots. First no environment, then a quarter of them, sleeps for 5 s
at its first step. Compared is the time at which the last of the other 48 ends.

The rule, written down before the run that it judges:

- ``context``: the lower end of the interval of the ratio of times is 10 or more at 480 tokens, 30 or more at 1,000,
  and all tokens are the same;
- ``kept``: the lower end of the interval of the ratio of times is 2 or more;
- ``slow``: the upper end of the interval of the ratio of times is 1.1 or less.

Intervals are 95 %, Student's t over rounds (``ROUNDS``), each of which has other questions and random draws; they vary
with the machine and the tokens.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.bench.record import noted
from bebop.config.job import DecodingConfig, EnvironmentConfig, ModelConfig, TaskConfig
from bebop.metrics.intervals import across_seeds
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.agent_loop import AgentLoop, Played
from bebop.rollout.agent_setup import make_agent_loop
from bebop.rollout.engine import Request
from bebop.rollout.engine_thread import EngineThread
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.tasks.environment import EnvStep, Message
from bebop.tasks.environments.store import Store
from bebop.tasks.environments.store import item as store_item
from bebop.tasks.source import EnvironmentSource
from bebop.trajectory import SamplingParams

ROUNDS = 5
TURNS, SIDE_BY_SIDE, SLOTS, STEPS = 30, 16, 64, 6
SLEEP, SHARE = 5.0, 4  # seconds; every fourth
LONGEST, ROOM = 96, 2048  # tokens of a turn, of a trajectory
LENGTHS, BARS = (128, 480, 1000), {480: 10, 1000: 30}
ANSWERED, HEARD = 8, 16  # tokens of a turn, and read after it
PARKED = {"kept": 2**30, "read again": 0}
Row = dict[str, Any]


class Sleeper:
    """The environment ``store``, some episodes of which sleep at their first step."""

    blocking = False

    def __init__(self, sleepers: int = 0) -> None:
        """Let every ``sleepers``-th episode sleep; 0: none."""
        self.store, self.sleepers, self.asleep = Store(), sleepers, False

    @staticmethod
    def item(index: int, seed: int) -> dict[str, Any]:
        """Return a question of ``store`` with its number."""
        return {**store_item(index, seed, length=STEPS), "index": index}

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Begin as ``store`` does."""
        self.asleep = bool(self.sleepers) and item["index"] % self.sleepers == 0
        return await self.store.reset(item, seed)

    async def step(self, text: str) -> EnvStep:
        """Answer as ``store`` does, after a sleep at the first step of a sleeper."""
        if self.asleep:
            self.asleep = False
            await asyncio.sleep(SLEEP)
        return await self.store.step(text)

    async def close(self) -> None:
        """End the episode."""
        await self.store.close()


def task(name: str, turns: int, **args: Any) -> TaskConfig:
    """Return a task that is limited only to ``turns`` turns."""
    limits = EnvironmentConfig(max_turns=turns, max_seconds=float("inf"))
    return TaskConfig(source="environment", name=name, args=args, environment=limits)


def play(
    policy: Policy, config: TaskConfig, count: int, slots: int, seed: int, parked: int
) -> tuple[list[Played], list[float]]:
    """Play trajectories 0, 1, ...; return them and the seconds at which each ended."""
    thread = EngineThread(
        TorchEngine(policy, DecodingConfig(), slots=slots, max_length=ROOM, measure=False, parked_bytes=parked)
    )
    agents: AgentLoop = make_agent_loop(ModelConfig(), config, ROOM, thread, policy.eos_token_ids)
    source, ends = EnvironmentSource(replace(config, seed=seed)), [0.0] * count
    digits = tuple(policy.tokenizer.convert_tokens_to_ids(list("1234567")))
    thread.start()
    agents.start()

    def ended(i: int, _: Future[Played]) -> None:
        ends[i] = time.perf_counter() - began

    try:
        began = time.perf_counter()
        futures: list[Future[Played]] = []
        for i in range(count):
            stops = (*policy.eos_token_ids, *digits)
            params = SamplingParams(max_new_tokens=LONGEST, stop_token_ids=stops, seed=(seed << 40) + i)
            future = agents.play(source.prompt(i), params)
            future.add_done_callback(partial(ended, i))
            futures.append(future)
        return [future.result() for future in futures], ends
    finally:
        agents.stop()
        thread.stop()


def tokens(played: list[Played]) -> list[list[int]]:
    """Return the tokens of each trajectory."""
    return [one.trajectory.completion.token_ids.tolist() if one.trajectory else [] for one in played]


def conversations(policy: Policy, length: int, seed: int, parked: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of the step in which all conversations continue, and the tokens of that turn."""
    engine = TorchEngine(
        policy, DecodingConfig(), slots=SIDE_BY_SIDE, max_length=length + 64, measure=False, parked_bytes=parked
    )
    numbers = np.random.default_rng((seed, length))
    prompts = numbers.integers(6, 480, (SIDE_BY_SIDE, length - ANSWERED)).tolist()

    def asked(tokens: list[list[int]], longest: int) -> list[Request]:
        return [
            Request(id=i, token_ids=tuple(t), params=SamplingParams(max_new_tokens=longest, seed=i), park=True)
            for i, t in enumerate(tokens)
        ]

    first = generate(engine, asked(prompts, ANSWERED))
    heard = numbers.integers(6, 480, (SIDE_BY_SIDE, HEARD)).tolist()
    history = [[*p, *a.token_ids.tolist(), *new] for p, a, new in zip(prompts, first, heard, strict=True)]
    for request in asked(history, ANSWERED):
        engine.add(request)
    began = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - began
    found: dict[int, list[int]] = {}
    while engine.unfinished:
        found |= {one.id: one.completion.token_ids.tolist() for one in engine.step()}
    return seconds, [found[i] for i in range(SIDE_BY_SIDE)]


def context(policy: Policy, length: int, rounds: int) -> Row:
    """Compare parked contexts with contexts that are read again."""
    seconds: dict[str, list[float]] = {way: [] for way in PARKED}
    same = 0
    for seed in tqdm(range(rounds), desc=f"context {length}"):
        found = {}
        for way in list(PARKED)[:: 1 if seed % 2 else -1]:
            taken, found[way] = conversations(policy, length, seed, PARKED[way])
            noted({"what": f"context {length}", "round": seed, "arm": way, "seconds": taken})
            seconds[way].append(taken)
        same += sum(a == b for a, b in zip(*found.values(), strict=True))
    ratio = across_seeds([b / a for a, b in zip(seconds["kept"], seconds["read again"], strict=True)])
    share, bar = same / (rounds * SIDE_BY_SIDE), BARS.get(length)
    return {
        "what": f"context {length}", "trajectories": 2 * rounds * SIDE_BY_SIDE, "turns": 4 * rounds * SIDE_BY_SIDE,
        "longest, tokens": length + HEARD + ANSWERED, "with the same tokens": share,
        "seconds": across_seeds(seconds["kept"]).value,
        "seconds of the other": across_seeds(seconds["read again"]).value,
        "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "bar": f">= {bar}" if bar else "none",
        "holds": bar is None or (ratio.low >= bar and share == 1),
    }  # fmt: skip


def kept(policy: Policy, rounds: int) -> Row:
    """Compare trajectories with and without parked caches."""
    seconds: dict[str, list[float]] = {way: [] for way in PARKED}
    same = turns = longest = 0
    for seed in tqdm(range(rounds), desc="kept"):
        found = {}
        for way in list(PARKED)[:: 1 if seed % 2 else -1]:  # in turns
            played, ends = play(
                policy, task("store", TURNS, length=TURNS), SIDE_BY_SIDE, SIDE_BY_SIDE, seed, PARKED[way]
            )
            seconds[way].append(max(ends))
            noted({"what": "kept", "round": seed, "arm": way, "seconds": max(ends)})
            found[way] = tokens(played)
            turns += sum(len(one.trajectory.turns) for one in played if one.trajectory)
        same += sum(a == b for a, b in zip(*found.values(), strict=True))
        longest = max(longest, *(len(ids) for ids in found["kept"]))
    ratio = across_seeds([b / a for a, b in zip(seconds["kept"], seconds["read again"], strict=True)])
    return {
        "what": "kept", "trajectories": 2 * rounds * SIDE_BY_SIDE, "turns": turns, "longest, tokens": longest,
        "with the same tokens": same / (rounds * SIDE_BY_SIDE),
        "seconds": across_seeds(seconds["kept"]).value,
        "seconds of the other": across_seeds(seconds["read again"]).value,
        "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "bar": ">= 2", "holds": ratio.low >= 2,
    }  # fmt: skip


def slow(policy: Policy, rounds: int) -> Row:
    """Measure with a quarter of the environments asleep, and with none."""
    name, seconds = f"{Path(__file__).resolve()}:Sleeper", {0: list[float](), SHARE: list[float]()}
    turns = longest = 0
    for seed in tqdm(range(rounds), desc="slow"):
        for sleepers in (0, SHARE) if seed % 2 else (SHARE, 0):
            played, ends = play(policy, task(name, STEPS, sleepers=sleepers), SLOTS, SLOTS, seed, PARKED["kept"])
            seconds[sleepers].append(max(end for i, end in enumerate(ends) if i % SHARE))
            noted({"what": "slow", "round": seed, "arm": f"sleepers {sleepers}", "seconds": seconds[sleepers][-1]})
            turns += sum(len(one.trajectory.turns) for one in played if one.trajectory)
            longest = max(longest, *map(len, tokens(played)))
    ratio = across_seeds([b / a for a, b in zip(seconds[0], seconds[SHARE], strict=True)])
    return {
        "what": "slow", "trajectories": 2 * rounds * SLOTS, "turns": turns, "longest, tokens": longest,
        "with the same tokens": float("nan"),
        "seconds": across_seeds(seconds[SHARE]).value, "seconds of the other": across_seeds(seconds[0]).value,
        "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "bar": "<= 1.1", "holds": ratio.high <= 1.1,
    }  # fmt: skip


def run(rounds: int = ROUNDS) -> list[Row]:
    """Measure all rows."""
    policy = load_policy(ModelConfig(), need_head=True)
    return [*(context(policy, length, rounds) for length in LENGTHS), kept(policy, rounds), slow(policy, rounds)]
