"""Worker and trainer behind the loop's protocols, which do nothing but take their time."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.config import DecodingConfig
from bebop.config_simulate import SimulateConfig
from bebop.metrics import Metrics
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.protocols import LINGER_SECONDS, Assignment, PartialGroup, WorkerReport
from bebop.simulation.batch import Ended, SimulatedBatch
from bebop.simulation.costs import Costs, cycles
from bebop.trajectory import Batch, Completion, DecodeStats, Group, Prompt, Trajectory


def prompt(index: int) -> Prompt:
    """Number ``index`` of a stream without questions."""
    return Prompt(index=index, task="simulated", text="", token_ids=(), item={})


class Answers:
    """How long each answer is and in how many cycles it is decoded: by its number alone, whoever decodes it."""

    def __init__(self, config: SimulateConfig) -> None:
        self.config = config

    def drawn(self, index: int) -> list[tuple[int, int]]:
        """(tokens, cycles) of each answer to a prompt."""
        answers, grain = self.config.completions, self.config.grain
        rng, size = np.random.default_rng([self.config.seed, index]), self.config.fleet.group_size
        if answers.lengths:
            lengths = rng.choice(np.array(answers.lengths), size)
        else:
            lengths = np.minimum(rng.lognormal(np.log(answers.median), answers.sigma, size), answers.longest)
        tokens = np.maximum(1, np.ceil(lengths / grain)).astype(int)
        return [(int(count), cycles(int(count), answers, rng)) for count in tokens]


class SimulatedWorker:
    """See ``protocols.Worker``; ``speed`` of its engine against the others', ``pulls``: prompts go to who has room."""

    def __init__(self, config: SimulateConfig, answers: Answers, speed: float = 1.0, pulls: bool = True) -> None:
        self.costs, self.answers, self._pulls = Costs.of(config), answers, pulls
        costs = self.costs.config

        @cache
        def cycle(rows: int) -> float:
            return self.costs.cycle(rows) / speed

        self.batch = SimulatedBatch(config.fleet.slots, cycle, costs.prefill / speed)
        self._news = asyncio.Event()
        self._open: dict[int, tuple[int, int]] = {}  # key -> (place of its assignment, member)
        self._asked: dict[int, Assignment] = {}  # by place
        self._missing: dict[int, int] = {}  # answers of it that have not ended
        self._done: dict[int, dict[int, Trajectory]] = {}  # those of its answers that are to be reported, by member
        self._ended = 0  # answers to be reported
        self.decoded = 0  # answers so far
        self._whole = False  # an assignment among them is finished
        self._lengths: dict[int, int] = {}
        self._key = self._place = self._reports = 0
        self._told: WorkerReport | None = None
        self._counted = (0.0, 0.0)

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """See ``protocols.Worker``."""
        now = _now()
        for assignment in assignments:
            drawn = self.answers.drawn(assignment.prompt.index)
            self._place += 1
            self._asked[self._place], self._missing[self._place] = assignment, len(assignment.members)
            for member in assignment.members:
                self._key += 1
                self._open[self._key] = (self._place, member)
                self._lengths[self._key], count = drawn[member]
                self.batch.add(self._key, count, now)
        self._news.set()

    async def collect(self, seen: int) -> WorkerReport:
        """See ``protocols.Worker``."""
        if self._told is not None and self._told.number > seen:
            return self._told
        until: float | None = None  # it waits for more, once there is something
        while not self._due() and (until is None or _now() < until):
            if until is None and self._idle():
                until = _now() + LINGER_SECONDS
            await self._wait(min((at for at in (self.batch.next_change(), until) if at is not None), default=None))
        await asyncio.sleep(self.costs.config.report)
        self._advance()
        busy, swap = self.batch.busy, self.batch.swap
        self._reports += 1
        self._told = WorkerReport(
            number=self._reports,
            parts=self._parts(),
            busy=busy - self._counted[0],
            swap=swap - self._counted[1],
            version=self.batch.version,
            head="",
        )
        self._counted = (busy, swap)
        return self._told

    async def set_weights(self, weights: Any, version: int) -> None:
        """See ``protocols.Worker``."""
        await asyncio.sleep(self.costs.transfer)
        self.batch.load(version, self.costs.config.load, _now())
        self._news.set()

    async def configure(self, decoding: DecodingConfig) -> None:
        """Nothing: the costs are those of one way of drafting."""

    async def restart(self) -> None:
        """Nothing dies here."""
        raise NotImplementedError

    async def _wait(self, until: float | None) -> None:
        """For the next change, or until somebody asks for something."""
        self._news.clear()
        if until is None:
            await self._news.wait()
            return
        timer = asyncio.get_running_loop().call_at(until, self._news.set)
        await self._news.wait()
        timer.cancel()

    def _advance(self) -> None:
        """Take in all answers that have ended by now."""
        for ended in self.batch.advance(_now()):
            place, member = self._open.pop(ended.key)
            self._done.setdefault(place, {})[member] = self._trajectory(ended)
            self._ended += 1
            self.decoded += 1
            self._missing[place] -= 1
            self._whole = self._whole or not self._missing[place]

    def _due(self) -> bool:
        """Whether a report must not wait: as ``RolloutWorker`` sees it."""
        self._advance()
        return self._whole or (self._pulls and self._ended >= self.answers.config.fleet.group_size)

    def _idle(self) -> bool:
        """Whether there are answers to report, and a slot that others could have."""
        return self._pulls and self._ended > 0 and len(self._open) < self.batch.slots

    def _parts(self) -> tuple[PartialGroup, ...]:
        """All answers that were not reported yet; without pulling, of finished assignments alone."""
        parts = []
        for place in [place for place in self._done if self._pulls or not self._missing[place]]:
            asked, answers = self._asked[place], self._done.pop(place)
            members = tuple(m for m in asked.members if m in answers)
            found = tuple(answers[m] for m in members)
            parts.append(PartialGroup(prompt=asked.prompt, members=members, trajectories=found))
            self._ended -= len(members)
            if not self._missing[place]:
                del self._asked[place], self._missing[place]
        self._whole = False
        return tuple(parts)

    def _trajectory(self, ended: Ended) -> Trajectory:
        """An answer with nothing in it but its sizes; arrays without contents take no memory."""
        length, config = self._lengths.pop(ended.key), self.answers.config.completions
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
    """[length] of the weights that produced each token: tokens are spread evenly over the cycles."""
    if len(spans) == 1:
        return np.broadcast_to(np.int64(spans[0][1]), (length,))
    ends = np.cumsum([count for count, _ in spans])
    cuts = np.diff(np.round(ends * length / ends[-1]).astype(np.int64), prepend=0)
    return np.repeat(np.array([version for _, version in spans]), cuts)


