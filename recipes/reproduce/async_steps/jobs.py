"""The main job as a user starts it, once per arm and seed: asynchronous, with Ray, stored as soon as it ends.

Arms of a seed have the same prompts, random numbers and first policy, and decoding is exact: only drafts differ.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bebop.errors import UserError
from bebop.metrics.sinks import read_jsonl
from bebop.model.checkpoint import save_policy
from recipes import stages
from recipes.reproduce import study
from recipes.reproduce.study import DEPTH, FOLDER, QUICK

PLACE = FOLDER / "async_steps"
PLAIN, GREEDY, SAMPLED = "plain", "TO + CE", "RS + TV"
# Decoding of an arm, and the objective of its head, which is trained before RL and frozen during RL. The plain arm uses
# the sampled arm's folder, but not the head in it.
ARMS: Mapping[str, tuple[tuple[str, ...], str]] = {
    PLAIN: (("decoding=autoregressive",), "e2e_tv"),
    GREEDY: (("decoding=target_only", f"decoding.draft_tokens={DEPTH}"), "hard_ce"),
    SAMPLED: (("decoding=bebop", f"decoding.draft_tokens={DEPTH}"), "e2e_tv"),
}
SEEDS = study.SEEDS[:2] if QUICK else study.SEEDS
STEPS = 3 if QUICK else 40
GROUPS, ANSWERS = (2, 4) if QUICK else (6, 8)  # prompts of a step, completions of each
SLOTS = 8  # concurrent completions; few, so that plain rollouts take longer than updates, as in the paper
WARM = 1 if QUICK else 3  # first steps, whose latency does not count: allocations, and the pipeline fills
WINDOW = 2 if QUICK else 5  # steps whose mean reward has to reach BAR
# Reward to reach: runs of ``drift`` with as many completions a step begin at .38 to .50 and end at .70 to .84.
BAR = 0.0 if QUICK else 0.65
COMMON = (
    "model=tiny", "model.device=cpu", "task=chain_sum", "rollout.staleness=1", "rollout.workers=1",
    f"rollout.slots={SLOTS}", "rollout.threads=1", "trainer.threads=1", f"trainer.steps={STEPS}", "trainer.lr=1.5e-4",
    f"trainer.groups_per_step={GROUPS}", f"trainer.group_size={ANSWERS}", "trainer.save_every=0",
    "monitor.drift=false", "monitor.plots=false", "monitor.tensorboard=false", "monitor.ray_metrics=false",
    "runtime.progress=false",
)  # fmt: skip
NUMBERS = (
    "time/step", "time/rollout", "time/update", "time/idle", "time/rollout_idle", "response/tokens", "reward/mean",
    "staleness/mean",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Measurements of one job: metrics of each step, and how busy the machine was."""

    rows: Mapping[str, Sequence[float]]  # per step: ``NUMBERS``, and the accept length, which is 1 in plain decoding
    busy: float  # mean number of busy cores of the machine during the job, for any process

    def mean(self, name: str) -> float:
        """Return the mean of a metric over the steps after the first ``WARM``."""
        return float(np.mean(self.rows[name][WARM:]))

    @property
    def per_token(self) -> float:
        """Return the seconds of rollouts over the tokens of completions."""
        return sum(self.rows["time/rollout"][WARM:]) / sum(self.rows["response/tokens"][WARM:])

    @property
    def share(self) -> float:
        """Return the seconds of rollouts over the sum of rollouts and updates, which run side by side."""
        rollout, update = self.mean("time/rollout"), self.mean("time/update")
        return rollout / (rollout + update)

    def reaching(self) -> int | None:
        """Return the first step, from 1, that ends ``WINDOW`` steps of mean reward ``BAR``; None if there is none."""
        reward = np.asarray(self.rows["reward/mean"])
        means = np.convolve(reward, np.full(WINDOW, 1 / WINDOW), "valid")
        reached = np.flatnonzero(means >= BAR)
        return int(reached[0]) + WINDOW if len(reached) else None

    def seconds_to_bar(self) -> float:
        """Return the seconds until the reward reaches ``BAR``, or of the whole job if it never does."""
        return float(sum(self.rows["time/step"][: self.reaching()]))


def overrides(arm: str, seed: int, model: Path, run: Path) -> list[str]:
    """Return the command-line overrides of a job; no other study uses its prompts."""
    decoding, _ = ARMS[arm]
    own = (f"task.seed={800 + seed}", f"runtime.seed={seed}", f"model.path={model}", f"runtime.dir={run}")
    return [*COMMON, *decoding, *own]


def model_of(arm: str, seed: int) -> Path:
    """Return the folder of the built-in model with an arm's head, which is trained unless it is stored."""
    _, objective = ARMS[arm]
    folder = PLACE / f"{objective}-{seed}"
    stages.once(folder, partial(_saved, objective, seed))
    return folder


def _saved(objective: str, seed: int, folder: Path) -> dict[str, Any]:
    save_policy(study.head(study.Arm(objective=objective, seed=seed)), folder)
    return {}


def carry_out(arm: str, seed: int) -> Job:
    """Run a job, or read its stored result; a stopped job starts again, since its clock counts.

    Raises:
        UserError: The job failed; its output is in the named file.
    """
    folder = PLACE / f"{arm.replace(' ', '')}-{seed}"
    stages.once(folder, partial(_carried_out, arm, seed))
    kept = stages.read(folder)
    return Job(rows=kept["rows"], busy=kept["busy"])


def _carried_out(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    run, log = folder / "run", folder / "log"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "bebop.run", *overrides(arm, seed, model_of(arm, seed), run)]
    began, used = time.perf_counter(), _used()
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if status:
        raise UserError(f"the job of the arm {arm!r}, seed {seed}, ended with {status}: see {log}")
    busy = (_used() - used) / (time.perf_counter() - began)
    rows = read_jsonl(run / "metrics.jsonl")
    shutil.rmtree(run)
    lengths = [float(row.get("rollout/accept_length", 1.0)) for row in rows]
    return {"rows": {name: [row[name] for row in rows] for name in NUMBERS} | {"accept length": lengths}, "busy": busy}


def _used() -> float:
    """Return the processor seconds of the whole machine so far: Ray's processes are not children of this one."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def settings() -> dict[str, Any]:
    """Return all settings of the jobs; stored jobs must have the same."""
    heads = {name: asdict(study.Arm(objective=name, seed=0)) for name in {head for _, head in ARMS.values()}}
    told: dict[str, Any] = json.loads(json.dumps({"common": COMMON, "arms": ARMS, "heads": heads}, sort_keys=True))
    return told | {"seeds": [*SEEDS]}
