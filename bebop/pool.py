"""The rollout workers of a job: each gets prompts to answer, all get all weights, the dead are replaced."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from bebop.buffer import GroupBuffer
from bebop.clock import Clock
from bebop.config import DecodingConfig, JobConfig
from bebop.dispatch import DISPATCH
from bebop.errors import UserError
from bebop.lane import Lane, Orders
from bebop.monitor.controller import Health
from bebop.past_answers import PastAnswers
from bebop.protocols import Assignment, PartialGroup, Trainer, Worker, WorkerDied, WorkerReport
from bebop.trajectory import Group, Prompt, Trajectory, same_beginning

log = logging.getLogger(__name__)


class WorkerPool:
    """N workers; what they finish goes to the buffer, and their seconds to the clock."""

    def __init__(
        self,
        config: JobConfig,
        prompt: Callable[[int], Prompt],
        workers: Sequence[Worker],
        buffer: GroupBuffer,
        clock: Clock,
        past: PastAnswers | None = None,
    ) -> None:
        """``prompt(i)`` gives prompt number i of the stream; ``past``: sent along with prompts, None: nothing."""
        self.config, self.prompt, self.workers, self.buffer, self.clock = config, prompt, workers, buffer, clock
        self.past, self.restarts = past, 0
        self.heard: Callable[[], None] | None = None  # called when completions came in
        # Prompts below had been handed out when a worker died, or when the job was resumed: answers that had ended by
        # then were kept and others drawn again, so which tokens became of them depends on the tokens.
        self.disturbed = 0
        self._members = range(config.trainer.group_size)
        self._most_restarts = config.runtime.max_restarts
        self._orders = Orders(decoding=config.decoding)
        self._lanes = [Lane(number=i, worker=one, decoding=config.decoding) for i, one in enumerate(workers)]
        self._dispatch = DISPATCH[config.rollout.dealing](config, len(workers))
        self._heads: dict[int, str] = {}  # version -> fingerprint of the head that belongs to it
        self._headed = 0  # the latest publication that was to have the head with it
        self._health: dict[int, Health] = {}  # worker -> what it said in this step
        # Of groups that are not complete, by prompt and member; None: it was lost.
        self._answers: dict[int, dict[int, Trajectory | None]] = {}
        self._begun: dict[int, Prompt] = {}  # the same prompts, with the tokens that their environments began with

    async def submit(self, indices: Sequence[int]) -> None:
        """Hand out prompts, now or when somebody has room; none starts before the weights published last are there."""
        self._dispatch.add(indices)
        self._hand_out()

    async def publish(self, trainer: Trainer, version: int, *, head: bool = False, fingerprint: bool = False) -> None:
        """Send the trainer's weights to every worker, which swap them in between two decoding cycles.

        Workers are sent to side by side, and nobody waits until all have them, except in a synchronous job: there they
        have nothing else to do. ``head``: the MTP head with the weights, even if it never changed. ``fingerprint``:
        note which head belongs to them.
        """
        if fingerprint:
            oldest = version - self.config.rollout.staleness
            self._heads = {v: mark for v, mark in self._heads.items() if v >= oldest}
            self._heads[version] = await trainer.head_fingerprint()
        wanted = head
        # Who has not got the head by now gets it with these weights, which overtake those that it was to come with.
        head = head or any(lane.sent < self._headed for lane in self._lanes if self._headed)
        weights = await trainer.weights(head)
        # In one go: a replacement that starts meanwhile gets the old weights under their own version.
        self._orders.weights, self._orders.version = weights, version
        self._orders.published += 1
        self._headed = self._orders.published if head else self._headed
        if wanted:  # complaints that came while the weights were fetched are answered with this, too
            self._health.clear()
        for lane in self._lanes:
            if not lane.away:
                lane.arrived.clear()
            lane.news.set()
        if self.config.rollout.staleness == 0:
            for lane in self._lanes:
                await lane.arrived.wait()

    async def configure(self, decoding: DecodingConfig) -> None:
        """Have every worker draft as ``decoding`` says."""
        if decoding != self._orders.decoding:
            self._orders.decoding = decoding
            for lane in self._lanes:
                lane.news.set()

    async def serve(self, i: int) -> None:
        """Send worker i what there is for it, take in what it finishes, and replace it when it dies.

        ``UserError`` after too many deaths.
        """
        lane = self._lanes[i]
        try:
            while True:
                try:
                    await self._attend(lane)
                except WorkerDied as death:
                    self._lose(lane, death)
                    with contextlib.suppress(WorkerDied):  # the next call says so, too
                        await lane.worker.restart()
                    lane.renew(self.config.decoding)
                    self._dispatch.enter(i)
                    self._hand_out()
        finally:
            lane.leave()  # or a synchronous job would wait for ever until this worker has its weights

    async def _attend(self, lane: Lane) -> None:
        """Send to a worker and hear from it, until one of both fails: after that nothing of it counts any more."""
        both = [asyncio.create_task(lane.send(self._orders)), asyncio.create_task(self._hear(lane))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        errors = [error for task in both if not task.cancelled() and (error := task.exception()) is not None]
        # A death often shows on both ways; anything else is worse, and must not be taken for one.
        raise max(errors, key=lambda error: not isinstance(error, WorkerDied))

    async def _hear(self, lane: Lane) -> None:
        """Take in what a worker finishes."""
        while True:
            published, settled = self._orders.published, lane.sent == self._orders.published
            report = await lane.worker.collect(lane.seen)
            if report.number <= lane.seen:  # told twice
                continue
            lane.seen = report.number
            for part in report.parts:
                await self._take(lane.number, part)
            if report.parts and self.heard is not None:
                self.heard()
            self.clock.add(report)
            if settled and published == self._orders.published:  # else it may speak of what was in use before
                self._examine(lane.number, report)
            await asyncio.sleep(0)  # others report at the same moment: whoever is heard first must not get it all
            self._hand_out()

    def _lose(self, lane: Lane, death: WorkerDied) -> None:
        """A worker is gone: all that it had not handed over starts again."""
        self.restarts += 1
        self.disturbed = self.buffer.admitted
        if self.restarts > self._most_restarts:
            raise UserError(f"rollout workers died {self.restarts} times, the last time: {death}") from death
        lost = self._dispatch.leave(lane.number)
        log.warning("rollout worker %d died (%s); %d prompts start again", lane.number, death, len(lost))
        lane.leave()
        self._hand_out()

    def _hand_out(self) -> None:
        """Put what is to be asked for now on its way."""
        for i, index, members in self._dispatch.hand_out():
            prompt = self.prompt(index)
            past = () if self.past is None else self.past.of(prompt.token_ids)
            assignment = Assignment(prompt=prompt, members=members, past=past)
            self._lanes[i].outbox.append((self._orders.published, assignment))
            self._lanes[i].news.set()

    async def _take(self, i: int, part: PartialGroup) -> None:
        """Put what worker i finished to the rest of its group, and hand the group over once it is complete."""
        index = part.prompt.index
        for member, trajectory in zip(part.members, part.trajectories, strict=True):
            if self._dispatch.take(i, index, member):  # else it was taken before, or is somebody else's by now
                self._answers.setdefault(index, {})[member] = trajectory
        if part.prompt.token_ids:  # else nothing of it was ever begun
            same_beginning(self._begun.setdefault(index, part.prompt), part.prompt)
        if len(self._answers.get(index, ())) == len(self._members):
            answers, prompt = self._answers.pop(index), self._begun.pop(index, part.prompt)
            there = tuple(answer for member in self._members if (answer := answers[member]) is not None)
            lost = len(self._members) - len(there)
            await self.buffer.put(Group(prompt=prompt, trajectories=there, lost=lost))

    def _examine(self, i: int, report: WorkerReport) -> None:
        """Hold what worker i says it runs against what it should; a complaint stands until the step is over.

        The version must be at least that of the newest prompt it answered: those weights were sent before.
        """
        since = self.buffer.since
        due = max((since.get(part.prompt.index, 0) for part in report.parts), default=report.version)
        health = Health(
            worker=i,
            version=report.version,
            expected_version=max(report.version, due),
            head_checksum=report.head,
            expected_head_checksum=self._heads.get(report.version),
        )
        if health.diagnosis() or i not in self._health:
            self._health[i] = health

    @property
    def finished(self) -> int:
        """Completions that are there and were not trained on, those of groups in the making included."""
        whole = sum(len(group.trajectories) for group in self.buffer.ready.values())
        return whole + sum(len(members) for members in self._answers.values())

    def health(self) -> Health | None:
        """The worst that a worker said in this step, which is over with this call; None if none said anything."""
        said, self._health = self._health, {}
        return min(said.values(), key=lambda health: not health.diagnosis(), default=None)

    def restore(self, restarts: int) -> None:
        """Go on after so many deaths; each run has its own allowance."""
        self.restarts = restarts
        self.disturbed = self.buffer.limit - self.config.trainer.groups_per_step
        self._most_restarts = restarts + self.config.runtime.max_restarts
