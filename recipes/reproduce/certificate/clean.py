"""Intact engines: simulated ones, whose tokens are redrawn from the reference's distributions, and live ones."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bebop.certify.ledger import Ledger
from bebop.certify.model_reference import ModelReference
from recipes.reproduce.certificate.faults import Planted, live, trusted
from recipes.reproduce.certificate.runs import ALPHA, cohorts


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Parallel simulated runs at one temperature."""

    heat: float
    tokens: int  # of each run
    highest: NDArray[np.float64]  # [R] highest ln E that a run reached


class DrawnRun(Ledger):
    """Ledger of run ``number`` among several over the same texts, which share one draw of uniforms."""

    def __init__(self, vocabulary: int, number: int, runs: int, seed: int) -> None:
        super().__init__(vocabulary, alpha=ALPHA, seed=seed, enumerate_rows=False)
        self.number, self.runs = number, runs

    def tie_breaks(self, count: int) -> NDArray[np.float64]:
        """Return this run's row of the uniforms [R, N]."""
        return super().tie_breaks(self.runs * count).reshape(self.runs, count)[self.number]


def simulated(heat: float, runs: int, count: int, seed: int) -> Simulated:
    """Simulate runs over the texts of one live run of ``count`` cohorts.

    The tokens before a position are given. The token there is drawn anew from the reference's distribution.
    """
    engine, reference = live(Planted(heat=heat), seed), ModelReference(trusted())
    ledgers = [DrawnRun(reference.policy.vocab_size, number, runs, seed) for number in range(runs)]
    numbers = torch.Generator().manual_seed(seed)
    source = cohorts(engine, heat, seed)
    for _ in range(count):
        params, answers = next(source)
        block = dataclasses.replace(reference.block(answers, params), reported=None)
        drawn = torch.multinomial(block.probs, runs, replacement=True, generator=numbers).T
        for ledger, tokens in zip(ledgers, drawn, strict=True):
            logprobs = block.probs.gather(1, tokens[:, None])[:, 0].log()
            ledger.update(dataclasses.replace(block, tokens=tokens, cells=tokens, logprobs=logprobs))
        for ledger in ledgers[1:]:  # all runs share the bigrams learned from run 0's past tokens
            ledger.bigram.load_state_dict(ledgers[0].bigram.state_dict())
    highest = np.array([ledger.highest for ledger in ledgers])
    return Simulated(heat=heat, tokens=ledgers[0].tokens, highest=highest)


def share_beyond(highest: NDArray[np.float64], level: float) -> tuple[float, float, float]:
    """Return the share of runs whose E ever reached ``level``, with Wilson's 95 % interval (share, low, high)."""
    z, n = 1.959964, len(highest)
    share = float((highest >= math.log(level)).mean())
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return share, max(0.0, (middle - half) / (1 + z * z / n)), (middle + half) / (1 + z * z / n)
