"""Jobs over a finite set of questions, one per seed; their checkpoints and completions are kept to decode again."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recipes.stages import bebop, claim, once

RUN = "run"  # the run folder, below that of a job


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of the study, stored as ``settings.json`` in its folder."""

    seeds: int = 3
    questions: int = 256
    epochs: int = 4
    groups: int = 16  # prompts of a step; divides the questions
    group_size: int = 8
    points: int = 4  # of an epoch, at which weights are kept and all arms decode; divides its steps

    @property
    def epoch_steps(self) -> int:
        """Return the steps of an epoch."""
        return self.questions // self.groups

    @property
    def apart(self) -> int:
        """Return the steps between two points."""
        return self.epoch_steps // self.points

    def steps(self, epoch: int) -> list[int]:
        """Return the steps of an epoch (from 0) after which weights are measured, never at its very beginning."""
        first = epoch * self.epoch_steps + self.apart // 2
        return [first + i * self.apart for i in range(self.points)]


def carried_out(plan: Plan, out: Path) -> list[Path]:
    """Run every unfinished job and return the run folders. Raise ``UserError`` if ``out`` belongs to another plan."""
    claim(plan, out)
    for seed in range(plan.seeds):
        once(out / f"seed-{seed}", partial(_job, plan, seed))
    return [out / f"seed-{seed}" / RUN for seed in range(plan.seeds)]


def _job(plan: Plan, seed: int, folder: Path) -> dict[str, float]:
    """Run the main job on the questions and random draws of ``seed``.

    It is synchronous, so that every completion comes from one version of the weights.
    """
    steps = plan.epochs * plan.epoch_steps
    bebop(
        "run", "model.device=cpu", f"task.size={plan.questions}", f"task.seed={seed}", f"runtime.seed={seed}",
        f"runtime.dir={folder / RUN}", "rollout.staleness=0", f"trainer.steps={steps}",
        f"trainer.groups_per_step={plan.groups}", f"trainer.group_size={plan.group_size}", "monitor.trace=all",
        "monitor.certify_every=0", "monitor.probe_every=0", f"trainer.save_every={max(1, plan.apart // 2)}",
        f"trainer.keep={steps}",
    )  # fmt: skip
    return {}
