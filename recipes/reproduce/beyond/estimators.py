"""Estimates of E[A], the accepted drafts of a cycle, from the same completions (SPEC 0.6): unbiased ones and shortcuts.

All are functions of weights of completions [R, S], so that a bootstrap resamples the completions of all terms together.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bebop.adaptation.probe import Probe
from bebop.metrics.intervals import Interval, resampled
from recipes.reproduce.beyond.recording import Cycles

Array = NDArray[np.float64]
Estimator = Callable[["Sums", Array], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Totals per completion."""

    cycles: Array  # [S]
    accepted: Array  # [S]
    reached_overlap: Array  # [S] overlap of the steps that were reached
    path: Array  # [S] the unbiased estimate along drafted paths
    path_product: Array  # [S] overlaps multiplied along drafted paths
    live: Array  # [S, K] cycles in which a step exists
    overlap: Array  # [S, K] overlap of each step, summed over these cycles
    starts: Array  # [S] anchors of the text at which a cycle began
    starts_text: Array  # [S] the unbiased estimate from text at these anchors
    anchors: Array  # [S] all anchors of the text
    text: Array  # [S] the unbiased estimate from text
    starts_product: Array  # [S] overlaps multiplied along the text, where cycles began


def sums(cycles: Cycles, probe: Probe) -> Sums:
    """Return totals per completion from its decoding and from a probe of the head on the same completion as text."""
    count = int(cycles.answer.max()) + 1
    before = np.cumprod(np.concatenate([np.ones((len(cycles.answer), 1)), cycles.survive[:, :-1]], 1), 1)
    reached = (np.arange(before.shape[1]) <= cycles.accepted[:, None]) & (cycles.live > 0)
    key = cycles.answer * 100_000 + cycles.start
    began = np.isin(probe.row * 100_000 + probe.place, key)
    overlaps = np.nan_to_num(probe.numbers["overlap"])  # a step that does not exist ends the product

    def of_cycle(values: Array) -> Array:
        return np.bincount(cycles.answer, values, count).astype(float)

    def of_anchor(values: Array) -> Array:
        return np.bincount(probe.row, values, count).astype(float)

    def table(values: Array) -> Array:
        return np.stack([of_cycle(column) for column in values.T], 1)

    return Sums(
        cycles=of_cycle(np.ones(len(cycles.answer))),
        accepted=of_cycle(cycles.accepted),
        reached_overlap=of_cycle((reached * cycles.overlap).sum(1)),
        path=of_cycle((cycles.live * before * cycles.overlap).sum(1)),
        path_product=of_cycle((cycles.live * np.cumprod(cycles.overlap, 1)).sum(1)),
        live=table(cycles.live),
        overlap=table(cycles.live * cycles.overlap),
        starts=of_anchor(began.astype(float)),
        starts_text=of_anchor(np.where(began, probe.accept - 1, 0.0)),
        anchors=of_anchor(np.ones(len(probe.row))),
        text=of_anchor(probe.accept - 1),
        starts_product=of_anchor(began * np.cumprod(overlaps, 1).sum(1)),
    )


def concatenated(parts: Sequence[Sums]) -> Sums:
    """Return the completions of several seeds side by side."""
    names = [f.name for f in dataclasses.fields(Sums)]
    return Sums(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def mean_of(total: str, count: str) -> Estimator:
    """Return an estimator that divides one total by another."""
    return lambda s, w: (w @ getattr(s, total)) / (w @ getattr(s, count))


def product_of_means(s: Sums, w: Array) -> Array:
    """Multiply the mean overlaps of steps over all drafted paths, weighted by the share of cycles that get so far."""
    live = w @ s.live
    means = np.divide(w @ s.overlap, live, out=np.zeros_like(live), where=live > 0)
    share = live / (w @ s.cycles)[:, None]
    total: Array = (share * np.cumprod(means, 1)).sum(1)
    return total


COUNTS = mean_of("accepted", "cycles")
ESTIMATORS: dict[str, Estimator] = {
    "counts": COUNTS,
    "Rao-Blackwell: overlap where reached": mean_of("reached_overlap", "cycles"),
    "drafted paths, unbiased": mean_of("path", "cycles"),
    "text, unbiased, where cycles began": mean_of("starts_text", "starts"),
    "text, unbiased, every token": mean_of("text", "anchors"),
    "overlaps multiplied along drafted paths": mean_of("path_product", "cycles"),
    "overlaps multiplied along text": mean_of("starts_product", "starts"),
    "mean overlaps multiplied": product_of_means,
}


def estimate(name: str, s: Sums) -> Interval:
    """Return an estimate of E[A], bootstrapped over completions."""
    return resampled(lambda w: ESTIMATORS[name](s, w), len(s.cycles))


def bias(name: str, s: Sums) -> Interval:
    """Return an estimate minus the engine's counts on the same completions, resampled together."""
    return resampled(lambda w: ESTIMATORS[name](s, w) - COUNTS(s, w), len(s.cycles))
