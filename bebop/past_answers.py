"""Answers that were trained on, by the tokens of their prompt, for decoding systems that draft from them.

The driver keeps them and sends those of a prompt along with it, so that workers share what any of them said. They enter
in the order of prompts as batches are taken, so what is known depends on that order alone: a run that is resumed reads
the newest ones back from ``trajectories.sqlite`` and knows the same.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bebop.config import JobConfig
from bebop.options import HistoryOptions
from bebop.systems import SYSTEMS
from bebop.trajectories import Trajectories
from bebop.trajectory import Group

log = logging.getLogger(__name__)
Answers = tuple[NDArray[np.int32], ...]


class PastAnswers:
    """The newest answers, ``tokens`` of them in all; older ones are forgotten, whoever they belong to."""

    def __init__(self, tokens: int, answers: int) -> None:
        """``answers``: how many of a prompt count, the newest."""
        self.limit, self.answers = tokens, answers
        self.tokens = 0
        self._ages: deque[bytes] = deque()  # the prompt of each answer, the oldest first
        self._by_prompt: dict[bytes, deque[NDArray[np.int32]]] = {}

    @classmethod
    def wanted(cls, config: JobConfig) -> "PastAnswers | None":
        """None where nothing drafts from them. Trajectories of several turns are not repeated from their beginning."""
        if not SYSTEMS[config.decoding.system].history or config.task.turns:
            return None
        options = config.decoding.of(HistoryOptions)
        return cls(options.past_tokens, options.answers)

    def take(self, groups: Iterable[Group]) -> None:
        """Groups of one turn that are trained on, in the order of their prompts."""
        for group in groups:
            for trajectory in group.trajectories:
                self.add(group.prompt.token_ids, trajectory.completion.token_ids)

    def add(self, prompt: Sequence[int], answer: Sequence[int] | NDArray[np.integer]) -> None:
        """One answer more."""
        key, tokens = _key(prompt), np.array(answer, dtype=np.int32)
        self._ages.append(key)
        self._by_prompt.setdefault(key, deque()).append(tokens)
        self.tokens += len(tokens)
        while self.tokens > self.limit:
            oldest = self._ages.popleft()
            self.tokens -= len(self._by_prompt[oldest].popleft())
            if not self._by_prompt[oldest]:
                del self._by_prompt[oldest]

    def of(self, prompt: Sequence[int]) -> Answers:
        """Those of a prompt, the oldest first."""
        return tuple(self._by_prompt.get(_key(prompt), ()))[-self.answers :]

    def recall(self, path: Path, step: int) -> None:
        """Know what a run knew after ``step``, from its ``trajectories.sqlite``; a warning where it kept none."""
        if not path.exists():
            log.warning("%s is not there (monitor.trace=off): drafts from history begin with nothing", path)
            return
        found: list[list[tuple[NDArray[np.int32], NDArray[np.int32]]]] = []  # by step
        tokens = 0
        with Trajectories(path) as stored:
            # Steps from the newest back, until they hold more than can be kept: whatever was before is forgotten.
            while step > 0 and tokens <= self.limit:
                found.append([(one.prompt_ids, one.ids) for one in stored.answers(range(step, step + 1))])
                tokens += sum(len(answer) for _, answer in found[-1])
                step -= 1
        for prompt, answer in chain.from_iterable(reversed(found)):
            self.add(prompt.tolist(), answer)


def _key(prompt: Sequence[int]) -> bytes:
    return np.array(prompt, dtype=np.int32).tobytes()
