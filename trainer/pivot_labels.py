"""Which candidates are pivots, how far labels and scores can be trusted: numbers over rollouts (SPEC 4.3, 4.4)."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Definition = Literal["paper", "residual"]
SPLITS = ("train", "validation", "test")
SHARES = (0.6, 0.8)  # of prompts: up to where the first and the second split go


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """A candidate that rejection sampling rejected, with what became of K continuations of each kind.

    The k-th continuations of all kinds share their random numbers. prompt=7, prefix=(2, 17, 4), token=9, p=0.04.
    """

    prompt: int  # number of the prompt, the first with its tokens
    prefix: tuple[int, ...]  # prompt and answer before the candidate
    token: int
    p: float  # of the candidate under the target
    q: float  # and under the draft
    entropy: float  # of the target, nats
    value: str  # [K] "0110...": success of continuations of prefix + candidate, by the target
    reference: str  # [K] of the prefix alone
    residual: str  # [K] of prefix + what rejection sampling would have put in the candidate's place
    judged: bool = False  # a checker found that a success of the candidate is unsound


def successes(bits: Sequence[str]) -> Floats:
    """Continuations "0110" of n candidates -> [n, K]."""
    return np.array([[float(bit == "1") for bit in row] for row in bits])


def loss_of_value(rows: Sequence[Rollouts], definition: Definition, first: int = 0, last: int | None = None) -> Floats:
    """By how much [n] a candidate lowers the chance of success, from continuations first..last - 1.

    ``paper``: against what the target makes of the prefix. ``residual``: against the recovered token, which is what
    comes if the candidate is rejected; the paper's own definition lets harm pass where that is better than average.
    """
    against = successes([row.reference if definition == "paper" else row.residual for row in rows])
    value = successes([row.value for row in rows])
    return np.asarray((against - value)[:, first:last].mean(1), dtype=np.float64)


def pivots(losses: Floats, tol: float, judged: Bools) -> Bools:
    """Which candidates [n] are pivots; a judge may only add to them."""
    return (losses > tol) | judged


def split_of(prompt: int, seed: int) -> str:
    """Train, validation or test: by prompt, so that no text of one split is known from another."""
    place = zlib.crc32(f"{seed}:{prompt}".encode()) / 2**32
    return SPLITS[int(place >= SHARES[0]) + int(place >= SHARES[1])]


def auc(scores: Floats, labels: Bools, weights: Floats | None = None) -> float:
    """The chance that a pivot scores higher than what is none, ties counted half; NaN without both."""
    weights = np.ones(len(scores)) if weights is None else weights
    order = np.argsort(scores, kind="stable")
    ranked, of_pivot = scores[order], labels[order]
    positive, negative = weights[order] * of_pivot, weights[order] * ~of_pivot
    below = np.concatenate([[0.0], negative.cumsum()])
    first, last = np.searchsorted(ranked, ranked, "left"), np.searchsorted(ranked, ranked, "right")
    pairs = positive.sum() * negative.sum()
    return float((positive * (below[first] + below[last]) / 2).sum() / pairs) if pairs else float("nan")


def kappa(first: Bools, second: Bools) -> float:
    """Cohen's kappa of two label sets [n]: 1 agreement, 0 what chance gives; NaN where chance agrees always."""
    agreed, a, b = float((first == second).mean()), float(first.mean()), float(second.mean())
    chance = a * b + (1 - a) * (1 - b)
    return (agreed - chance) / (1 - chance) if chance < 1 else float("nan")


def calibration(scores: Floats, labels: Bools, bins: int = 10) -> list[tuple[float, float, int]]:
    """Mean score, share of pivots and number of candidates in each of the bins of equal width that hold any."""
    place = np.minimum((scores * bins).astype(int), bins - 1)
    held = [place == i for i in range(bins)]
    return [(float(scores[h].mean()), float(labels[h].mean()), int(h.sum())) for h in held if h.any()]


def expected_calibration_error(scores: Floats, labels: Bools, bins: int = 10) -> float:
    """Mean distance of score and share of pivots over the bins, weighted by their number."""
    table = calibration(scores, labels, bins)
    return sum(abs(score - share) * count for score, share, count in table) / len(scores)
