"""Held-out evaluation: questions that training does not ask, completed by one version of the weights.

Invariants:

- Every token of an evaluation comes from the same version. The loop starts the next update only after the evaluation,
  so no other weights are published meanwhile.
- The seeds of its completions are the same in each evaluation, and no completion of training has them.
- Training asks the same prompts, in the same order, with the same seeds, as without evaluations.
- An evaluation counts once it is complete. An interrupted evaluation runs again, after a resume as well.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bebop.config.job import JobConfig
from bebop.metrics.sinks import StepLog, read_jsonl
from bebop.run_dir.checkpoints import STEPS, Store
from bebop.trajectory import Prompt, Trajectory

EVALUATIONS = "evaluations.jsonl"  # in a run folder: a line for each evaluation
Members = Mapping[int, Trajectory | None]  # completions of a question by number; None: its environment was lost


class Questions(Protocol):
    """The held-out questions of a job (``bebop.tasks.held_out``)."""

    numbers: Sequence[int]  # [Q] numbers in the stream of questions

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of question ``-1 - index``, for an ``index`` below 0."""
        ...


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of ``k`` completions passes.

    It is 1 - C(n - c, k) / C(n, k): the share of the subsets of size k in which at least one completion passes
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", Eq. 1).

    Args:
        n: number of sampled completions, at least ``k``.
        c: number of completions that pass.
        k: size of a subset.
    """
    assert 0 <= c <= n and 1 <= k <= n, (n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


class Evaluation:
    """The evaluations of a job: the one in progress, and the best one so far."""

    def __init__(self, config: JobConfig, questions: Questions, log: StepLog | None = None) -> None:
        """Make the evaluations of a job; ``log`` stores a line of each (``evaluations.jsonl``)."""
        self.config, self.settings, self.questions, self.log = config, config.evaluation, questions, log
        self.best: tuple[int, float] | None = None  # step and score
        self.pending: dict[str, float] | None = None  # metrics of a step whose evaluation was interrupted
        self._version = -1  # of the evaluation in progress
        self._results: dict[int, Members] = {}  # by index of the question
        self._whole = asyncio.Event()
        self._texts: dict[str, int] = {}  # text of a question -> its index
        self._seen: set[int] = set()  # indices of questions that training has asked

    @property
    def indices(self) -> range:
        """Return the indices of the questions: -Q to -1."""
        return range(-len(self.questions.numbers), 0)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of a question."""
        return self.questions.prompt(index)

    def due(self, version: int) -> bool:
        """Return whether weights of this version must be evaluated after their publication."""
        return version % self.settings.every == 0 or version == self.config.trainer.steps

    def begin(self, version: int) -> None:
        """Begin an evaluation of the weights of a version."""
        self._version, self._results = version, {}
        self._whole.clear()

    def put(self, index: int, members: Members) -> None:
        """Add the completions of a question."""
        for trajectory in filter(None, members.values()):
            for turn in trajectory.turns:
                assert (turn.completion.versions == self._version).all(), "an evaluation is of one version"
        self._results[index] = members
        if len(self._results) == len(self.indices):
            self._whole.set()

    async def whole(self) -> bool:
        """Wait until the completions of all questions have arrived."""
        return await self._whole.wait()

    @property
    def progress(self) -> str:
        """Return a text with the number of finished questions."""
        return f"evaluating: {len(self._results)}/{len(self.indices)} questions"

    def note(self, prompt: Prompt) -> None:
        """Record a prompt of the training stream: ``eval/seen`` counts held-out questions among them."""
        if not prompt.text:
            return  # an environment has not begun: its questions differ by their seeds
        if not self._texts:
            self._texts = {self.prompt(index).text: index for index in self.indices}
        if (index := self._texts.get(prompt.text)) is not None:
            self._seen.add(index)

    def finish(self) -> dict[str, float]:
        """End the evaluation: write its line, update the best one, and return its metrics."""
        row = self._metrics()
        score = row[self.settings.score]
        if not math.isnan(score) and (self.best is None or score > self.best[1]):
            self.best = (self._version, score)
        if self.best is not None:
            row["eval/best_step"] = float(self.best[0])
        if self.log is not None:
            self.log.write({"step": self._version, **row, **self._line(self.log)})
        return row

    def improved(self, version: int) -> bool:
        """Return whether weights of this version are the best so far and must be saved.

        Those of version 0 need no checkpoint: they are in ``model.path``.
        """
        return self.settings.keep_best and self.best is not None and self.best[0] == version > 0

    @property
    def protected(self) -> int | None:
        """Return the step whose checkpoint must stay; None if there is none."""
        return self.best[0] if self.best is not None and self.settings.keep_best else None

    def _metrics(self) -> dict[str, float]:
        """Return the metrics of the evaluation in progress, whose completions have all arrived."""
        own, found = self.settings, list(self._results.values())
        every = [t for members in found for t in members.values() if t is not None]
        row = {
            "eval/length": _mean([t.written for t in every]),
            "eval/truncated": _mean([t.turns[-1].completion.finish_reason == "length" for t in every]),
            "eval/seen": float(len(self._seen)),
        }
        if self.config.task.turns:
            row["eval/lost"] = float(sum(t is None for members in found for t in members.values()))
        if own.greedy:
            rewards = [t.reward for members in found if (t := members[0]) is not None]
            row["eval/greedy_reward"] = _mean(rewards)
            row["eval/greedy_pass_at_1"] = _mean([reward >= own.threshold for reward in rewards])
        if own.samples:
            sampled, k = [self._sampled(members) for members in found], own.k or own.samples
            counts = [(len(rewards), sum(reward >= own.threshold for reward in rewards)) for rewards in sampled]
            row["eval/reward"] = _mean([float(np.mean(rewards)) for rewards in sampled if rewards])
            row["eval/pass_at_1"] = _mean([pass_at_k(n, c, 1) for n, c in counts if n])
            row["eval/pass_at_k"] = _mean([pass_at_k(n, c, k) for n, c in counts if n >= k])
        return row

    def _sampled(self, members: Members) -> list[float]:
        """Return the rewards of the sampled completions of a question, without lost ones."""
        return [t.reward for number, t in members.items() if t is not None and not self.settings.is_greedy(number)]

    def _line(self, log: StepLog) -> dict[str, Any]:
        """Return the rest of the log's line, without metrics: the best checkpoint, and the rewards of each question."""
        best = None
        if self.best is not None:
            (step, score), store = self.best, Store(log.path.parent, STEPS)
            saved = store.path(step) if self.improved(self._version) else store.newest(step)  # saved next, or before
            path = saved.relative_to(store.run_dir).as_posix() if saved and self.protected else None
            best = {"step": step, self.settings.score: score, "checkpoint": path}
        rewards = [
            {
                "question": number,
                **({"greedy": first.reward if (first := members[0]) else None} if self.settings.greedy else {}),
                "sampled": self._sampled(members),
            }
            for number, index in zip(self.questions.numbers, reversed(self.indices), strict=True)
            if (members := self._results[index])
        ]
        return {"best": best, "questions": rewards}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "best": list(self.best) if self.best is not None else None,
            "pending": self.pending,
            "questions": list(self.questions.numbers),
            "seen": sorted(self._seen),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, including the questions of the earlier evaluations."""
        self.best = (int(state["best"][0]), float(state["best"][1])) if state["best"] is not None else None
        self.pending, self._seen = state["pending"], set(state["seen"])
        self.questions.numbers = list(state["questions"])


def best_line(run_dir: Path) -> str:
    """Return one line about the best evaluation of a run and its checkpoint; empty for a run without evaluations."""
    path = run_dir / EVALUATIONS
    rows = read_jsonl(path) if path.is_file() else []
    best = rows[-1].get("best") if rows else None
    if not isinstance(best, dict):
        return ""
    saved = Store(run_dir, STEPS).newest(best["step"]) if best["checkpoint"] else None
    where = str(saved or "no checkpoint of it was kept")
    where = where if best["step"] else "no step is better than the model that the run began with"
    (name, score), *_ = [(key, value) for key, value in best.items() if key.startswith("eval/")]
    return f"best evaluation: step {best['step']}, {name} {score:.3f}: {where}"


def _mean(values: Sequence[float]) -> float:
    """Return the mean, or NaN for an empty sequence."""
    return float(np.mean(values)) if values else math.nan
