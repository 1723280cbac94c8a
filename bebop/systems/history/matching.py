"""How a request matches other completions of its prompt, and how much such matches are worth.

A draft is accepted with the overlap of its distribution with the target's, and overlap is what is learned here: that
of history's own distribution h, of the head's m, and of their mean. The overlap of w h + (1 - w) m is concave in w, but
mostly near its largest at an end: where the target is sure of one token, it is linear. What the share of tokens that
came from history would say, the w of the greatest likelihood, lies in between and is worse than either end.

Which tokens followed is a walk through dictionaries, a few microseconds a token and row.
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


# Buckets: matches of 1, 2, 3-4, 5-8, 9-16 and more tokens; what followed came once, twice, more often, or in several
# ways. The last bucket is of positions without a match.
LENGTHS, KINDS = 6, 4
BUCKETS, NONE = LENGTHS * KINDS + 1, LENGTHS * KINDS
SHARES = (1.0, 0.5, 0.0)  # w that a mixture may have; of equals the first
PRIOR = 4.0  # positions that the prior is worth
HEAD = 0.7  # its overlap, before anything is known
DOUBT = 2.0  # how long a match, times how often it was followed, is as likely to be wrong as to be right
SEVERAL = 0.5  # what is left of that where several tokens followed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """What a row trusts in, by bucket."""

    share: Sequence[float]  # w
    alone: Sequence[float]  # overlap of what followed with the target, on average; 0 without a match
    gain: Sequence[float]  # tokens that the head adds to that, 0 or more


def prior() -> Tensor:
    """Return sums [BUCKETS, 7] at PRIOR positions: overlaps with w of SHARES; positions of the first, and of the
    others.

    Then how many drafts stood where the head was asked, and how many more stood after them.
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
    """Return what rows trust in, from their sums [B, BUCKETS, 7].

    A draft that stands is worth a token, and those that follow.
    """
    overlaps = sums[..., :3] / sums[..., [3, 4, 4]]
    best, which = overlaps.max(-1)
    shares = torch.tensor(SHARES, dtype=sums.dtype, device=sums.device)[which]
    worth = 1 + sums[..., 6].sum(-1) / sums[..., 5].sum(-1)
    found = torch.stack([shares, overlaps[..., 0], (best - overlaps[..., 0]) * worth[:, None]], 1)
    return [Trusted(share=share, alone=alone, gain=gain) for share, alone, gain in found.tolist()]


class OverlapSums:
    """Sums of rows by bucket.

    ``siblings``: rows of one prompt learn together, and their sums stay with the history of the prompt.
    Otherwise each request learns for itself.
    """

    def __init__(self, slots: Slots, siblings: bool) -> None:
        self.fresh = prior().to(slots.device)
        self.own = None if siblings else slots.register_column("history/trust", self.fresh)  # [S, BUCKETS, 7]

    def sums(self, texts: Sequence[Automaton]) -> Tensor:
        """Return the sums of the first rows [B, BUCKETS, 7], each with the texts that it matches."""
        if self.own is not None:
            return self.own[: len(texts)]
        return torch.stack([self.fresh if one.learned is None else one.learned for one in texts])

    def add(self, texts: Sequence[Automaton], new: Tensor) -> None:
        """Take in what the first rows have seen [B, BUCKETS, 7]."""
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
    """How far a row has matched the other completions to its prompt; a copy of it runs ahead while it drafts."""

    texts: Automaton
    state: int = ROOT
    tokens: int = 0  # matched
    read: int = 0  # tokens of the completion

    def advance(self, token: int) -> None:
        """Read a token."""
        self.state, self.tokens = self.texts.advance(self.state, self.tokens, token)


class Next(NamedTuple):
    """What followed the longest match of a row."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]  # of each, they sum to 1
    bucket: int

    @classmethod
    def of(cls, match: SuffixMatch, greedy: bool) -> Self | None:
        """Return what followed a match; None where nothing did. ``greedy``: what followed most often alone."""
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
        """Return the token at a number in [0, 1), by inverting the distribution."""
        if len(self.tokens) == 1:
            return self.tokens[0]
        sums = accumulate(self.chances)
        return next((t for t, total in zip(self.tokens, sums, strict=True) if uniform < total), self.tokens[-1])


class Followers:
    """The followers in a cycle's distributions one by one, each with the place of its draft."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, int, int]] = []  # row, step, token, bucket
        self.chances: list[tuple[float, float]] = []  # in history, and the weight w that history has there

    def add(self, row: int, step: int, found: Next, weight: float) -> None:
        """Add what was found to the distribution of a draft, with this weight."""
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
        """Draft a row from history alone, from ``step`` on: a token for each of ``uniforms``, while the ``chance`` that
        all stand, by what each bucket is trusted, exceeds ``least``. ``always``: the first one in any case.

        It is ``Next.of`` and ``SuffixMatch.advance`` in one loop, which does without their calls where a single token
        followed, as one mostly does: this is most of what drafts from history cost.
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
        """Return row, step, token, bucket, chance, weight [N] of those from number ``start`` on."""
        places = torch.tensor(self.places[start:], dtype=torch.long, device=device).reshape(-1, 4)
        chances = torch.tensor(self.chances[start:], dtype=torch.float64, device=device).reshape(-1, 2)
        return (*places.unbind(1), *chances.unbind(1))


# ---- what a request keeps


class Matches:
    """Matches by slot, a ``Cache``: they follow from the context, so that a row in a new place begins anew."""

    def __init__(self, slots: Slots) -> None:
        self.of: list[SuffixMatch | None] = [None] * slots.sizes.slots

    def copy_slot(self, source: int, first: int, end: int, length: int) -> None:
        """Copy the match of one slot to slots first..end-1."""
        for slot in range(first, end):
            self.of[slot] = copy(self.of[source])

    def snapshot(self, slot: int, length: int) -> tuple[Tensor, ...]:
        """Return nothing: a match can be found again."""
        return ()

    def restore(self, slot: int, held: Any, length: int) -> None:
        """Put nothing back: the match is found again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProbs:
    """The head's own distributions at the first n drafts."""

    probs: Tensor  # [B, n, V]
    places: Sequence[tuple[int, int, int]]  # row, step, bucket of those that it was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What a cycle drafted."""

    followers: Followers
    lengths: Tensor  # [B]
    passes: Tensor | float  # [B] of the head
    head: HeadProbs | None = None


