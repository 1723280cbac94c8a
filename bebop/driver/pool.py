"""The rollout workers of a job: the completions that each worker owes, and the messages that it is sent.

Invariants, whatever workers do and however often they die:

- Each completion of a group is accepted once, from the worker that owes it.
- Completions that a dead worker owed start again. A report counts once, also when it arrives twice.
- No prompt starts before the weights that were the newest when it was handed out have arrived.
- All workers get the newest weights, side by side. No worker waits for another, except in a synchronous job
  (``rollout.staleness=0``), where workers have nothing else to do.
- Bookkeeping for a completion costs the same for any number of workers.

From the top of the file down: ``Dispatch`` keeps the books and sends nothing. A ``WorkerChannel`` sends one worker its
weights, settings and prompts, one after another. The ``WorkerPool`` joins them, and the loop calls only it.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from bebop.config.job import DecodingConfig, JobConfig
from bebop.driver.buffer import GroupBuffer
from bebop.driver.evaluation import Evaluation
from bebop.driver.past_completions import PastCompletions
from bebop.driver.protocols import Assignment, DamagedWeights, PartialGroup, Trainer, Worker, WorkerDied, WorkerReport
from bebop.driver.step_timer import StepTimer
from bebop.errors import UserError
from bebop.monitor.controller import Health
from bebop.trajectory import Group, Prompt, Trajectory, same_beginning

log = logging.getLogger(__name__)
HandOut = tuple[int, int, tuple[int, ...]]  # worker, prompt, members of its group
Share = tuple[int, tuple[int, ...]]  # prompt, members of its group
MAX_SENDS = 3  # attempts to send weights that arrive damaged


class Dispatch:
    """Tracks the completions in flight at each worker; a completion is a prompt and a member of its group."""

    def __init__(self, workers: int, group_size: int) -> None:
        self.workers, self.members = workers, tuple(range(group_size))
        self._in_flight: list[dict[tuple[int, int], None]] = [{} for _ in range(workers)]

    def add(self, prompts: Iterable[int], completions: int | None = None) -> None:
        """Queue prompts, each for a whole group, or for another number of completions."""
        members = self.members if completions is None else tuple(range(completions))
        for prompt in prompts:
            self._add(prompt % self.workers, prompt, members)

    def take(self, worker: int, prompt: int, member: int) -> bool:
        """Return whether the worker owed this completion, and count it as delivered."""
        return self._in_flight[worker].pop((prompt, member), self) is None

    def leave(self, worker: int) -> list[int]:
        """Queue again all completions in flight at a dead worker, and return their prompts."""
        lost: dict[int, list[int]] = {}
        for prompt, member in sorted(self._in_flight[worker]):
            lost.setdefault(prompt, []).append(member)
        self._in_flight[worker] = {}
        for prompt, members in lost.items():
            self._add(worker, prompt, tuple(members))
        return list(lost)

    def enter(self, worker: int) -> None:
        """Make a replaced worker available again."""
        raise NotImplementedError

    def hand_out(self) -> list[HandOut]:
        """Return the requests to hand out now, by worker, and count them as in flight."""
        raise NotImplementedError

    def _add(self, worker: int, prompt: int, members: tuple[int, ...]) -> None:
        """Queue members of a group; ``worker`` is the target in a static dispatch."""
        raise NotImplementedError

    def _put(self, worker: int, prompt: int, members: Sequence[int]) -> HandOut:
        self._in_flight[worker].update(dict.fromkeys((prompt, member) for member in members))
        return worker, prompt, tuple(members)


class StaticDispatch(Dispatch):
    """Hands prompt i to worker ``i % workers`` at once.

    The assignment of prompts depends on nothing else, so a synchronous job is the same bit for bit each time.
    """

    def __init__(self, workers: int, group_size: int) -> None:
        super().__init__(workers, group_size)
        self._waiting: dict[int, list[Share]] = {}  # by worker
        self._down: dict[int, list[Share]] = {}  # by worker, for workers that are being replaced

    def hand_out(self) -> list[HandOut]:
        waiting, self._waiting = self._waiting, {}
        return [self._put(worker, *share) for worker in sorted(waiting) for share in sorted(waiting[worker])]

    def leave(self, worker: int) -> list[int]:
        self._down.setdefault(worker, self._waiting.pop(worker, []))
        return super().leave(worker)

    def enter(self, worker: int) -> None:
        back = self._down.pop(worker, [])
        if back:
            self._waiting[worker] = back

    def _add(self, worker: int, prompt: int, members: tuple[int, ...]) -> None:
        queue = self._down.get(worker)
        if queue is None:
            queue = self._waiting.setdefault(worker, [])
        queue.append((prompt, members))


class PullDispatch(Dispatch):
    """Keeps prompts until a worker has room: in order, to the worker that owes the fewest completions.

    No worker owes more than ``bound``. Groups stay whole, since each worker that decodes for a group reads its prompt,
    with two exceptions. A free slot takes a part of a group. And if there is less work than room, no worker gets more
    than an equal share of it.
    """

    def __init__(self, workers: int, group_size: int, slots: int, bound: int) -> None:
        """Set how many completions a worker decodes in parallel (``slots``), and how many it may owe (``bound``)."""
        super().__init__(workers, group_size)
        self.slots, self.bound = slots, bound
        self._queue: list[Share] = []  # a heap, by prompt
        self._open = 0  # completions that are queued or in flight
        self._down: set[int] = set()
        # Workers by the completions that they owe: _owing[n] holds those that owe n, the longest first. None owes
        # fewer than _least.
        self._owing: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._owing[0] = dict.fromkeys(range(workers))
        self._least = 0

    def take(self, worker: int, prompt: int, member: int) -> bool:
        owed = super().take(worker, prompt, member)
        if owed:
            self._open -= 1
            self._move(worker, 1)
        return owed

    def hand_out(self) -> list[HandOut]:
        handed = []
        while self._queue and (worker := self._least_busy()) is not None:
            prompt, members = self._queue[0]
            room, owed = self.bound - self._least, self._least
            if owed >= self.slots and room < len(members):
                break  # no worker has a free slot, nor room for the group
            share = -(-self._open // (self.workers - len(self._down))) - owed
            given = max(1, min(len(members), room, share))
            heappop(self._queue)
            if given < len(members):
                heappush(self._queue, (prompt, members[given:]))
            handed.append(self._put(worker, prompt, members[:given]))
            self._move(worker, -given)
        return handed

    def leave(self, worker: int) -> list[int]:
        owed = len(self._in_flight[worker])
        self._owing[owed].pop(worker, None)
        self._down.add(worker)
        self._open -= owed  # ``_add`` counts it again
        return super().leave(worker)

    def enter(self, worker: int) -> None:
        if worker in self._down:
            self._down.remove(worker)
            self._owing[0][worker] = None
            self._least = 0

    def _add(self, worker: int, prompt: int, members: tuple[int, ...]) -> None:
        heappush(self._queue, (prompt, members))
        self._open += len(members)

    def _least_busy(self) -> int | None:
        """Return a worker that owes the fewest completions; None if no worker may owe more."""
        if len(self._down) == self.workers:
            return None
        while not self._owing[self._least]:
            self._least += 1  # at most once for each completion handed out since it fell, so the cost is constant
        return next(iter(self._owing[self._least])) if self._least < self.bound else None

    def _move(self, worker: int, fewer: int) -> None:
        """Update the index for a worker that owes ``fewer`` completions less than before."""
        owed = len(self._in_flight[worker])
        del self._owing[owed + fewer][worker]
        self._owing[owed][worker] = None
        self._least = min(self._least, owed)


def _pull(config: JobConfig, workers: int) -> Dispatch:
    return PullDispatch(workers, config.trainer.group_size, config.rollout.slots, in_flight(config))


DISPATCH: dict[str, Callable[[JobConfig, int], Dispatch]] = {
    "static": lambda config, workers: StaticDispatch(workers, config.trainer.group_size),
    "pull": _pull,
}


def in_flight(config: JobConfig) -> int:
    """Return the number of completions that one worker may owe.

    The default is its slots plus one group, which is about what ends between two of its reports. A larger bound would
    only commit completions earlier to workers that may turn out to be slow.
    """
    return config.rollout.in_flight or config.rollout.slots + config.trainer.group_size


@dataclass(slots=True, kw_only=True)
class DesiredState:
    """Weights and settings that all workers should have by now."""

    decoding: DecodingConfig
    published: int = 0  # how often weights were published
    weights: Any = None  # of the last publication
    version: int = 0  # of these weights


@dataclass(slots=True, kw_only=True)
class WorkerChannel:
    """One worker, the messages it was sent, and those to send next.

    All channels send the same reference to the weights. Behind Ray the transfer is already a kind of tree. A node
    fetches an object once, from any node that has it by then, and the workers of a node share the copy.
    """

    number: int
    worker: Worker
    decoding: DecodingConfig  # settings that the worker was sent last, or started with
    sent: int = 0  # the newest publication that the worker has; 0: none
    seen: int = 0  # number of its newest report
    redrawn: int = 0  # as that report has it
    # Assignments to send, each with the publication that must have arrived before.
    outbox: list[tuple[int, Assignment]] = field(default_factory=list)
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)  # there may be something to send
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # it has the newest weights, or is down
    down: bool = False  # it is being replaced

    def close(self) -> None:
        """Drop the messages for a worker that is gone, and end every wait for them."""
        self.outbox, self.down = [], True
        self.arrived.set()

    def reopen(self, decoding: DecodingConfig) -> None:
        """Send to a new process of the worker, which started with ``decoding``."""
        self.decoding, self.sent, self.seen, self.down = decoding, 0, 0, False
        self.redrawn = 0
        self.wakeup.set()

    async def send(self, desired: DesiredState) -> None:
        """Keep the worker up to date for ever; raise ``WorkerDied`` if it is gone.

        Weights that a newer publication replaces before they are sent are left out. A prompt waits for the weights that
        were the newest when it was handed out, not for later ones. So a worker that loads weights more slowly than they
        are published still gets its prompts.
        """
        while True:
            if self.sent < desired.published:
                await self._send_weights(desired)
            if self.decoding != desired.decoding:
                decoding = desired.decoding
                await self.worker.configure(decoding)
                self.decoding = decoding
            ready = [assignment for needed, assignment in self.outbox if needed <= self.sent]
            if ready:
                self.outbox = [(needed, later) for needed, later in self.outbox if needed > self.sent]
                await self.worker.submit(ready)
            if self.sent == desired.published:
                self.arrived.set()
                if self.decoding == desired.decoding and not self.outbox:
                    self.wakeup.clear()
                    await self.wakeup.wait()

    async def _send_weights(self, desired: DesiredState) -> None:
        """Send the newest weights, again if they arrive damaged, which the worker notices and refuses."""
        for left in reversed(range(MAX_SENDS)):
            published, weights, version = desired.published, desired.weights, desired.version
            try:
                await self.worker.set_weights(weights, version)
            except DamagedWeights as damage:
                if not left:
                    raise WorkerDied(
                        f"weights of version {version} arrived {MAX_SENDS} times damaged: {damage}"
                    ) from damage
                log.warning(
                    "rollout worker %d refuses weights of version %d, %s: sent again", self.number, version, damage
                )
                continue
            self.sent = published
            return


class WorkerPool:
    """N workers; groups that they complete go to the buffer, and their seconds to the timer."""

    def __init__(
        self,
        config: JobConfig,
        prompt: Callable[[int], Prompt],
        workers: Sequence[Worker],
        buffer: GroupBuffer,
        timer: StepTimer,
        past: PastCompletions | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Make a pool.

        Args:
            prompt: ``prompt(i)`` returns prompt i of the stream.
            past: source of the completions to send along with prompts.
            evaluation: source of the prompts below 0, and receiver of their completions.
        """
        self.config, self.prompt, self.workers, self.buffer, self.timer = config, prompt, workers, buffer, timer
        self.past, self.restarts, self.evaluation = past, 0, evaluation
        self.on_completions: Callable[[], None] | None = None  # called when completions came in
        # Prompts below this number were in flight when a worker died, a server lost a request or the job was resumed.
        # Completions that had ended by then were kept and the others drawn again. So the selection of their tokens
        # depends on the tokens.
        self.disturbed = 0
        self._members = range(config.trainer.group_size)
        self._max_restarts = config.runtime.max_restarts
        self._desired = DesiredState(decoding=config.decoding)
        self._channels = [
            WorkerChannel(number=i, worker=worker, decoding=config.decoding) for i, worker in enumerate(workers)
        ]
        self._dispatch = DISPATCH[config.rollout.dealing](config, len(workers))
        self._heads: dict[int, str] = {}  # version -> fingerprint of the head that belongs to it
        self._head_published = 0  # the latest publication that must include the head
        self._health: dict[int, Health] = {}  # worker -> the health that it reported in this step
        # Completions of incomplete groups, by prompt and member; None: the member was lost.
        self._partial: dict[int, dict[int, Trajectory | None]] = {}
        self._begun: dict[int, Prompt] = {}  # their prompts, with the tokens that their environments began with

    async def submit(self, indices: Sequence[int]) -> None:
        """Hand out prompts, now or when a worker has room."""
        self._dispatch.add(indices)
        self._hand_out()

    def evaluate(self, evaluation: Evaluation) -> None:
        """Hand out the questions of an evaluation before waiting prompts; workers get the newest weights first."""
        self._dispatch.add(evaluation.indices, self.config.evaluation.completions)
        self._hand_out()

    async def publish(self, trainer: Trainer, version: int, *, head: bool = False, fingerprint: bool = False) -> None:
        """Send the trainer's weights to every worker, which swaps them in between two decoding cycles.

        Args:
            trainer: source of the weights.
            version: version of the weights.
            head: whether to send the MTP head along even if it never changed.
            fingerprint: whether to record the fingerprint of the head that belongs to them.
        """
        if fingerprint:
            oldest = version - self.config.rollout.staleness
            self._heads = {v: mark for v, mark in self._heads.items() if v >= oldest}
            self._heads[version] = await trainer.head_fingerprint()
        wanted = head
        # A worker that still waits for a head gets it now: these weights replace those that should have included it.
        head = head or any(channel.sent < self._head_published for channel in self._channels if self._head_published)
        weights = await trainer.weights(head)
        # No await in between: a replacement that starts meanwhile gets the old weights with their own version.
        self._desired.weights, self._desired.version = weights, version
        self._desired.published += 1
        self._head_published = self._desired.published if head else self._head_published
        if wanted:  # this also settles complaints that came while the weights were fetched
            self._health.clear()
        for channel in self._channels:
            if not channel.down:
                channel.arrived.clear()
            channel.wakeup.set()
        if self.config.rollout.staleness == 0:
            for channel in self._channels:
                await channel.arrived.wait()

    async def configure(self, decoding: DecodingConfig) -> None:
        """Make every worker draft as ``decoding`` says."""
        if decoding != self._desired.decoding:
            self._desired.decoding = decoding
            for channel in self._channels:
                channel.wakeup.set()

    async def serve(self, i: int) -> None:
        """Send to worker i, accept its completions, and replace it when it dies.

        Raises:
            UserError: Workers have died more than ``runtime.max_restarts`` times.
        """
        channel = self._channels[i]
        try:
            while True:
                try:
                    await self._exchange(channel)
                except WorkerDied as death:
                    self._lose(channel, death)
                    with contextlib.suppress(WorkerDied):  # the next call raises it again
                        await channel.worker.restart()
                    channel.reopen(self.config.decoding)
                    self._dispatch.enter(i)
                    self._hand_out()
        finally:
            channel.close()  # otherwise a synchronous job would wait for this worker's weights for ever

    async def _exchange(self, channel: WorkerChannel) -> None:
        """Send to a worker and receive from it until one of the two fails; then stop both."""
        both = [
            asyncio.create_task(channel.send(self._desired)),
            asyncio.create_task(self._receive(channel)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        errors = [error for task in both if not task.cancelled() and (error := task.exception()) is not None]
        # A death often raises in both tasks; any other error is worse and must not be hidden by it.
        raise max(errors, key=lambda error: not isinstance(error, WorkerDied))

    async def _receive(self, channel: WorkerChannel) -> None:
        """Process the reports of a worker, for ever."""
        while True:
            published, settled = self._desired.published, channel.sent == self._desired.published
            report = await channel.worker.collect(channel.seen)
            if report.number <= channel.seen:  # it arrived before
                continue
            channel.seen = report.number
            if report.redrawn > channel.redrawn:
                channel.redrawn, self.disturbed = report.redrawn, self.buffer.admitted
            for part in report.parts:
                await self._take(channel.number, part)
            if report.parts and self.on_completions is not None:
                self.on_completions()
            self.timer.add(report)
            if settled and published == self._desired.published:  # else it may describe earlier weights
                self._check_health(channel.number, report)
            await asyncio.sleep(0)  # other workers report at the same moment, and the first must not get all the work
            self._hand_out()

    def _lose(self, channel: WorkerChannel, death: WorkerDied) -> None:
        """Start again all completions that a dead worker owes."""
        self.restarts += 1
        self.disturbed = self.buffer.admitted
        if self.restarts > self._max_restarts:
            raise UserError(f"rollout workers died {self.restarts} times, the last time: {death}") from death
        lost = self._dispatch.leave(channel.number)
        log.warning("rollout worker %d died (%s); %d prompts start again", channel.number, death, len(lost))
        channel.close()
        self._hand_out()

    def _hand_out(self) -> None:
        """Put the requests to hand out now into the outboxes."""
        for i, index, members in self._dispatch.hand_out():
            prompt = self._prompt(index)
            past = () if self.past is None else self.past.of(prompt.token_ids)
            assignment = Assignment(prompt=prompt, members=members, past=past)
            self._channels[i].outbox.append((self._desired.published, assignment))
            self._channels[i].wakeup.set()

    def _prompt(self, index: int) -> Prompt:
        """Return prompt ``index``; indices below 0 belong to the evaluation, which also records training prompts."""
        if self.evaluation is None:
            return self.prompt(index)
        if index < 0:
            return self.evaluation.prompt(index)
        prompt = self.prompt(index)
        self.evaluation.note(prompt)
        return prompt

    async def _take(self, i: int, part: PartialGroup) -> None:
        """Add completions of worker i to their group, and hand the group over once it is complete."""
        index = part.prompt.index
        for member, trajectory in zip(part.members, part.trajectories, strict=True):
            if self._dispatch.take(i, index, member):  # else it arrived before, or another worker owes it now
                self._partial.setdefault(index, {})[member] = trajectory
        if part.prompt.token_ids:  # else no environment of it ever began
            same_beginning(self._begun.setdefault(index, part.prompt), part.prompt)
        if self.evaluation is not None and part.prompt.held_out:
            if len(self._partial.get(index, ())) == self.config.evaluation.completions:
                self._begun.pop(index, None)
                self.evaluation.put(index, self._partial.pop(index))
        elif len(self._partial.get(index, ())) == len(self._members):
            members, prompt = self._partial.pop(index), self._begun.pop(index, part.prompt)
            there = tuple(one for member in self._members if (one := members[member]) is not None)
            await self.buffer.put(Group(prompt=prompt, trajectories=there, lost=len(self._members) - len(there)))

    def _check_health(self, i: int, report: WorkerReport) -> None:
        """Compare the state of worker i with the desired state; a complaint stands until the step is over.

        The version must be at least that of the newest prompt it completed, whose weights were sent before.
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
        """Return the number of completions that were not trained on yet, those of partial groups included."""
        whole = sum(len(group.trajectories) for group in self.buffer.ready.values())
        return whole + sum(len(members) for index, members in self._partial.items() if index >= 0)

    def health(self) -> Health | None:
        """Return the worst health that a worker reported in this step, which ends with this call; None without any."""
        reported, self._health = self._health, {}
        return min(reported.values(), key=lambda health: not health.diagnosis(), default=None)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. A resume disturbs prompts in flight, whose completions it draws again."""
        return {"restarts": self.restarts, "disturbed": max(self.disturbed, self.buffer.admitted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, after the buffer; each run may restart ``max_restarts`` more times.

        A checkpoint without ``disturbed`` is taken for one that was written between two steps.
        """
        self.restarts = state["restarts"]
        between = self.buffer.limit - self.config.trainer.groups_per_step
        self.disturbed = state.get("disturbed", between)
        self._max_restarts = self.restarts + self.config.runtime.max_restarts
