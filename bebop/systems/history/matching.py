"""Matches of a request with other completions of its prompt, and how much such matches are worth.

A draft is accepted with the overlap of its distribution with the target's, and overlap is what is learned here: that of
history's distribution h, of the head's m, and of their mean. The overlap of w h + (1 - w) m is concave in w, but its
maximum is mostly near an end: where the target is sure of one token, it is linear. The w of the greatest likelihood,
which the share of tokens from history would give, lies in between and is worse than either end.

Finding the followers is a walk through dictionaries, a few microseconds a token and row.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.model.attention import Span
from bebop.rollout.decoding.base import Rows, TargetOutput
from bebop.rollout.history import BEGIN, ROOT, Automaton
from bebop.rollout.slots import Slots
from bebop.systems.history.options import HistoryOptions

# ---- how much matches are worth


# Buckets: matches of 1, 2, 3-4, 5-8, 9-16 and more tokens; one token followed once, twice or more often, or several
# tokens followed. The last bucket is that of positions without a match.
LENGTHS, KINDS = 6, 4
BUCKETS, NONE = LENGTHS * KINDS + 1, LENGTHS * KINDS
SHARES = (1.0, 0.5, 0.0)  # possible w of a mixture; the first of equals is used
PRIOR = 4.0  # weight of the prior, in positions
HEAD = 0.7  # prior overlap of the head
DOUBT = 2.0  # match length times number of followers at which a match is as likely wrong as right
SEVERAL = 0.5  # factor on that chance if several tokens followed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """Trust of a row, by bucket."""

    share: Sequence[float]  # w
    alone: Sequence[float]  # mean overlap of history with the target; 0 without a match
    gain: Sequence[float]  # tokens that the head adds to that, 0 or more


def prior() -> Tensor:
    """Return prior sums [BUCKETS, 7], worth PRIOR positions.

    Columns: overlaps with w of SHARES; positions of the first overlap, and of the others; drafts accepted where the
    head was asked, and further drafts accepted after them.
    """
    lengths = 2.0 ** torch.arange(LENGTHS, dtype=torch.float64)[:, None]
    strength = lengths * torch.tensor([1.0, 2.0, 3.0, 1.0], dtype=torch.float64)
    share = strength / (strength + DOUBT)
    share[:, -1] *= SEVERAL
    alone = torch.cat([share.flatten(), share.new_zeros(1)])
    head = torch.full_like(alone, HEAD)
    both = torch.where(alone > 0, (alone + head) / 2, 0)
    one = torch.ones_like(alone)
    return PRIOR * torch.stack([alone, both, head, one, one, HEAD * one, HEAD * one], 1)


def trusted(sums: Tensor) -> list[Trusted]:
    """Return the trust of rows from their sums [B, BUCKETS, 7].

    An accepted draft is worth one token, plus the accepted drafts that follow it.
    """
    overlaps = sums[..., :3] / sums[..., [3, 4, 4]]
    best, which = overlaps.max(-1)
    shares = torch.tensor(SHARES, dtype=sums.dtype, device=sums.device)[which]
    worth = 1 + sums[..., 6].sum(-1) / sums[..., 5].sum(-1)
    found = torch.stack([shares, overlaps[..., 0], (best - overlaps[..., 0]) * worth[:, None]], 1)
    return [Trusted(share=share, alone=alone, gain=gain) for share, alone, gain in found.tolist()]


class OverlapSums:
    """Sums of rows by bucket.

    ``siblings``: rows of one prompt learn together, and their sums are stored with the history of the prompt. Otherwise
    each request learns by itself.
    """

    def __init__(self, slots: Slots, siblings: bool) -> None:
        self.fresh = prior().to(slots.device)
        self.own = None if siblings else slots.register_column("history/trust", self.fresh)  # [S, BUCKETS, 7]

    def sums(self, texts: Sequence[Automaton]) -> Tensor:
        """Return the sums of the first rows [B, BUCKETS, 7]; ``texts`` are the texts that each row matches."""
        if self.own is not None:
            return self.own[: len(texts)]
        return torch.stack([self.fresh if one.learned is None else one.learned for one in texts])

    def add(self, texts: Sequence[Automaton], new: Tensor) -> None:
        """Add the new sums [B, BUCKETS, 7] of the first rows."""
        if self.own is not None:
            self.own[: len(texts)] += new
            return
        rows: dict[int, list[int]] = {}
        for row, one in enumerate(texts):
            rows.setdefault(id(one), []).append(row)
        for members in rows.values():
            one = texts[members[0]]
            one.learned = (self.fresh if one.learned is None else one.learned) + new[members].sum(0)


# ---- matches


@dataclass(slots=True)
class SuffixMatch:
    """Match of a row with the other completions of its prompt; a copy runs ahead while the row drafts."""

    texts: Automaton
    state: int = ROOT
    tokens: int = 0  # matched
    read: int = 0  # tokens of the completion

    def advance(self, token: int) -> None:
        """Extend the match by a token."""
        self.state, self.tokens = self.texts.advance(self.state, self.tokens, token)


class Next(NamedTuple):
    """Tokens that followed the longest match of a row, with their chances."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]  # of each, they sum to 1
    bucket: int

    @classmethod
    def of(cls, match: SuffixMatch, greedy: bool) -> Self | None:
        """Return the followers of a match, None if there are none; ``greedy``: only the most frequent follower."""
        texts = match.texts
        match.state, match.tokens = texts.followed(match.state, match.tokens)
        if match.state == ROOT:
            return None
        length = KINDS * min((match.tokens - 1).bit_length(), LENGTHS - 1)
        follow = texts.follow[match.state]
        if len(follow) == 1:  # mostly
            [(token, after)] = follow.items()
            return cls((token,), (1.0,), length + min(texts.count[after], KINDS - 1) - 1)
        found = texts.followers(match.state)
        if greedy:
            return cls((max(found, key=lambda one: one[1])[0],), (1.0,), length + KINDS - 1)
        total = sum(count for _, count in found)
        return cls(tuple(t for t, _ in found), tuple(c / total for _, c in found), length + KINDS - 1)

    def draw(self, uniform: float) -> int:
        """Return the token at ``uniform`` in [0, 1), by inverting the distribution."""
        if len(self.tokens) == 1:
            return self.tokens[0]
        sums = accumulate(self.chances)
        return next((t for t, total in zip(self.tokens, sums, strict=True) if uniform < total), self.tokens[-1])


