"""Intact engines: simulated, with tokens drawn again from the reference's own distributions, and live."""

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
    """Parallel runs at one temperature."""

    heat: float
    tokens: int  # of each run
    highest: NDArray[np.float64]  # [R] sup of ln E


def simulated(heat: float, runs: int, count: int, seed: int) -> Simulated:
    """So many runs over the texts of one live run of ``count`` cohorts: what stands before a token is given, and the
    token is drawn anew from the distribution that the reference has there."""
    engine, reference = live(Planted(heat=heat), seed), ModelReference(trusted())
    ledger = Ledger(reference.policy.vocab_size, alpha=ALPHA, runs=runs, seed=seed)
    numbers = torch.Generator().manual_seed(seed)
    source = cohorts(engine, heat, seed)
    for _ in range(count):
        params, answers = next(source)
        block = dataclasses.replace(reference.block(answers, params), reported=None)
        ledger.update(block, torch.multinomial(block.probs, runs, replacement=True, generator=numbers).T)
    return Simulated(heat=heat, tokens=ledger.tokens, highest=ledger.highest.copy())


def share_beyond(highest: NDArray[np.float64], level: float) -> tuple[float, float, float]:
    """Share of runs whose E ever reached ``level``, with Wilson's interval of 95 %."""
    z, n = 1.959964, len(highest)
    share = float((highest >= math.log(level)).mean())
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return share, max(0.0, (middle - half) / (1 + z * z / n)), (middle + half) / (1 + z * z / n)
