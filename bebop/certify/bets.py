"""Bets against the claim: towards named directions, and towards a learned one.

``Bets`` holds the bets on named directions. For each direction it tracks ln e of every share, the total variation from
the claim, and how fast a fault would show. ``Tilt`` learns a direction of its own from earlier cohorts. ``Bigram``
learns which token follows which.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.answers import Block
from bebop.certify.directions import FLOOR, Direction, Rows
from bebop.certify.evidence import SHARES, Array, log_mean_exp, share_bound, visible_share

SAMPLE = 64  # one position in so many is enumerated, to learn how fast a fault would show
WORST = 16  # positions kept for each direction
DOUBLINGS = 20  # of a run's tokens, at which ``needed`` stops its search


class Bets:
    """Running bets on named directions."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.tested: set[str] = set()
        self._at = {name: i for i, name in enumerate(self.names)}
        self._logs = np.zeros((len(names), len(SHARES)))
        self._moved = np.zeros(len(names))  # total variation between direction and claim, summed over positions
        self._growth = np.zeros((2, len(names), len(SHARES)))  # ln(1 + share (r/p - 1)) and its square, under the fault
        self._sampled = np.zeros(len(names))  # number of positions in these sums
        self._worst: dict[str, list[tuple[float, int, int]]] = {}  # r/p, request, position

    def add(self, names: Sequence[str], masks: Array, ratio: Array, tv: Array, places: NDArray[np.int64]) -> None:
        """Bet on one direction at subsets of positions: ``masks`` [names, n], ``ratio`` r(x)/p(x) [n], ``tv`` [n].

        ``places`` [n, 2] are request and position, to report the worst positions later.
        """
        own = [self._at[name] for name in names]
        excess = ratio - 1
        for e, share in enumerate(SHARES):
            self._logs[own, e] += masks @ np.log1p(share * excess)
        self._moved[own] += masks @ tv
        for name, mask in zip(names, masks, strict=True):
            if mask.any():
                self.tested.add(name)
                self._keep(name, np.where(mask > 0, ratio, 0.0), places)

    def learn(self, names: Sequence[str], masks: Array, direction: Direction, p: Tensor) -> None:
        """Enumerate rows p [n, M] to learn how fast a fault towards this direction shows; masks [names, n]."""
        cells = torch.arange(p.shape[1], device=p.device).expand(len(p), -1)
        r = direction.at(cells)
        excess, moved = r / p.clamp_min(FLOOR) - 1, r - p
        own = [self._at[name] for name in names]
        for e, share in enumerate(SHARES):  # one at a time: all together leave the cache
            logs = torch.log1p(excess * share)
            grown = (moved * share).add_(p).mul_(logs)
            for moment in (0, 1):
                self._growth[moment, own, e] += masks @ grown.sum(-1).cpu().numpy()
                grown.mul_(logs)
        self._sampled[own] += len(p)

    def _keep(self, name: str, ratio: Array, places: NDArray[np.int64]) -> None:
        best = np.argsort(-ratio, kind="stable")[:WORST]
        new = [(float(ratio[i]), int(places[i, 0]), int(places[i, 1])) for i in best]
        self._worst[name] = sorted(self._worst.get(name, []) + new, reverse=True)[:WORST]

    def log_es(self) -> Array:
        """Return ln e of every direction, mixed over shares: [names]."""
        return log_mean_exp(self._logs)

    def bound(self, name: str, tokens: int) -> tuple[float, float]:
        """Return upper bounds of a direction's share, and of its total variation per token."""
        share = share_bound(self._logs[self._at[name]])
        return share, share * float(self._moved[self._at[name]]) / max(tokens, 1)

    def enumerated(self, name: str) -> bool:
        """Return whether ``learn`` has measured how fast a fault towards this direction would show."""
        return bool(self._growth[1, self._at[name]].any())

    def visible(self, name: str, tokens: int, weight: float, alpha: float) -> tuple[float, float]:
        """Return the smallest share that shows with probability 90 %, and its total variation per token."""
        at = self._at[name]
        growth, square = self._growth[:, at] / max(self._sampled[at], 1)
        share = visible_share(tokens, growth, square, weight, alpha)
        return share, share * float(self._moved[at]) / max(tokens, 1)

    def needed(self, name: str, tokens: int, weight: float, alpha: float, tv: float) -> int | None:
        """Return how many tokens show a fault of total variation ``tv`` with probability 90 %, to a factor of 2.

        The result is at least ``tokens``; None means that the direction never moves that much.
        """
        at = self._at[name]
        share = tv * tokens / self._moved[at] if self._moved[at] > 0 else math.inf
        if share > 1:
            return None
        growth, square = self._growth[:, at] / max(self._sampled[at], 1)
        many = (tokens << k for k in range(DOUBLINGS))
        return next((n for n in many if visible_share(n, growth, square, weight, alpha) <= share), tokens << DOUBLINGS)

    def worst(self, name: str) -> list[tuple[int, int, float]]:
        """Return request, position and the token's gain in ln e at the likeliest share, the largest first."""
        share = SHARES[int(self._logs[self._at[name]].argmax())]
        return [(request, at, float(np.log1p(share * (r - 1)))) for r, request, at in self._worst.get(name, [])]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "names": self.names,
            "tested": sorted(self.tested),
            "logs": self._logs.copy(),
            "moved": self._moved.copy(),
            "growth": self._growth.copy(),
            "sampled": self._sampled.copy(),
            "worst": {name: list(kept) for name, kept in self._worst.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; raise ``ValueError`` if it has other directions."""
        if tuple(state["names"]) != self.names or np.shape(state["logs"]) != self._logs.shape:
            raise ValueError("the checkpoint's evidence is of other directions: start the evidence anew")
        self.tested = set(state["tested"])
        self._logs, self._moved = np.array(state["logs"]), np.array(state["moved"])
        self._growth, self._sampled = np.array(state["growth"]), np.array(state["sampled"])
        self._worst = {name: [tuple(one) for one in kept] for name, kept in state["worst"].items()}


# ---- the learned direction

FEATURES = ("log p", "row before", "bigram", "draft", "seen", "repeat", "stop", "place among ids")
RIDGE = 100.0  # weighs about as much as this many tokens
MAX_WEIGHT = 1.0
STEPS = (0.25, 0.5, 1.0)  # of w, mixed with equal weights; each twice the one before
CLAMP = 6.0  # of features, so that no rare token decides
LEAST = math.log(1e-9)  # lower limit of a log-probability, for the same reason


class Tilt:
    """Bets on the tilted claim p(x) exp(w · f(x)) / z, where w fits the tokens of earlier cohorts.

    It detects faults without a name: any fault that makes tokens likelier by a smooth function of their features. w is
    one Newton step from 0 on the log-likelihood: (F + ridge)^-1 S. The score S is the sum of f(x) - E f. The Fisher
    information F is the sum of outer products of the same deviations, whose expectation under the claim is F itself. In
    the first cohort w is 0 and no bet is placed.
    """

    def __init__(self) -> None:
        size = len(FEATURES)
        self._logs = np.zeros(len(STEPS))
        self._score = np.zeros(size)
        self._fisher = np.zeros((size, size))
        self._new: list[Array] = []  # deviations [n, F] of this cohort

    @property
    def log_e(self) -> float:
        """Return ln of the e-value, mixed over the steps of w."""
        return float(log_mean_exp(self._logs))

    def weights(self) -> Array:
        """Return w [F] from earlier cohorts."""
        solved = np.linalg.solve(self._fisher + RIDGE * np.eye(len(FEATURES)), self._score)
        return np.clip(solved, -MAX_WEIGHT, MAX_WEIGHT)

    def add(self, rows: Rows, cells: Tensor) -> Array:
        """Bet on tokens with columns ``cells`` [n]; return the gain in ln e of each, [n]."""
        p, w = rows.p, torch.from_numpy(self.weights()).to(rows.p.device)
        own = torch.zeros(len(p), len(FEATURES), dtype=torch.float64, device=p.device)
        mean = torch.zeros_like(own)
        lean = torch.zeros_like(p) if bool(w.any()) else None
        for i, one in enumerate(features(rows)):
            if one is None:
                continue
            mean[:, i] = (p * one).sum(-1)
            own[:, i] = one.gather(1, cells[:, None])[:, 0] - mean[:, i]
            if lean is not None:
                lean.add_(one, alpha=float(w[i]))
        self._new.append(own.cpu().numpy())
        if lean is None:
            return np.zeros(len(p))
        gains = _gains(p, lean.sub_((mean @ w)[:, None]), own @ w)
        self._logs += gains.sum(0)
        return gains[:, int(self._logs.argmax())]

    def close(self) -> None:
        """Learn from the cohort that just ended."""
        for own in self._new:
            self._score += own.sum(0)
            self._fisher += own.T @ own
        self._new = []

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the state for a checkpoint."""
        return {"logs": self._logs.copy(), "score": self._score.copy(), "fisher": self._fisher.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._logs, self._score = np.array(state["logs"]), np.array(state["score"])
        self._fisher, self._new = np.array(state["fisher"]), []


def _gains(p: Tensor, lean: Tensor, taken: Tensor) -> Array:
    """Return ln of tilted claim over claim at each step of w, [n, STEPS], for tokens whose tilt is ``taken`` [n]."""
    grown = (STEPS[0] * lean).exp_()  # and its square and fourth power: one exponential for all steps
    found = []
    for step in STEPS:
        found.append(step * taken - (p * grown).sum(-1).log())
        grown.square_()
    gains: Array = torch.stack(found, -1).cpu().numpy()
    return gains


def features(rows: Rows) -> Iterator[Tensor | None]:
    """Yield features of the columns [n, M] that are known before the token; None for a missing feature."""
    p, part = rows.p, rows.part
    log_p = rows.log("p", p).clamp_min(LEAST)

    def against(name: str, other: Tensor | None) -> Tensor | None:
        return None if other is None else rows.log(name, other).clamp_min(LEAST).sub_(log_p).clamp_(-CLAMP, CLAMP)

    yield log_p.clamp(-CLAMP, CLAMP)
    yield against("before", part.before)
    yield against("bigram", rows.bigram)
    yield against("draft", part.draft)
    yield None if part.seen is None else part.seen.double()
    yield (~rows.without(rows.column(part.last[:, None]))).double()
    yield (~rows.without(rows.stops())).double() if part.stops else None
    yield rows.middle()


# ---- pairs of tokens

MAX_PAIRS = 1 << 17  # 1.5 MB; the rarest are forgotten first
PRIOR = 4.0  # weight of the claim, in tokens


class Bigram:
    """Counts of token pairs in earlier cohorts: a stand-in for any context that is shorter than the true one.

    Call ``learn`` after a cohort and ``table`` before the next.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.keys: NDArray[np.int64] = np.zeros(0, np.int64)  # token before * vocabulary + token, sorted
        self.counts: NDArray[np.float32] = np.zeros(0, np.float32)

    def learn(self, before: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Count pairs [N]."""
        new, counts = np.unique(before * self.vocabulary + tokens, return_counts=True)
        keys, place = np.unique(np.concatenate([self.keys, new]), return_inverse=True)
        total = np.bincount(place, weights=np.concatenate([self.counts, counts]), minlength=len(keys))
        if len(keys) > MAX_PAIRS:
            kept = np.sort(np.argsort(-total, kind="stable")[:MAX_PAIRS])
            keys, total = keys[kept], total[kept]
        self.keys, self.counts = keys, total.astype(np.float32)

    def table(self, part: Block) -> Tensor | None:
        """Return (PRIOR p + counts after the last token) / their sum, [n, M]; None before any pair was counted."""
        if not len(self.keys):
            return None
        last = part.last.cpu().numpy()
        first = np.searchsorted(self.keys, last * self.vocabulary)
        count = np.searchsorted(self.keys, (last + 1) * self.vocabulary) - first
        rows = np.repeat(np.arange(len(last)), count)
        entry = np.arange(len(rows)) + np.repeat(first - (np.cumsum(count) - count), count)
        r = PRIOR * part.probs
        token = self.keys[entry] - last[rows] * self.vocabulary
        values = torch.from_numpy(self.counts[entry].astype(np.float64)).to(r.device)
        at = torch.from_numpy(rows).to(r.device)
        column = torch.from_numpy(token).to(r.device)
        if part.ids is not None:
            column = _columns(part.ids, at, column)
            at, values, column = at[column >= 0], values[column >= 0], column[column >= 0]
        r.index_put_((at, column), values, accumulate=True)
        return r / r.sum(-1, keepdim=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"keys": self.keys.copy(), "counts": self.counts.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.keys, self.counts = np.array(state["keys"], np.int64), np.array(state["counts"], np.float32)


def _columns(ids: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Return the column [entries] of each token in its row: its own, else the one for all others, else -1."""
    ranked, order = ids.sort(-1)
    found = []
    for at, token in zip(rows.split(4096), tokens.split(4096), strict=True):
        own = ranked[at]
        place = torch.searchsorted(own, token[:, None]).clamp_max(own.shape[1] - 1)
        there = own.gather(1, place) == token[:, None]
        rest = torch.where(own[:, :1] < 0, 0, -1)
        place = torch.where(there, place, rest)[:, 0]
        found.append(torch.where(place >= 0, order[at, place.clamp_min(0)], -1))
    return torch.cat(found) if found else rows.new_zeros(0)