class Followers:
    """Followers in the distributions of a cycle, one by one, each with the place of its draft."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, int, int]] = []  # row, step, token, bucket
        self.chances: list[tuple[float, float]] = []  # in history, and the weight w that history has there

    def add(self, row: int, step: int, found: Next, weight: float) -> None:
        """Add the followers to the distribution of a draft, with history's weight in it."""
        self.places += [(row, step, token, found.bucket) for token in found.tokens]
        self.chances += [(chance, weight) for chance in found.chances]

    def go_on(
        self,
        row: int,
        step: int,
        match: SuffixMatch,
        trust: Sequence[float],
        uniforms: Sequence[float],
        *,
        greedy: bool,
        chance: float = 1.0,
        least: float,
        always: bool,
    ) -> list[int]:
        """Draft a row from history alone, from ``step`` on: one token for each of ``uniforms``, while the chance that
        all are accepted exceeds ``least``.

        ``chance`` starts that product, and ``trust`` gives each bucket's factor. ``always``: draft the first token in
        any case.

        This is ``Next.of`` and ``SuffixMatch.advance`` in one loop. It avoids their calls if a single token followed,
        the usual
        case: this loop is most of the cost of drafts from history.
        """
        texts, drawn = match.texts, list[int]()
        follow, link, length, count = texts.follow, texts.link, texts.length, texts.count
        state, matched = texts.followed(match.state, match.tokens)
        for uniform in uniforms:
            while state != ROOT and not follow[state]:
                state = link[state]
                matched = length[state]
            if state == ROOT:
                break
            after, found = follow[state], None
            if len(after) == 1:
                [(token, there)] = after.items()
                bucket = KINDS * min((matched - 1).bit_length(), LENGTHS - 1) + min(count[there], KINDS - 1) - 1
            else:
                match.state, match.tokens = state, matched
                found = Next.of(match, greedy)
                assert found is not None
                token, bucket = found.draw(uniform), found.bucket
                there = after[token]
            chance *= trust[bucket]
            if chance <= least and (drawn or not always):
                break
            if found is None:
                self.places.append((row, step, token, bucket))
                self.chances.append((1.0, 1.0))
            else:
                self.add(row, step, found, 1.0)
            drawn.append(token)
            state, matched, step = there, matched + 1, step + 1
        match.state, match.tokens = state, matched
        return drawn

    def tensors(self, device: torch.device, start: int = 0) -> tuple[Tensor, ...]:
        """Return row, step, token, bucket, chance and weight [N] of the followers from index ``start`` on."""
        places = torch.tensor(self.places[start:], dtype=torch.long, device=device).reshape(-1, 4)
        chances = torch.tensor(self.chances[start:], dtype=torch.float64, device=device).reshape(-1, 2)
        return (*places.unbind(1), *chances.unbind(1))


