"""Attribution of lost acceptance to tokens: the overlap lost between two windows of steps, shared out over kinds of
token.

At every tested place i of a completion the overlap o_i and the target's entropy H_i are known (``bebop.trajectory``).
The earlier steps give f(H), the overlap at an entropy, and r_g, the mean deviation of places of kind g from it. In the
later steps f(H_i) + r_g is the expected overlap if only entropies and the mix of places had changed. The loss

    L = mean_i (f(H_i) + r_g(i) - o_i),    change = (mean expected - mean before) - L

is a sum over kinds, so each kind has its share. A kind is, for instance, the token that the target expects most. r_g is
clipped so that the mean expectation of a kind stays an overlap, in [0, 1].
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.monitor.estimate import Array, Estimate

Ints = NDArray[np.int64]
BINS = 12  # of entropy, at most; equally full
FULL = 20  # places in a bin, at least
SHRINK = 10.0  # pseudo-places at f(H) added to each kind: with few places, r_g is mostly chance
DRAWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """N tested places of traced completions."""

    answer: Ints  # [N] which completion; completions are what is resampled
    place: Ints  # [N] index of the token in it
    overlap: Array  # [N] sum of min(p, q)
    entropy: Array  # [N] of the target, nats

    def __len__(self) -> int:
        return len(self.answer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Overlap lost by one kind of place; the losses of all kinds add up to that of all places."""

    kind: int
    before: int  # places
    after: int
    overlap_before: float  # NaN: there were none
    overlap_after: float
    expected: float  # in the steps after
    loss: Estimate  # overlap a place *of all kinds*; its interval is over completions
    worst: Ints  # indices into the places after, the largest loss first, a completion once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDrift:
    """Losses of all kinds, largest loss first (largest gain first if overlap rose above the expectation)."""

    change: float  # of the mean overlap
    explained: float  # part of it: entropies and the mix of places
    loss: Estimate  # the rest, with the opposite sign
    parts: tuple[Part, ...]


def share_out(
    before: Places, after: Places, kinds_before: Ints, kinds_after: Ints, worst: int = 5, seed: int = 0
) -> TokenDrift:
    """Share the loss out over kinds [N]; raise ``ValueError`` if a window has no places."""
    if not len(before) or not len(after):
        raise ValueError("there are no tested places on one side")
    curve = _curve(before)
    own, now = before.overlap - curve(before.entropy), curve(after.entropy)
    kinds, places = np.unique(np.concatenate([kinds_before, kinds_after]), return_inverse=True)
    first, second = places[: len(before)], places[len(before) :]
    count = len(kinds)
    then = _by_answer(before.answer, first, count, np.stack([np.ones_like(own), own, before.overlap]))
    later = _by_answer(after.answer, second, count, np.stack([np.ones_like(now), now, after.overlap]))
    losses, _ = _losses(then.sum(1), later.sum(1))
    draws = _draws(then, later, seed)
    wanted = _expected(then.sum(1), later.sum(1))
    expected = now + (wanted - _ratio(later[1].sum(0), later[0].sum(0)))[second]
    whole = Estimate(point=float(losses.sum()), draws=draws.sum(1))
    ahead = 1.0 if whole.point >= 0 else -1.0
    order = [g for g in np.argsort(-ahead * losses, kind="stable") if later[0, :, g].sum() > 0]
    missing = ahead * (expected - after.overlap)
    parts = tuple(
        Part(
            kind=int(kinds[g]),
            before=int(then[0, :, g].sum()),
            after=int(later[0, :, g].sum()),
            overlap_before=float(_ratio(then[2, :, g].sum(), then[0, :, g].sum())),
            overlap_after=float(_ratio(later[2, :, g].sum(), later[0, :, g].sum())),
            expected=float(wanted[g]),
            loss=Estimate(point=float(losses[g]), draws=draws[:, g]),
            worst=_worst(after.answer, missing, np.flatnonzero(second == g), worst),
        )
        for g in order
    )
    change = float(after.overlap.mean() - before.overlap.mean())
    return TokenDrift(change=change, explained=change + whole.point, loss=whole, parts=parts)


class _Curve:
    """Mean overlap at an entropy: linear between the means of bins, constant beyond them."""

    def __init__(self, entropy: Array, overlap: Array) -> None:
        self.entropy, self.overlap = entropy, overlap

    def __call__(self, entropy: Array) -> Array:
        found: Array = np.interp(entropy, self.entropy, self.overlap)
        return found


def _curve(places: Places) -> _Curve:
    order = np.argsort(places.entropy, kind="stable")
    bins = np.array_split(order, max(1, min(BINS, len(order) // FULL)))
    means = np.array([[places.entropy[b].mean(), places.overlap[b].mean()] for b in bins])
    return _Curve(means[:, 0], means[:, 1])


def _by_answer(answer: Ints, kind: NDArray[np.intp], kinds: int, values: Array) -> Array:
    """Return the sums [n, A, G] of values [n, N] by completion and kind."""
    answers, row = np.unique(answer, return_inverse=True)
    sums = np.zeros((len(values), len(answers), kinds))
    for own, value in zip(sums, values, strict=True):
        np.add.at(own, (row, kind), value)
    return sums


def _expected(then: Array, later: Array) -> Array:
    """Return each kind's expected mean overlap [..., G] in the later steps if only entropies and the mix of places
    changed.

    NaN for a kind without places there; ``then``, ``later``: sums [3, ..., G].
    """
    found: Array = np.clip(_ratio(later[1], later[0]) + _off(then), 0.0, 1.0)
    return found


def _off(then: Array) -> Array:
    """Return r_g [..., G] from counts and sums [3, ..., G] of the earlier steps."""
    found: Array = then[1] / (then[0] + SHRINK)
    return found


def _losses(then: Array, later: Array) -> tuple[Array, Array]:
    """Return the loss of each kind [..., G] and the number of all places [..., 1], from sums [3, ..., G]."""
    whole = later[0].sum(-1, keepdims=True)
    expected = np.where(later[0] > 0, later[0] * _expected(then, later), 0.0)
    return (expected - later[2]) / whole, whole


def _draws(then: Array, later: Array, seed: int) -> Array:
    """Return the losses [B, G] with the completions of both windows resampled; f stays as it is."""
    rng = np.random.default_rng([seed, then.shape[1], later.shape[1]])

    def resampled(sums: Array) -> Array:
        answers = sums.shape[1]
        weights = rng.multinomial(answers, np.full(answers, 1 / answers), DRAWS).astype(float)
        found: Array = np.einsum("ba,nag->nbg", weights, sums)
        return found

    return _losses(resampled(then), resampled(later))[0]


def _worst(answer: Ints, missing: Array, among: NDArray[np.intp], count: int) -> Ints:
    """Return the indices ``among`` with the largest ``missing`` [N], one per completion and at most ``count``."""
    ordered = among[np.argsort(-missing[among], kind="stable")]
    _, first = np.unique(answer[ordered], return_index=True)
    return ordered[np.sort(first)][:count].astype(np.int64)


def _ratio(total: Any, count: Any) -> Any:
    """Return total / count, NaN where the count is 0."""
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=np.asarray(count) > 0)
