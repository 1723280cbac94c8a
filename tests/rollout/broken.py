"""Broken variants of rules, caches, drafters and decoders, each of which the test of its distribution rejects."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bebop.kernels.verify import chain_verify, sample
from bebop.model.attention import CausalContext, PackedContext, SlotContext
from bebop.rollout.decoding.base import Accepted, Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.mtp import MTPDrafter
from bebop.rollout.decoding.rules import BlockRule, Rejection, TreeWalk
from bebop.rollout.decoding.temperature import GRID
from bebop.rollout.pages import Pages
from bebop.systems.eagle3.decoding import Eagle3Drafter
from bebop.systems.history.decoding import HistoryDrafter, HistoryMTPDrafter
from bebop.systems.history.matching import Cycle, Followers, Next
from bebop.systems.pad.decoding import PivotOverride
from bebop.systems.pipo.decoding import PairDecoder, Second

# ---- rules


class BonusFromTheLastDraftRow(Rejection):
    """The bonus as the paper's Algorithms 3 and 4 print it: from p_K instead of p_{K+1}."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        shifted = torch.cat([out.probs[:, :-1], out.probs[:, -2:-1]], 1)
        return super().accept(rows, draft, replace(out, probs=shifted), uniforms)


class ResidualIsTheTarget(Rejection):
    """After a rejection draws from p instead of max(0, p - q)."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        accepted, _ = chain_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths)
        index = torch.arange(len(accepted))
        return Accepted.chain(draft, accepted, sample(out.probs[index, accepted], uniforms[:, -1]))


class UnprocessedDraft(Rejection):
    """Verifies with the draft's distribution before temperature, not the one that the draft was sampled from."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        assert draft.probs is not None
        raw = draft.probs**0.7
        return super().accept(rows, replace(draft, probs=raw / raw.sum(-1, keepdim=True)), out, uniforms)


class DropUnlikely(Rejection):
    """The illegal length rule of SPEC 1.7: it filters the draft distribution, and the test sees the bias."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        assert draft.probs is not None
        q = draft.probs.gather(-1, draft.tokens[..., None])[..., 0]
        return super().accept(rows, replace(draft, lengths=(q > 0.3).long().cumprod(1).sum(1)), out, uniforms)


class OnlyWhatWillStand(Rejection):
    """Makes no more drafts than the target is going to accept, as if it had seen what comes of them."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        stand, _ = chain_verify(draft.tokens, draft.probs, out.probs, uniforms)
        return super().accept(rows, replace(draft, lengths=stand), out, uniforms)


class AcceptsOneMore(Rejection):
    """Takes a draft that was not the target's choice."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        accepted, token = chain_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths)
        return Accepted.chain(draft, (accepted + 1).clamp_max(draft.tokens.shape[1]), token)


class TakesTheNextDraft(Rejection):
    """Verifies a draft with the distribution of the one after it."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        assert draft.probs is not None
        return super().accept(rows, replace(draft, probs=draft.probs.roll(-1, 1)), out, uniforms)


class LastThatPasses(BlockRule):
    """Tests each draft by itself, as a chain does, and accepts up to the last one that passes, as a block does."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        assert draft.probs is not None
        drafts, index = draft.tokens.shape[1], torch.arange(len(draft.tokens))
        p, q = (probs.gather(-1, draft.tokens[..., None])[..., 0] for probs in (out.probs[:, :drafts], draft.probs))
        passed = uniforms[:, :drafts] * q < p
        accepted = (torch.arange(1, drafts + 1) * passed).amax(-1)
        residual = (out.probs[index, accepted] - draft.probs[index, accepted.clamp(max=drafts - 1)]).clamp_min(1e-9)
        probs = torch.where((accepted < drafts)[:, None], residual, out.probs[:, drafts])
        return Accepted.chain(draft, accepted, sample(probs, uniforms[:, -1]))


class WrongParent(TreeWalk):
    """Takes the second node's child for one of the first."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        assert draft.parents is not None
        parents = draft.parents.clone()
        parents[:, 4] = 0
        return super().accept(rows, replace(draft, parents=parents), out, uniforms)


