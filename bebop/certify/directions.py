"""Directions of the black box: distributions that each known kind of fault would mix into the claimed distribution.

Every direction is a distribution over the columns of its row, and depends only on the past. In a row where it is
undefined (no such token, an empty residual) it equals p, which is no bet.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from bebop.certify.answers import Block
from bebop.certify.noise import accepted_by_own_uniform, same_gumbel, same_uniform_rejected

FLOOR = 1e-12  # least p(x): a token that the claim excludes counts with this probability, so e stays finite
EMPTY = 1e-9  # less mass than this counts as none
PLACES = 4  # distinguished places of a decoding cycle: 0, 1, 2, and all from 3 on
NUCLEUS = 0.95
LEADING = 48  # bits of a double behind its sign, its exponent and four more of them
HOT, HOTTER, COLD, COLDER = 0.8, 0.5, 1.25, 2.0  # powers of p


class Direction(Protocol):
    """A distribution r [n, M] that need not be stored as a table."""

    def at(self, cells: Tensor) -> Tensor:
        """Return r at columns [n, R]."""

    def tv(self, p: Tensor) -> Tensor:
        """Return the total variation from p, [n]."""


@dataclass(frozen=True, slots=True)
class Table:
    """A distribution stored as a table."""

    r: Tensor  # [n, M]

    def at(self, cells: Tensor) -> Tensor:
        """Return r at columns [n, R]."""
        return self.r.gather(1, cells)

    def tv(self, p: Tensor) -> Tensor:
        """Return the total variation from p, [n]."""
        return (self.r - p).abs_().sum(-1) / 2


@dataclass(frozen=True)
class Within:
    """The distribution p restricted to some columns."""

    p: Tensor  # [n, M]
    kept: Tensor  # [n, M] bool

    @cached_property
    def mass(self) -> Tensor:
        """Return the mass of p in these columns, [n, 1]."""
        return (self.p * self.kept).sum(-1, keepdim=True)

    def at(self, cells: Tensor) -> Tensor:
        """Return r at columns [n, R]."""
        own = self.p.gather(1, cells)
        return torch.where(self.mass > EMPTY, own * self.kept.gather(1, cells) / self.mass.clamp_min(EMPTY), own)

    def tv(self, p: Tensor) -> Tensor:
        """Return the total variation from p, [n]."""
        mass = self.mass[:, 0]
        return torch.where(mass > EMPTY, 1 - mass, 0.0).clamp_min(0)


@dataclass(frozen=True, slots=True)
class Points:
    """Equal mass on a few distinct columns; -1: not in this row."""

    p: Tensor  # [n, M]
    columns: Tensor  # [n, k]

    def at(self, cells: Tensor) -> Tensor:
        """Return r at columns [n, R]."""
        there = (self.columns >= 0).sum(-1, keepdim=True)
        hits = (cells[:, :, None] == self.columns[:, None]).sum(-1)
        return torch.where(there > 0, hits / there.clamp_min(1), self.p.gather(1, cells))

    def tv(self, p: Tensor) -> Tensor:
        """Return the total variation from p, [n]."""
        there = self.columns >= 0
        count = there.sum(-1, keepdim=True)
        shared = torch.minimum(p.gather(1, self.columns.clamp_min(0)), 1 / count.clamp_min(1)) * there
        return torch.where(count[:, 0] > 0, 1 - shared.sum(-1), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Positions of a block, with the facts known before their tokens."""

    part: Block
    vocabulary: int
    neighbour: Tensor | None = None  # [n, M] row of the request before at the same position; p where there is none
    bigram: Tensor | None = None  # [n, M] learned from earlier cohorts
    _made: dict[str, Tensor] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return a table that several directions share; it is computed at the first call."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def p(self) -> Tensor:
        """Return the claim [n, M]."""
        return self.part.probs

    def column(self, token: Tensor) -> Tensor:
        """Return columns [n, k] of tokens [n, k]; -1: the row does not have the token."""
        if self.part.ids is None:
            return torch.where((token >= 0) & (token < self.p.shape[1]), token, -1)
        same = self.part.ids[:, None] == token[:, :, None]
        return torch.where(same.any(-1) & (token >= 0), same.to(torch.uint8).argmax(-1), -1)

    def stops(self) -> Tensor:
        """Return the columns [n, k] of the tokens that end a completion."""
        stops = torch.tensor(self.part.stops, device=self.p.device).expand(len(self.p), -1)
        return self.once("stops", lambda: self.column(stops))

    def log(self, name: str, table: Tensor) -> Tensor:
        """Return ln of a table [n, M], computed once for each name."""
        return self.once(f"log {name}", table.log)

    def middle(self) -> Tensor:
        """Return F(x-) + F(x) of the claim [n, M], in the order of ids."""
        return self.once("middle", lambda: middle(self.part, self.p))

    def nucleus(self) -> Tensor:
        """Return whether a column is among the likeliest that have .95 of the mass, [n, M]."""
        return self.once("nucleus", lambda: nucleus(self))

    def listed(self) -> Tensor:
        """Return the claim, with 0 in the column for all others."""
        return self.p if self.part.ids is None else self.p.masked_fill(self.part.ids < 0, 0.0)

    def without(self, columns: Tensor) -> Tensor:
        """Return a mask [n, M] of all columns except ``columns`` [n, k]."""
        kept = torch.ones_like(self.p, dtype=torch.bool)
        return kept.scatter(1, columns.clamp_min(0), columns < 0) if columns.shape[1] == 1 else _each(kept, columns)


