"""GRPO job of the study, a few steps at a time: the heads are evaluated on each segment before its checkpoints are
removed.

The job is synchronous and decodes without drafts. Decoding is exact, so the drafting head changes nothing about the
run, and all heads are evaluated beside the same one.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from bebop.trainer import checkpoint
from recipes.reproduce.real.rl import task
from recipes.reproduce.real.rl.plan import RLPlan, directions
from recipes.stages import bebop

RUN = "run"  # run folder, inside that of a direction and seed


PLAIN = ("decoding=autoregressive",)


def settings(plan: RLPlan, direction: str, seed: int, questions: Path, decoding: Sequence[str] = PLAIN) -> list[str]:
    """Return the settings of the job of a direction and seed, except its number of steps and its folder."""
    return [
        f"model={plan.model}", "model.init_mtp=false", "model.device=cpu", f"model.dtype={plan.dtype}",
        *decoding, "task=file",
        "task.name=short_sentence", f"task.path={questions}", f"task.reward={task.__file__}:score", "task.system=null",
        f"task.seed={seed}", f"runtime.seed={seed}", "rollout.staleness=0",
        f"rollout.slots={plan.groups * plan.group_size}", f"rollout.max_length={plan.max_length}",
        f"rollout.sampling.max_new_tokens={plan.max_new_tokens}", f"trainer.groups_per_step={plan.groups}",
        f"trainer.group_size={plan.group_size}", f"trainer.lr={plan.lr}", "trainer.max_tokens=1024",
        "algorithm.kl_coefficient=0.0",
        "trainer.save_every=1", f"trainer.keep={plan.segment + 1}", "monitor.trace=all", "monitor.drift=false",
        "monitor.probe_every=0", "monitor.certify_every=0", "monitor.tensorboard=false", "monitor.plots=false",
        "monitor.ray_metrics=false", "runtime.hang_after=600", *directions(plan)[direction],
    ]  # fmt: skip


def run_until(plan: RLPlan, direction: str, seed: int, place: Path, questions: Path, until: int) -> None:
    """Run the job in ``place`` up to ``until`` steps, from its newest checkpoint if it has one."""
    run = place / RUN
    kept = checkpoint.store(run)
    newest = kept.newest_sound()
    if newest is None:
        shutil.rmtree(run, ignore_errors=True)  # left by a job that was stopped in its first step
        chosen = settings(plan, direction, seed, questions)
        bebop("run", *chosen, f"runtime.dir={run}", f"trainer.steps={until}")
    elif kept.step(newest) < until:
        bebop("run", f"runtime.dir={run}", "runtime.resume=true", f"trainer.steps={until}")


def weights_of(place: Path, version: int) -> Path:
    """Return the Hugging Face folder of the weights after ``version`` updates, from 1."""
    kept = checkpoint.store(place / RUN)
    newest: dict[int, Path] = {kept.step(path): path for path in kept.all()}
    return newest[version] / "policy"
