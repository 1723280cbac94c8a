"""Pivot labels from rollouts, and measures of how reliable labels and scores are (SPEC 4.3, 4.4)."""

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bebop.metrics.intervals import Array, Interval, ratio, resampled

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Definition = Literal["paper", "residual"]
SPLITS = ("train", "validation", "test")
SHARES = (0.6, 0.8)  # cumulative shares of prompts at the end of the first and the second split


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Candidate that rejection sampling rejected, with the outcome of K continuations of each kind.

    The k-th continuations of all kinds share their random numbers. prompt=7, prefix=(2, 17, 4), token=9, p=0.04.
    """

    prompt: int  # number of the first prompt with these tokens
    prefix: tuple[int, ...]  # prompt and completion before the candidate
    token: int
    p: float  # of the candidate under the target
    q: float  # and under the draft
    entropy: float  # of the target, nats
    value: str  # [K] "0110...": success of continuations of prefix + candidate, by the target
    reference: str  # [K] of the prefix alone
    residual: str  # [K] of prefix + the token that rejection sampling would have emitted instead
    judged: bool = False  # a checker found that a success of the candidate is unsound


def successes(bits: Sequence[str]) -> Floats:
    """Convert the bit strings ("0110") of n candidates to successes [n, K]."""
    return np.array([[float(bit == "1") for bit in row] for row in bits])


def loss_of_value(rows: Sequence[Rollouts], definition: Definition, first: int = 0, last: int | None = None) -> Floats:
    """Return by how much [n] a candidate lowers the chance of success, from continuations first..last - 1.

    ``paper``: relative to the target's continuations of the prefix. ``residual``: relative to the recovered token,
    which is emitted if the candidate is rejected. The paper's definition misses harm where that token is better than
    average.
    """
    against = successes([row.reference if definition == "paper" else row.residual for row in rows])
    value = successes([row.value for row in rows])
    return np.asarray((against - value)[:, first:last].mean(1), dtype=np.float64)


def pivots(losses: Floats, tol: float, judged: Bools) -> Bools:
    """Return which candidates [n] are pivots; the judge can only add pivots."""
    return (losses > tol) | judged


def split_of(prompt: int, seed: int) -> str:
    """Return the split of a prompt: train, validation or test. Prompts of one split never occur in another."""
    place = zlib.crc32(f"{seed}:{prompt}".encode()) / 2**32
    return SPLITS[int(place >= SHARES[0]) + int(place >= SHARES[1])]


def auc(scores: Floats, labels: Bools, weights: Floats | None = None) -> float:
    """Return the chance that a pivot scores higher than a non-pivot, ties counted half; NaN if one class is missing."""
    weights = np.ones(len(scores)) if weights is None else weights
    order = np.argsort(scores, kind="stable")
    ranked, of_pivot = scores[order], labels[order]
    positive, negative = weights[order] * of_pivot, weights[order] * ~of_pivot
    below = np.concatenate([[0.0], negative.cumsum()])
    first, last = np.searchsorted(ranked, ranked, "left"), np.searchsorted(ranked, ranked, "right")
    pairs = positive.sum() * negative.sum()
    return float((positive * (below[first] + below[last]) / 2).sum() / pairs) if pairs else float("nan")


def kappa(first: Bools, second: Bools) -> float:
    """Return Cohen's kappa of two label sets [n]: 1 is agreement, 0 is chance level; NaN if chance always agrees."""
    agreed, a, b = float((first == second).mean()), float(first.mean()), float(second.mean())
    chance = a * b + (1 - a) * (1 - b)
    return (agreed - chance) / (1 - chance) if chance < 1 else float("nan")


def calibration(scores: Floats, labels: Bools, bins: int = 10) -> list[tuple[float, float, int]]:
    """Return mean score, share of pivots and number of candidates for each non-empty bin of equal width."""
    place = np.minimum((scores * bins).astype(int), bins - 1)
    held = [place == i for i in range(bins)]
    return [(float(scores[h].mean()), float(labels[h].mean()), int(h.sum())) for h in held if h.any()]


def expected_calibration_error(scores: Floats, labels: Bools, bins: int = 10) -> float:
    """Return the mean distance between score and share of pivots over the bins, weighted by their counts."""
    table = calibration(scores, labels, bins)
    return sum(abs(score - share) * count for score, share, count in table) / len(scores)


