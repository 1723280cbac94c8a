"""A worker and a trainer behind the loop's protocols that do nothing but take their time."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.config.job import DecodingConfig
from bebop.config.simulate import SimulateConfig
from bebop.driver.protocols import LINGER_SECONDS, Assignment, WorkerReport
from bebop.driver.report_queue import OpenAssignment, ReportQueue
from bebop.metrics.metrics import Metrics
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.simulation.batch import Ended, SimulatedBatch
from bebop.simulation.costs import Costs, cycles
from bebop.trajectory import Batch, Completion, DecodeStats, Group, Prompt, Trajectory


def prompt(index: int) -> Prompt:
    """Return prompt ``index`` of a stream without questions."""
    return Prompt(index=index, task="simulated", text="", token_ids=(), item={})


class Completions:
    """Draws how long each completion is, by its number only, whoever decodes it."""

    def __init__(self, config: SimulateConfig) -> None:
        self.config = config

    def draw(self, index: int) -> list[tuple[int, int]]:
        """Return (tokens, cycles) of each completion of a prompt."""
        answers, grain = self.config.completions, self.config.grain
        rng, size = np.random.default_rng([self.config.seed, index]), self.config.fleet.group_size
        if answers.lengths:
            lengths = rng.choice(np.array(answers.lengths), size)
        else:
            lengths = np.minimum(rng.lognormal(np.log(answers.median), answers.sigma, size), answers.longest)
        tokens = np.maximum(1, np.ceil(lengths / grain)).astype(int)
        return [(int(count), cycles(int(count), answers, rng)) for count in tokens]


class SimulatedWorker:
    """A rollout worker whose engine runs in virtual time."""

    def __init__(
        self, config: SimulateConfig, completions: Completions, speed: float = 1.0, pulls: bool = True
    ) -> None:
        """Make a worker with an engine of ``speed`` times the others', whose prompts are pulled or dealt statically."""
        self.costs, self.completions = Costs.of(config), completions
        costs, fleet = self.costs.config, config.fleet

        @cache
        def cycle(rows: int) -> float:
            return self.costs.cycle(rows) / speed

        self.batch = SimulatedBatch(fleet.slots, cycle, costs.prefill / speed)
        self.decoded = 0  # completions so far
        self._wakeup = asyncio.Event()
        self._open: dict[int, tuple[OpenAssignment, int]] = {}  # key -> its assignment, member
        self._queue = ReportQueue(pulls=pulls, group_size=fleet.group_size, slots=fleet.slots)
        self._lengths: dict[int, int] = {}  # key -> tokens
        self._key = self._reports = 0
        self._unacknowledged: WorkerReport | None = None
        self._reported = (0.0, 0.0)  # seconds in cycles and in loads

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        now = _now()
        for assignment in assignments:
            drawn, part = self.completions.draw(assignment.prompt.index), self._queue.open(assignment)
            for member in assignment.members:
                self._key += 1
                self._open[self._key] = part, member
                self._lengths[self._key], count = drawn[member]
                self.batch.add(self._key, count, now)
        self._wakeup.set()

    async def collect(self, seen: int) -> WorkerReport:
        if self._unacknowledged is not None and self._unacknowledged.number > seen:
            return self._unacknowledged
        until: float | None = None  # it waits for more, once there is something
        while not self._due() and (until is None or _now() < until):
            if until is None and self._queue.starving:
                until = _now() + LINGER_SECONDS
            await self._wait(min((at for at in (self.batch.next_change(), until) if at is not None), default=None))
        await asyncio.sleep(self.costs.config.report)
        self._advance()
        busy, swap = self.batch.busy, self.batch.swap
        self._reports += 1
        self._unacknowledged = WorkerReport(
            number=self._reports,
            parts=self._queue.take(),
            busy=busy - self._reported[0],
            swap=swap - self._reported[1],
            version=self.batch.version,
            head="",
        )
        self._reported = (busy, swap)
        return self._unacknowledged

    async def set_weights(self, weights: Any, version: int) -> None:
        await asyncio.sleep(self.costs.transfer)
        self.batch.load(version, self.costs.config.load, _now())
        self._wakeup.set()

    async def configure(self, decoding: DecodingConfig) -> None:
        """Do nothing: the costs are those of one way of drafting."""

    async def restart(self) -> None:
        raise NotImplementedError  # nothing dies here

    async def _wait(self, until: float | None) -> None:
        """Wait for the next change, or until something is submitted."""
        self._wakeup.clear()
        if until is None:
            await self._wakeup.wait()
            return
        timer = asyncio.get_running_loop().call_at(until, self._wakeup.set)
        await self._wakeup.wait()
        timer.cancel()

    def _advance(self) -> None:
        """Take in all completions that have ended by now."""
        for ended in self.batch.advance(_now()):
            self._queue.finish(*self._open.pop(ended.key), self._trajectory(ended))
            self._queue.decoding -= 1
            self.decoded += 1

    def _due(self) -> bool:
        self._advance()
        return self._queue.due

    def _trajectory(self, ended: Ended) -> Trajectory:
        """Return a completion with nothing in it but its sizes; arrays without contents take no memory."""
        length, config = self._lengths.pop(ended.key), self.completions.config.completions
        spent = sum(count for count, _ in ended.spans)
        chances = np.cumprod(np.array([1.0, *config.accept_rates]))[: config.draft_tokens]
        reached = np.asarray(spent * chances, dtype=np.float64)
        accepted = reached * np.array(config.accept_rates[: config.draft_tokens])
        nothing = np.zeros(config.draft_tokens)
        stats = DecodeStats(
            cycles=spent, tokens=length, target_forwards=spent, draft_forwards=spent * config.draft_tokens,
            reached=reached, accepted=accepted, overlap=accepted, target_only=accepted,
            draft_entropy=nothing, target_entropy=nothing,
        )  # fmt: skip
        completion = Completion(
            token_ids=np.broadcast_to(np.int64(0), (length,)),
            logprobs=np.broadcast_to(np.float32(0), (length,)),
            versions=versions(ended.spans, length),
            stats=stats,
        )
        return Trajectory.single(completion=completion, reward=0.0)