class MatchState:
    """The matches of all rows, the trust in them, and the pace of each request.

    Trust is of cycles that have ended, so what it decides depends on no target's distribution at a position that is
    still to be drafted: exact.
    """

    def __init__(self, slots: Slots, config: DecodingConfig) -> None:
        options = config.of(HistoryOptions)
        self.slots, self.siblings = slots, options.siblings
        self.costs = config.costs  # of this cycle
        self.first = config.draft_tokens != "auto"  # a row has one draft in any case: trust keeps learning
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
        """Let rows whose contexts are read anew match anew."""
        self.begun[span.first : span.first + rows] = False

    def ahead(self, rows: Rows) -> list[SuffixMatch]:
        """Return a match of each row, to run ahead with; gives the rows uniforms that no text of theirs was drawn
        with."""
        for slot in (~self.begun[: rows.batch]).nonzero()[:, 0].tolist():
            self.matches.of[slot] = self._begin(slot)
        self.begun[: rows.batch] = True
        digests = np.array([texts.digest for texts in self._texts(rows)], dtype=np.uint64)
        rows.reseed(torch.from_numpy(digests.view(np.int64)).to(self.slots.device))
        return [copy(match) for match in self.matches.of[: rows.batch] if match is not None]

    def trusted(self, rows: Rows) -> list[Trusted]:
        """Return what each row trusts in at the start of a cycle."""
        return trusted(self.overlaps.sums(self._texts(rows)))

    def paces(self, rows: Rows) -> list[float]:
        """Return tokens that each row emits in the time of a plain step."""
        tokens, time = self.rate[: rows.batch].unbind(-1)
        paces: list[float] = (tokens / time).tolist()
        return paces

    def learn(self, rows: Rows, out: TargetOutput, emitted: Tensor) -> None:
        """Learn from the cycle that was ``drafted``; nothing where another drafter was in charge."""
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
        after = (emitted[row] - step - 2).double()  # drafts that stood after this one, which did if that is 0 or more
        stood, after = (after >= 0).double(), after.clamp_min(0)
        for column, values in ((1, both[row, step]), (2, own[row, step]), (4, 1.0), (5, stood), (6, after)):
            new[..., column].index_put_((row, bucket), reached * values, accumulate=True)

    def _texts(self, rows: Rows) -> list[Automaton]:
        return [match.texts for match in self.matches.of[: rows.batch] if match is not None]

    def follow(self, rows: Rows, tokens: Tensor, emitted: Tensor) -> None:
        """Take in what was emitted: match on, and let the others match it; once, whoever else keeps these matches."""
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
        """Read on.

        A row that writes is at the end of its own text, which is matched as far as others, or itself, said it.
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
    """Return drafts of history alone by row: padded tokens [B, K], K being the most, and the q [B, K, V] of each, or
    None."""
    batch, width = len(lines), max(map(len, lines))
    padded = [[*line, *[0] * (width - len(line))] for line in lines]
    tokens = torch.tensor(padded, dtype=torch.long, device=device).reshape(batch, width)
    if not width:
        return tokens, None
    row, step, token, _, chance, weight = followers.tensors(device)
    row, step, token, chance = (x[weight > 0] for x in (row, step, token, chance))
    return tokens, torch.zeros(batch, width, vocabulary, device=device).index_put((row, step, token), chance.float())


def greedy_rows(rows: Rows, temperature: float | None) -> list[bool]:
    """Return which rows draft what is likeliest: those of a greedy target, or all at draft temperature 0."""
    own = rows.sampling.temperature
    if temperature == 0 or own is None:
        return [temperature == 0] * rows.batch
    greedy: list[bool] = (own == 0).tolist()
    return greedy
