"""Drafts from a mixture of history and the model's own MTP head: q = w * history + (1 - w) * MTP, sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    passes: int = 1  # of the head; that of ``commit`` is made anyway
    headed: int = 0  # drafts with the head
    tail: list[int] = field(default_factory=list)  # those of history alone, after them
    alive: bool = True  # drafts on with the head


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
        slots.extend_stats(("head_overlap",))

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """See ``Drafter``."""
        super().prefill(span, tokens, lengths, out)
        self.recall.forget(span, len(tokens))

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """See ``Drafter``. A step with the head waits for its tokens, which say what may follow in history."""
        wanted = length.start(rows)
        limits = [length.limit] * rows.batch if wanted is None else wanted.tolist()
        if not max(limits):
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None, lengths=wanted)
        lines, followers = self._rows(rows, limits), Followers()
        uniforms = rows.uniforms[:, : max(limits)].tolist()
        hidden, seen = self.hidden[: rows.batch], rows.seen
        tokens: list[Tensor] = []
        first: Tensor | None = None  # the head's distribution at the first draft
        probs: list[Tensor] = []
        shares: list[list[float]] = []
        for step in range(max(limits)):
            found = [self._found(row, line, step, followers, uniforms[row]) for row, line in enumerate(lines)]
            if not any(line.alive for line in lines):
                break
            if step:
                hidden = self._feed(rows, step - 1, tokens[-1][:, None], hidden[:, None])[:, 0]
            logits = self.policy.logits(hidden)[:, None]
            own = rows.probs(logits, None if seen is None else seen[:, None], self.temperature)[:, 0]
            first = own if step == 0 else first
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
        return replace(self._draft(lines, followers, torch.stack(tokens, 1), torch.stack(probs, 1), shares), head=first)

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter``."""
        super().commit(rows, out, tokens, emitted)
        self.recall.learn(rows, out, emitted)
        self.recall.follow(rows, tokens, emitted)

    def _rows(self, rows: Rows, limits: list[int]) -> list[_Row]:
        recall, greedy = self.recall, greedy_rows(rows, self.temperature)
        parts = zip(recall.ahead(rows), recall.weights(rows), recall.paces(rows), greedy, limits, strict=True)
        return [_Row(*part) for part in parts]

    def _found(self, row: int, line: _Row, step: int, followers: Followers, uniforms: list[float]) -> Next | None:
        """What followed a row's match, while the head follows it; else it is finished by history alone."""
        line.alive = line.alive and step < line.limit
        found = Next.of(line.match, line.greedy) if line.alive else None
        if found is None or not step:
            return found
        if line.chance * (1 - line.weights[found.bucket]) > line.pace * self.recall.pass_cost:
            return found
        line.alive, least = False, line.pace * self.recall.verify_cost
        while found is not None and step < line.limit:
            line.chance *= line.weights[found.bucket]
            if line.chance <= least:
                break
            followers.add(row, step, found, 1.0)
            line.tail.append(found.draw(uniforms[step]))
            line.match.advance(line.tail[-1])
            step, found = step + 1, Next.of(line.match, line.greedy)
        return None

    def _go_on(
        self, lines: list[_Row], found: list[Next | None], own: Tensor, step: int, followers: Followers
    ) -> list[float]:
        """w of each row's next draft; ends those that are not worth what they cost, the first always being made."""
        shares = [0.0] * len(lines)
        for row, (line, one, nats) in enumerate(zip(lines, found, entropy(own).tolist(), strict=True)):
            if not line.alive:
                continue
            line.passes += step > 0
            trust = 0.0 if one is None else line.weights[one.bucket]
            line.chance *= trust + (1 - trust) * exp(-0.7 * nats)
            line.alive = not step or line.chance > line.pace * (self.recall.verify_cost + self.recall.pass_cost)
            line.headed += line.alive
            # Of the two that a greedy target could mean, the likelier.
            shares[row] = float(trust >= 0.5) if line.greedy else trust
            if line.alive and one is not None and shares[row]:
                followers.add(row, step, one, shares[row])
        return shares

    def _mixture(self, own: Tensor, shares: list[float], followers: Followers, start: int) -> Tensor:
        """q [B, V] of a step, whose followers begin at number ``start``."""
        mixed = own * torch.tensor([1 - share for share in shares], device=own.device)[:, None]
        row, _, token, _, chance, share = followers.tensors(own.device, start)
        return mixed.index_put((row, token), (chance * share).to(mixed.dtype), accumulate=True)

    def _draft(
        self, lines: list[_Row], followers: Followers, tokens: Tensor, probs: Tensor, shares: list[list[float]]
    ) -> Draft:
        """Tokens [B, n] and probs [B, n, V] with the head, and the tails of rows that went on without."""
        counts = torch.tensor([[line.headed, len(line.tail), line.passes] for line in lines], device=tokens.device)
        headed, tails, passes = counts.unbind(1)
        lengths = headed + tails
        wider = int(lengths.max()) - tokens.shape[1]
        if wider > 0:
            tokens, probs = (pad(tokens, (0, wider)), pad(probs, (0, 0, 0, wider)))
        width = tokens.shape[1]
        share = torch.tensor(shares[:width], device=tokens.device).T
        share = pad(share, (0, width - share.shape[1]), value=1.0)
        if any(line.tail for line in lines):
            alone = torch.arange(width, device=tokens.device) >= headed[:, None]
            said = [token for line in lines for token in line.tail]
            tokens[alone & (torch.arange(width, device=tokens.device) < lengths[:, None])] = torch.tensor(
                said, device=tokens.device
            )
            probs = torch.where(alone[..., None], 0, probs)
            row, step, token, _, chance, weight = followers.tensors(tokens.device)
            sure = weight == 1
            probs[row[sure], step[sure], token[sure]] = chance[sure].to(probs.dtype)
            share = torch.where(alone, 1.0, share)
        self.recall.drafted = Cycle(followers=followers, probs=probs, lengths=lengths, passes=passes.double())
        return Draft(
            tokens=tokens, probs=probs, lengths=lengths, forwards=int(passes.max()), sources={"history": share}
        )


EntryClass = HistoryMTPDrafter