# ---- what a request keeps


class Matches:
    """Matches by slot, a ``Cache``; they follow from the context, so that a row in a new slot starts again."""

    def __init__(self, slots: Slots) -> None:
        self.of: list[SuffixMatch | None] = [None] * slots.sizes.slots

    def copy_slot(self, source: int, first: int, end: int, length: int) -> None:
        """Copy the match of one slot to slots first..end-1."""
        for slot in range(first, end):
            self.of[slot] = copy(self.of[source])

    def snapshot(self, slot: int, length: int) -> tuple[Tensor, ...]:
        """Return nothing: a match can be recomputed."""
        return ()

    def restore(self, slot: int, held: Any, length: int) -> None:
        """Do nothing: the match is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProbs:
    """Head's own distributions at the first n drafts."""

    probs: Tensor  # [B, n, V]
    places: Sequence[tuple[int, int, int]]  # row, step, bucket of the drafts for which the head was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Drafts of one cycle, kept until it commits."""

    followers: Followers
    lengths: Tensor  # [B]
    passes: Tensor | float  # [B] of the head
    head: HeadProbs | None = None


class MatchState:
    """Matches of all rows, the trust in them, and the pace of each request.

    Trust comes from finished cycles only. So its decisions depend on no target distribution at a position that is still
    to
    be drafted: decoding stays exact.
    """

    def __init__(self, slots: Slots, config: DecodingConfig) -> None:
        options = config.of(HistoryOptions)
        self.slots, self.siblings = slots, options.siblings
        self.costs = config.costs  # of this cycle
        self.first = config.draft_tokens != "auto"  # a row always has one draft, so that trust keeps learning
        slots.history.limit = options.tokens
        self.matches = slots.register_cache("history", Matches)
        # [S] whether it has a match
        self.begun = slots.register_column("history/begun", torch.tensor(False), of_context=True)
        self.overlaps = OverlapSums(slots, options.siblings)
        pace = torch.tensor([2.0, 1.0 + self.costs.verify], dtype=torch.float64)
        self.rate = slots.register_column("history/rate", pace)  # [S, 2] tokens, time in plain steps
        self.drafted: Cycle | None = None  # between drafting and commitment
        slots.extend_stats(("history", "history_accepted"))

    def forget(self, span: Span, rows: int) -> None:
        """Reset the matches of rows whose contexts are read again."""
        self.begun[span.first : span.first + rows] = False

    def ahead(self, rows: Rows) -> list[SuffixMatch]:
        """Return a copy of each row's match, to run ahead with; reseed the rows, so that their uniforms differ from
        those with which their texts were drawn.
        """
        for slot in (~self.begun[: rows.batch]).nonzero()[:, 0].tolist():
            self.matches.of[slot] = self._begin(slot)
        self.begun[: rows.batch] = True
        digests = np.array([texts.digest for texts in self._texts(rows)], dtype=np.uint64)
        rows.reseed(torch.from_numpy(digests.view(np.int64)).to(self.slots.device))
        return [copy(match) for match in self.matches.of[: rows.batch] if match is not None]

    def trusted(self, rows: Rows) -> list[Trusted]:
        """Return the trust of each row at the start of a cycle."""
        return trusted(self.overlaps.sums(self._texts(rows)))

    def paces(self, rows: Rows) -> list[float]:
        """Return the tokens that each row emits in the time of a plain step."""
        tokens, time = self.rate[: rows.batch].unbind(-1)
        paces: list[float] = (tokens / time).tolist()
        return paces

    def learn(self, rows: Rows, out: TargetOutput, emitted: Tensor) -> None:
        """Learn from the cycle in ``drafted``; do nothing if another drafter was in charge."""
        cycle, self.drafted = self.drafted, None
        if cycle is None:
            return
        time = 1.0 + cycle.passes * self.costs.draft + cycle.lengths.double() * self.costs.verify
        self.rate[: rows.batch] = 0.999 * self.rate[: rows.batch] + torch.stack([emitted.double(), time], 1)
        new = torch.zeros(rows.batch, *self.overlaps.fresh.shape, dtype=torch.float64, device=emitted.device)
        if cycle.followers.places:
            row, step, token, bucket, chance, _ = cycle.followers.tensors(emitted.device)
            reached = (step < emitted[row]).double()
            stood = torch.minimum(out.probs[row, step, token].double(), chance)
            for column, values in ((0, stood), (3, chance)):
                new[..., column].index_put_((row, bucket), reached * values, accumulate=True)
        if cycle.head is not None:
            self._learn_of_head(cycle.head, cycle.followers, out, emitted, new)
        self.overlaps.add(self._texts(rows), new)

    def _learn_of_head(
        self, head: HeadProbs, followers: Followers, out: TargetOutput, emitted: Tensor, new: Tensor
    ) -> None:
        """Add to ``new`` the overlaps where the head was asked: its own, and that of its mean with history."""
        steps = head.probs.shape[1]
        p, half = out.probs[:, :steps], head.probs / 2
        own, both = torch.minimum(p, head.probs).sum(-1).double(), torch.minimum(p, half).sum(-1).double()
        row, step, token, _, chance, _ = followers.tensors(emitted.device)
        row, step, token, chance = (x[step < steps] for x in (row, step, token, chance))
        at, mine = p[row, step, token].double(), half[row, step, token].double()
        more = torch.minimum(at, mine + chance / 2) - torch.minimum(at, mine)
        both = both.index_put((row, step), more, accumulate=True)
        row, step, bucket = torch.tensor(head.places, device=emitted.device).unbind(1)
        reached = (step < emitted[row]).double()
        after = (emitted[row] - step - 2).double()  # drafts accepted after this one; below 0: this one was rejected
        stood, after = (after >= 0).double(), after.clamp_min(0)
        for column, values in ((1, both[row, step]), (2, own[row, step]), (4, 1.0), (5, stood), (6, after)):
            new[..., column].index_put_((row, bucket), reached * values, accumulate=True)

    def _texts(self, rows: Rows) -> list[Automaton]:
        return [match.texts for match in self.matches.of[: rows.batch] if match is not None]

    def follow(self, rows: Rows, tokens: Tensor, emitted: Tensor) -> None:
        """Extend the matches by the emitted tokens, and make these available to other rows, only once per cycle."""
        known = torch.stack([self.begun[: rows.batch].long(), self.slots.count[: rows.batch], emitted]).tolist()
        for slot, (begun, count, new, line) in enumerate(zip(*known, tokens.tolist(), strict=True)):
            match = self.matches.of[slot]
            if begun and match is not None and match.read == count:
                self._read(match, line[:new])

    def _begin(self, slot: int) -> SuffixMatch:
        asked, count = int(self.slots.asked[slot]), int(self.slots.count[slot])
        match = SuffixMatch(self.slots.history.of(self.slots.prompts[slot, :asked].tolist()))
        answer = self.slots.tokens[slot, :count].tolist()
        match.read = len(answer)
        if self.siblings:
            match.state = self.slots.history.enter(match.texts, answer)
            match.tokens = match.texts.length[match.state]
        else:
            for token in (BEGIN, *answer):
                match.advance(token)
        return match

    def _read(self, match: SuffixMatch, tokens: Sequence[int]) -> None:
        """Extend a match by ``tokens``.

        A row in progress is at the end of its own text, which is matched as far as other texts, or its own, contain it.
        """
        match.read += len(tokens)
        if self.siblings:
            match.state = self.slots.history.extend(match.texts, match.state, tokens)
            match.tokens = match.texts.length[match.state]
        else:
            for token in tokens:
                match.advance(token)


def alone(
    lines: Sequence[Sequence[int]], followers: Followers, vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return drafts of history alone: padded tokens [B, K], K being the maximum, and each q [B, K, V], or None."""
    batch, width = len(lines), max(map(len, lines))
    padded = [[*line, *[0] * (width - len(line))] for line in lines]
    tokens = torch.tensor(padded, dtype=torch.long, device=device).reshape(batch, width)
    if not width:
        return tokens, None
    row, step, token, _, chance, weight = followers.tensors(device)
    row, step, token, chance = (x[weight > 0] for x in (row, step, token, chance))
    return tokens, torch.zeros(batch, width, vocabulary, device=device).index_put((row, step, token), chance.float())


def greedy_rows(rows: Rows, temperature: float | None) -> list[bool]:
    """Return which rows draft the likeliest token: those of a greedy target, or all at draft temperature 0."""
    own = rows.sampling.temperature
    if temperature == 0 or own is None:
        return [temperature == 0] * rows.batch
    greedy: list[bool] = (own == 0).tolist()
    return greedy
