"""The loop over tiny fakes at its three seams: who is asked what, when, and what is left behind."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bebop.driver.loop import SAMPLES, Loop
from bebop.errors import UserError
from bebop.metrics.sinks import Sample
from tests.fakes import GROUPS, SIZE, FakeSink, FakeTrainer, FakeWorker, go, in_order, job, make, prompt


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


@pytest.mark.parametrize("finished", [0, 2])
def test_told_to_stop_in_a_long_update_it_keeps_the_steps_before_and_the_batch(finished: int) -> None:
    loop, trainer, sink = make(job(steps=9, staleness=0), FakeWorker(), endless=finished)

    async def stop_midway() -> bool:
        running = asyncio.create_task(loop.run())
        while trainer.version < finished or not loop.buffer._whole:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert not running.done() and not trainer.saved
        loop.stopping.set()
        return await asyncio.wait_for(running, 5)

    assert asyncio.run(stop_midway()) is False
    assert [step for step, _ in sink.rows] == [*range(1, finished + 1)]
    [(step, state)] = trainer.saved.items()
    assert step == finished
    kept = [group.prompt.index for group in state["buffer"]["ready"]]
    assert kept == in_order(finished + 1)[-1], "the batch of the update that was dropped is trained on by a resume"


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


@dataclass(kw_only=True)
class SlowlySaving(FakeTrainer):
    """Takes a while for a checkpoint."""

    async def save(self, step: int, loop_state: dict[str, Any], best: int | None = None) -> None:
        await super().save(step, loop_state)
        await asyncio.sleep(0.2)


def test_checkpoints_are_no_time_in_which_the_trainer_waited_for_completions() -> None:
    config, sink = job(steps=4, staleness=0, save_every=2), FakeSink()
    assert go(Loop(config, prompt, [FakeWorker()], SlowlySaving(), [sink]))
    rows = dict(sink.rows)
    assert max(row["time/idle"] for row in rows.values()) < 0.15
    assert [step for step, row in rows.items() if row["time/save"] >= 0.2] == [3], "the step that it delayed"
    assert [step for step, row in rows.items() if row["time/save"] == 0] == [1, 2, 4]
    assert rows[3]["time/step"] > 0.2


def test_the_first_step_begins_once_workers_have_the_weights() -> None:
    """Loading a checkpoint before it is no waiting for completions."""
    config, sink = job(steps=1, staleness=0), FakeSink()
    loop = Loop(config, prompt, [FakeWorker()], FakeTrainer(), [sink])
    time.sleep(0.2)  # as long as the trainer takes to load
    assert go(loop)
    [(_, row)] = sink.rows
    assert row["time/idle"] < 0.15 and row["time/step"] < 0.15


def test_metrics_of_all_steps_add_up() -> None:
    loop, _, sink = make(job(steps=6, staleness=2), FakeWorker(), FakeWorker())
    assert go(loop)
    assert sum(row["response/tokens"] for _, row in sink.rows) == 6 * GROUPS * SIZE * 3
    assert sum(row["time/step"] for _, row in sink.rows) > 0


def test_it_is_said_how_far_a_step_has_come() -> None:
    said: list[str] = []
    loop, *_ = make(job(steps=3, staleness=0), FakeWorker())
    loop.progress = said.append
    assert go(loop)
    wanted = GROUPS * SIZE
    assert said.count(f"learning from {wanted} completions") == 3
    assert {f"{SIZE}/{wanted} completions", f"{wanted}/{wanted} completions"} <= set(said)


@dataclass(kw_only=True)
class Shown(FakeSink):
    samples: dict[int, Sequence[Sample]] = field(default_factory=dict)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        assert len(self.rows) == step, "the numbers of a step come first"
        self.samples[step] = samples


@pytest.mark.parametrize(("every", "steps"), [(3, [1, 3, 6]), (10, [1]), (0, [])])
def test_samples_of_the_first_step_and_of_every_few_are_shown(every: int, steps: list[int]) -> None:
    """A completion of each of the first groups, to the sinks that show any."""
    config, sink = job(steps=7), Shown()
    config = replace(config, runtime=replace(config.runtime, sample_every=every))
    loop = Loop(config, prompt, [FakeWorker()], FakeTrainer(), [FakeSink(), sink])
    assert go(loop) and len(sink.rows) == 7
    assert list(sink.samples) == steps
    for step, samples in sink.samples.items():
        first = (step - 1) * GROUPS
        assert [one.number for one in samples] == list(range(first, first + min(SAMPLES, GROUPS)))
        assert [one.prompt for one in samples] == [str(one.number) for one in samples]
        assert all(isinstance(one.reward, float) for one in samples)
