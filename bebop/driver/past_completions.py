"""Completions that were trained on, by the tokens of their prompt, for decoding systems that draft from them.

The driver keeps them and sends those of a prompt along with it, so that workers share the completions of all workers.
They enter in the order of prompts as batches are trained on. So a resumed run restores the same state from the newest
ones in ``trajectories.sqlite``.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bebop.config.job import JobConfig
from bebop.systems import SYSTEMS
from bebop.systems.history.options import HistoryOptions
from bebop.trajectory import Group
from bebop.trajectory_db.reader import Trajectories

log = logging.getLogger(__name__)
Completions = tuple[NDArray[np.int32], ...]


class PastCompletions:
    """The newest completions, ``tokens`` tokens in all; the oldest are dropped first, whatever their prompt."""

    def __init__(self, tokens: int, answers: int) -> None:
        """Store at most ``tokens`` tokens, and return the newest ``answers`` completions of a prompt."""
        self.limit, self.answers = tokens, answers
        self.tokens = 0
        self._ages: deque[bytes] = deque()  # the prompt of each completion, the oldest first
        self._by_prompt: dict[bytes, deque[NDArray[np.int32]]] = {}

    @classmethod
    def wanted(cls, config: JobConfig) -> "PastCompletions | None":
        """Make them for a job whose system drafts from them; None for others and for tasks of several turns."""
        # A trajectory of several turns is not repeated from its beginning.
        if not SYSTEMS[config.decoding.system].history or config.task.turns:
            return None
        options = config.decoding.of(HistoryOptions)
        return cls(options.past_tokens, options.completions)

    def take(self, groups: Iterable[Group]) -> None:
        """Add the completions of a batch, groups of one turn in the order of their prompts."""
        for group in groups:
            for trajectory in group.trajectories:
                self.add(group.prompt.token_ids, trajectory.completion.token_ids)

    def add(self, prompt: Sequence[int], completion: Sequence[int] | NDArray[np.integer]) -> None:
        """Add one completion."""
        key, tokens = _key(prompt), np.array(completion, dtype=np.int32)
        self._ages.append(key)
        self._by_prompt.setdefault(key, deque()).append(tokens)
        self.tokens += len(tokens)
        while self.tokens > self.limit:
            oldest = self._ages.popleft()
            self.tokens -= len(self._by_prompt[oldest].popleft())
            if not self._by_prompt[oldest]:
                del self._by_prompt[oldest]

    def of(self, prompt: Sequence[int]) -> Completions:
        """Return the newest ``answers`` completions of a prompt, the oldest first."""
        return tuple(self._by_prompt.get(_key(prompt), ()))[-self.answers :]

    def recall(self, path: Path, step: int) -> None:
        """Read the state of a run after ``step`` from its ``trajectories.sqlite``; warn if there is no such file."""
        if not path.exists():
            log.warning("%s is not there (monitor.trace=off): drafts from history begin with nothing", path)
            return
        found: list[list[tuple[NDArray[np.int32], NDArray[np.int32]]]] = []  # by step
        tokens = 0
        with Trajectories(path) as stored:
            # From the newest step back, until the steps hold more than is kept: what was before is forgotten anyway.
            while step > 0 and tokens <= self.limit:
                found.append([(one.prompt_ids, one.ids) for one in stored.answers(range(step, step + 1))])
                tokens += sum(len(completion) for _, completion in found[-1])
                step -= 1
        for prompt, completion in chain.from_iterable(reversed(found)):
            self.add(prompt.tolist(), completion)


def _key(prompt: Sequence[int]) -> bytes:
    return np.array(prompt, dtype=np.int32).tobytes()