def versions(spans: Sequence[tuple[int, int]], length: int) -> NDArray[np.int64]:
    """Return [length] the version that produced each token; tokens are spread evenly over the cycles."""
    if len(spans) == 1:
        return np.broadcast_to(np.int64(spans[0][1]), (length,))
    ends = np.cumsum([count for count, _ in spans])
    cuts = np.diff(np.round(ends * length / ends[-1]).astype(np.int64), prepend=0)
    return np.repeat(np.array([version for _, version in spans]), cuts)


class SimulatedTrainer:
    """A trainer whose updates take time and change nothing."""

    def __init__(self, config: SimulateConfig) -> None:
        self.config, self.costs = config, Costs.of(config)
        self.version = 0
        self.batches: list[int] = []  # first prompt of each batch

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        answered = sum(t.written for t in batch.trajectories)
        asked = self.config.completions.prompt / self.config.grain * len(batch.trajectories)
        await asyncio.sleep(self.costs.update(answered + asked))
        self.batches.append(batch.groups[0].prompt.index)
        self.version += 1
        return {}, self.version

    async def abandon(self) -> None:
        """Do nothing: nobody stops a simulation in the middle."""

    async def logprobs(self) -> Mapping[int, NDArray[np.float32]]:
        return {}  # nothing is traced

    async def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        raise NotImplementedError  # there is no probe set in a simulation

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        return None

    async def weights(self, head: bool) -> int:
        await asyncio.sleep(self.costs.config.fetch)
        return self.version

    async def head_fingerprint(self) -> str:
        return ""  # there is no head

    async def save(self, step: int, loop_state: dict[str, Any]) -> None:
        """Do nothing: nothing is kept."""


def _now() -> float:
    return asyncio.get_running_loop().time()
