"""Simulated engine, worker and trainer that only take time; worker and trainer implement the loop's protocols."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bebop.config.job import DecodingConfig
from bebop.config.simulate import SimulateConfig
from bebop.driver.protocols import LINGER_SECONDS, Assignment, WorkerReport
from bebop.driver.report_queue import OpenAssignment, ReportQueue
from bebop.metrics.metrics import Metrics
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.simulation.costs import Costs, cycles
from bebop.trajectory import Batch, Completion, DecodeStats, Group, Prompt, Trajectory

# ---- the engine

SLACK = 1e-9  # tolerance: times are sums of floats


class Ended(NamedTuple):
    """Finished completion."""

    key: int
    at: float  # seconds
    spans: tuple[tuple[int, int], ...]  # (cycles, version of the weights that ran them), in order


class _Call(NamedTuple):
    """Request for a completion, or new weights: then ``key`` is their version, and loading takes ``seconds``."""

    at: float
    key: int
    cycles: int
    seconds: float | None


@dataclass(slots=True)
class _Row:
    key: int
    started: int  # the engine's cycles before the row
    loads: int  # index of the weights at its start


class SimulatedBatch:
    """Continuous batching: computes when each completion ends, at the cost of one event for each.

    It holds an engine's rows, queue and clock. It admits calls between two cycles, in the order of their arrival. All
    rows of a batch take part in every cycle, so the seconds of a cycle change only when a row comes or goes. The cycles
    between two such changes are skipped at once. The result equals that of stepping cycle by cycle.
    """

    def __init__(self, slots: int, cycle: Callable[[int], float], prefill: float = 0.0) -> None:
        """Create an engine whose cycle of n rows takes ``cycle(n)`` seconds, and each admission ``prefill`` seconds."""
        self.slots, self.cycle, self.prefill = slots, cycle, prefill
        self.at = 0.0  # seconds of the cycle boundary up to which everything is simulated
        self.version = 0
        self.busy = self.swap = 0.0  # seconds so far: in cycles and prefills, in loads
        self._cycles = 0
        self._began = False  # whether the turn at ``at`` has admitted its calls: later ones wait for the next turn
        self._calls: deque[_Call] = deque()  # arrived since the last boundary
        self._waiting: deque[_Call] = deque()
        self._rows: list[tuple[int, int, _Row]] = []  # heap: (cycle after which it ends, order, row)
        self._order = 0
        self._loads: list[tuple[int, int]] = [(0, 0)]  # (cycles before, version)

    def add(self, key: int, cycles: int, now: float) -> None:
        """Request a completion of ``cycles`` cycles, 1 or more."""
        self._calls.append(_Call(now, key, cycles, None))

    def load(self, version: int, seconds: float, now: float) -> None:
        """Load new weights, which takes ``seconds``."""
        self._calls.append(_Call(now, version, 0, seconds))

    def advance(self, now: float) -> list[Ended]:
        """Return the completions that ended by ``now``, in order; a cycle in progress at ``now`` is left for later."""
        ended: list[Ended] = []
        while True:
            self._take_in()
            if not self._rows:
                if not self._calls or self._calls[0].at > now:
                    return ended
                self.at = max(self.at, self._calls[0].at)
                continue
            seconds = self.cycle(len(self._rows))
            count = min(self._until_change(seconds), math.floor((now - self.at) / seconds + SLACK))
            if count < 1:
                return ended
            self.at += count * seconds
            self.busy += count * seconds
            self._cycles += count
            self._began = False
            while self._rows and self._rows[0][0] == self._cycles:
                ended.append(self._end(heapq.heappop(self._rows)[2]))

    def next_change(self) -> float | None:
        """Return the time at which a completion ends or a call is admitted, without further calls; None if never."""
        if self._rows:
            seconds = self.cycle(len(self._rows))
            return self.at + self._until_change(seconds) * seconds
        return max(self.at, self._calls[0].at) if self._calls else None

    def _until_change(self, seconds: float) -> int:
        """Return the number of cycles until a row ends or a waiting call can be admitted."""
        count = self._rows[0][0] - self._cycles
        if self._calls:
            count = min(count, max(1, math.ceil((self._calls[0].at - self.at) / seconds - SLACK)))
        return count

    def _take_in(self) -> None:
        """Admit, once in a turn, the calls that arrived by its boundary, then fill the slots."""
        if self._began:
            return
        boundary = self.at + SLACK
        while self._calls and self._calls[0].at <= boundary:
            call = self._calls.popleft()
            if call.seconds is None:
                self._waiting.append(call)
                continue
            self.at += call.seconds
            self.swap += call.seconds
            self.version = call.key
            self._loads.append((self._cycles, self.version))
        while self._waiting and len(self._rows) < self.slots:
            call = self._waiting.popleft()
            self.at += self.prefill
            self.busy += self.prefill
            self._order += 1
            row = _Row(call.key, self._cycles, len(self._loads) - 1)
            heapq.heappush(self._rows, (self._cycles + call.cycles, self._order, row))
        self._began = bool(self._rows)

    def _end(self, row: _Row) -> Ended:
        """Return a finished row with the weights that ran each of its cycles."""
        spans: list[tuple[int, int]] = []
        for index in range(row.loads, len(self._loads)):
            begin = max(row.started, self._loads[index][0])
            end = self._loads[index + 1][0] if index + 1 < len(self._loads) else self._cycles
            if end > begin:
                spans.append((end - begin, self._loads[index][1]))
        return Ended(row.key, self.at, tuple(spans))


# ---- worker and trainer


def prompt(index: int) -> Prompt:
    """Return prompt ``index`` of a stream without questions."""
    return Prompt(index=index, task="simulated", text="", token_ids=(), item={})


class Completions:
    """Lengths of completions, drawn by the prompt's number only, so they do not depend on the worker."""

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
    """Rollout worker whose engine runs in virtual time."""

    def __init__(
        self, config: SimulateConfig, completions: Completions, speed: float = 1.0, pulls: bool = True
    ) -> None:
        """Create a worker with an engine ``speed`` times as fast as others, whose prompts are pulled or dealt
        statically.
        """
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
        until: float | None = None  # with results pending, it waits until this time for more
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
        """Do nothing: the costs hold for one way of drafting."""

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
        """Queue all completions that have ended by now."""
        for ended in self.batch.advance(_now()):
            self._queue.finish(*self._open.pop(ended.key), self._trajectory(ended))
            self._queue.decoding -= 1
            self.decoded += 1

    def _due(self) -> bool:
        self._advance()
        return self._queue.due

    def _trajectory(self, ended: Ended) -> Trajectory:
        """Return a completion that has only sizes; its arrays without contents take no memory."""
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
    """Return the version that produced each token [length]; tokens are spread evenly over the cycles."""
    if len(spans) == 1:
        return np.broadcast_to(np.int64(spans[0][1]), (length,))
    ends = np.cumsum([count for count, _ in spans])
    cuts = np.diff(np.round(ends * length / ends[-1]).astype(np.int64), prepend=0)
    return np.repeat(np.array([version for _, version in spans]), cuts)


class SimulatedTrainer:
    """Trainer whose updates take time and change nothing."""

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
        """Do nothing: a simulation is never stopped in the middle."""

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

    async def save(self, step: int, loop_state: dict[str, Any], best: int | None = None) -> None:
        """Do nothing: a simulation stores no checkpoint."""


def _now() -> float:
    return asyncio.get_running_loop().time()
