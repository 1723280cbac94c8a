"""Metrics that carry their own reduction.

A metric stores what is needed to merge it with the same metric of another worker: a mean stores total and count, never
only its value. ``a + b`` over disjoint data equals the metric of the union, so merging cannot form a mean of means.
Values (plain floats) are computed once, at the sinks (``bebop.metrics.sinks``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Mean:
    """Weighted mean as total and count. NaN while the count is 0.

    >>> (Mean.of([1.0, 2.0]) + Mean.of([6.0])).value
    3.0
    """

    total: float
    count: float  # sum of weights

    @classmethod
    def of(cls, values: ArrayLike, weights: ArrayLike | None = None) -> "Mean":
        """Return the mean of numbers; ``weights`` broadcasts to them. Metrics raise ``TypeError``: merge them."""
        array = _numbers(values)
        if weights is None:
            return cls(float(array.sum()), float(array.size))
        weight = np.broadcast_to(_numbers(weights), array.shape)
        return cls(float((array * weight).sum()), float(weight.sum()))

    def __add__(self, other: "Mean") -> "Mean":
        """Return the mean of both, as if computed on the union."""
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """Return total / count."""
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum, for instance of samples or tokens."""

    total: float

    def __add__(self, other: "Sum") -> "Sum":
        """Return the sum of both, as if computed on the union."""
        return Sum(self.total + other.total) if isinstance(other, Sum) else NotImplemented

    @property
    def value(self) -> float:
        """Return the total."""
        return float(self.total)


@dataclass(frozen=True, slots=True)
class SampleSize:
    """Effective sample size of weights, as a share of their number: (Σw)² / (n Σw²) (Kish 1965). NaN without weights.

    >>> (SampleSize.of([1.0, 1.0]) + SampleSize.of([2.0, 0.0])).value
    0.6666666666666666
    """

    total: float  # sum of weights
    squares: float  # sum of their squares
    count: float

    @classmethod
    def of(cls, weights: ArrayLike) -> "SampleSize":
        """Return the effective sample size of weights of any shape."""
        array = _numbers(weights)
        return cls(float(array.sum()), float((array**2).sum()), float(array.size))

    def __add__(self, other: "SampleSize") -> "SampleSize":
        """Return the metric of both, as if computed on the union."""
        if not isinstance(other, SampleSize):
            return NotImplemented
        return SampleSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def value(self) -> float:
        """Return the effective sample size as a share from 0 to 1."""
        return self.total**2 / (self.count * self.squares) if self.squares else math.nan


@dataclass(frozen=True, slots=True)
class Max:
    """Maximum. NaN on either side gives NaN, unlike Python's ``max``."""

    value: float

    def __add__(self, other: "Max") -> "Max":
        """Return the maximum of both, as if computed on the union."""
        return Max(float(np.maximum(self.value, other.value))) if isinstance(other, Max) else NotImplemented


@dataclass(frozen=True, slots=True)
class Percentile:
    """Percentile that stores all its numbers: for few numbers, such as one per trajectory. NaN while empty."""

    numbers: tuple[float, ...]
    share: float  # of the numbers that lie at or below it, from 0 to 1

    @classmethod
    def of(cls, values: ArrayLike, share: float) -> "Percentile":
        """Return the percentile of numbers of any shape."""
        return cls(tuple(_numbers(values).ravel().tolist()), share)

    def __add__(self, other: "Percentile") -> "Percentile":
        """Return the metric of both, as if computed on the union."""
        if not isinstance(other, Percentile) or self.share != other.share:
            return NotImplemented
        return Percentile(self.numbers + other.numbers, self.share)

    @property
    def value(self) -> float:
        """Return the smallest number such that the share ``share`` of the numbers lies at or below it."""
        if not self.numbers:
            return math.nan
        return float(np.quantile(np.array(self.numbers), self.share, method="inverted_cdf"))


Metric = Mean | Sum | SampleSize | Max | Percentile
Metrics = dict[str, Metric]


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """Merge metrics of disjoint data name by name; raise ``TypeError`` if a name has two kinds or is a bare number."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if not isinstance(metric, Metric):
                raise TypeError(f"{name} is a {type(metric).__name__}, which does not know how to merge; give a metric")
            try:
                merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
            except TypeError as error:
                kinds = f"{type(merged[name]).__name__} with {type(metric).__name__}"
                raise TypeError(f"{name} cannot merge {kinds}: one name has one kind (and one share)") from error
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the value of each metric, as the last step before a sink: values can no longer be merged."""
    return {name: metric.value for name, metric in metrics.items()}


def _numbers(source: ArrayLike) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return ``source`` as float64; raise ``TypeError`` if it contains a metric."""
    array = np.asarray(source)
    if array.dtype == object:
        raise TypeError("numbers are wanted here; metrics are merged with +, never averaged")
    return array.astype(np.float64)
