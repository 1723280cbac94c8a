"""Evaluations of held-out questions: the estimator, the loop over fakes, and what a resume makes of it."""

import asyncio
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.driver.evaluation import EVALUATIONS, Evaluation, best_line, pass_at_k
from bebop.driver.loop import Loop
from bebop.driver.protocols import Assignment, PartialGroup
from bebop.metrics.sinks import StepLog, read_jsonl
from bebop.run_dir.checkpoints import seal
from bebop.runtime.actors import RayTrainer
from bebop.trajectory import Completion, Prompt, Trajectory
from tests import fakes
from tests.fakes import FakeSink, FakeTrainer, FakeWorker, go, in_order, job


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0), (1, 1, 1, 1.0), (4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 1, 4, 1.0), (4, 0, 4, 0.0),
        (5, 2, 3, 1 - 1 / 10), (10, 3, 5, 1 - 21 / 252), (200, 1, 100, 0.5), (3, 2, 2, 1.0),
    ],
)  # fmt: skip
def test_pass_at_k_equals_numbers_worked_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_share_of_subsets_with_a_pass() -> None:
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@dataclass(kw_only=True)
class Asked:
    """Held-out questions without a task."""

    numbers: Sequence[int] = (0, 3, 4, 8)

    def prompt(self, index: int) -> Prompt:
        return replace(fakes.prompt(index), text=f"held out {self.numbers[-1 - index]}")


@dataclass(kw_only=True)
class Answering(FakeWorker):
    """Passes a held-out question greedily from version ``good[0]`` to below ``good[1]``, and by every second sample."""

    good: tuple[int, int] = (0, 99)
    held: list[tuple[int, int]] = field(default_factory=list)  # (version, prompt) of held-out questions it was sent
    mixed: bool = False  # whether it ever had both kinds of questions

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        await super().submit(assignments)
        self.mixed = self.mixed or len({a.prompt.held_out for a in self.queue}) == 2
        self.held += [(self.version, a.prompt.index) for a in assignments if a.prompt.held_out]

    def part(self, assignment: Assignment) -> PartialGroup:
        if not assignment.prompt.held_out:
            return super().part(assignment)
        right = self.good[0] <= self.version < self.good[1]
        rewards = [1.0 if (right if member == 0 else member % 2) else 0.5 for member in assignment.members]
        completion = Completion(
            token_ids=np.array([1, 2]), logprobs=np.zeros(2, dtype=np.float32), versions=np.full(2, self.version)
        )
        trajectories = tuple(Trajectory.single(completion=completion, reward=reward) for reward in rewards)
        return PartialGroup(prompt=assignment.prompt, members=assignment.members, trajectories=trajectories)


EVERY = {"every": 2, "samples": 3, "k": 2, "best_by": "greedy_pass_at_1"}


def make(
    *workers: Answering, steps: int = 5, folder: Path | None = None, start: int = 0, settings: Any = EVERY, **other: Any
) -> tuple[Loop, FakeTrainer, FakeSink]:
    config = job(steps=steps, evaluation=settings, **other)
    trainer, sink = FakeTrainer(version=start), FakeSink()
    log = None if folder is None else StepLog(folder / EVALUATIONS, start or None)
    evaluation = Evaluation(config, Asked(), log)
    return Loop(config, fakes.prompt, workers, trainer, [sink], evaluation=evaluation), trainer, sink


def evaluated(rows: Sequence[tuple[int, Mapping[str, float]]]) -> list[int]:
    return [step for step, row in rows if "eval/pass_at_1" in row]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_each_evaluation_is_of_one_version_and_training_asks_what_it_always_does(staleness: int) -> None:
    workers = [Answering(), Answering()]
    loop, trainer, sink = make(*workers, staleness=staleness)
    assert go(loop)
    assert trainer.batches == in_order(5) and max(trainer.lags) <= staleness
    assert [step for step, _ in sink.rows] == [0, 1, 2, 3, 4, 5] and evaluated(sink.rows) == [0, 2, 4, 5]
    held = sorted(pair for worker in workers for pair in worker.held)
    assert held == [(version, index) for version in (0, 2, 4, 5) for index in (-4, -3, -2, -1)]
    assert all(row["time/eval"] > 0 for step, row in sink.rows if step in (0, 2, 4, 5))
    assert {row["time/eval"] for step, row in sink.rows if step in (1, 3)} == {0.0}
    assert any(worker.mixed for worker in workers) == (staleness > 0), "a synchronous job evaluates by itself"