def _each(kept: Tensor, columns: Tensor) -> Tensor:
    for column in columns.unbind(1):  # one at a time: several missing columns would write to one place
        kept &= torch.ones_like(kept).scatter(1, column[:, None].clamp_min(0), column[:, None] < 0)
    return kept


def unit(r: Tensor, p: Tensor) -> Tensor:
    """Return r normalised to sum 1; rows without mass become p."""
    mass = r.sum(-1, keepdim=True)
    if bool((mass > EMPTY).all()):  # nearly always; torch.where takes four times as long as the rest
        return r / mass
    return torch.where(mass > EMPTY, r / mass.clamp_min(EMPTY), p)


def middle(part: Block, r: Tensor) -> Tensor:
    """Return F(x-) + F(x) of r [n, M] in the order of ids: 0 to 2; the column for all others is the last."""
    if part.ids is None:
        return 2 * r.cumsum(-1) - r
    order = by_id(part.ids)
    ranked = r.gather(1, order)
    return torch.empty_like(r).scatter_(1, order, 2 * ranked.cumsum(-1) - ranked)


def by_id(ids: Tensor) -> Tensor:
    """Return columns [n, M] in the order of their ids; the one for all others is the last."""
    return torch.where(ids < 0, torch.iinfo(torch.int64).max, ids).argsort(-1)


def power(rows: Rows, name: str, base: Tensor, exponent: float) -> Tensor:
    """Return a distribution at another temperature; the mass of all other tokens is unchanged.

    ``name``: the name of ``base``, under which all of its powers share one logarithm.
    """
    grown = (rows.log(name, base) * exponent).exp_()
    if rows.part.ids is None:
        return unit(grown, base)
    rest = rows.part.ids < 0
    inner = grown.masked_fill_(rest, 0.0)
    mass = base.masked_fill(rest, 0.0).sum(-1, keepdim=True)
    total = inner.sum(-1, keepdim=True)
    return torch.where(rest | (total <= EMPTY), base, inner * mass / total.clamp_min(EMPTY))


def nucleus(rows: Rows) -> Tensor:
    """Return a mask [n, M] of the likeliest columns that together reach .95 of the mass."""
    p = rows.listed()
    ranked = p.topk(min(64, p.shape[1]), -1).values
    least = _least(ranked)
    if ranked.shape[1] < p.shape[1]:
        for row in torch.nonzero(ranked.sum(-1) < NUCLEUS)[:, 0].tolist():
            least[row] = _least(_upper_part(p[row])[None])[0]
    return (p >= least) & (p > 0)


def _least(ranked: Tensor) -> Tensor:
    """Return the smallest probability [n, 1] of the nucleus, from ``ranked`` [n, k] in descending order."""
    ahead = ranked.cumsum(-1) - ranked
    last = ((ahead < NUCLEUS) & (ranked > 0)).sum(-1, keepdim=True) - 1
    return ranked.gather(1, last.clamp_min(0))


