"""Evidence that is not a mixture towards one table: single tokens, uniforms behind tokens, reported log-probs.

The probability integral transform of a token is uniform under the claim, for any rows: u lies at random between F(x-)
and F(x), in the order of likelihood or of ids. Dependence between the transforms of two tokens means that they share
randomness.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.answers import Block
from bebop.certify.evidence import SHARES, Array, log_mean_exp, share_bound

ELEMENTS = 1 << 19  # elements of a table in one chunk

# ---- one token too often


class Ids:
    """A bet for each token of the vocabulary that it comes too often; only tokens that occurred need an update."""

    def __init__(self, vocabulary: int) -> None:
        self._logs = np.zeros((vocabulary, len(SHARES)))  # without the factor of all positions
        # The claim, summed over positions; 0 where columns are not tokens.
        self._mass = np.zeros(vocabulary, np.float32)
        self._positions = 0
        self._odds = np.log(np.asarray(SHARES) / (1 - np.asarray(SHARES)))

    def add(self, tokens: NDArray[np.int64], log_p: Array, mass: Array | None) -> None:
        """Bet on ``tokens`` [n] with log-probs ``log_p`` [n]; ``mass`` [V] is the claim, summed over positions."""
        np.add.at(self._logs, tokens, np.logaddexp(0.0, self._odds - log_p[:, None]))
        self._positions += len(tokens)
        if mass is not None:
            self._mass += mass.astype(np.float32)

    def _all(self) -> Array:
        found: Array = self._logs + self._positions * np.log1p(-np.asarray(SHARES))
        return found

    @property
    def log_e(self) -> float:
        """Return ln e, mixed over tokens and shares with equal weights."""
        return float(log_mean_exp(self._all().ravel())) if self._positions else 0.0

    def leader(self) -> tuple[int, float]:
        """Return the token with the most evidence, and its likeliest share."""
        token, share = np.unravel_index(int(self._all().argmax()), self._logs.shape)
        return int(token), SHARES[int(share)]

    def bound(self) -> tuple[float, float]:
        """Return upper bounds, over all tokens, of the share and of the total variation per token.

        Bounds are largest for tokens with much evidence and for frequent tokens: the method checks the top 64 of each
        kind.
        """
        logs = self._all()
        some = {*np.argsort(-logs.max(-1))[:64].tolist(), *np.argsort(-self._mass)[:64].tolist()}
        shares = {token: share_bound(logs[token]) for token in some}
        left = {token: 1 - float(self._mass[token]) / max(self._positions, 1) for token in some}
        apart = {token: share * left[token] for token, share in shares.items()}
        return max(shares.values()), max(apart.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; it holds only the tokens that occurred."""
        there = np.flatnonzero(self._logs.any(1))
        return {"tokens": there, "logs": self._logs[there], "mass": self._mass.copy(), "positions": self._positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; raise ``ValueError`` if it has another vocabulary."""
        if len(state["mass"]) != len(self._mass):
            raise ValueError("the checkpoint's evidence is of another vocabulary: start the evidence anew")
        self._logs[:] = 0
        self._logs[np.array(state["tokens"])] = np.array(state["logs"])
        self._mass, self._positions = np.array(state["mass"]), int(state["positions"])


# ---- the uniform behind a token


def likelier(p: Tensor, cells: Tensor, own: Tensor) -> Tensor:
    """Return F(x-) [n] in the order of likelihood; ties are in the order of columns.

    ``cells`` [n] are the columns of the tokens x, ``own`` [n] is p(x). It takes one pass over the table, and no sort.
    """
    value = own[:, None]
    ahead, same = (p * (p > value)).sum(-1), p == value
    for row in torch.nonzero(same.sum(-1) > 1)[:, 0].tolist():
        ahead[row] += own[row] * same[row, : int(cells[row])].sum()
    return ahead


BINS = {"pit": (16,), "pit_ids": (16,), "pit_serial": (6, 6), "pit_rows": (6, 6)}
PRIOR = {1: 20.0, 2: 10.0}  # initial counts of each bin: they limit the influence of a first cohort


class Pit:
    """Bets on bins of the transform, with the frequencies of earlier cohorts (Krichevsky and Trofimov 1981).

    ``pit``: in the order of likelihood. ``pit_ids``: in the order of ids. ``pit_serial``: given the bin of the token
    before. ``pit_rows``: given the bin of the neighbouring request at the same position.
    """

    def __init__(self) -> None:
        self._logs = dict.fromkeys(BINS, 0.0)
        self._counts = {name: np.zeros(bins) for name, bins in BINS.items()}

    def add(self, ranked: Array, by_id: Array, serial: NDArray[np.int64], rows: NDArray[np.int64]) -> dict[str, Array]:
        """Bet on a cohort, then learn from it; return the gain in ln e at each position.

        ``ranked`` and ``by_id`` [N] are the transform in either order. ``serial`` and ``rows`` [N] are the positions
        that each position is paired with; -1: none.
        """
        gains: dict[str, Array] = {}
        for name, u in (("pit", ranked), ("pit_ids", by_id)):
            gains[name] = self._one(name, _bins(u, BINS[name][0])[..., None])
        six = _bins(by_id, 6)
        for name, partner in (("pit_serial", serial), ("pit_rows", rows)):
            there = np.flatnonzero(partner >= 0)
            gains[name] = np.zeros(len(partner))
            gains[name][there] = self._one(name, np.stack([six[partner[there]], six[there]], -1))
        return gains

    def _one(self, name: str, bins: NDArray[np.int64]) -> Array:
        """Bet on the last of bins [n, pair or single], given the others."""
        counts, size = self._counts[name], BINS[name][-1]
        prior = PRIOR[len(BINS[name])]
        chances = (counts + prior) / (counts.sum(-1, keepdims=True) + size * prior)
        at = tuple(bins.T)
        gains: Array = np.log(size * chances[at])
        self._logs[name] += float(gains.sum())
        np.add.at(counts, at, 1.0)
        return gains

    def log_es(self) -> dict[str, float]:
        """Return ln e of each bet, by name."""
        return self._logs

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: (self._logs[name], self._counts[name].copy()) for name in BINS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        for name in BINS:
            self._logs[name], self._counts[name] = float(state[name][0]), np.array(state[name][1])


def _bins(u: Array, count: int) -> NDArray[np.int64]:
    return np.clip((u * count).astype(np.int64), 0, count - 1)


def overlap(upper: Array | Tensor, own: Array | Tensor, low: Array | Tensor, high: Array | Tensor) -> Any:
    """Return the distribution of a token whose uniform lies between ``low`` and ``high``.

    An engine that uses a uniform twice draws from it. The probability of a token is the part of the interval from
    ``low`` to ``high`` that the token's own interval covers: F(x-) to F(x), or ``upper - own`` to ``upper``.
    """
    if isinstance(upper, Tensor):
        shared = torch.minimum(upper, high) - torch.maximum(upper - own, low)  # type: ignore[arg-type]
        return shared.clamp_min(0) / (high - low)
    return np.clip(np.minimum(upper, high) - np.maximum(upper - own, low), 0, None) / (high - low)


# ---- reported log-probs

EVENTS = {"reported": 1.0, "reported_far": 1.0, "reported_high": 0.5, "reported_low": 0.5, "reported_hot": 0.5,
          "reported_cold": 0.5}  # fmt: skip
"""Chance of each that an intact engine may have, of the chance to be off by more than the tolerance at all."""
FAR = 20  # tolerances
LARGEST_ODDS = 3.0  # ln of claimed over reported probability: no single token may decide
SHARE_WRONG = (0.002, 0.01, 0.05, 0.2, 0.5, 0.9)


class Reported:
    """Bets that more log-probs exceed the tolerance than an intact engine's precision explains.

    ``far`` counts errors of 20 times the tolerance. The last four events have half the allowed chance each. ``high``:
    tokens were drawn from the reported distribution. ``low``: tokens were drawn from the declared one. ``hot`` and
    ``cold``: the error points where a higher or a lower temperature would move log p(x), by the sign of log p(x) +
    entropy.
    """

    def __init__(self, allowed: float) -> None:
        """Begin with no evidence.

        ``allowed``: probability that a log-prob of an intact engine exceeds the tolerance.
        """
        self._null = allowed * np.asarray(list(EVENTS.values()))[:, None]
        self._shares = np.maximum(np.asarray(SHARE_WRONG), self._null)  # [EVENTS, shares]; what is allowed: no bet
        self._logs = np.zeros((len(EVENTS), len(SHARE_WRONG)))
        self.largest = 0.0  # distance, nats
        self._odds = np.zeros(2)  # sum of claimed over reported probability where they differ, and how often they do

    def add(self, block: Block, tolerance: Array) -> Array:
        """Bet on a cohort with ``reported`` and ``declared``; return each position's gain in ln e of ``reported``."""
        assert block.reported is not None and block.declared is not None
        apart = (block.reported - block.declared).double().cpu().numpy()
        known = ~np.isnan(apart)
        claim = block.probs if block.raw is None else block.raw
        step = max(1, ELEMENTS // claim.shape[1])
        entropy = torch.cat([torch.special.entr(part).sum(-1) for part in claim.split(step)])
        lean = np.sign((block.declared + entropy).double().cpu().numpy())
        wrong = known & ~(np.abs(apart) <= tolerance)
        far = known & ~(np.abs(apart) <= FAR * tolerance)
        events = np.stack([wrong, far, wrong & (apart > 0), wrong & (apart < 0), wrong & (apart * lean < 0),
                           wrong & (apart * lean > 0)])  # fmt: skip
        self.largest = max(self.largest, float(np.abs(apart[known]).max(initial=0.0)))
        self._odds += [np.exp(np.minimum(-apart[wrong], LARGEST_ODDS)).sum(), wrong.sum()]
        hit, miss = np.log(self._shares / self._null), np.log((1 - self._shares) / (1 - self._null))
        self._logs += events.sum(-1)[:, None] * hit + (known & ~events).sum(-1)[:, None] * miss
        best = int(self._logs[0].argmax())
        gains: Array = np.where(wrong, hit[0, best], miss[0, best] * known)
        return gains + np.where(wrong, np.minimum(np.abs(apart), 100.0) * 1e-3, 0.0)  # the furthest first

    @property
    def odds(self) -> float | None:
        """Return the mean of claimed over reported probability where these differ; None: they nowhere differ.

        Its expectation is 1 if tokens are drawn from the reported distribution: then it is the sum of the claim.
        """
        return float(self._odds[0] / self._odds[1]) if self._odds[1] else None

    def log_es(self) -> dict[str, float]:
        """Return ln e of each event."""
        return dict(zip(EVENTS, log_mean_exp(self._logs).tolist(), strict=True))

    def share(self, name: str) -> float:
        """Return an upper bound of the share of positions with that event."""
        at = list(EVENTS).index(name)
        return share_bound(self._logs[at], shares=self._shares[at])

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"logs": self._logs.copy(), "largest": self.largest, "odds": self._odds.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._logs, self.largest = np.array(state["logs"]), float(state["largest"])
        self._odds = np.array(state.get("odds", np.zeros(2)))
