"""Run ``python -m bebop.run``, the main job as a user starts it, for each arm and seed."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.config.compose import job_config
from bebop.config.job import JobConfig, ModelConfig
from bebop.errors import UserError
from bebop.metrics.sinks import read_jsonl
from bebop.model.parts import find_part
from recipes.reproduce.study import FOLDER, QUICK

RUNS = FOLDER / "pad_training"
STEPS = 2 if QUICK else 14
GROUPS, ANSWERS = (2, 4) if QUICK else (5, 8)
LEARNING_RATE = 3e-4
PLAIN, SMALL, LARGE = "rejection sampling", "small tau", "large tau"
WHOLE, UNWEIGHTED = "large tau, whole answers", "large tau, no weights"
PADS = (SMALL, LARGE, WHOLE, UNWEIGHTED)
ARMS = (PLAIN, *PADS)
# Synchronous, so that the importance weight is p / P and nothing else; what only watches or draws is left out.
COMMON = (
    "task=chain_sum", "rollout.staleness=0", "model.device=cpu", f"trainer.steps={STEPS}",
    f"trainer.lr={LEARNING_RATE}", f"trainer.groups_per_step={GROUPS}", f"trainer.group_size={ANSWERS}",
    "monitor.drift=false", "monitor.plots=false", "monitor.tensorboard=false", "monitor.ray_metrics=false",
    "runtime.progress=false",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Output of a finished job: its folder and its last policy."""

    folder: Path
    policy: Path  # the last one, a Hugging Face folder

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each step."""
        return read_jsonl(self.folder / "metrics.jsonl")


def decoding(arm: str, taus: Mapping[str, float]) -> tuple[str, ...]:
    """Return the overrides that only this arm has; ``taus`` holds those of ``SMALL`` and ``LARGE``."""
    if arm == PLAIN:
        return ("decoding=bebop",)
    pad = ("decoding=pad", f"decoding.options.tau={taus[SMALL if arm == SMALL else LARGE]}")
    more = {WHOLE: ("algorithm.tis_level=sequence",), UNWEIGHTED: ("algorithm.rescore=true",)}
    return (*pad, *more.get(arm, ()))


def overrides(arm: str, seed: int, taus: Mapping[str, float]) -> list[str]:
    """Return the command line of a job; arms of a seed share questions and random numbers."""
    return [*COMMON, f"task.seed={700 + seed}", f"runtime.seed={seed}", *decoding(arm, taus)]


def configuration(arm: str, seed: int, taus: Mapping[str, float]) -> JobConfig:
    """Return the job's configuration as dataclasses."""
    return job_config(overrides(arm, seed, taus))


def train(arm: str, seed: int, taus: Mapping[str, float]) -> Trained:
    """Run a job in processes of its own, unless the same job with the same classifier has already succeeded.

    Raises:
        UserError: The job failed; the message names the file with its output.
    """
    wanted = overrides(arm, seed, taus)
    key = hashlib.sha256(json.dumps([classifier(), wanted]).encode()).hexdigest()[:10]
    folder = RUNS / f"{ARMS.index(arm)}-{seed}-{key}"
    done = Trained(folder=folder, policy=folder / "checkpoints" / f"step_{STEPS:06d}" / "policy")
    if done.policy.is_dir():
        return done
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "bebop.run", *wanted, f"runtime.dir={folder}"]
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if status:
        raise UserError(f"the job of the arm {arm!r}, seed {seed}, ended with {status}: see {log}")
    return done


def classifier() -> str:
    """Return the hash of the pivot classifier file that the jobs load."""
    return hashlib.sha256(find_part(ModelConfig(path="tiny"), "pivot").read_bytes()).hexdigest()[:16]