def _upper_part(p: Tensor) -> Tensor:
    """Return the probabilities of p [M] that reach down to the end of the nucleus, in descending order.

    The leading bits of a double give its order of magnitude. One pass sums the mass of each magnitude, which avoids a
    sort of the whole row.
    """
    size = (p.view(torch.int64) >> LEADING).clamp_min_(0)  # below 0: minus zero
    above = torch.bincount(size, weights=p).flip(0).cumsum(0).flip(0)  # [sizes] mass of columns of a size or a larger
    reached = torch.nonzero(above >= NUCLEUS)
    smallest = int(reached[-1]) if len(reached) else 0
    return p[size >= smallest].sort(descending=True).values


def _uniform(rows: Rows) -> Direction:
    """Return equal mass on all tokens of the vocabulary."""
    if rows.part.ids is None:
        return Table(rows.p.new_full((1, 1), 1 / rows.p.shape[1]).expand_as(rows.p))
    r = torch.full_like(rows.p, 1 / rows.vocabulary)
    rest = (rows.part.ids < 0).double()
    unlisted = (rows.vocabulary - rows.p.shape[1] + rest.sum(-1, keepdim=True)) / rows.vocabulary
    r = r * (1 - rest) + unlisted * rest / rest.sum(-1, keepdim=True).clamp_min(1)
    return Table(unit(r, rows.p))


def _seen(rows: Rows, negated: bool) -> Direction | None:
    seen = rows.part.seen
    return None if seen is None else Within(rows.p, ~seen.bool() if negated else seen.bool())


def _given(r: Tensor | None) -> Direction | None:
    return None if r is None else Table(r)


CONTAMINATION: Mapping[str, Callable[[Rows], Direction | None]] = {
    "row_before": lambda rows: _given(rows.part.before),
    "neighbour": lambda rows: _given(rows.neighbour),
    "bigram": lambda rows: _given(rows.bigram),
    "hotter": lambda rows: Table(power(rows, "p", rows.p, HOT)),
    "much_hotter": lambda rows: Table(power(rows, "p", rows.p, HOTTER)),
    "colder": lambda rows: Table(power(rows, "p", rows.p, COLD)),
    "much_colder": lambda rows: Table(power(rows, "p", rows.p, COLDER)),
    "argmax": lambda rows: Points(rows.p, rows.listed().argmax(-1, keepdim=True)),
    "second": lambda rows: Points(rows.p, rows.listed().topk(2, -1).indices[:, 1:]),
    "nucleus": lambda rows: Within(rows.p, rows.nucleus()),
    "tail": lambda rows: Within(rows.p, ~rows.nucleus()),
    "uniform": _uniform,
    "low_ids": lambda rows: Table(unit(rows.p * (2 - rows.middle()), rows.p)),
    "high_ids": lambda rows: Table(unit(rows.p * rows.middle(), rows.p)),
    "stop": lambda rows: Points(rows.p, rows.stops()) if rows.part.stops else None,
    "no_stop": lambda rows: Within(rows.p, rows.without(rows.stops())) if rows.part.stops else None,
    "repeat": lambda rows: Points(rows.p, rows.column(rows.part.last[:, None])),
    "no_repeat": lambda rows: Within(rows.p, rows.without(rows.column(rows.part.last[:, None]))),
    "seen": lambda rows: _seen(rows, False),
    "unseen": lambda rows: _seen(rows, True),
    "unprocessed": lambda rows: _given(rows.part.raw),
    "copies": lambda rows: _copies(rows),
}
# Faults of speculative cycles differ by the place in the cycle: a row of the wrong place, a cache not rolled back.
BY_PLACE = ("row_before", "bigram", "hotter", "colder", "seen", "unseen", "argmax", "stop", "no_stop", "no_repeat")
"""Of these, one bet a place (``PLACES``)."""


def _copies(rows: Rows) -> Direction | None:
    twin = rows.part.twin
    return None if twin is None else Points(rows.p, rows.column(twin[:, None]))


def verified(p: Tensor, drawn: Tensor, accepted: Tensor, recovered: Tensor) -> Tensor:
    """Return the distribution [n, M] of a token after the verification of one draft.

    The draft comes from ``drawn`` and is accepted with probability ``accepted``. After a rejection the token comes from
    ``recovered``. All are [n, M].
    """
    taken = drawn * accepted
    rejected = (1 - taken.sum(-1, keepdim=True)).clamp_min(0)
    return unit(taken.addcmul_(rejected, recovered), p)


