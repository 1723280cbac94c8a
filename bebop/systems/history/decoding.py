"""Drafts from history: sampled from the tokens that followed the longest match in other completions of the prompt.

``HistoryDrafter`` drafts from history alone, ``HistoryMTPDrafter`` from a mixture with the model's own MTP head:
q = w * history + (1 - w) * MTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

import torch
from torch import Tensor
from torch.nn.functional import pad

from bebop.config.job import DecodingConfig
from bebop.kernels.verify import sample
from bebop.model.attention import Span
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.mtp import DeferredPrefill, HeadDrafter
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots
from bebop.systems.history.matching import (
    NONE,
    Cycle,
    Followers,
    HeadProbs,
    MatchState,
    Next,
    SuffixMatch,
    Trusted,
    alone,
    greedy_rows,
)

# ---- history alone


class HistoryDrafter:
    """Drafter without a model: q is the empirical distribution, and a row without a match drafts nothing.

    A row keeps drafting while the chance that all its drafts so far are accepted exceeds the cost of a verified
    position.
    The chance follows from the trust of ``MatchState`` in its matches. The cost is ``Costs.verify`` times the request's
    tokens in the time of a plain step. The first draft is always made, so that trust keeps learning; with
    ``draft_tokens=auto`` it must pay off as well.
    """

    layers: tuple[int, ...] = ()
    target_pass = None

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.matching, self.vocabulary = MatchState(slots, config), policy.vocab_size
        self.temperature = config.temperature_of_drafts

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Reset the matches of the rows of a prefill; they are computed when the row drafts."""
        self.matching.forget(span, len(tokens))

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft the next tokens of every row.

        The width is that of the longest draft, so no pass is wider than necessary.
        """
        drawn, followers = self._draw(rows, length)
        if not length.limit:  # matches of new rows are computed once a row drafts
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None)
        lengths = torch.tensor([len(line) for line in drawn], device=rows.last.device)
        tokens, probs = alone(drawn, followers, self.vocabulary, rows.last.device)
        self.matching.drafted = Cycle(followers=followers, lengths=lengths, passes=0.0)
        sources = {"history": torch.ones_like(tokens)}
        total = sum(map(len, drawn))
        return Draft(tokens=tokens, probs=probs, lengths=lengths, total=total, sources=sources)

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Update trust and matches with the tokens that the cycle emitted."""
        self.matching.learn(rows, out, emitted)
        self.matching.follow(rows, tokens, emitted)

    def _draw(self, rows: Rows, length: DraftLength) -> tuple[list[list[int]], Followers]:
        """Return the drafts of each row, and the followers from which they were drawn."""
        matching, wanted, followers = self.matching, length.start(rows), Followers()
        matching.costs = length.costs
        limits = [length.limit] * rows.batch if wanted is None else wanted.tolist()
        if not max(limits):
            return [[] for _ in limits], followers
        matches, greedy = matching.ahead(rows), greedy_rows(rows, self.temperature)
        uniforms = rows.uniforms[:, : max(limits)].tolist()
        of_rows = zip(matches, matching.trusted(rows), matching.paces(rows), strict=True)
        drawn = [
            followers.go_on(
                row, 0, match, trust.alone, uniforms[row][: limits[row]], greedy=greedy[row],
                least=pace * matching.costs.verify, always=matching.first,
            )
            for row, (match, trust, pace) in enumerate(of_rows)
        ]  # fmt: skip
        return drawn, followers


# ---- history and the MTP head


@dataclass(slots=True)
class _Row:
    """State of a row while it drafts."""

    match: SuffixMatch
    trusted: Trusted
    pace: float  # tokens emitted in the time of a plain step
    greedy: bool
    limit: int  # drafts
    chance: float = 1.0  # that all its drafts so far are accepted, as predicted
    passes: int = 0  # of the head
    headed: int = 0  # drafts with the head
    tail: list[int] = field(default_factory=list)  # later drafts from history alone
    alive: bool = True  # still drafts with the head


