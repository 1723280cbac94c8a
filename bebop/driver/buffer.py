"""The buffer between rollouts and trainer: finished groups in, batches out, with bounded staleness.

Invariants, with B groups in a batch:

- Batch j consists of prompts jB .. (j+1)B - 1 in that order, whenever they finish. No prompt is lost or repeated.
- Staleness is bounded exactly. Prompt i may start once ``i < (version + 1 + staleness) * B`` and is trained on at
  version ``i // B``, so its first token lags by at most ``staleness`` updates.
- A batch is not biased towards completions that happen to finish early. The price is that the trainer waits for the
  longest completion of a batch, while the workers go on with later prompts.

Groups can be filtered: the buffer skips groups that teach nothing, and the next in order take their places. A batch
then consists of the first B groups that are kept, and is complete once all groups before its last one have arrived.
With t prompts taken or skipped so far, prompt i may start once ``i < t + (1 + staleness) * B - C``, where C prompts are
in the unfinished batch. Each batch takes B prompts at least, so the bound is the same.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from bebop.errors import UserError
from bebop.trajectory import Batch, Group

MAX_BATCHES = 10  # one batch skips at most the groups of 10 batches; DAPO's max_num_gen_batches


def has_spread(group: Group) -> bool:
    """Return whether the rewards of a group differ; otherwise every advantage in it is 0."""
    rewards = [t.reward for t in group.trajectories]
    return len(rewards) > 1 and min(rewards) < max(rewards)


class GroupBuffer:
    """Groups by prompt index, for one event loop and no threads."""

    def __init__(
        self, groups_per_batch: int, staleness: int, *, version: int = 0, keeps: Callable[[Group], bool] | None = None
    ) -> None:
        """Make an empty buffer after ``version`` updates; ``keeps`` selects the groups to train on, None means all."""
        self.groups_per_batch, self.staleness, self.keeps = groups_per_batch, staleness, keeps
        self.version = version
        self.taken = version * groups_per_batch  # prompts 0 .. taken - 1 were trained on or skipped
        self.admitted = self.taken  # prompts 0 .. admitted - 1 have been handed out
        self.since: dict[int, int] = {}  # version at which each prompt was handed out, until it is taken
        self.ready: dict[int, Group] = {}
        self._chosen: list[int] = []  # prompts of the unfinished batch
        self._next = self.taken  # the first prompt that is neither chosen nor skipped
        self._arrival = asyncio.Condition()

    @property
    def filtered(self) -> list[Group]:
        """Return the groups that were skipped for the unfinished batch."""
        chosen = set(self._chosen)
        return [self.ready[i] for i in range(self.taken, self._next) if i not in chosen]

    @property
    def limit(self) -> int:
        """Return the first prompt that may not start yet."""
        return self._next - len(self._chosen) + (1 + self.staleness) * self.groups_per_batch

    def admit(self) -> list[int]:
        """Return the prompts that may start now, each once, without groups restored from a checkpoint."""
        limit = self.limit
        fresh = [i for i in range(self.admitted, limit) if i not in self.ready]
        self.since |= dict.fromkeys(fresh, self.version)
        self.admitted = max(self.admitted, limit)
        return fresh

    async def put(self, group: Group) -> None:
        """Add a finished group."""
        index = group.prompt.index
        assert self.taken <= index < self.admitted, f"prompt {index} was not handed out or was trained on already"
        assert index not in self.ready, f"prompt {index} came back twice"
        async with self._arrival:
            self.ready[index] = group
            self._choose()
            self._arrival.notify_all()

    async def take(self) -> Batch | None:
        """Return the next batch once all its groups have arrived; it counts as trained on after ``advance``.

        None means that groups were skipped, and that ``admit`` has other prompts to start in their places.
        """
        async with self._arrival:
            await self._arrival.wait_for(lambda: self._whole or self.limit > self.admitted)
        return Batch(groups=tuple(self.ready[i] for i in self._chosen)) if self._whole else None

    def advance(self) -> None:
        """Drop the groups of the batch that has been trained on, and raise the version."""
        for i in range(self.taken, self._next):
            del self.ready[i]
            self.since.pop(i, None)
        self.version, self.taken, self._chosen = self.version + 1, self._next, []
        self._choose()

    @property
    def _whole(self) -> bool:
        return len(self._chosen) == self.groups_per_batch

    def _choose(self) -> None:
        """Extend the unfinished batch in prompt order, as far as groups have arrived; each group is judged once."""
        while not self._whole and (group := self.ready.get(self._next)) is not None:
            passed = self._next - self.taken - len(self._chosen)
            if self.keeps is None or self.keeps(group) or passed >= MAX_BATCHES * self.groups_per_batch:
                self._chosen.append(self._next)
            self._next += 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without prompts in flight, which start again after a resume."""
        ready = [self.ready[i] for i in sorted(self.ready)]
        sizes = {"version": self.version, "groups_per_batch": self.groups_per_batch}
        return {**sizes, "taken": self.taken, "ready": ready}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore ``state``; raise ``UserError`` for another batch size, which would skip or repeat prompts."""
        before = state["groups_per_batch"]
        if before != self.groups_per_batch:
            here = f"trainer.groups_per_step={self.groups_per_batch}"
            raise UserError(f"{here} is not possible: the checkpoint was made with {before}, and prompts are counted")
        self.version = state["version"]
        self.taken = state["taken"]
        self.admitted = self._next = self.taken
        self.since, self._chosen = {}, []
        self.ready = {group.prompt.index: group for group in state["ready"] if group.prompt.index >= self.taken}
        self._choose()
