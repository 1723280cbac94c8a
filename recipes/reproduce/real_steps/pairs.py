"""Pairs of jobs with the same first policy and prompts, one decoded plainly and one with sampled drafts."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from recipes import stages
from recipes.reproduce.real.rl.jobs import PLAIN, settings
from recipes.reproduce.real.rl.plan import FALLING, RL_PLAN
from recipes.reproduce.study import QUICK

ARMS: Mapping[str, tuple[str, ...]] = {  # K is the best one at batch 8 and 32 in ``real_pays``
    "plain": PLAIN,
    "drafts": ("decoding=bebop", "decoding.draft_tokens=1"),
}
PAIRS = 2 if QUICK else 3
STEPS = 2 if QUICK else 4  # of a job; the first is not counted, because it warms up
GROUPS = 2 if QUICK else 4  # prompts of a step
NUMBERS = ("time/step", "time/rollout", "time/update", "response/tokens", "rollout/accept_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Seconds, tokens of completions, and accept length of a job, one value per counted step."""

    step: Sequence[float]
    rollout: Sequence[float]
    update: Sequence[float]
    tokens: Sequence[float]
    accept_length: Sequence[float]

    @property
    def per_token(self) -> float:
        """Return the seconds of rollouts per token of completions.

        The two jobs of a pair have completions of different lengths.
        """
        return sum(self.rollout) / sum(self.tokens)


Pair = Mapping[str, Job]  # by arm


def overrides(model: Path, questions: Path, pair: int, arm: str, run: Path) -> list[str]:
    """Return the settings of the job of an arm.

    They are those of ``real.rl``, with fewer prompts a step and only the last checkpoint.
    """
    plan = replace(RL_PLAN, groups=GROUPS, dtype="float32")
    own = [f"model.path={model}", f"trainer.steps={STEPS}", f"trainer.save_every={STEPS}", "trainer.keep=1"]
    return [*settings(plan, FALLING, pair, questions, ARMS[arm]), *own, f"runtime.dir={run}"]


def carry_out(model: Path, questions: Path, pair: int, arm: str, place: Path) -> Job:
    """Run a job, or read the timings of a finished one.

    A stopped job starts over, because its start counts.
    """
    run = place / f"{arm}-{pair}"

    def stage(folder: Path) -> Mapping[str, Mapping[str, Sequence[float]]]:
        stages.bebop("run", *overrides(model, questions, pair, arm, folder / "run"))
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(folder / "run")  # its checkpoint is some 2 GB
        return {"rows": {name: [row[name] for row in rows] for name in NUMBERS}}

    stages.once(run, stage)
    step, rollout, update, tokens, lengths = (stages.read(run)["rows"][name][1:] for name in NUMBERS)
    return Job(step=step, rollout=rollout, update=update, tokens=tokens, accept_length=lengths)


def ratio(pair: Pair, number: str) -> float:
    """Return the time of plain decoding over that with drafts: of rollouts per token, or of a step."""
    plain, drafts = pair["plain"], pair["drafts"]
    if number == "rollouts":
        return plain.per_token / drafts.per_token
    return float(np.mean(plain.step) / np.mean(drafts.step))


def share(pair: Pair) -> float:
    """Return the share of a plain step that rollouts take."""
    return float(np.sum(pair["plain"].rollout) / np.sum(pair["plain"].step))
