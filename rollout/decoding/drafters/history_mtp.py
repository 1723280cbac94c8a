"""Drafts from a mixture of history and the model's own MTP head: q = w * history + (1 - w) * MTP, sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.kernels.verify import sample
from bebop.model.attention import Span
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.head import HeadDrafter
from bebop.rollout.decoding.recall import Cycle, Followers, Match, Next, Recall, greedy_rows
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots


@dataclass(slots=True)
class _Row:
    """A row while it drafts."""

    match: Match
    weights: list[float]  # w by bucket
    pace: float  # tokens in the time of a plain step
    greedy: bool
    limit: int  # drafts
    chance: float = 1.0  # that all its drafts so far are accepted, as predicted
    length: int = 0  # drafts that count
    passes: int = 1  # of the head; that of ``commit`` is made anyway
    alive: bool = True  # drafts on
    headed: bool = True  # the head still follows


class HistoryMTPDrafter(HeadDrafter):
    """The mixture as a whole is what drafts are drawn from and verified against, so w may be anything that looks back.

    The first draft's state of the head is there anyway. After that the head follows a row for as long as what it may
    add, (1 - w) of a token that is reached with the chance so far, exceeds the cost of its pass; then history goes on
    alone (w = 1), and the pass is left out once no row needs it. As in ``EntropyLength``, a row drafts on while its
    predicted chance exceeds what the step costs; a draft stands with w + (1 - w) exp(-0.7 H), H being the entropy of
    the head's distribution.
    """

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        super().__init__(policy, slots, config)
        self.recall = Recall(slots, config)

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """See ``Drafter``."""
        super().prefill(span, tokens, lengths, out)
        self.recall.forget(span, len(tokens))

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """See ``Drafter``. A step waits for its tokens, which say what may follow in history."""
        wanted = length.start(rows)
        limits = [length.limit] * rows.batch if wanted is None else wanted.tolist()
        if not max(limits):
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None, lengths=wanted)
        lines, followers = self._rows(rows, limits), Followers()
        hidden, seen = self.hidden[: rows.batch], rows.seen
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        shares: list[list[float]] = []
        for step in range(max(limits)):
            found = [Next.of(line.match, line.greedy) if line.alive else None for line in lines]
            shares.append([self._weight(line, one, step) for line, one in zip(lines, found, strict=True)])
            headed = any(line.alive and line.headed for line in lines)
            if headed and step:
                hidden = self._feed(rows, step - 1, tokens[-1][:, None], hidden[:, None])[:, 0]
            own = self._head(rows, hidden, seen) if headed else None
            self._go_on(lines, found, own, step)
            if not any(line.alive for line in lines):
                break
            start = len(followers.places)
            for row, (line, one, weight) in enumerate(zip(lines, found, shares[-1], strict=True)):
                if line.alive and one is not None and weight:
                    followers.add(row, step, one, weight)
            probs.append(self._mixture(rows, own, shares[-1], followers, start))
            tokens.append(sample(probs[-1], rows.uniforms[:, step]))
            for line, token in zip(lines, tokens[-1].tolist(), strict=True):
                if line.alive:
                    line.match.advance(token)
            if seen is not None:
                seen = seen.scatter(-1, tokens[-1][:, None], True)
        return self._draft(rows, lines, followers, tokens, probs, shares)

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter``."""
        super().commit(rows, out, tokens, emitted)
        self.recall.learn(rows, out, emitted)
        self.recall.follow(rows, tokens, emitted)

    def _rows(self, rows: Rows, limits: list[int]) -> list[_Row]:
        recall, greedy = self.recall, greedy_rows(rows, self.temperature)
        parts = zip(recall.ahead(rows), recall.weights(rows), recall.paces(rows), greedy, limits, strict=True)
        return [_Row(*part) for part in parts]

    def _weight(self, line: _Row, found: Next | None, step: int) -> float:
        """w of a row's next draft; whether the head follows it from here on."""
        line.alive = line.alive and step < line.limit
        if not line.alive or found is None:
            line.alive = line.alive and line.headed  # nobody has anything to say
            return 0.0
        weight = line.weights[found.bucket]
        if step and line.headed and line.chance * (1 - weight) <= line.pace * self.recall.pass_cost:
            line.headed = False
        if not line.headed:
            return 1.0
        return float(weight >= 0.5) if line.greedy else weight  # of a greedy target's two candidates, the likelier

    def _head(self, rows: Rows, hidden: Tensor, seen: Tensor | None) -> Tensor:
        """The head's distributions [B, V]."""
        logits = self.policy.logits(hidden)[:, None]
        return rows.probs(logits, None if seen is None else seen[:, None], self.temperature)[:, 0]

    def _go_on(self, lines: list[_Row], found: list[Next | None], own: Tensor | None, step: int) -> None:
        """End the rows whose next draft is not worth what it costs; the first draft is always made."""
        entropies = [0.0] * len(lines) if own is None else entropy(own).tolist()
        for line, one, nats in zip(lines, found, entropies, strict=True):
            if not line.alive:
                continue
            line.passes += line.headed and step > 0
            trust = 0.0 if one is None else line.weights[one.bucket]
            line.chance *= trust + (1 - trust) * exp(-0.7 * nats) if line.headed else trust
            cost = self.recall.verify_cost + (self.recall.pass_cost if line.headed else 0.0)
            if step and line.chance <= line.pace * cost:
                line.alive = False
                continue
            line.length += 1

    def _mixture(
        self, rows: Rows, own: Tensor | None, weights: list[float], followers: Followers, start: int
    ) -> Tensor:
        """q [B, V] of this step, whose followers begin at number ``start``."""
        if own is None:
            mixed = torch.zeros(rows.batch, self.policy.vocab_size, device=rows.last.device)
        else:
            mixed = own * torch.tensor([1 - weight for weight in weights], device=own.device)[:, None]
        row, _, token, _, chance, weight = followers.tensors(mixed.device, start)
        return mixed.index_put((row, token), (chance * weight).to(mixed.dtype), accumulate=True)

    def _draft(
        self,
        rows: Rows,
        lines: list[_Row],
        followers: Followers,
        tokens: list[Tensor],
        probs: list[Tensor],
        shares: list[list[float]],
    ) -> Draft:
        lengths, passes = torch.tensor([[line.length, line.passes] for line in lines], device=rows.last.device).unbind(
            1
        )
        drawn = torch.stack(probs, 1)
        self.recall.drafted = Cycle(followers=followers, probs=drawn, lengths=lengths, passes=passes.double())
        share = torch.tensor(shares[: len(tokens)], device=lengths.device).T
        return Draft(
            tokens=torch.stack(tokens, 1),
            probs=drawn,
            lengths=lengths,
            forwards=int(passes.max()),
            sources={"history": share},
        )


EntryClass = HistoryMTPDrafter
