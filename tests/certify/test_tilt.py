"""The learned tilt: fair with whatever it learned, blind in its first cohort, and it finds what has no name."""

import copy
import math

import numpy as np
import pytest
import torch

from bebop.certify.bets import FEATURES, STEPS, Tilt
from bebop.certify.directions import Rows
from tests.certify.blocks import block

M = 16


def leaning(given) -> torch.Tensor:
    """Towards seen tokens, by a factor."""
    r = given.probs * torch.where(given.seen, 1.6, 1.0)
    return r / r.sum(-1, keepdim=True)


def cohort(tilt: Tilt, seed: int, fault=None) -> np.ndarray:
    given = block(400, M, seed=seed, fault=fault)
    gain = tilt.add(Rows(part=given, vocabulary=M), given.cells)
    tilt.close()
    return gain


def test_the_first_cohort_teaches_and_bets_nothing() -> None:
    tilt = Tilt()
    assert not cohort(tilt, 0, leaning).any() and tilt.log_e == 0
    assert tilt.weights()[FEATURES.index("seen")] > 0.1


def test_bets_are_fair_with_what_was_learned() -> None:
    tilt = Tilt()
    for seed in range(3):
        cohort(tilt, seed, leaning)
    one = block(1, M, seed=9)
    totals = np.zeros(len(STEPS))
    for x in range(M):
        again = copy.deepcopy(tilt)
        again.add(Rows(part=one, vocabulary=M), torch.tensor([x]))
        totals += float(one.probs[0, x]) * np.exp(again._logs[0] - tilt._logs[0])
    assert totals == pytest.approx(np.ones(len(STEPS)), abs=1e-12)


def test_a_cohort_is_no_teacher_of_itself() -> None:
    """Halves of a cohort bet with the same weights."""
    tilt = Tilt()
    cohort(tilt, 0, leaning)
    before = tilt.weights()
    given = block(400, M, seed=1, fault=leaning)
    tilt.add(Rows(part=given.part(0, 200), vocabulary=M), given.cells[:200])
    assert (tilt.weights() == before).all()
    tilt.close()
    assert (tilt.weights() != before).any()


def test_what_leans_is_found_and_what_does_not_is_not() -> None:
    clean, faulty = Tilt(), Tilt()
    for seed in range(6):
        cohort(clean, seed)
        cohort(faulty, seed, leaning)
    assert faulty.log_e > math.log(1e4) and clean.log_e < 2
