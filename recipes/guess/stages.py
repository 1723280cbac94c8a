"""The stages in their order; each leaves a folder, whole or not at all, and a finished one is not done again."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop.command import writing
from bebop.config import ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy, save_policy
from recipes.guess import playing, sft

SETTINGS = "settings.json"
STAGE = "stage.json"  # of a finished stage: its seconds, and what it measured
DRAFTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything; ``settings.json`` of the folder that it is carried out in."""

    seeds: int = 3
    supervised_steps: int = 140
    slips: float = 0.38
    turns: int = 1200  # that the head is adapted on
    head_steps: int = 120
    held_out: int = 192  # turns on which it is measured
    games: int = 256  # in which a start is measured
    steps: int = 45  # of GRPO
    groups: int = 12
    group_size: int = 8
    threads: int = 1


def carried_out(plan: Plan, out: Path) -> list[Path]:
    """Every stage that is left; the folders of the jobs. ``UserError`` if ``out`` is of another plan."""
    claim(plan, out)
    start, head = out / "supervised", out / "head"
    once(start, lambda folder: supervised(plan, folder))
    once(head, lambda folder: adapted(plan, start / "model", folder))
    jobs = [out / f"seed-{seed}" for seed in range(plan.seeds)]
    for seed, job in enumerate(jobs):
        once(job, lambda folder, seed=seed: reinforced(plan, head / "model", seed, folder))  # type: ignore[misc]
    return jobs


def claim(plan: Plan, out: Path) -> None:
    """Make the folder, or find it to be of the same plan."""
    path, wanted = out / SETTINGS, dataclasses.asdict(plan)
    if path.is_file():
        found = json.loads(path.read_text())
        # More seeds only add jobs to what is there.
        if {**found, "seeds": 0} != {**wanted, "seeds": 0}:
            differing = ", ".join(name for name in wanted if found.get(name) != wanted[name])
            raise UserError(f"--out {out} was begun with other settings ({differing}): give another folder")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted, indent=1) + "\n")


def once(folder: Path, stage: Callable[[Path], dict[str, Any]]) -> None:
    """Carry out a stage unless it is finished; what a stopped one left is begun again."""
    if (folder / STAGE).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    began, processor = time.perf_counter(), processor_seconds()
    measured = stage(folder)
    took = {"seconds": time.perf_counter() - began, "processor_seconds": processor_seconds() - processor}
    scratch = folder / f"{STAGE}.new"
    with writing(folder):
        scratch.write_text(json.dumps({**took, **measured}, indent=1) + "\n")
        scratch.replace(folder / STAGE)


def read(folder: Path) -> dict[str, Any]:
    """What a finished stage measured."""
    found: dict[str, Any] = json.loads((folder / STAGE).read_text())
    return found


def supervised(plan: Plan, folder: Path) -> dict[str, Any]:
    """The built-in model on demonstrations; ``folder``/model."""
    torch.set_num_threads(plan.threads)
    torch.manual_seed(0)
    policy = load_policy(ModelConfig(path="tiny", device="cpu"))
    began = time.process_time()
    sft.train(policy, steps=plan.supervised_steps, slips=plan.slips)
    seconds = time.process_time() - began
    with writing(folder):
        save_policy(policy, folder / "model", torch.float32)
    return {"training_processor_seconds": seconds, **measured(plan, folder / "model", "games, supervised")}


def adapted(plan: Plan, model: Path, folder: Path) -> dict[str, Any]:
    """The head on turns of the model's own games; ``folder``/model."""
    bebop(
        "adapt", f"model.path={model}", "model.device=cpu", "task=environment", "task.name=guess",
        f"dir={folder / 'adapt'}", f"out={folder / 'model'}", f"data.sequences={plan.turns}",
        f"data.max_length={playing.LONGEST}", f"data.sampling.max_new_tokens={playing.TURN}",
        f"evaluation.prompts={plan.held_out}", f"evaluation.draft_tokens={DRAFTS}", f"head.depth={DRAFTS}",
        f"train.steps={plan.head_steps}", f"train.warm_steps={plan.head_steps // 3}", f"train.threads={plan.threads}",
        f"train.rows_per_step={min(32, plan.turns)}", f"train.eval_every={max(1, plan.head_steps // 3)}",
    )  # fmt: skip
    found = json.loads((folder / "adapt" / "results.json").read_text())["systems"]["bebop"]
    changed = {when: found[when]["accept_length"] for when in ("before", "after", "change")}
    return {"accept_length": changed, **measured(plan, folder / "model", "games, adapted head")}


def reinforced(plan: Plan, model: Path, seed: int, folder: Path) -> dict[str, Any]:
    """GRPO on questions and draws of ``seed``; synchronous, so that the trainer scores all tokens by their weights."""
    bebop(
        "run", f"model.path={model}", "model.device=cpu", "task=environment", "task.name=guess", f"task.seed={seed}",
        f"runtime.seed={seed}", f"runtime.dir={folder / 'run'}", f"rollout.max_length={playing.LONGEST}",
        f"rollout.sampling.max_new_tokens={playing.TURN}", "rollout.staleness=0", f"rollout.threads={plan.threads}",
        f"rollout.slots={playing.SLOTS}", f"decoding.draft_tokens={DRAFTS}", f"trainer.steps={plan.steps}",
        f"trainer.groups_per_step={plan.groups}", f"trainer.group_size={plan.group_size}", "trainer.lr=2e-4",
        "trainer.lr_warmup_steps=5", f"trainer.threads={plan.threads}",
    )  # fmt: skip
    return {}


def measured(plan: Plan, model: Path, label: str) -> dict[str, Any]:
    """Games of a checkpoint: the share that it wins, the accept length by turn."""
    config = ModelConfig(path=str(model), device="cpu", check=False)
    played = playing.play(config, load_policy(config), plan.games, DRAFTS, label)
    return {"won": playing.won(played), "accept_length_by_turn": playing.accept_lengths(played)}


def bebop(command: str, *overrides: str) -> None:
    """One of the commands, in a process of its own with its own progress bars; ``UserError`` if it fails."""
    done = subprocess.run([sys.executable, "-m", f"bebop.{command}", *overrides], check=False)
    if done.returncode != 0:
        raise UserError(f"bebop.{command} ended with status {done.returncode}; run it again to go on from this stage")


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
