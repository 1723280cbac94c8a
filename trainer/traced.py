"""The trainer's log-probs of the answers whose tokens are kept, taken from the passes that an update makes anyway."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bebop.trainer.packing import PackedRows
from bebop.trajectory import Trajectory


class TracedLogprobs:
    """Of one update and one rank: place of an answer in the batch, group by group -> log p [T] of what was written.

    p is the distribution that is trained (temperature applied, no truncation), under the weights before any step.
    """

    def __init__(self, trajectories: Sequence[Trajectory] = ()) -> None:
        """``trajectories`` of the whole batch."""
        traced = [all(turn.completion.trace is not None for turn in t.turns) for t in trajectories]
        self._wanted = {place for place, one in enumerate(traced) if one}
        self.found: dict[int, NDArray[np.float32]] = {}

    def add(self, first: int, rows: PackedRows, logp: Tensor) -> None:
        """A micro-batch with its log-probs [A]; its minibatch begins with answer number ``first`` of the batch."""
        places = [first + number if number >= 0 else -1 for number in rows.rows.tolist()]
        if self._wanted.isdisjoint(places):
            return
        parts = logp.detach().float().cpu().split(rows.answers.tolist())
        for place, part in zip(places, parts, strict=True):
            if place in self._wanted:
                self.found[place] = part.numpy().copy()  # a view would keep the whole micro-batch
