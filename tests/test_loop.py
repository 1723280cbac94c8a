"""The loop over tiny fakes at its three seams: who is asked what, when, and what is left behind when things die."""

import asyncio
import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bebop.config import JobConfig
from bebop.errors import UserError
from bebop.loop import Loop
from bebop.metrics import Mean, Metrics
from bebop.parsing import from_dict
from bebop.protocols import WorkerDied, WorkerReport
from bebop.trajectory import Batch, Completion, DecodeStats, Group, Prompt, Trajectory

GROUPS, SIZE = 3, 2


@dataclass(kw_only=True)
class FakeWorker:
    """Answers prompts, newest first, with the weights it has. Dies at the calls listed in ``deaths``."""

    deaths: set[tuple[str, int]] = field(default_factory=set)  # (method, which call of it, from 1)
    raises: dict[int, Exception] = field(default_factory=dict)  # which collect raises what
    stuck: bool = False  # never finishes anything
    version: int = -1
    queue: list[Prompt] = field(default_factory=list)
    submitted: list[tuple[int, int]] = field(default_factory=list)  # (weight version, prompt) as queued
    weights: list[tuple[str, int]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    alive: bool = True
    starting: bool = False

    def _call(self, method: str) -> None:
        assert not self.starting, f"{method} on a worker that is not there yet"
        self.calls[method] += 1
        if (method, self.calls[method]) in self.deaths:
            self.alive = False
        if not self.alive:
            raise WorkerDied(f"in {method}")

    async def submit(self, prompts: Sequence[Prompt]) -> None:
        await asyncio.sleep(0)
        self._call("submit")
        self.queue += prompts
        self.submitted += [(self.version, p.index) for p in prompts]

    async def collect(self) -> WorkerReport:
        for _ in range(5):
            await asyncio.sleep(0)
        self._call("collect")
        if self.calls["collect"] in self.raises:
            raise self.raises[self.calls["collect"]]
        if not self.queue or self.stuck:
            return WorkerReport(groups=(), busy=0.0, swap=0.0, version=self.version, head="")
        groups = (answer(self.queue.pop(), self.version),)
        return WorkerReport(groups=groups, busy=0.01, swap=0.001, version=self.version, head="")

    async def set_weights(self, weights: Any, version: int) -> None:
        await asyncio.sleep(0)
        self._call("set_weights")
        self.weights.append((weights, version))
        self.version = version

    async def restart(self) -> None:
        self.starting = True
        for _ in range(20):
            await asyncio.sleep(0)
        self.starting, self.alive, self.queue, self.version = False, True, [], -1


def answer(prompt: Prompt, version: int) -> Group:
    """A group that depends on the prompt alone."""
    ones = np.ones(2)
    stats = DecodeStats(cycles=2, tokens=3, target_forwards=2, draft_forwards=2, reached=np.array([2.0, 1.0]))
    stats.accepted, stats.overlap, stats.draft_entropy = ones * 1.0, ones * 0.9, ones * 0.5
    stats.target_only, stats.target_entropy = ones * 0.5, ones * 0.5
    completion = Completion(
        token_ids=np.array([prompt.index, 1, 2]),
        logprobs=np.zeros(3, dtype=np.float32),
        versions=np.full(3, version),
        stats=stats,
    )
    return Group(prompt=prompt, trajectories=(Trajectory(completion=completion, reward=1.0),) * SIZE)


@dataclass(kw_only=True)
class FakeTrainer:
    """Counts updates; keeps batches and checkpoints."""

    version: int = 0
    batches: list[list[int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    slow: int = 0  # turns of the event loop that an update takes
    fetch: int = 7  # and that getting at the weights takes

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        for _ in range(self.slow):
            await asyncio.sleep(0)
        self.batches.append([g.prompt.index for g in batch.groups])
        self.lags += [self.version - g.oldest_version for g in batch.groups]
        self.version += 1
        learned: Metrics = {"policy/entropy": Mean(1.0, 1), "train/kl": Mean(2.0, 4)}
        return learned, self.version

    async def weights(self, head: bool) -> str:
        version = self.version
        for _ in range(self.fetch):
            await asyncio.sleep(0)
        return f"weights {version}"

    async def save(self, step: int, loop_state: dict[str, Any]) -> None:
        assert step == self.version
        self.saved[step] = copy.deepcopy(loop_state)


@dataclass(kw_only=True)
class FakeSink:
    rows: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, values))

    def close(self) -> None:
        pass


def prompt(index: int) -> Prompt:
    return Prompt(index=index, task="test", text=str(index), token_ids=(index,), item={})


def job(steps: int = 5, staleness: int = 1, save_every: int = 0, max_restarts: int = 3) -> JobConfig:
    sections = {
        "rollout": {"staleness": staleness},
        "trainer": {"steps": steps, "groups_per_step": GROUPS, "group_size": SIZE, "save_every": save_every},
        "runtime": {"max_restarts": max_restarts},
    }
    return from_dict(JobConfig, sections)


def make(config: JobConfig, *workers: FakeWorker, **trainer: Any) -> tuple[Loop, FakeTrainer, FakeSink]:
    taught, sink = FakeTrainer(**trainer), FakeSink()
    return Loop(config, prompt, workers, taught, [sink]), taught, sink


def go(loop: Loop, seconds: float = 10) -> bool:
    return asyncio.run(asyncio.wait_for(loop.run(), seconds))


def in_order(steps: int, first: int = 0) -> list[list[int]]:
    return [list(range(j * GROUPS, (j + 1) * GROUPS)) for j in range(first, steps)]


@pytest.mark.parametrize("count", [1, 2])
def test_synchronous_prompts_wait_for_the_weights_of_their_step(count: int) -> None:
    workers = [FakeWorker() for _ in range(count)]
    loop, trainer, _ = make(job(steps=4, staleness=0), *workers, slow=10)
    assert go(loop)
    assert trainer.batches == in_order(4)
    assert set(trainer.lags) == {0}
    asked = sorted(s for worker in workers for s in worker.submitted)
    assert asked == [(index // GROUPS, index) for index in range(4 * GROUPS)]
    for worker in workers:
        assert worker.weights == [(f"weights {v}", v) for v in range(5)]


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_asynchronous_staleness_reaches_but_never_exceeds_the_bound(staleness: int) -> None:
    workers = [FakeWorker(), FakeWorker()]
    loop, trainer, sink = make(job(steps=12, staleness=staleness), *workers, slow=200)
    assert go(loop)
    assert trainer.batches == in_order(12)
    assert max(trainer.lags) == staleness
    assert max(row["staleness/max"] for _, row in sink.rows) == staleness


DEATHS = [{("collect", 2)}, {("collect", 1)}, {("submit", 1)}, {("submit", 3)}, {("set_weights", 1)}]
DEATHS += [{("set_weights", 3)}, {("collect", 3), ("submit", 4)}]


@pytest.mark.parametrize("deaths", DEATHS)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_dead_worker_is_replaced_and_no_prompt_is_lost(deaths: set[tuple[str, int]], staleness: int) -> None:
    victim, other = FakeWorker(deaths=deaths), FakeWorker()
    loop, trainer, sink = make(job(steps=6, staleness=staleness), victim, other)
    assert go(loop)
    assert trainer.batches == in_order(6)
    assert max(trainer.lags) <= staleness
    assert loop.pool.restarts == len(deaths) == sink.rows[-1][1]["rollout/restarts"]
    times = Counter(index for _, index in victim.submitted)
    assert set(times.values()) <= set(range(1, len(deaths) + 2))  # once more for each death at most
    assert set(Counter(index for _, index in other.submitted).values()) == {1}
    assert all(weights == f"weights {version}" for weights, version in victim.weights)


def test_prompts_of_a_dead_worker_are_submitted_again_once() -> None:
    """Three prompts go out, prompt 2 comes back, then the worker dies: the other two start again."""
    worker = FakeWorker(deaths={("collect", 3)})
    loop, trainer, _ = make(job(steps=1, staleness=0), worker)
    assert go(loop)
    assert worker.submitted == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1)]
    assert trainer.batches == [[0, 1, 2]]


def test_a_replacement_that_dies_while_it_starts_is_replaced_too() -> None:
    worker = FakeWorker(deaths={("collect", 2), ("set_weights", 2), ("submit", 2)})
    loop, trainer, _ = make(job(steps=3), worker)
    assert go(loop)
    assert trainer.batches == in_order(3) and loop.pool.restarts == 3


def test_a_replacement_during_an_update_keeps_old_weights_under_their_own_version() -> None:
    """Dies while new weights are being fetched: what it is given meanwhile must not carry the new number."""
    for call in range(2, 60):
        worker = FakeWorker(deaths={("collect", call)})
        loop, trainer, _ = make(job(steps=4, staleness=2), worker, slow=3, fetch=60)
        assert go(loop)
        assert all(weights == f"weights {version}" for weights, version in worker.weights), call
        assert trainer.batches == in_order(4)


def test_too_many_deaths_end_the_job_with_a_checkpoint() -> None:
    worker = FakeWorker(deaths={("collect", n) for n in range(8, 40)})
    loop, trainer, _ = make(job(steps=20, max_restarts=2), worker)
    with pytest.raises(UserError, match="died 3 times, the last time: in collect"):
        go(loop)
    assert trainer.version == 2 and list(trainer.saved) == [2]
    # Whoever resumes has the whole allowance again.
    again, taught, _ = make(job(steps=20, max_restarts=2), FakeWorker(deaths={("collect", 3)}), version=2)
    again.restore(trainer.saved[2])
    assert go(again) and trainer.batches + taught.batches == in_order(20)


def test_a_failing_reward_ends_the_job_with_a_checkpoint() -> None:
    worker = FakeWorker(raises={8: UserError("reward f on prompt 7 raised KeyError: 'x'")})
    loop, trainer, _ = make(job(steps=20), worker)
    with pytest.raises(UserError, match="reward f on prompt 7"):
        go(loop)
    assert trainer.version > 0 and list(trainer.saved) == [trainer.version]


@pytest.mark.parametrize("steps_done", [0, 2])
def test_told_to_stop_while_waiting_it_saves_and_returns_false(steps_done: int) -> None:
    worker = FakeWorker()
    loop, trainer, _ = make(job(steps=9, staleness=0), worker)

    async def stop_midway() -> bool:
        running = asyncio.create_task(loop.run())
        while trainer.version < steps_done or not worker.submitted:
            await asyncio.sleep(0)
        worker.stuck = True
        await asyncio.sleep(0.05)  # now it waits for a batch that will not come
        assert not running.done() and not trainer.saved
        loop.stopping.set()
        return await asyncio.wait_for(running, 5)

    assert asyncio.run(stop_midway()) is False
    assert list(trainer.saved) == [trainer.version] and trainer.version >= steps_done


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_restored_loop_goes_on_with_the_same_prompts(staleness: int) -> None:
    whole = make(job(steps=8, staleness=staleness), FakeWorker())
    assert go(whole[0])
    first, before, _ = make(job(steps=3, staleness=staleness), FakeWorker(), slow=200)
    assert go(first) and list(before.saved) == [3]
    worker = FakeWorker()
    second, after, sink = make(job(steps=8, staleness=staleness), worker, version=3)
    second.restore(before.saved[3])
    assert go(second)
    assert before.batches + after.batches == whole[1].batches == in_order(8)
    assert max(after.lags) <= staleness
    assert worker.weights[0] == ("weights 3", 3)
    assert [step for step, _ in sink.rows] == [4, 5, 6, 7, 8]
    # Answers kept in the checkpoint are not asked for again.
    kept = {group.prompt.index for group in before.saved[3]["buffer"]["ready"]}
    assert not kept & {index for _, index in worker.submitted}
    assert kept or staleness == 0


@pytest.mark.parametrize(("every", "expected"), [(0, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7])])
def test_checkpoints_every_so_many_steps_and_at_the_end(every: int, expected: list[int]) -> None:
    loop, trainer, _ = make(job(steps=7, save_every=every), FakeWorker())
    assert go(loop)
    assert list(trainer.saved) == expected