class SimulatedTrainer:
    """See ``protocols.Trainer``."""

    def __init__(self, config: SimulateConfig) -> None:
        self.config, self.costs = config, Costs.of(config)
        self.version = 0
        self.batches: list[int] = []  # first prompt of each batch

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        """See ``protocols.Trainer``."""
        answered = sum(t.written for t in batch.trajectories)
        asked = self.config.completions.prompt / self.config.grain * len(batch.trajectories)
        await asyncio.sleep(self.costs.update(answered + asked))
        self.batches.append(batch.groups[0].prompt.index)
        self.version += 1
        return {}, self.version

    async def abandon(self) -> None:
        """Nobody stops a simulation in the middle."""

    async def logprobs(self) -> Mapping[int, NDArray[np.float32]]:
        """None: nothing is traced."""
        return {}

    async def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        """There is no probe set in a simulation."""
        raise NotImplementedError

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        """There is nothing to be said."""
        return None

    async def weights(self, head: bool) -> int:
        """Their version."""
        await asyncio.sleep(self.costs.config.fetch)
        return self.version

    async def head_fingerprint(self) -> str:
        """There is no head."""
        return ""

    async def save(self, step: int, loop_state: dict[str, Any]) -> None:
        """Nothing is kept."""


def _now() -> float:
    return asyncio.get_running_loop().time()
