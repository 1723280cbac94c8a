"""Finished groups in, batches out: bounds staleness, and neither loses nor repeats a prompt.

Prompts are numbered; batch j is made of prompts jB .. (j+1)B - 1, in that order, whenever they finish. Two things
follow. Staleness is bounded exactly: prompt i may start once ``i < (version + 1 + staleness) * B`` and is trained on at
version ``i // B``, so its first token lags by at most ``staleness`` updates. And a batch is not biased towards answers
that happen to finish early. The price is that the trainer waits for a batch's longest answer, while the workers go on
with later prompts.
"""

import asyncio
from typing import Any

from bebop.errors import UserError
from bebop.trajectory import Batch, Group


class GroupBuffer:
    """Groups by prompt index; single event loop, no threads."""

    def __init__(self, groups_per_batch: int, staleness: int, *, version: int = 0) -> None:
        """``version`` is the number of updates done, which is also the number of batches taken."""
        self.groups_per_batch, self.staleness = groups_per_batch, staleness
        self.version = version
        self.admitted = version * groups_per_batch  # prompts 0 .. admitted - 1 have been handed out
        self.ready: dict[int, Group] = {}
        self._here = 0  # groups of the next batch that are ready
        self._arrival = asyncio.Condition()

    @property
    def taken(self) -> int:
        """Prompts trained on so far: 0 .. taken - 1."""
        return self.version * self.groups_per_batch

    def admit(self) -> list[int]:
        """Prompts that may start now, each handed out once; those restored from a checkpoint are left out."""
        limit = (self.version + 1 + self.staleness) * self.groups_per_batch
        fresh = [i for i in range(self.admitted, limit) if i not in self.ready]
        self.admitted = max(self.admitted, limit)
        return fresh

    async def put(self, group: Group) -> None:
        """Take in a finished group."""
        index = group.prompt.index
        assert self.taken <= index < self.admitted, f"prompt {index} was not handed out or was trained on already"
        assert index not in self.ready, f"prompt {index} came back twice"
        async with self._arrival:
            self.ready[index] = group
            self._here += index < self.taken + self.groups_per_batch
            self._arrival.notify_all()

    async def take(self) -> Batch:
        """The next batch, once all its groups are there. It counts as trained on from ``advance`` on."""
        wanted = range(self.taken, self.taken + self.groups_per_batch)
        async with self._arrival:
            await self._arrival.wait_for(lambda: self._here == len(wanted))
        return Batch(groups=tuple(self.ready[i] for i in wanted))

    def advance(self) -> None:
        """The batch has been trained on: drop its groups and raise the version."""
        for i in range(self.taken, self.taken + self.groups_per_batch):
            del self.ready[i]
        self.version += 1
        self._count()

    def _count(self) -> None:
        """How much of the next batch is there: once a batch, since counting at every arrival would be quadratic."""
        self._here = sum(i in self.ready for i in range(self.taken, self.taken + self.groups_per_batch))

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: prompts in flight are not kept, they start again."""
        ready = [self.ready[i] for i in sorted(self.ready)]
        return {"version": self.version, "groups_per_batch": self.groups_per_batch, "ready": ready}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; ``UserError`` if batches had another size, which would skip or repeat prompts."""
        before = state["groups_per_batch"]
        if before != self.groups_per_batch:
            here = f"trainer.groups_per_step={self.groups_per_batch}"
            raise UserError(f"{here} is not possible: the checkpoint was made with {before}, and prompts are counted")
        self.version = state["version"]
        self.admitted = self.taken
        self.ready = {group.prompt.index: group for group in state["ready"] if group.prompt.index >= self.taken}
        self._count()
