"""A real job whose parts fail when they are told to: ``python -m tests.chaos.job`` with the overrides of bebop.run.

What is told by signals needs none of this. Here are the failures within a process: a reply that is lost, one that comes
twice, weights that change on their way, a disk that is slow, a thread that stands still, a clock that jumps; and bugs,
planted to see the ledger find them (``BUG``). Nothing of it is in the code of the job.
"""

import hashlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from bebop.command import run_main
from bebop.config.job import JobConfig
from bebop.driver.pool import WorkerPool
from bebop.driver.protocols import DamagedWeights, WorkerReport
from bebop.driver.weights import CheckedWeights, SharedReader, SharedWeights
from bebop.metrics.metrics import Metrics
from bebop.rollout.worker import RolloutWorker, make_worker
from bebop.runtime import actors
from bebop.trainer.rank import TrainerRank
from bebop.trajectory import Batch
from tests.chaos.control import BUG, Control, here

SLOW_SECONDS = 5.0
POLL_SECONDS = 0.2
BUGS = (
    "a report told twice counts twice",
    "an answer is swapped for that of another prompt",
    "old weights under a new version",
    "a batch is trained on again",
    "a version is told one too high",
)


def bug(name: str) -> bool:
    """Whether it is planted in this process."""
    assert name in BUGS
    return os.environ.get(BUG) == name


def follow_clock(control: Control) -> None:
    """Let ``time.time`` of this process jump to where ``clock`` says."""
    real, ahead = time.time, [0.0]
    time.time = lambda: real() + ahead[0]  # type: ignore[method-assign]

    def follow() -> None:
        while True:
            ahead[0] = control.number("clock")
            time.sleep(POLL_SECONDS)

    threading.Thread(target=follow, daemon=True).start()


class Worker(actors.RayWorker):
    """As the driver sees it: replies get lost or come twice, and weights arrive as they were not sent."""

    last: WorkerReport | None = None

    async def collect(self, seen: int) -> WorkerReport:
        """See ``RayWorker``."""
        control = here()
        if self.last is not None and self.last.number == seen and control.take("report-twice"):
            told, self.last = self.last, None
            return replace(told, number=seen + 1) if bug("a report told twice counts twice") else told
        report = await super().collect(seen)
        if report.parts and control.take("report-lost"):
            report = await super().collect(seen)
        if report.parts:
            self.last = report
        return report

    async def set_weights(self, weights: Any, version: int) -> None:
        """See ``RayWorker``."""
        control = here()
        for how in DAMAGES:
            if control.take(f"weights-{how}"):
                sent = await weights
                if isinstance(sent, SharedWeights):  # the damage is on the way: the memory itself stays as it is
                    there, release = SharedReader().open(sent)
                    sent = CheckedWeights(weights={n: t.clone() for n, t in there.items()}, manifest=sent.manifest)
                    release()
                try:
                    await super().set_weights(ray.put(replace(sent, weights=DAMAGES[how](sent.weights))), version)
                except DamagedWeights:
                    control.note(refused=how, version=version)
                    raise
        await super().set_weights(weights, version)


def _short(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    name = max(weights, key=lambda name: weights[name].numel())
    return {**weights, name: weights[name][: len(weights[name]) // 2].clone()}


def _missing(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name != min(weights)}


def _changed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    name = max(weights, key=lambda name: weights[name].numel())
    other = weights[name].clone()
    other.view(-1)[7] += 1
    return {**weights, name: other}


DAMAGES = {"short": _short, "missing": _missing, "changed": _changed}


class Decoding(RolloutWorker):
    """Within the worker's process."""

    def set_weights(self, weights: Any, version: int) -> None:
        """See ``RolloutWorker``."""
        if bug("old weights under a new version") and version == 3:
            weights = {}
        super().set_weights(weights, version + bug("a version is told one too high"))


def worker(config: JobConfig) -> RolloutWorker:
    """``make_worker``, with an engine whose thread may stand still."""
    control = here()
    follow_clock(control)
    made = make_worker(config)
    made.__class__ = Decoding
    step = made.engine.step

    def standing() -> Any:
        if control.take("decoder-stands"):
            threading.Event().wait()
        return step()

    made.engine.step = standing  # type: ignore[method-assign]
    return made


class Rank(TrainerRank):
    """Within the process of a rank; a journal says what was trained on, apart from what the job itself keeps."""

    def __init__(self, config: JobConfig, rank: int = 0, world: int = 1, init_method: str | None = None) -> None:
        follow_clock(here())
        super().__init__(config, rank, world, init_method)

    def update(self, batch: Batch, cotrain: bool = False) -> tuple[Metrics, int]:
        """See ``TrainerRank``."""
        control = here()
        if control.take("update-stands"):
            threading.Event().wait()
        found = self._noted(batch, cotrain)
        if bug("a batch is trained on again") and found[1] == 3:
            self._noted(batch, cotrain)
        return found

    def _noted(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        found = super().update(batch, cotrain)
        if self.rank == 0:
            rows = [[group.prompt.index, [marked(t.completion.token_ids) for t in group.trajectories]]
                    for group in batch.groups]  # fmt: skip
            here().note(version=found[1], trained=rows)
        return found

    def save(self, folder: Path, loop_state: dict[str, Any]) -> None:
        """See ``TrainerRank``."""
        if self.rank == 0 and here().take("disk-is-slow"):
            time.sleep(SLOW_SECONDS)
        super().save(folder, loop_state)

    def load(self, folder: Path) -> dict[str, Any]:
        """See ``TrainerRank``."""
        found = super().load(folder)
        if self.rank == 0:
            here().note(loaded=self.trainer.version)
        return found


def marked(token_ids: Any) -> str:
    """Tells one answer from others."""
    return hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest()[:16]


class Pool(WorkerPool):
    """With planted bugs."""

    async def _take(self, i: int, part: Any) -> None:
        before = self.__dict__.setdefault("kept", part)
        if bug("an answer is swapped for that of another prompt") and part.prompt.index == 9:
            part = replace(part, trajectories=before.trajectories[:1] * len(part.members))
        await super()._take(i, part)


def planted() -> None:
    """Put all this in the place of what it stands for, in the driver; other processes are given it by reference."""
    from bebop.driver import loop
    from bebop.driver.pool import Dispatch
    from bebop.runtime import job as runtime

    runtime.RayWorker = Worker  # type: ignore[misc]
    loop.WorkerPool = Pool  # type: ignore[misc]
    actors.make_worker = worker
    actors.make_rank = Rank
    if bug("a report told twice counts twice"):
        Dispatch.take = lambda *_: True  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> int:
    """``bebop.run``, with parts that fail."""
    from bebop import run

    planted()
    follow_clock(here())
    return run.main(list(arguments))


if __name__ == "__main__":
    from tests.chaos import job  # so that what other processes are given has a module that they can import

    run_main(job.main)
