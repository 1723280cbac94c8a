"""Stages of the recipe, in their order."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop.command import writing
from bebop.config.job import ModelConfig
from bebop.model.checkpoint import load_policy, save_policy
from recipes.guess import playing, sft
from recipes.stages import bebop, claim, once

DRAFTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of the recipe, stored as ``settings.json`` in its folder."""

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
    """Run every unfinished stage and return the job folders. Raise ``UserError`` if ``out`` is of another plan."""
    claim(plan, out)
    start, head = out / "supervised", out / "head"
    once(start, lambda folder: supervised(plan, folder))
    once(head, lambda folder: adapted(plan, start / "model", folder))
    jobs = [out / f"seed-{seed}" for seed in range(plan.seeds)]
    for seed, job in enumerate(jobs):
        once(job, lambda folder, seed=seed: reinforced(plan, head / "model", seed, folder))  # type: ignore[misc]
    return jobs


def supervised(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train the built-in model on demonstrations and save it in ``folder``/model."""
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
    """Adapt the head on turns of the model's own games and save the model in ``folder``/model."""
    bebop(
        "adapt", f"model.path={model}", "model.device=cpu", "task=environment", "task.name=guess",
        f"dir={folder / 'adapt'}", f"out={folder / 'model'}", f"data.sequences={plan.turns}",
        f"data.max_length={playing.LONGEST}", f"data.sampling.max_new_tokens={playing.TURN}",
        f"evaluation.prompts={plan.held_out}", f"evaluation.draft_tokens={DRAFTS}", f"head.depth={DRAFTS}",
        "head.lr=0.002", f"train.steps={plan.head_steps}", f"train.warm_steps={plan.head_steps // 3}",
        f"train.threads={plan.threads}", f"train.rows_per_step={min(32, plan.turns)}",
        f"train.eval_every={max(1, plan.head_steps // 3)}",
    )  # fmt: skip
    found = json.loads((folder / "adapt" / "results.json").read_text())["systems"]["bebop"]
    changed = {when: found[when]["accept_length"] for when in ("before", "after", "change")}
    return {"accept_length": changed, **measured(plan, folder / "model", "games, adapted head")}


def reinforced(plan: Plan, model: Path, seed: int, folder: Path) -> dict[str, Any]:
    """Run GRPO on the questions and random draws of ``seed``.

    It is synchronous, so that the trainer scores all tokens by the weights that sampled them.
    """
    bebop(
        "run", f"model.path={model}", "model.device=cpu", "task=environment", "task.name=guess", f"task.seed={seed}",
        f"runtime.seed={seed}", f"runtime.dir={folder / 'run'}", f"rollout.max_length={playing.LONGEST}",
        f"rollout.sampling.max_new_tokens={playing.TURN}", "rollout.staleness=0", f"rollout.threads={plan.threads}",
        f"rollout.slots={playing.SLOTS}", f"decoding.draft_tokens={DRAFTS}", f"trainer.steps={plan.steps}",
        f"trainer.groups_per_step={plan.groups}", f"trainer.group_size={plan.group_size}", "trainer.lr=2e-4",
        "trainer.lr_warmup_steps=5", f"trainer.threads={plan.threads}", "algorithm.kl_coefficient=0.0",
    )  # fmt: skip
    return {}


def measured(plan: Plan, model: Path, label: str) -> dict[str, Any]:
    """Play games with a checkpoint; return the share won and the accept length by turn."""
    config = ModelConfig(path=str(model), device="cpu", check=False)
    played = playing.play(config, load_policy(config), plan.games, DRAFTS, label)
    return {"won": playing.won(played), "accept_length_by_turn": playing.accept_lengths(played)}