def test_metrics_are_those_of_the_completions() -> None:
    loop, _, sink = make(Answering(good=(2, 4)))
    assert go(loop)
    rows = dict(sink.rows)
    for step, greedy in {0: 0.0, 2: 1.0, 4: 0.0, 5: 0.0}.items():
        row = rows[step]
        assert row["eval/greedy_pass_at_1"] == greedy and row["eval/greedy_reward"] == 0.5 + greedy / 2
        assert row["eval/pass_at_1"] == pytest.approx(2 / 3), "of three samples two pass"
        assert row["eval/pass_at_k"] == 1.0 and row["eval/reward"] == pytest.approx(2.5 / 3)
        assert row["eval/length"] == 2 and row["eval/truncated"] == 0 and row["eval/seen"] == 0


def test_the_threshold_decides_what_passes() -> None:
    loop, _, sink = make(Answering(good=(9, 9)), settings={**EVERY, "threshold": 0.5})
    assert go(loop)
    assert dict(sink.rows)[2]["eval/greedy_pass_at_1"] == dict(sink.rows)[2]["eval/pass_at_1"] == 1.0


def test_questions_that_training_asks_are_counted() -> None:
    loop, _, sink = make(Answering())
    assert loop.evaluation is not None
    ask = loop.pool.prompt
    loop.pool.prompt = lambda index: replace(ask(index), text=f"held out {index}")
    assert go(loop)
    assert dict(sink.rows)[0]["eval/seen"] == 3, "prompts 0 to 5 were handed out by then"
    assert dict(sink.rows)[5]["eval/seen"] == 4


def test_the_best_checkpoint_is_saved_named_and_protected(tmp_path: Path) -> None:
    loop, trainer, _ = make(Answering(good=(2, 4)), steps=9, folder=tmp_path)
    asked: list[tuple[int, int | None]] = []
    save = trainer.save

    async def note(step: int, state: dict[str, Any], best: int | None = None) -> None:
        asked.append((step, best))
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
        await save(step, state)

    trainer.save = note  # type: ignore[method-assign]
    assert go(loop)
    assert asked == [(2, 2), (9, 2)], "step 2 is better than step 0, and none is better than step 2"
    lines = read_jsonl(tmp_path / EVALUATIONS)
    assert [line["step"] for line in lines] == [0, 2, 4, 6, 8, 9]
    assert lines[0]["best"] == {"step": 0, "eval/greedy_pass_at_1": 0.0, "checkpoint": None}
    wanted = {"step": 2, "eval/greedy_pass_at_1": 1.0, "checkpoint": "checkpoints/step_000002"}
    assert all(line["best"] == wanted for line in lines[1:])
    assert lines[1]["questions"][1] == {"question": 3, "greedy": 1.0, "sampled": [1.0, 0.5, 1.0]}
    assert (
        best_line(tmp_path)
        == f"best evaluation: step 2, eval/greedy_pass_at_1 1.000: {tmp_path}/checkpoints/step_000002"
    )
    (tmp_path / "checkpoints/step_000002").rmdir()
    assert best_line(tmp_path).endswith("1.000: no checkpoint of it was kept")


def test_a_checkpoint_that_is_due_and_best_is_saved_once() -> None:
    loop, trainer, _ = make(Answering(good=(2, 9)), save_every=2)
    assert go(loop)
    assert list(trainer.saved) == [2, 4, 5]
    assert trainer.saved[5]["evaluation"]["best"] == [2, 1.0], "of equals the first"


def test_without_keep_best_no_checkpoint_is_added() -> None:
    loop, trainer, _ = make(Answering(good=(2, 9)), settings={**EVERY, "keep_best": False})
    assert go(loop)
    assert list(trainer.saved) == [5]


def test_a_resumed_loop_knows_the_best_and_repeats_nothing(tmp_path: Path) -> None:
    first, before, _ = make(Answering(good=(2, 4)), steps=4, folder=tmp_path)
    assert go(first)
    second, after, sink = make(Answering(good=(9, 9)), steps=7, folder=tmp_path, start=4)
    second.restore(before.saved[4])
    assert go(second)
    assert [step for step, _ in sink.rows] == [5, 6, 7] and evaluated(sink.rows) == [6, 7]
    assert {row["eval/best_step"] for _, row in sink.rows if "eval/best_step" in row} == {2.0}
    assert [line["step"] for line in read_jsonl(tmp_path / EVALUATIONS)] == [0, 2, 4, 6, 7]
    assert after.saved[7]["evaluation"]["best"] == [2, 1.0]


def test_questions_stay_those_of_the_first_start() -> None:
    first, before, _ = make(Answering(), steps=2)
    assert go(first)
    second, _, _ = make(Answering(), steps=4, start=2)
    assert second.evaluation is not None
    second.evaluation.questions.numbers = [7, 8, 9, 10]  # a longer training leaves out others
    second.restore(before.saved[2])
    assert second.evaluation.prompt(-1).text == "held out 0" and second.evaluation.prompt(-4).text == "held out 8"


