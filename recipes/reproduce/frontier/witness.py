"""Sampled total variation to the target: from tokens alone, given the distributions known before them.

For a token, let p be the target's distribution, q that of a draft for its place, and A = {x: q(x) > p(x)}. A is known
before the token is drawn from P. Then 1[token in A] - p(A) has the mean P(A) - p(A) <= TV(P, p), whatever P is. For
rules that move mass only from other tokens to those that drafts favour, it is the total variation itself: 0 for exact
rules, epsilon TV(p, q) for the planted one, R_N for PAD (SPEC 4.4). Each term is about a single token, given the
decoder's state before it. The average is over all emitted tokens; those without a draft count 0.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bebop.bench.rollout import products
from bebop.kernels.verify import one_hot
from bebop.rollout.decoding.base import AcceptanceRule, Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.torch_engine import TorchEngine

COLUMNS = ("witness", "computed", "reached", "accepted", "overlap", "positions", "entries")
BIAS = "bias"  # name of the count by which rules report their own total variation
# Target and draft distributions [..., V] -> TV(P, p) [...] of a rule.
Variation = Callable[[Tensor, Tensor], Tensor]


class Witness:
    """Observer of cycles of draft and verification that sums ``COLUMNS`` over completions, by request.

    ``computed``: TV(P, p) from distributions, as the rule counts it or by ``variation``. ``entries``: layers times
    cache entries held at the end. ``positions``: positions that the backbone was fed, including rejected drafts.
    """

    def __init__(self, seeds: Sequence[int], variation: Variation | None = None) -> None:
        """Register the ``seeds`` of the requests in order; they identify a request in any slot."""
        self.places = {seed: place for place, seed in enumerate(seeds)}
        self.variation = variation
        self.sums = {name: torch.zeros(len(seeds), dtype=torch.float64) for name in COLUMNS}

    def of(self, rows: Rows) -> Tensor:
        """Return the index of the request in each row [B]."""
        return torch.tensor([self.places[seed] for seed in rows.slots.seed[: rows.batch].tolist()])

    def add(self, name: str, places: Tensor, values: Tensor) -> None:
        """Add values [B] to a column."""
        self.sums[name].index_add_(0, places, values.double())

    def __call__(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted, emitted: Tensor) -> None:
        """Add the tested drafts of a cycle; see ``draft_verify.Observer``."""
        drafts = draft.tokens.shape[1]
        steps = torch.arange(drafts)
        tested = steps < emitted[:, None]
        if draft.lengths is not None:
            tested &= steps < draft.lengths[:, None]
        row, step = tested.nonzero(as_tuple=True)
        p = out.probs[row, step].double()
        chosen = draft.tokens[row, step]
        q = one_hot(chosen, p.shape[-1], p.dtype) if draft.probs is None else draft.probs[row, step].double()
        places = self.of(rows)[row]
        kept = step < torch.minimum(accepted.lengths, emitted)[row]
        self.add("witness", places, evidence(accepted.tokens[row, step], p, q))
        self.add("reached", places, torch.ones_like(kept))
        self.add("accepted", places, kept)
        self.add("overlap", places, torch.minimum(p, q).sum(-1))
        if self.variation is not None:
            self.add("computed", places, self.variation(p, q))
        elif BIAS in accepted.counts:
            self.add("computed", places, accepted.counts[BIAS][row, step])


def evidence(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return 1[token in A] - p(A) [n] of tokens [n], with A = {q > p} of distributions [n, V]."""
    favoured = q > p
    return favoured.gather(-1, tokens[:, None])[:, 0].double() - (p * favoured).sum(-1)


class CountsFed:
    """An acceptance rule that delegates and counts the positions fed by each row: its newest token and its drafts."""

    def __init__(self, rule: AcceptanceRule, witness: Witness) -> None:
        self.rule, self.witness = rule, witness
        self.exact, self.stepwise, self.layers, self.counts = rule.exact, rule.stepwise, rule.layers, rule.counts

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Count the fed positions, then delegate; see ``AcceptanceRule``."""
        all_of_them = torch.full_like(rows.last, draft.tokens.shape[1])
        fed = 1 + (all_of_them if draft.lengths is None else draft.lengths)
        self.witness.add("positions", self.witness.of(rows), fed)
        return self.rule.accept(rows, draft, out, uniforms)


@contextmanager
def watching(engine: TorchEngine, witness: Witness) -> Iterator[list[float]]:
    """Record everything that ``witness`` needs within the block; yield the floating-point operations of the cycles."""
    decoder, slots = engine.decoder, engine.slots
    if isinstance(decoder, DraftVerify):
        decoder.observers.append(witness)
        decoder.rule = CountsFed(decoder.rule, witness)
    layers = sum(len(cache.keys) for cache in slots.caches.values())
    with products(engine.policy, engine) as spent:
        inner = decoder.cycle  # this one counts products

        def cycle(batch: int, *args: Any) -> Tensor:
            done = inner(batch, *args)
            for slot in done.nonzero()[:, 0].tolist():
                witness.sums["entries"][witness.places[int(slots.seed[slot])]] = layers * float(slots.fed[slot])
            return done

        setattr(decoder, "cycle", cycle)  # noqa: B010
        try:
            yield spent
        finally:
            setattr(decoder, "cycle", inner)  # noqa: B010
