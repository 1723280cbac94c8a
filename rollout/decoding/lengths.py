"""How many tokens to draft: a fixed number, or as many as the draft's entropy makes worth while."""

import math

import torch
from torch import Tensor

from bebop.rollout.decoding.protocols import Draft, Verdict
from bebop.rollout.slots import Slots


class FixedLength:
    """Always K drafts."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """All rows go on."""
        return None

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """Nothing to learn."""


class EntropyLength:
    """Draft on while the expected gain exceeds its cost (SPEC 1.7, renewal-reward form).

    Token j is drafted if the predicted product of acceptances up to j exceeds rate * (time of one draft step + time of
    one more verified position), where rate is tokens emitted per unit of time so far and times are in units of a plain
    step. Acceptance is predicted from the entropy of the draft distribution in buckets, learned from what was accepted.
    The first draft is always made, so that the predictor keeps learning. The rule sees draft distributions before
    anything is
    sampled from them, never the target: exact.

    Each request learns for itself, from the same prior: its draft lengths, hence its tokens, depend neither on the
    requests beside it nor on those before, and there is nothing that a checkpoint would have to hold.
    """

    edges = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5)  # nats

    def __init__(self, slots: Slots, limit: int, draft_cost: float, verify_cost: float) -> None:
        self.limit = limit
        self.cost = draft_cost + verify_cost
        # A prior worth ten observations: acceptance falls with entropy.
        middles = [0.01, *(math.sqrt(a * b) for a, b in zip(self.edges, self.edges[1:], strict=False)), 3.0]
        tested = torch.full((len(middles),), 10.0, dtype=torch.float64)
        self.tested = slots.add("length/tested", tested)  # [S, buckets] drafts
        self.passed = slots.add("length/passed", tested * torch.exp(-0.7 * torch.tensor(middles, dtype=torch.float64)))
        self.rate = slots.add(
            "length/rate", torch.tensor([2.0, 1.0 + self.cost], dtype=torch.float64)
        )  # [S, 2] tokens, time

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """See ``DraftLength``."""
        if step == 0:
            return torch.ones_like(entropies[:, 0], dtype=torch.bool)
        rows = slice(len(entropies))
        chance = (self.passed[rows] / self.tested[rows]).gather(1, self._bucket(entropies)).prod(1)
        return chance > self.rate[rows, 0] / self.rate[rows, 1] * self.cost

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """Count what was tested and accepted per bucket; keep the running rate, older cycles fading."""
        batch, drafts = draft.tokens.shape
        lengths = torch.full_like(verdict.accepted, drafts) if draft.lengths is None else draft.lengths
        steps = torch.arange(drafts, device=lengths.device)
        reached = (steps <= verdict.accepted[:, None]) & (steps < lengths[:, None])
        accepted = steps < verdict.accepted[:, None]
        bucket = self._bucket(draft.entropies)
        self.tested[:batch].scatter_add_(1, bucket, reached.double())
        self.passed[:batch].scatter_add_(1, bucket, accepted.double())
        now = torch.stack([verdict.accepted + 1.0, 1.0 + lengths * self.cost], 1)
        self.rate[:batch] = 0.999 * self.rate[:batch] + now

    def _bucket(self, entropies: Tensor) -> Tensor:
        edges = torch.tensor(self.edges, device=entropies.device)
        return torch.bucketize(entropies, edges)