# ---- results of a training


TAUS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def auc_interval(scores: Floats, labels: Bools, prompts: Array) -> Interval:
    """Return the AUC with its bootstrap interval over prompts."""
    names, place = np.unique(prompts, return_inverse=True)

    def statistic(weights: Array) -> Array:
        return np.array([auc(scores, labels, row[place]) for row in weights])

    return resampled(statistic, len(names))


def gained(scores: Floats, losses: Floats, prompts: Array, tau: float) -> dict[str, Any]:
    """Return the effect of overriding every candidate with a score below tau: their share, and the utility change of
    each.

    Utility is relative to the recovered token, which is emitted otherwise; negative is a loss. Totals are resampled by
    prompt.
    """
    names, place = np.unique(prompts, return_inverse=True)

    def by_prompt(values: Floats) -> Floats:
        return np.asarray(np.bincount(place, weights=values, minlength=len(names)), dtype=np.float64)

    chosen = (scores < tau).astype(float)
    share, change = by_prompt(chosen), by_prompt(chosen * -losses)
    return {
        "tau": tau,
        "share": dataclasses.asdict(ratio(share, by_prompt(np.ones_like(scores)))),
        "change": dataclasses.asdict(ratio(change, share)),
    }


def rules_at(rate: float, scores: Floats, losses: Floats, p: Floats, entropy: Floats) -> dict[str, float]:
    """Return the mean utility change of one override, for several rules that override the same share of candidates."""
    count = max(1, round(rate * len(scores)))
    orders = {"classifier": scores, "inverted": -scores, "probability": -p, "entropy": -entropy, "oracle": losses}
    means = {name: float(-losses[np.argsort(order, kind="stable")[:count]].mean()) for name, order in orders.items()}
    return {**means, "random": float(-losses.mean())}


def reliability(first: Sequence[Rollouts], second: Sequence[Rollouts], tol: float) -> dict[str, Any]:
    """Return the agreement of two independent label sets of the same candidates, by either definition; without the
    judge.
    """
    none = np.zeros(len(first), dtype=bool)
    found: dict[str, Any] = {"candidates": len(first)}
    for definition in ("paper", "residual"):
        a, b = (pivots(loss_of_value(rows, definition), tol, none) for rows in (first, second))
        found[definition] = {"kappa": kappa(a, b), "agreed": float((a == b).mean()), "pivots": float(a.mean())}
    return found


def split_results(rows: Sequence[Rollouts], scores: Floats, labels: Bools) -> dict[str, Any]:
    """Return the measures of one split."""
    prompts = np.array([row.prompt for row in rows], dtype=float)
    losses = loss_of_value(rows, "residual")
    p, entropy = np.array([row.p for row in rows]), np.array([row.entropy for row in rows])
    return {
        "candidates": len(rows),
        "prompts": len(np.unique(prompts)),
        "pivots": float(labels.mean()),
        "judged": float(np.mean([row.judged for row in rows])),
        "auc": dataclasses.asdict(auc_interval(scores, labels, prompts)),
        "calibration_error": expected_calibration_error(scores, labels),
        "calibration": calibration(scores, labels),
        "taus": [gained(scores, losses, prompts, tau) for tau in TAUS],
        "rules": {str(rate): rules_at(rate, scores, losses, p, entropy) for rate in (0.1, 0.25, 0.5)},
    }


def as_text(results: dict[str, Any]) -> str:
    """Return the results as text for the terminal."""
    lines = []
    for name in SPLITS:
        one = results["splits"][name]
        area = one["auc"]
        lines.append(
            f"{name}: {one['candidates']} candidates of {one['prompts']} prompts, {one['pivots']:.0%} pivots, "
            f"AUC {area['value']:.3f} [{area['low']:.3f}, {area['high']:.3f}], "
            f"calibration error {one['calibration_error']:.3f}"
        )
    agreed = results["reliability"]
    if agreed:
        kappas = ", ".join(f"{name} {agreed[name]['kappa']:.2f}" for name in ("paper", "residual"))
        lines.append(f"two label sets of {agreed['candidates']} candidates: kappa {kappas}")
    return "\n".join(lines) + "\n"