class HistoryMTPDrafter(HeadDrafter):
    """Drafter from a mixture of history and head. Sampling and verification both use the mixture, so w may depend on
    the past.

    The head is asked for a draft if its possible gain exceeds the cost of its pass. The gain is a token that history
    alone would miss, times the chance so far. Otherwise history continues alone (w = 1). Until it is asked, the head
    reads nothing: the tokens since then are part of the first draft's pass. With ``siblings`` rows depend on one
    another anyway, so all of them have to earn the pass together: it takes the same time as for one row. As in
    ``EntropyLength``, a row keeps drafting while its predicted chance exceeds the cost of the step. A draft is accepted
    with c + (1 - w) exp(-0.7 H): c is w times the chance that history's own draft would be accepted, H the entropy of
    the head's distribution.
    """

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        super().__init__(policy, slots, config)
        self.matching = MatchState(slots, config)
        self.cache.deferred = self.cache.deferred or DeferredPrefill(slots, self.hidden[0])
        self.forced = 0  # passes that could not be deferred, since the last draft
        slots.extend_stats(("head_overlap", "head_read"))

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Let the head read the text of a prefill, and reset the matches of its rows."""
        super().prefill(span, tokens, lengths, out)
        self.matching.forget(span, len(tokens))

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft the next tokens of every row.

        A step with the head waits for the head's tokens, which determine what may follow in history.
        """
        wanted = length.start(rows)
        self.matching.costs = length.costs
        limits = [length.limit] * rows.batch if wanted is None else wanted.tolist()
        if not max(limits):
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None, lengths=wanted)
        lines, followers = self._rows(rows, limits), Followers()
        uniforms = rows.uniforms[:, : max(limits)].tolist()
        hidden, seen = self.hidden[: rows.batch], rows.seen  # a view, which catching up writes into
        tokens: list[Tensor] = []
        owns: list[Tensor] = []  # the head's distributions
        asked: list[tuple[int, int, int]] = []
        probs: list[Tensor] = []
        shares: list[list[float]] = []
        for step in range(max(limits)):
            found = self._found(lines, step, followers, uniforms)
            if not any(line.alive for line in lines):
                break
            if step == 0:
                self.catch_up(rows)
            else:
                hidden = self._feed(rows, step - 1, tokens[-1][:, None], hidden[:, None])[:, 0]
            logits = self.policy.logits(hidden)[:, None]
            own = rows.probs(logits, None if seen is None else seen[:, None], self.temperature)[:, 0]
            owns.append(own)
            asked += [
                (row, step, NONE if one is None else one.bucket) for row, one in enumerate(found) if lines[row].alive
            ]
            start = len(followers.places)
            shares.append(self._go_on(lines, found, own, step, followers))
            if not any(line.alive for line in lines):
                break
            probs.append(self._mixture(own, shares[-1], followers, start))
            tokens.append(sample(probs[-1], rows.uniforms[:, step]))
            for line, token in zip(lines, tokens[-1].tolist(), strict=True):
                if line.alive:
                    line.match.advance(token)
            if seen is not None:
                seen = seen.scatter(-1, tokens[-1][:, None], True)
        head = HeadProbs(probs=torch.stack(owns, 1), places=asked) if owns else None
        return self._draft(rows, lines, followers, tokens, probs, shares, head)

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Update trust and matches with the tokens that the cycle emitted.

        The head's reading of them is deferred until it is asked, or until there is no more room.
        """
        deferred = self.cache.deferred
        assert deferred is not None
        width = int(emitted.max())
        if deferred.full(width):
            self.forced += self.catch_up(rows)
        deferred.put_off(rows, out, emitted, width)
        self.matching.learn(rows, out, emitted)
        self.matching.follow(rows, tokens, emitted)

    def _rows(self, rows: Rows, limits: list[int]) -> list[_Row]:
        matching, greedy = self.matching, greedy_rows(rows, self.temperature)
        parts = zip(matching.ahead(rows), matching.trusted(rows), matching.paces(rows), greedy, limits, strict=True)
        return [_Row(*part) for part in parts]

    def _found(
        self, lines: list[_Row], step: int, followers: Followers, uniforms: list[list[float]]
    ) -> list[Next | None]:
        """Return the followers of each row that continues with the head; the other rows are finished from history
        alone.
        """
        found: list[Next | None] = []
        gains: list[float] = []
        for line in lines:
            line.alive = line.alive and step < line.limit
            one = Next.of(line.match, line.greedy) if line.alive else None
            found.append(one)
            gains.append(line.alive * line.chance * line.trusted.gain[NONE if one is None else one.bucket])
        cost = self.matching.costs.draft
        wanted = [gain > line.pace * cost for gain, line in zip(gains, lines, strict=True)]
        if self.matching.siblings and sum(gains) <= sum(line.pace for line in lines) * cost:
            wanted = [False] * len(lines)
        for row, line in enumerate(lines):
            if line.alive and not wanted[row]:
                line.alive = False
                self._finish(row, line, step, followers, uniforms[row])
                found[row] = None
        return found

    def _finish(self, row: int, line: _Row, step: int, followers: Followers, uniforms: list[float]) -> None:
        """Draft the rest of a row from history alone."""
        line.tail = followers.go_on(
            row, step, line.match, line.trusted.alone, uniforms[step : line.limit], greedy=line.greedy,
            chance=line.chance, least=line.pace * self.matching.costs.verify, always=self.matching.first and not step,
        )  # fmt: skip

    def _go_on(
        self, lines: list[_Row], found: list[Next | None], own: Tensor, step: int, followers: Followers
    ) -> list[float]:
        """Return w of each row's next draft; end the rows whose draft is not worth its cost."""
        shares, costs = [0.0] * len(lines), self.matching.costs
        for row, (line, one, nats) in enumerate(zip(lines, found, entropy(own).tolist(), strict=True)):
            if not line.alive:
                continue
            line.passes += 1
            share, alone = (
                (0.0, 0.0) if one is None else (line.trusted.share[one.bucket], line.trusted.alone[one.bucket])
            )
            if line.greedy:  # the likelier of the two candidates for a greedy target's token
                share = float(share >= 0.5)
            line.chance *= share * alone + (1 - share) * exp(-0.7 * nats)
            least = line.pace * (costs.verify + (costs.draft if step else 0.0))
            line.alive = line.chance > least or (self.matching.first and not step)
            line.headed += line.alive
            shares[row] = share
            if one is not None:
                followers.add(row, step, one, share * line.alive)
        return shares

    def _mixture(self, own: Tensor, shares: list[float], followers: Followers, start: int) -> Tensor:
        """Return q [B, V] of a step, whose followers begin at index ``start``."""
        mixed = own * torch.tensor([1 - share for share in shares], device=own.device)[:, None]
        row, _, token, _, chance, share = followers.tensors(own.device, start)
        return mixed.index_put((row, token), (chance * share).to(mixed.dtype), accumulate=True)

    def _draft(
        self,
        rows: Rows,
        lines: list[_Row],
        followers: Followers,
        headed: list[Tensor],
        mixed: list[Tensor],
        shares: list[list[float]],
        head: HeadProbs | None,
    ) -> Draft:
        """Return the drafts with the head, n of [B] from ``mixed`` [B, V], followed by the tails from history alone."""
        device = rows.last.device
        counts = torch.tensor([[line.headed, len(line.tail), line.passes] for line in lines], device=device)
        ends, tails, passes = counts.unbind(1)
        lengths, total = ends + tails, sum(line.headed + len(line.tail) for line in lines)
        probs: Tensor | None
        if headed:
            tokens, probs, share = self._joined(lines, followers, headed, mixed, shares, ends)
        else:
            tokens, probs = alone([line.tail for line in lines], followers, self.policy.vocab_size, device)
            share = torch.ones(tokens.shape, device=device)
        self.matching.drafted = Cycle(followers=followers, lengths=lengths, passes=passes.double(), head=head)
        forced, self.forced = self.forced, 0
        return Draft(
            tokens=tokens,
            probs=probs,
            lengths=lengths,
            total=total,
            forwards=max(line.passes for line in lines) + forced,
            sources={"history": share},
            head=None if head is None else head.probs[:, 0],
        )

    def _joined(
        self,
        lines: list[_Row],
        followers: Followers,
        headed: list[Tensor],
        mixed: list[Tensor],
        shares: list[list[float]],
        ends: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [B, K], their q [B, K, V] and history's share [B, K]; ``ends`` [B]: drafts with the head."""
        device = ends.device
        width = max(len(headed), *(line.headed + len(line.tail) for line in lines))
        wider = width - len(headed)
        tokens, probs = pad(torch.stack(headed, 1), (0, wider)), pad(torch.stack(mixed, 1), (0, 0, 0, wider))
        share = pad(torch.tensor(shares[: len(headed)], device=device).T, (0, wider), value=1.0)
        places = [(row, line.headed + i) for row, line in enumerate(lines) for i in range(len(line.tail))]
        if not places:
            return tokens, probs, share
        said = [token for line in lines for token in line.tail]
        rows, steps = torch.tensor(places, device=device).unbind(1)
        tokens[rows, steps] = torch.tensor(said, device=device)
        history = torch.arange(width, device=device) >= ends[:, None]
        row, step, token, _, chance, weight = followers.tensors(device)
        sure = (weight == 1) & (step >= ends[row])
        probs = torch.where(history[..., None], 0, probs)
        probs[row[sure], step[sure], token[sure]] = chance[sure].to(probs.dtype)
        return tokens, probs, torch.where(history, 1.0, share)
