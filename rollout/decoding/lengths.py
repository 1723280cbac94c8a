"""How many tokens to draft: a fixed number, or as many as the draft's entropy makes worth while."""

import math

import torch
from torch import Tensor

from bebop.rollout.decoding.protocols import Draft, Verdict


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
    step. Acceptance is predicted from the entropy of the draft law in buckets, learned from what was accepted. The
    first draft is always made, so that the predictor keeps learning. The rule sees draft laws before anything is
    sampled from them, never the target: exact.
    """

    edges = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5)  # nats

    def __init__(self, limit: int, draft_cost: float, verify_cost: float) -> None:
        self.limit = limit
        self.draft_cost, self.verify_cost = draft_cost, verify_cost
        # A prior worth ten observations: acceptance falls with entropy.
        middles = [0.01, *(math.sqrt(a * b) for a, b in zip(self.edges, self.edges[1:], strict=False)), 3.0]
        self.tested = torch.full((len(middles),), 10.0, dtype=torch.float64)
        self.passed = 10.0 * torch.exp(-0.7 * torch.tensor(middles, dtype=torch.float64))
        self.emitted = 2.0
        self.spent = 1.0 + draft_cost + verify_cost

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """See ``DraftLengthPolicy``."""
        if step == 0:
            return torch.ones_like(entropies[:, 0], dtype=torch.bool)
        chance = (self.passed / self.tested).to(entropies.device)[self._bucket(entropies)].prod(1)
        rate = self.emitted / self.spent
        return chance > rate * (self.draft_cost + self.verify_cost)

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """Count what was tested and accepted per bucket; keep the running rate, older cycles fading."""
        drafts = draft.tokens.shape[1]
        lengths = torch.full_like(verdict.accepted, drafts) if draft.lengths is None else draft.lengths
        steps = torch.arange(drafts, device=lengths.device)
        reached = (steps <= verdict.accepted[:, None]) & (steps < lengths[:, None])
        accepted = steps < verdict.accepted[:, None]
        bucket = self._bucket(draft.entropies)
        self.tested.index_add_(0, bucket[reached].cpu(), torch.ones(int(reached.sum()), dtype=torch.float64))
        self.passed.index_add_(0, bucket[reached].cpu(), accepted[reached].double().cpu())
        fade = 0.999
        self.emitted = fade * self.emitted + float((verdict.accepted + 1).sum())
        self.spent = fade * self.spent + float((1 + lengths * (self.draft_cost + self.verify_cost)).sum())

    def _bucket(self, entropies: Tensor) -> Tensor:
        edges = torch.tensor(self.edges, device=entropies.device)
        return torch.bucketize(entropies, edges)
