"""Decoding in pairs of tokens: one cache entry and one backbone pass per pair, no verification (PIPO, SPEC 2.5).

A pass reads the newest pair and gives the distribution of the next pair's first token. A further layer, which sees that
token, drafts the second, and a head estimates the confidence in the draft. Below the threshold the draft is dropped,
and PAD fills its place in the next pair. So completions have the pair network's distribution, gate included, and not
the policy's. The policy only contributes its embedding and language-model head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.kernels.verify import sample
from bebop.model.attention import SlotContext, Span, cache_shape
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Rows
from bebop.rollout.decoding.draft_verify import end, remember, write
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots
from bebop.systems.pipo.network import PairModel, as_pairs
from bebop.systems.pipo.options import PipoOptions

Pair = tuple[int, int]
NONE = -1  # marks a missing draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """Draft for the second place of the next pair, with its gate."""

    probs: Tensor  # [B, 1, V] that the draft was drawn from
    draft: Tensor  # [B]
    confidence: Tensor  # [B]
    kept: Tensor  # [B] bool


class PairDecoder:
    """Decoding cycle of pairs: its accept length counts tokens per pair, its accept rate kept drafts.

    A kept draft is drawn from the draft's own distribution, whatever the gate. A completion's log-probs are under this
    distribution and that of the first token. New weights of the policy affect it only through embedding and
    language-model head, either at once (``on_update=keep``) or with contexts read again. The network is a part and
    stays unchanged.
    """

    exact = False
    # As part of a prompt, a text is split into other pairs than those that it was drawn in.
    extends = False

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        network = policy.parts["pipo"]
        assert isinstance(network, PairModel)
        if network.pad in policy.eos_token_ids:
            raise UserError(
                f"decoding.system={config.system!r} is not possible: its pad token {network.pad}, which is never "
                "drawn, is one that ends completions"
            )
        self.policy, self.slots = policy, slots
        self.network = network.to(policy.device, policy.backbone.dtype)
        self.cache = slots.register_cache("pipo", self._cache)
        # [S, 2] the newest pair, not fed
        self.pair = slots.register_column("pipo/pair", torch.tensor([network.pad, network.pad]), of_context=True)
        width = slots.tokens.shape[1]
        # By completion token, W = length + K + 1; at a pair's first token, and neutral at its second:
        fresh = {
            "kept": torch.zeros(width, dtype=torch.bool),  # whether its draft follows it
            "draft": torch.full((width,), NONE),
            "draft_logprob": torch.zeros(width),  # log-prob of the draft when drawn
            "confidence": torch.zeros(width),
        }
        self.kept, self.drafts, self.draft_logprobs, self.confidence = (
            slots.register_column(f"pipo/{name}", value, by_token=True)
            for name, value in fresh.items()  # [S, W] each
        )
        slots.extend_stats(("confidence",))
        self.measure = True
        self.drafting = True
        self.configure(config)

    def _cache(self, slots: Slots) -> SlotContext:
        """Create the cache of the backbone's layers and the draft's layer behind them; all have one entry per pair."""
        like = self.policy.embed(torch.zeros(1, dtype=torch.long, device=slots.device))
        network = self.network
        return slots.kv_cache(cache_shape(network.config, network.layers), like)

    def configure(self, config: DecodingConfig) -> bool:
        """Switch to a new configuration; return whether drafting starts, whose cache entries are missing.

        Nothing is drafted if no draft is ever accepted.
        """
        self.options = config.of(PipoOptions)
        self.tau = self.network.tau if self.options.tau is None else self.options.tau
        before = self.drafting
        self.drafting = self.options.keep > 0 if self.options.gate == "random" else self.tau < 1
        return self.drafting and not before

    def entries(self, slot: int, context: list[int]) -> list[Pair]:
        """Return the pairs of a context: those of the prompt, then those in which the completion was drawn."""
        asked = int(self.slots.asked[slot])
        kept = self.kept[slot, : len(context) - asked].tolist()
        return [*as_pairs(context[:asked], self.network.pad), *answer_pairs(context[asked:], kept, self.network.pad)]

    def prefill(self, first: int, contexts: Sequence[Sequence[Pair]], starts: Sequence[int] = ()) -> None:
        """Read contexts into the slots ``first``, ``first`` + 1, ..."""
        starts = starts or [0] * len(contexts)
        parts = [context[start:] for context, start in zip(contexts, starts, strict=True)]
        lengths = [len(part) - 1 for part in parts]
        width, filling = max(lengths), (self.network.pad, self.network.pad)
        padded = torch.tensor([[*p, *[filling] * (width + 1 - len(p))] for p in parts], device=self.slots.device)
        for row, length in enumerate(lengths):
            self.pair[first + row] = padded[row, length]
        if width == 0:
            return
        embeddings = self.policy.embed(padded)
        span = Span.of(first, starts, lengths, width, self.slots.capacity, self.slots.device)
        with self.cache.at_span(span):
            states = self.network.states(self.network.compress(embeddings[:, :-1]), span.positions, self.cache)
            if self.drafting:
                self.network.draft_states(embeddings[:, 1:, 0], states, span.positions, self.cache)

    @torch.inference_mode()
    def cycle(self, batch: int, longest: int, version: int) -> Tensor:
        """Advance the first B slots by a cycle."""
        slots, rows = self.slots, Rows(self.slots, batch, longest)
        slots.set_version(version)
        states = self.read(rows)
        probs = rows.probs(self.network.logits(self.policy, states), None if rows.seen is None else rows.seen[:, None])
        token = sample(probs[:, 0], rows.uniforms[:, 0])
        second = self.draft(rows, states, token) if self.drafting else None
        if second is None:
            accepted = Accepted(tokens=token[:, None], lengths=torch.zeros_like(token))
        else:
            accepted = Accepted(tokens=torch.stack([token, second.draft], 1), lengths=second.kept.long())
        emitted, done = end(rows, accepted)
        both = probs if second is None else torch.cat([probs, second.probs], 1)
        write(rows, accepted, both.gather(-1, accepted.tokens[..., None])[..., 0].log(), self.exact)
        slots.exact[:batch] = False
        if second is not None:
            self._note(rows, accepted, second, probs, emitted)
        remember(rows, accepted.tokens, emitted)
        slots.work[:batch, :2].add_(1)
        slots.work[:batch, 2].add_(int(self.drafting))
        slots.fed[:batch].add_(1)
        slots.count[:batch].add_(emitted)
        slots.last[:batch] = accepted.tokens[torch.arange(batch, device=slots.device), emitted - 1]
        filler = torch.full_like(token, self.network.pad)
        self.pair[:batch] = torch.stack([token, torch.where(emitted == 2, slots.last[:batch], filler)], 1)
        return done

    def read(self, rows: Rows) -> Tensor:
        """Feed the newest pair of each row and return states [B, 1, d], which predict the next pair's first token."""
        inputs = self.network.compress(self.policy.embed(self.pair[: rows.batch]))[:, None]
        positions = rows.fed[:, None]
        self.cache.place(positions, rows.used)
        return self.network.states(inputs, positions, self.cache)

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        """Draw the token after ``token`` [B], which the states [B, 1, d] predicted, and apply the gate.

        The cache is already placed by ``read``.
        """
        drafted = self.network.draft_states(self.policy.embed(token)[:, None], states, rows.fed[:, None], self.cache)
        logits = self.network.logits(self.policy, drafted)
        seen = None if rows.seen is None else rows.seen.scatter(1, token[:, None], True)[:, None]
        probs = rows.probs(logits, seen)
        draft = sample(probs[:, 0], rows.uniforms[:, 1])
        confidence = self.network.confidence(states[:, 0], drafted[:, 0])
        if self.options.gate == "random":
            kept = rows.uniforms[:, 2] < self.options.keep
        else:
            kept = confidence >= self.tau
        return Second(probs=probs, draft=draft, confidence=confidence, kept=kept)

    def stages(self) -> list[tuple[Any, str, str]]:
        """Return the stages that a benchmark may time, as (object, method, name)."""
        return [(self, "prefill", "prefill"), (self, "read", "verify"), (self, "draft", "draft")]

    def _note(self, rows: Rows, accepted: Accepted, second: Second, first: Tensor, emitted: Tensor) -> None:
        """Record the draft and its outcome, and count it if the completion had room for it.

        The entropies are those of both distributions that a pair is drawn from; ``first`` [B, 1, V] is that of the
        first token.
        """
        slots, place = self.slots, self.slots.count[: rows.batch, None]
        whole, _ = end(rows, Accepted(tokens=accepted.tokens, lengths=torch.ones_like(accepted.lengths)))
        reached = whole == 2
        logprob = second.probs[:, 0].gather(1, second.draft[:, None])[:, 0].log()
        for column, value in (
            (self.kept, second.kept & reached),
            (self.drafts, torch.where(reached, second.draft, NONE)),
            (self.draft_logprobs, torch.where(reached, logprob, 0)),
            (self.confidence, torch.where(reached, second.confidence, 0)),
        ):
            column[: rows.batch].scatter_(1, place, value[:, None].to(column.dtype))
        sums = {"reached": reached, "accepted": emitted == 2}
        if self.measure:
            entropies = entropy(torch.cat([second.probs, first], 1))
            sums |= {"draft_entropy": entropies[:, 0] * reached, "target_entropy": entropies[:, 1] * reached}
        sums["confidence"] = second.confidence * reached
        slots.record([*sums], torch.stack([value.double() for value in sums.values()], 1)[..., None], emitted, ahead=1)


def answer_pairs(answer: Sequence[int], kept: Sequence[bool], pad: int) -> list[Pair]:
    """Return the pairs in which a completion was drawn.

    Args:
        answer: its tokens [T].
        kept: [T], at the first token of a pair: whether the one after it is the pair's second.
        pad: fills the place of a missing second token.
    """
    pairs: list[Pair] = []
    place = 0
    while place < len(answer):
        whole = bool(kept[place]) and place + 1 < len(answer)
        pairs.append((answer[place], answer[place + 1] if whole else pad))
        place += 1 + whole
    return pairs