class RowOfTheParent(TreeWalk):
    """Takes the target's distribution before a node for the one after it."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        assert draft.parents is not None
        late = torch.cat([out.probs[:, :1], out.probs[:, 1 + draft.parents[0]]], 1)
        return super().accept(rows, draft, replace(out, probs=late), uniforms)


class DrawnAgain(TreeWalk):
    """Verifies second children as if the first had not been taken out."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        assert draft.probs is not None
        return super().accept(rows, replace(draft, probs=draft.probs[:, [0, 0, 2, 2, 2]]), out, uniforms)


class WrongState(PivotOverride):
    """Judges a candidate by the state one place too late."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        late = {layer: states.roll(-1, 1) for layer, states in out.layers.items()}
        return super().accept(rows, draft, replace(out, layers=late), uniforms)


class OverridesStops(PivotOverride):
    """Also accepts a drafted end of the completion."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        stops = rows.slots.stops.clone()
        rows.slots.stops.fill_(-1)
        accepted = super().accept(rows, draft, out, uniforms)
        rows.slots.stops.copy_(stops)
        return accepted


class EndsAtOverrides(PivotOverride):
    """Ends the block at an overridden draft with a token of the target: what was drafted after it is dropped."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        accepted = super().accept(rows, draft, out, uniforms)
        first = accepted.counts["overridden"][:, 0].bool()
        tokens = accepted.tokens.clone()
        tokens[:, 1] = sample(out.probs[:, 1], uniforms[:, -1]).where(first, tokens[:, 1])
        return Accepted(tokens=tokens, lengths=accepted.lengths.where(~first, 1), counts=accepted.counts)


# ---- caches, drafters and decoders


class StaleRow(SlotContext):
    """Leaves the first row of each verification as the last cycle's draft wrote it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if query.shape[2] > 1 and self.first_slot == 0 and self.bias.shape[-1] == self.keys.shape[3]:
            batch = len(key)
            at = self.entries[:, None, :1, None].expand(batch, key.shape[1], 1, key.shape[3])
            key, value = key.clone(), value.clone()
            key[:, :, :1] = self.keys[layer, :batch].gather(2, at)
            value[:, :, :1] = self.values[layer, :batch].gather(2, at)
        return super().attend(layer, query, key, value, scaling)


class StaleTable(Pages):
    """In the table of the device every other slot still has the pages that its neighbour has by now."""

    def upload(self) -> None:
        super().upload()
        self.table[::2] = self.table[1::2]


class NotCompacted(SlotContext):
    """Leaves the accepted nodes of a tree where they were written."""

    def compact(self, first: Tensor, kept: Tensor) -> None:
        """Nothing."""


class PeekingTemperature(MTPDrafter):
    """Draws the first draft at each temperature, and takes the one whose token the target accepts most readily."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        context, sizes = rows.context(), rows.sizes
        positions = torch.arange(context.shape[1]).expand_as(context)
        hidden = self.policy.hidden(context, positions, CausalContext())
        p = rows.probs(self.policy.logits(hidden[torch.arange(rows.batch), sizes - 1])[:, None])[:, 0]
        own, logits = rows.sampling.temperature, self.policy.logits(self.hidden[: rows.batch])[:, None]
        assert own is not None and self.tempered is not None
        q = torch.stack([rows.probs(logits, None, factor * own)[:, 0] for factor in GRID])  # [G, B, V]
        token = sample(q, rows.uniforms[:, 0].expand(len(GRID), -1))[..., None]
        best = (p.expand_as(q).gather(-1, token) / q.gather(-1, token))[..., 0].argmax(0)
        chosen = (torch.tensor(GRID)[best] * own)[:, None].expand(-1, length.limit)
        self.tempered.choose = lambda rows, drafts: chosen  # type: ignore[method-assign]
        return super().propose(rows, length)


class OtherTemperature(MTPDrafter):
    """Says that its drafts were drawn at the target's temperature, whatever they were drawn at."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        draft = super().propose(rows, length)
        assert self.drawn is not None
        return replace(draft, probs=rows.probs(torch.stack(self.drawn.logits, 1)))


