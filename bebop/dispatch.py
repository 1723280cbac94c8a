"""Which worker is asked for which answers, and which answers are where: bookkeeping alone, nothing is sent here.

``StaticDispatch`` hands prompt i to worker ``i % workers`` at once: who decodes what depends on nothing, so that a
synchronous job is the same bit for bit each time. ``PullDispatch`` keeps prompts until a worker has room for them. No
operation looks at all workers: what an answer costs here does not depend on how many there are.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from bebop.config import JobConfig

Handed = tuple[int, int, tuple[int, ...]]  # worker, prompt, members of its group


class Dispatch:
    """What is in flight where. Workers are there from the start; answers are known by prompt and member."""

    def __init__(self, workers: int, group_size: int) -> None:
        self.workers, self.members = workers, tuple(range(group_size))
        self._in_flight: list[dict[tuple[int, int], None]] = [{} for _ in range(workers)]

    def add(self, prompts: Iterable[int]) -> None:
        """Have these prompts answered, each by a whole group."""
        for prompt in prompts:
            self._add(prompt % self.workers, prompt, self.members)

    def take(self, worker: int, prompt: int, member: int) -> bool:
        """Whether the worker owed this answer, which it owes no more."""
        return self._in_flight[worker].pop((prompt, member), self) is None

    def leave(self, worker: int) -> list[int]:
        """The worker is gone, and all that is in flight there starts again; the prompts that this concerns."""
        lost: dict[int, list[int]] = {}
        for prompt, member in sorted(self._in_flight[worker]):
            lost.setdefault(prompt, []).append(member)
        self._in_flight[worker] = {}
        for prompt, members in lost.items():
            self._add(worker, prompt, tuple(members))
        return list(lost)

    def enter(self, worker: int) -> None:
        """The worker is there again."""
        raise NotImplementedError

    def hand_out(self) -> list[Handed]:
        """Whom to ask for what now; it counts as in flight from here on."""
        raise NotImplementedError

    def _add(self, worker: int, prompt: int, members: tuple[int, ...]) -> None:
        """To be answered, by this worker where that matters."""
        raise NotImplementedError

    def _put(self, worker: int, prompt: int, members: Sequence[int]) -> Handed:
        self._in_flight[worker].update(dict.fromkeys((prompt, member) for member in members))
        return worker, prompt, tuple(members)


class StaticDispatch(Dispatch):
    """Prompt i belongs to worker i modulo their number, whatever happens."""

    def __init__(self, workers: int, group_size: int) -> None:
        super().__init__(workers, group_size)
        self._waiting: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # by worker
        self._away: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # of workers that are not there

    def hand_out(self) -> list[Handed]:
        """See ``Dispatch``."""
        waiting, self._waiting = self._waiting, {}
        return [self._put(worker, *asked) for worker in sorted(waiting) for asked in sorted(waiting[worker])]

    def leave(self, worker: int) -> list[int]:
        """See ``Dispatch``."""
        self._away.setdefault(worker, self._waiting.pop(worker, []))
        return super().leave(worker)

    def enter(self, worker: int) -> None:
        """See ``Dispatch``."""
        back = self._away.pop(worker, [])
        if back:
            self._waiting[worker] = back

    def _add(self, worker: int, prompt: int, members: tuple[int, ...]) -> None:
        place = self._away.get(worker)
        if place is None:
            place = self._waiting.setdefault(worker, [])
        place.append((prompt, members))


class PullDispatch(Dispatch):
    """In the order of prompts to whoever owes the fewest answers, and to nobody more than ``bound``.

    Groups stay whole, since a prompt is read once by each worker that answers it, with two exceptions: a slot that is
    free takes what there is, and when there is less work than fits, no worker is given more than an equal share of it.
    """

    def __init__(self, workers: int, group_size: int, slots: int, bound: int) -> None:
        """``slots``: answers that a worker decodes side by side; ``bound``: that it may owe."""
        super().__init__(workers, group_size)
        self.slots, self.bound = slots, bound
        self._queue: list[tuple[int, tuple[int, ...]]] = []  # a heap, by prompt
        self._answers = 0  # queued and in flight
        self._away: set[int] = set()
        # Workers by the answers they owe: _owing[n] holds those that owe n, who has done so for longest first; none
        # owes fewer than _least.
        self._owing: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._owing[0] = dict.fromkeys(range(workers))
        self._least = 0

    def take(self, worker: int, prompt: int, member: int) -> bool:
        """See ``Dispatch``."""
        owed = super().take(worker, prompt, member)
        if owed:
            self._answers -= 1
            self._move(worker, 1)
        return owed

    def hand_out(self) -> list[Handed]:
        """See ``Dispatch``."""
        handed = []
        while self._queue and (worker := self._hungriest()) is not None:
            prompt, members = self._queue[0]
            room, owed = self.bound - self._least, self._least
            if owed >= self.slots and room < len(members):
                break  # nobody has a free slot, nor room for the group
            share = -(-self._answers // (self.workers - len(self._away))) - owed
            given = max(1, min(len(members), room, share))
            heappop(self._queue)
            if given < len(members):
                heappush(self._queue, (prompt, members[given:]))
            handed.append(self._put(worker, prompt, members[:given]))
            self._move(worker, -given)
        return handed

    def leave(self, worker: int) -> list[int]:
        """See ``Dispatch``."""
        owed = len(self._in_flight[worker])
        self._owing[owed].pop(worker, None)
        self._away.add(worker)
        self._answers -= owed  # to be added again
        return super().leave(worker)

    def enter(self, worker: int) -> None:
        """See ``Dispatch``."""
        if worker in self._away:
            self._away.remove(worker)
            self._owing[0][worker] = None
            self._least = 0

    def _add(self, worker: int, prompt: int, members: tuple[int, ...]) -> None:
        heappush(self._queue, (prompt, members))
        self._answers += len(members)

    def _hungriest(self) -> int | None:
        """Who owes fewest, and could owe more."""
        if len(self._away) == self.workers:
            return None
        while not self._owing[self._least]:
            self._least += 1  # as often as answers were handed out since it was lowered: a constant for each of them
        return next(iter(self._owing[self._least])) if self._least < self.bound else None

    def _move(self, worker: int, fewer: int) -> None:
        """The worker owes so many fewer than before."""
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
    """Answers that one worker may owe.

    By default a group more than it decodes side by side, which is about what ends between two of its reports. More
    would only be committed earlier to workers that may turn out to be slow.
    """
    return config.rollout.in_flight or config.rollout.slots + config.trainer.group_size
