"""Runs one job in virtual time, from its first update to its last, and summarises it: hours pass in seconds."""

import asyncio
import selectors
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.config.simulate import SimulateConfig
from bebop.driver.loop import Loop
from bebop.driver.protocols import Trainer
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, Sweep
from bebop.monitor.watch import JobMonitor
from bebop.simulation.parts import Completions, SimulatedTrainer, SimulatedWorker, prompt
from bebop.trajectory import Group

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Results of a job without its first ``fleet.skip`` steps; seconds are virtual, except for ``own_seconds``."""

    step_seconds: float
    trainer_idle: float  # share of the time
    rollout_idle: float  # share of the time, over workers
    staleness_mean: float  # updates, over tokens
    staleness_max: float
    trajectories_per_second: float
    tokens_per_second: float  # decoded
    accept_length: float
    seconds: float  # of the whole job
    own_seconds: float  # real processor time of the whole simulation
    decoded: int  # completions, also those without an update
    trajectories: int  # used in updates
    rows: tuple[Mapping[str, float], ...] = ()  # metrics of each step


class _Rows:
    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append(values)

    def close(self) -> None: ...


class _TimedMonitor(JobMonitor):
    """Monitor of a job that takes ``seconds`` for each step."""

    seconds = 0.0

    async def read(
        self, step: int, groups: Sequence[Group], trainer: Trainer, undisturbed: bool = True
    ) -> tuple[ProbeReading | None, Sweep | None, Certified | None]:
        await asyncio.sleep(self.seconds)
        return await super().read(step, groups, trainer, undisturbed)


def job(config: SimulateConfig) -> JobConfig:
    """Return the job settings that the loop, its pool, buffer and monitor read."""
    fleet = config.fleet
    sections: dict[str, Any] = {
        "rollout": {
            "workers": min(fleet.workers, 4096),
            "slots": fleet.slots,
            "staleness": fleet.staleness,
            "dispatch": fleet.dispatch,
        },
        "trainer": {
            "steps": fleet.steps,
            "groups_per_step": fleet.groups_per_step,
            "group_size": fleet.group_size,
            "save_every": 0,
        },
        "monitor": {"probe_every": 0, "certify_every": 0, "check_completions": 0},
    }
    return from_dict(JobConfig, sections)


def simulate(config: SimulateConfig, speeds: Sequence[float] = ()) -> Simulated:
    """Simulate a job; ``speeds`` are those of the first workers' engines, relative to the others."""
    began = time.process_time()
    rows, seconds, decoded = run_virtually(_run(config, speeds))
    own, fleet = time.process_time() - began, config.fleet
    steady = rows[fleet.skip :]
    spent = sum(row["time/step"] for row in steady)
    answers = fleet.groups_per_step * fleet.group_size

    def share(name: str) -> float:
        return sum(row[name] for row in steady) / spent

    def mean(name: str) -> float:
        return sum(row.get(name, 1.0) for row in steady) / len(steady)

    return Simulated(
        step_seconds=spent / len(steady),
        trainer_idle=share("time/idle"),
        rollout_idle=share("time/rollout_idle"),
        staleness_mean=mean("staleness/mean"),
        staleness_max=max(row["staleness/max"] for row in steady),
        trajectories_per_second=answers * len(steady) / spent,
        tokens_per_second=sum(row["response/tokens"] for row in steady) * config.grain / spent,
        accept_length=mean("rollout/accept_length"),
        seconds=seconds,
        own_seconds=own,
        decoded=decoded,
        trajectories=answers * fleet.steps,
        rows=tuple(rows),
    )


async def _run(config: SimulateConfig, speeds: Sequence[float]) -> tuple[list[Mapping[str, float]], float, int]:
    completions, sink, now = Completions(config), _Rows(), asyncio.get_running_loop().time
    every = [*speeds, *[1.0] * (config.fleet.workers - len(speeds))]
    settings = job(config)
    pulls = settings.rollout.dealing == "pull"
    workers = [SimulatedWorker(config, completions, speed, pulls=pulls) for speed in every]
    with tempfile.TemporaryDirectory(prefix="bebop-simulate-") as folder:
        monitor = _TimedMonitor(settings, Path(folder))
        monitor.seconds = config.costs.step
        loop = Loop(settings, prompt, workers, SimulatedTrainer(config), [sink], monitor, now=now)
        try:
            await loop.run()
        finally:
            monitor.close()
    return sink.rows, now(), sum(worker.decoded for worker in workers)


# ---- virtual time: an event loop whose clock jumps to the next timer when there is nothing else to do


class Deadlock(RuntimeError):
    """All tasks wait and no timer is set: in real time this would never end."""


class _Jumping(selectors.SelectSelector):
    """Selector that advances the virtual time instead of waiting for files."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0  # seconds since the loop was made

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock("all tasks wait for one another: nothing is left that could happen")
        self.now += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop with a virtual ``time()``; do not use threads and sockets, since their waits take no virtual time."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time; raise ``Deadlock`` if it would never end."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
