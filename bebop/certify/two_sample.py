"""Tests without a reference: do two engines draw from one distribution, and does an engine repeat itself by seed?

The two-sample test bets on pairs of completions of one prompt, one of each engine. If both draw from one distribution,
it is a fair coin which of the two came from which engine. A classifier that has learned from *earlier* pairs alone bets
on it, and its wins are an e-process (sequential two-sample testing by betting, Shekhar and Ramdas 2021, arXiv
2112.09162). It sees differences between whole completions only where they repeat. A share of tokens that a reference
finds within a few thousand tokens takes tens of thousands of completions here.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bebop.certify.answers import Answer

SCALES = (0.1, 0.3, 1.0, 3.0)  # factors of the classifier's score, mixed with equal weights
RATE = 0.3  # learning rate of AdaGrad

Features = dict[tuple[str, int], float]


class TwoSample:
    """Evidence that two engines differ; ``log_e`` is anytime valid (Ville)."""

    def __init__(self) -> None:
        self.pairs = 0
        self.history: list[tuple[int, float]] = []  # tokens of the first engine, ln E
        self.tokens = 0
        self._wins = np.zeros(len(SCALES))
        self._weights: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._squares: defaultdict[tuple[str, int], float] = defaultdict(lambda: 1e-6)

    @property
    def log_e(self) -> float:
        """Return ln of the e-value."""
        top = float(self._wins.max())
        return top + math.log(float(np.exp(self._wins - top).mean()))

    def update(self, own: Sequence[Answer], others: Sequence[Answer]) -> None:
        """Add completions of both engines, request by request, with the same prompts and independent seeds."""
        for one, other in zip(own, others, strict=True):
            if one.prompt != other.prompt:
                raise ValueError(f"requests {one.request} and {other.request} have different prompts")
            self._bet(difference(features(one), features(other)))
            self.pairs += 1
            self.tokens += len(one.token_ids)
        self.history.append((self.tokens, self.log_e))

    def _bet(self, apart: Features) -> None:
        """Bet with the weights learned from earlier pairs, then learn from this pair."""
        score = sum(self._weights[name] * value for name, value in apart.items() if name in self._weights)
        scaled = score * np.asarray(SCALES)
        self._wins += math.log(2) - np.logaddexp(0.0, -scaled)  # ln 2 sigma(s): fair, as sigma(s) + sigma(-s) = 1
        error = 1.0 / (1.0 + math.exp(min(score, 700.0)))
        for name, value in apart.items():
            slope = error * value
            self._squares[name] += slope * slope
            self._weights[name] += RATE * slope / math.sqrt(self._squares[name])


def features(answer: Answer) -> Features:
    """Return the features of the classifier: length, end, the first tokens, and how often each token occurs."""
    ids = answer.token_ids.tolist()
    found: Features = {("length", 0): math.log1p(len(ids)) / 4, ("stopped", 0): float(answer.finish_reason == "stop")}
    for place, token in enumerate(ids[:3]):
        found[(f"at {place}", token)] = 1.0
    for token in ids:
        name = ("count", token)
        found[name] = found.get(name, 0.0) + 1.0
    return {name: math.sqrt(value) if name[0] == "count" else value for name, value in found.items()}


def difference(one: Features, other: Features) -> Features:
    """Return the features of one completion minus those of another, without those that are equal."""
    apart = {name: one.get(name, 0.0) - other.get(name, 0.0) for name in {**one, **other}}
    return {name: value for name, value in apart.items() if value}


def repeated(first: Sequence[Answer], again: Sequence[Answer]) -> float:
    """Return the share of completions that came out the same when sampled again with the same seeds."""
    same = [np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True)]
    return float(np.mean(same))