@dataclass(kw_only=True)
class Protecting(FakeTrainer):
    """Notes the step whose checkpoint each save must leave."""

    best: dict[int, int | None] = field(default_factory=dict)

    async def save(self, step: int, loop_state: dict[str, Any], best: int | None = None) -> None:
        await super().save(step, loop_state)
        self.best[step] = best


@pytest.mark.parametrize("keep_best", [True, False])
def test_a_resume_without_evaluations_keeps_what_is_known_of_earlier_ones(keep_best: bool) -> None:
    first, before, _ = make(Answering(good=(2, 4)), steps=4)
    assert go(first)
    config, trainer = job(steps=7, save_every=1, evaluation={"keep_best": keep_best}), Protecting(version=4)
    without = Loop(config, fakes.prompt, [FakeWorker()], trainer, [])
    without.restore(before.saved[4])
    assert go(without)
    assert trainer.best == dict.fromkeys((5, 6, 7), 2 if keep_best else None)
    again, after, _ = make(Answering(good=(9, 9)), steps=9, start=7)
    assert again.evaluation is not None
    again.evaluation.questions.numbers = [7, 8, 9, 10]
    again.restore(trainer.saved[7])
    assert go(again)
    assert after.saved[9]["evaluation"]["best"] == [2, 1.0]
    assert again.evaluation.questions.numbers == [0, 3, 4, 8]


def test_a_resume_without_evaluations_forgets_the_row_of_an_interrupted_one() -> None:
    """Its step is over, and later evaluations are of other weights."""
    first, before, _ = make(Answering(), steps=4)
    assert go(first)
    state = before.saved[4]
    state["evaluation"]["pending"] = {"reward/mean": 0.5}
    trainer = FakeTrainer(version=4)
    without = Loop(job(steps=5), fakes.prompt, [FakeWorker()], trainer, [])
    without.restore(state)
    assert go(without) and trainer.saved[5]["evaluation"]["pending"] is None


@pytest.mark.parametrize("at", [0, 2, 4])
def test_an_evaluation_that_is_interrupted_is_made_up_for(at: int, tmp_path: Path) -> None:
    worker = Answering()
    loop, trainer, sink = make(worker, steps=4, folder=tmp_path)

    async def stop_midway() -> bool:
        running = asyncio.create_task(loop.run())
        while (at, -1) not in worker.held:
            worker.stuck = worker.version == at
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not running.done()
        loop.stopping.set()
        return await asyncio.wait_for(running, 5)

    assert asyncio.run(stop_midway()) is False
    assert list(trainer.saved) == [at] and evaluated(sink.rows) == list(range(0, at, 2))
    assert [step for step, _ in sink.rows] == list(range(at + 1))[: at * 9], "the row of a finished step is written"
    again, after, later = make(Answering(), steps=4, folder=tmp_path, start=at)
    again.restore(trainer.saved[at])
    assert go(again)
    assert [step for step, _ in later.rows] == list(range(at, 5)) and evaluated(later.rows) == list(range(at, 5, 2))
    if at:
        old = next(row for step, row in sink.rows if step == at)
        assert dict(later.rows)[at].items() >= {**old, "time/eval": dict(later.rows)[at]["time/eval"]}.items()
    assert [line["step"] for line in read_jsonl(tmp_path / EVALUATIONS)] == [0, 2, 4]
    assert list(after.saved) == [4] and after.saved[4]["evaluation"]["pending"] is None


class Ranks(RayTrainer):
    """Writes checkpoints without a process."""

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        (arguments[0] / "policy").mkdir(parents=True)
        seal(arguments[0])
        return []


@dataclass(kw_only=True)
class Writing(FakeTrainer):
    ranks: Ranks

    async def save(self, step: int, loop_state: dict[str, Any], best: int | None = None) -> None:
        await super().save(step, loop_state)
        await self.ranks.save(step, loop_state, best)


def writing(folder: Path, *workers: Answering, start: int = 0, **settings: Any) -> tuple[Loop, Writing]:
    """A loop of four steps whose checkpoints are folders."""
    loop, _, _ = make(*workers, steps=4, folder=folder, start=start, settings={**EVERY, **settings})
    loop.trainer = trainer = Writing(version=start, ranks=Ranks(loop.config, folder, ()))
    return loop, trainer


