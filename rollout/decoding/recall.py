"""What drafters from history keep of a request: how far it has matched, and how much such matches were worth to it."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.attention import Span
from bebop.options import HistoryOptions
from bebop.rollout.decoding.base import Rows, TargetOutput
from bebop.rollout.decoding.matching import Followers, Match
from bebop.rollout.decoding.trust import OverlapSums, Trusted, trusted
from bebop.rollout.history import BEGIN, Automaton
from bebop.rollout.slots import Slots


class Matches:
    """Matches by slot, a ``Cache``: they follow from the context, so that a row in a new place begins anew."""

    def __init__(self, slots: Slots) -> None:
        self.of: list[Match | None] = [None] * slots.sizes.slots

    def copy_slot(self, source: int, first: int, end: int, length: int) -> None:
        """See ``Cache``."""
        for slot in range(first, end):
            self.of[slot] = copy(self.of[source])

    def taken(self, slot: int, length: int) -> tuple[Tensor, ...]:
        """Nothing that could not be found again."""
        return ()

    def give(self, slot: int, held: Any, length: int) -> None:
        """See ``taken``."""


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


class Recall:
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
        self.matches = slots.own("history", Matches)
        self.begun = slots.add("history/begun", torch.tensor(False), of_context=True)  # [S] whether it has a match
        self.overlaps = OverlapSums(slots, options.siblings)
        pace = torch.tensor([2.0, 1.0 + self.costs.verify], dtype=torch.float64)
        self.rate = slots.add("history/rate", pace)  # [S, 2] tokens, time in plain steps
        self.drafted: Cycle | None = None  # between drafting and commitment
        slots.extend_stats(("history", "history_accepted"))

    def forget(self, span: Span, rows: int) -> None:
        """Rows whose contexts are read anew match anew."""
        self.begun[span.first : span.first + rows] = False

    def ahead(self, rows: Rows) -> list[Match]:
        """A match of each row, to run ahead with; gives the rows uniforms that no text of theirs was drawn with."""
        for slot in (~self.begun[: rows.batch]).nonzero()[:, 0].tolist():
            self.matches.of[slot] = self._begin(slot)
        self.begun[: rows.batch] = True
        digests = np.array([texts.digest for texts in self._texts(rows)], dtype=np.uint64)
        rows.reseed(torch.from_numpy(digests.view(np.int64)).to(self.slots.device))
        return [copy(match) for match in self.matches.of[: rows.batch] if match is not None]

    def trusted(self, rows: Rows) -> list[Trusted]:
        """Of each row, at the start of a cycle."""
        return trusted(self.overlaps.sums(self._texts(rows)))

    def paces(self, rows: Rows) -> list[float]:
        """Tokens that each row emits in the time of a plain step."""
        tokens, time = self.rate[: rows.batch].unbind(-1)
        paces: list[float] = (tokens / time).tolist()
        return paces

    def learn(self, rows: Rows, out: TargetOutput, emitted: Tensor) -> None:
        """From the cycle that was ``drafted``; nothing where another drafter was in charge."""
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

    def _begin(self, slot: int) -> Match:
        asked, count = int(self.slots.asked[slot]), int(self.slots.count[slot])
        match = Match(self.slots.history.of(self.slots.prompts[slot, :asked].tolist()))
        answer = self.slots.tokens[slot, :count].tolist()
        match.read = len(answer)
        if self.siblings:
            match.state = self.slots.history.enter(match.texts, answer)
            match.tokens = match.texts.length[match.state]
        else:
            for token in (BEGIN, *answer):
                match.advance(token)
        return match

    def _read(self, match: Match, tokens: Sequence[int]) -> None:
        """A row that writes is at the end of its own text, which is matched as far as others, or itself, said it."""
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
    """Drafts of history alone by row: padded tokens [B, K], K being the most, and the q [B, K, V] of each, or None."""
    batch, width = len(lines), max(map(len, lines))
    padded = [[*line, *[0] * (width - len(line))] for line in lines]
    tokens = torch.tensor(padded, dtype=torch.long, device=device).reshape(batch, width)
    if not width:
        return tokens, None
    row, step, token, _, chance, weight = followers.tensors(device)
    row, step, token, chance = (x[weight > 0] for x in (row, step, token, chance))
    return tokens, torch.zeros(batch, width, vocabulary, device=device).index_put((row, step, token), chance.float())


def greedy_rows(rows: Rows, temperature: float | None) -> list[bool]:
    """Which rows draft what is likeliest: those of a greedy target, or all at draft temperature 0."""
    own = rows.sampling.temperature
    if temperature == 0 or own is None:
        return [temperature == 0] * rows.batch
    greedy: list[bool] = (own == 0).tolist()
    return greedy