def test_rows_have_the_names_and_values_that_are_promised() -> None:
    loop, _, sink = make(job(steps=3, staleness=0), FakeWorker())
    assert go(loop)
    assert [step for step, _ in sink.rows] == [1, 2, 3]
    for step, row in sink.rows:
        promised = {
            "reward/mean": 1.0,
            "response/length": 3.0,
            "draft/entropy": 1.0 / 3,  # 0.5 + 0.5 over the 2 + 1 drafts that were reached
            "rollout/accept_length": 1.5,
            "rollout/accept_rate/1": 0.5,
            "rollout/accept_rate/2": 1.0,
            "rollout/overlap/1": 0.45,
            "rollout/overlap/2": 0.9,
            "staleness/mean": 0.0,
            "staleness/max": 0.0,
            "policy/entropy": 1.0,  # from the trainer, as every train/...
            "train/kl": 0.5,
            "response/tokens": GROUPS * SIZE * 3.0,
            "samples/prompts": float(step * GROUPS),
            "samples/trained": float(step * GROUPS * SIZE),
            "version": float(step),
        }
        assert {name: row[name] for name in promised} == pytest.approx(promised)
        times = {name: row[f"time/{name}"] for name in ("step", "rollout", "update", "sync", "idle")}
        assert min(times.values()) >= 0
        assert times["idle"] + times["update"] < times["step"]
        assert times["rollout"] == pytest.approx(GROUPS * 0.01, abs=0.011)  # one report may fall into the next step
        assert row["rollout/tokens_per_s"] == pytest.approx(GROUPS * SIZE * 3 / times["step"], rel=0.5)


def test_metrics_of_all_steps_add_up() -> None:
    loop, _, sink = make(job(steps=6, staleness=2), FakeWorker(), FakeWorker())
    assert go(loop)
    assert sum(row["response/tokens"] for _, row in sink.rows) == 6 * GROUPS * SIZE * 3
    assert sum(row["time/step"] for _, row in sink.rows) > 0
