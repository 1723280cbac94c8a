"""Check at the start of a job: reports the parts that are live, and raises an error for a part that is not.

verl only logs at DEBUG when a plug-in fails to load, and a hook on a module that is never imported is silent, too.
The trainer checks its own process and every training worker. Missing statistics of rollouts show at the first step.
"""

import sys
from types import ModuleType
from typing import Any

from bebop.errors import UserError
from bebop.verl_job.hooks import applied, wrap
from bebop.verl_job.settings import HEADS, VARIABLE, VerlConfig, current

REPORT = "metrics.report_v1"  # must have run in the trainer's process; in its workers, HEADS


def check_trainer(trainer_base: ModuleType) -> None:
    """Check the hooks before the first step."""

    def around(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(trainer, *args, **kwargs)
        workers, job = trainer.actor_rollout_wg.bebop_applied(), trainer.config.actor_rollout_ref
        line = verdict(current(), applied(), workers, job.actor.strategy)
        sys.stderr.write(f"bebop: rollout {job.rollout.name}, live: {line}\n")
        return result

    wrap(trainer_base.PPOTrainer, "init", around)


def answer_worker(engine_workers: ModuleType) -> None:
    """Let a training worker report the hooks that ran in its process."""

    def bebop_applied(self: Any) -> tuple[str, ...]:
        return applied()

    everywhere = engine_workers.register(dispatch_mode=engine_workers.Dispatch.ONE_TO_ALL)
    engine_workers.ActorRolloutRefWorker.bebop_applied = everywhere(bebop_applied)


def verdict(config: VerlConfig | None, own: tuple[str, ...], workers: list[tuple[str, ...]], strategy: str) -> str:
    """Return the parts that are live; raise ``UserError`` for a part that is switched on but not live."""
    if config is None:
        where = f"where the job was started ({VARIABLE} is not set)"
        raise UserError(f"the plug-in was not loaded {where}: is bebop-rl installed there, with its entry points?")
    for part in config.parts:
        missing = [REPORT] if part in ("metrics", "monitor", "prometheus") and REPORT not in own else []
        if part == "train_head":
            hook = HEADS[strategy]
            missing = [f"{hook} in worker {i}" for i, hooks in enumerate(workers) if hook not in hooks]
        if missing:
            raise UserError(f"bebop.{part}=True did not take: {', '.join(missing)} never ran; is verl 0.9.x installed?")
    return ", ".join(config.parts)