class DraftIdsForTokens(Eagle3Drafter):
    """Hands out draft ids where tokens are meant, as without ``d2t``; the distribution is that of the tokens."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        draft = super().propose(rows, length)
        return replace(draft, tokens=torch.searchsorted(self.network.tokens, draft.tokens))


class NotRenormalised(Eagle3Drafter):
    """Reports q as if it were a share of the whole vocabulary: its sum is that of the draft vocabulary, below 1."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        draft, network = super().propose(rows, length), self.network
        assert draft.probs is not None
        return replace(draft, probs=draft.probs * network.draft_vocab_size / network.vocab_size)


EAGLE3 = (DraftIdsForTokens, NotRenormalised)


class HeadReported(HistoryMTPDrafter):
    """Draws from the mixture, and hands the head's own distribution to verification."""

    def _draft(self, rows: Rows, lines: Any, followers: Followers, *given: Any) -> Draft:
        draft, head = super()._draft(rows, lines, followers, *given), given[-1]
        if draft.probs is None or head is None:
            return draft
        probs = draft.probs.clone()
        for row, line in enumerate(lines):
            probs[row, : line.headed] = head.probs[row, : line.headed]
        return Draft(tokens=draft.tokens, probs=probs, lengths=draft.lengths, sources=draft.sources)


class Peeking(HistoryMTPDrafter):
    """Draws from history and from the head with one number, and gives w = 1 to the one whose token the target likes
    better: a w that knows the target at the position being drafted, and what would come of it."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        self.catch_up(rows)
        uniforms, lines = rows.uniforms[:, 0], self.matching.ahead(rows)
        own = rows.probs(self.policy.logits(self.hidden[: rows.batch])[:, None])[:, 0]
        past = own.clone()
        for row, one in enumerate([Next.of(line, greedy=False) for line in lines]):
            if one is not None:
                past[row] = torch.zeros(own.shape[-1]).index_put((torch.tensor(one.tokens),), torch.tensor(one.chances))
        target = self.target(rows)
        tokens = torch.stack([sample(probs, uniforms) for probs in (own, past)], 1)  # [B, 2]
        better = target.gather(1, tokens).argmax(1)
        probs = torch.where((better == 1)[:, None], past, own)[:, None]
        lengths = torch.ones_like(better)
        self.matching.drafted = Cycle(followers=Followers(), lengths=lengths, passes=1.0)
        chosen = tokens.gather(1, better[:, None])
        return Draft(tokens=chosen, probs=probs, sources={"history": better[:, None].float()})

    def target(self, rows: Rows) -> Tensor:
        """Return p [B, V] at the position that is being drafted, by a pass over the whole context."""
        sizes = rows.sizes
        ids = torch.cat([line[:size] for line, size in zip(rows.context(), sizes.tolist(), strict=True)])
        places = torch.cat([torch.arange(size) for size in sizes.tolist()])
        hidden = self.policy.hidden(ids[None], places[None], PackedContext(sizes))
        return rows.probs(self.policy.logits(hidden)[0, sizes.cumsum(0) - 1][:, None])[:, 0]


class Flatter(HistoryDrafter):
    """Hands a flatter distribution to verification than it drew from."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        draft = super().propose(rows, length)
        return replace(draft, probs=None if draft.probs is None else 0.5 * draft.probs + 0.5 / draft.probs.shape[-1])


class DraftsFromTheTokenBefore(PairDecoder):
    """The draft layer sees the newest token that was fed, not the one just drawn."""

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        return super().draft(rows, states, self.pair[: rows.batch, 0])


class FeedsRejectedDrafts(PairDecoder):
    """A rejected draft is not emitted, but stands in the next pair all the same."""

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        self.latest = super().draft(rows, states, token)
        return self.latest

    def cycle(self, batch: int, longest: int, version: int) -> Tensor:
        done = super().cycle(batch, longest, version)
        self.pair[:batch, 1] = self.latest.draft
        return done


class OneUniformForBoth(PairDecoder):
    """Both tokens of a pair are drawn with one random number."""

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        rows.uniforms[:, 1] = rows.uniforms[:, 0]
        return super().draft(rows, states, token)


class KeepsLikelyDrafts(PairDecoder):
    """A gate that looks at the draft's own probability filters its distribution."""

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        second = super().draft(rows, states, token)
        chance = second.probs[:, 0].gather(1, second.draft[:, None])[:, 0]
        return Second(probs=second.probs, draft=second.draft, confidence=chance, kept=chance > 0.6)