def test_the_checkpoint_of_an_evaluation_that_was_made_up_for_has_the_name_that_is_told(tmp_path: Path) -> None:
    """The step was saved before its evaluation, and again after it, with the evaluation."""
    worker = Answering(good=(4, 9))
    loop, before = writing(tmp_path, worker)

    async def stop_midway() -> bool:
        running = asyncio.create_task(loop.run())
        while (4, -1) not in worker.held:
            worker.stuck = worker.version == 4
            await asyncio.sleep(0)
        loop.stopping.set()
        return await asyncio.wait_for(running, 5)

    assert asyncio.run(stop_midway()) is False and (tmp_path / "checkpoints/step_000004").is_dir()
    again, _ = writing(tmp_path, Answering(good=(4, 9)), start=4)
    again.restore(before.saved[4])
    assert go(again)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]
    assert read_jsonl(tmp_path / EVALUATIONS)[-1]["best"]["checkpoint"] == "checkpoints/step_000004"
    assert best_line(tmp_path).endswith(f"step 4, eval/greedy_pass_at_1 1.000: {tmp_path}/checkpoints/step_000004")
    assert (tmp_path / "model").resolve() == tmp_path / "checkpoints/step_000004/policy"


def test_a_best_checkpoint_that_was_not_kept_is_not_named(tmp_path: Path) -> None:
    """It was not asked for until a resume asked for it."""
    first, before = writing(tmp_path, Answering(good=(2, 4)), keep_best=False)
    assert go(first) and not read_jsonl(tmp_path / EVALUATIONS)[-1]["best"]["checkpoint"]
    config = {**EVERY, "keep_best": True}
    again, _, _ = make(Answering(good=(9, 9)), steps=6, folder=tmp_path, start=4, settings=config)
    again.restore(before.saved[4])
    assert go(again)
    assert read_jsonl(tmp_path / EVALUATIONS)[-1]["best"]["checkpoint"] is None
    assert best_line(tmp_path).endswith("step 2, eval/greedy_pass_at_1 1.000: no checkpoint of it was kept")


@pytest.mark.parametrize("dispatch", ["static", "pull"])
def test_a_worker_that_dies_in_an_evaluation_is_replaced_and_its_questions_are_asked_again(dispatch: str) -> None:
    workers = [Answering(deaths={("collect", 3)}), Answering(deaths={("submit", 2)})]
    loop, trainer, sink = make(*workers, rollout={"dispatch": dispatch})
    assert go(loop)
    assert loop.pool.restarts == 2 and trainer.batches == in_order(5)
    assert evaluated(sink.rows) == [0, 2, 4, 5]
    assert all(row["eval/pass_at_1"] == pytest.approx(2 / 3) for _, row in sink.rows if "eval/pass_at_1" in row)


def test_lost_members_count_neither_way(tmp_path: Path) -> None:
    config = job(
        evaluation={**EVERY, "samples": 2, "k": 2}, task={"source": "environment", "name": "guess"},
    )  # fmt: skip
    evaluation = Evaluation(config, Asked(numbers=(0, 1)), StepLog(tmp_path / EVALUATIONS))
    evaluation.begin(3)
    right, wrong = (
        Trajectory.single(
            completion=Completion(
                token_ids=np.ones(1, dtype=np.int64), logprobs=np.zeros(1, dtype=np.float32), versions=np.array([3])
            ),
            reward=reward,
        )
        for reward in (1.0, 0.0)
    )
    evaluation.put(-1, {0: None, 1: right, 2: None})
    evaluation.put(-2, {0: wrong, 1: right, 2: wrong})
    row = evaluation.finish()
    assert row["eval/lost"] == 2 and row["eval/greedy_pass_at_1"] == 0.0
    assert row["eval/pass_at_1"] == pytest.approx((1 + 1 / 2) / 2)
    assert row["eval/pass_at_k"] == 1.0, "of two samples of the second question; the first has one alone"
    assert json.loads((tmp_path / EVALUATIONS).read_text())["questions"][0] == {
        "question": 0, "greedy": None, "sampled": [1.0],
    }  # fmt: skip


def test_an_evaluation_without_a_score_is_never_the_best() -> None:
    evaluation = Evaluation(job(evaluation=EVERY), Asked(numbers=(0,)))
    evaluation.begin(2)
    evaluation.put(-1, dict.fromkeys(range(4)))
    assert math.isnan(evaluation.finish()["eval/pass_at_1"]) and evaluation.best is None and not evaluation.improved(2)


def test_tokens_of_another_version_are_a_bug() -> None:
    evaluation = Evaluation(job(evaluation=EVERY), Asked(numbers=(0,)))
    evaluation.begin(2)
    completion = Completion(
        token_ids=np.ones(2, dtype=np.int64), logprobs=np.zeros(2, dtype=np.float32), versions=np.array([2, 3])
    )
    with pytest.raises(AssertionError, match="one version"):
        evaluation.put(-1, {0: Trajectory.single(completion=completion, reward=1.0)})