def draft_directions(rows: Rows) -> Iterator[tuple[str, Direction]]:
    """Yield the distributions of faulty verification of one draft from ``Block.draft``; at place 0 it is that draft."""
    p, q = rows.p, rows.part.draft
    assert q is not None
    both = torch.minimum(p, q)
    left = (p - q).clamp_min_(0)
    residual = unit(left, p)
    odds = p / q.clamp_min(1e-300)  # where q is 0 it may be anything: nothing is drafted there
    accept = odds.clamp_max(1)
    top = q.argmax(-1, keepdim=True)
    yield "draft", Table(q)
    yield "overlap", Table(unit(both, p))
    yield "residual", Table(residual)
    yield "draft_top", Points(p, top)
    yield "no_draft_top", Within(p, rows.without(top))
    yield "residual_is_target", Table(both + (1 - both.sum(-1, keepdim=True)) * p)
    yield "residual_unnormalised", Table(verified(p, q, accept, _unnormalised(rows, left)))
    high = middle(rows.part, residual)
    yield "residual_high_ids", Table(verified(p, q, accept, unit(residual * high, p)))
    yield "residual_low_ids", Table(verified(p, q, accept, unit(residual * (2 - high), p)))
    yield "draft_hotter", Table(verified(p, power(rows, "draft", q, HOT), accept, residual))
    yield "draft_colder", Table(verified(p, power(rows, "draft", q, COLD), accept, residual))
    yield "draft_greedy", Table(verified(p, torch.zeros_like(q).scatter(1, top, 1.0), accept, residual))
    if rows.part.stops:
        kept = rows.without(rows.stops())
        yield "draft_no_stop", Table(verified(p, unit(q * kept, q), accept, residual))
    yield "accept_more", Table(verified(p, q, (MORE * odds).clamp_max_(1), residual))
    yield "accept_less", Table(verified(p, q, accept.log().mul_(LESS).exp_(), residual))
    # A draft also stands if it equals a draw of the target, besides the test with p / q.
    yield "accept_or_match", Table(verified(p, q, 1 - (1 - accept) * (1 - p), residual))


def _unnormalised(rows: Rows, residual: Tensor) -> Tensor:
    """Return the result of a search in a residual that was not normalised: the missing mass goes to its last token."""
    ids = torch.arange(residual.shape[1], device=residual.device) if rows.part.ids is None else rows.part.ids
    last = ((residual > 0) * (ids + 2)).argmax(-1, keepdim=True)
    return residual.scatter_add(1, last, (1 - residual.sum(-1, keepdim=True)).clamp_min(0))


MORE, LESS = 1.25, 0.8  # factor and exponent of the acceptance probability
DRAFT = (
    *("draft", "overlap", "residual", "draft_top", "no_draft_top", "residual_is_target", "residual_unnormalised"),
    *("residual_high_ids", "residual_low_ids", "draft_hotter", "draft_colder", "draft_greedy", "draft_no_stop"),
    *("accept_more", "accept_less", "accept_or_match"),
)


def noise_directions(rows: Rows) -> Iterator[tuple[str, Direction]]:
    """Yield the distributions that verification samples if two draws of a draft (``Block.draft``) share noise."""
    order = None if rows.part.ids is None else by_id(rows.part.ids)
    p, q = rows.p, rows.part.draft
    assert q is not None
    if order is not None:  # a uniform is looked up in the order of ids
        p, q = p.gather(1, order), q.gather(1, order)
    residual = unit((p - q).clamp_min(0), p)
    accept = torch.where(q > 0, p / q.clamp_min(1e-300), 1.0).clamp_max(1)
    before = q.cumsum(-1) - q
    for name, r in (
        ("residual_draft_gumbel", verified(p, q, accept, same_gumbel(q, residual))),
        ("residual_draft_uniform", verified(p, q, accept, same_uniform_rejected(q, residual, (q - p).clamp_min(0)))),
        ("accept_draft_uniform", verified(p, q, accepted_by_own_uniform(p, q, before), residual)),
    ):
        yield name, Table(r if order is None else torch.empty_like(r).scatter_(1, order, r))


SHARED_NOISE = ("residual_draft_gumbel", "residual_draft_uniform", "accept_draft_uniform")


def directions(rows: Rows) -> Iterator[tuple[str, Direction]]:
    """Yield every direction that these rows allow, one at a time: at most a few tables [n, M] are alive."""
    for name, make in CONTAMINATION.items():
        if (found := make(rows)) is not None:
            yield name, found
    if rows.part.draft is not None:
        yield from draft_directions(rows)
        yield from noise_directions(rows)
