"""Draft lengths that do not depend on measured time: a fixed one, and one by the entropy of drafts."""

import math

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.slots import Slots


class FixedLength(DraftLength):
    """A draft length of always K drafts."""

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.limit, self.costs = config.limit, config.costs


class EntropyLength(DraftLength):
    """A draft length that drafts on while the expected gain exceeds its cost (SPEC 1.7, renewal-reward form).

    Token j is drafted if the predicted product of acceptances up to j exceeds rate * (time of one draft step + time of
    one more verified position). Here rate is tokens emitted per unit of time so far, and times are in units of a plain
    step. Acceptance is predicted from the entropy of the draft distribution in buckets, learned from accepted drafts.
    The first draft is always made, so that the predictor keeps learning. The rule sees draft distributions before
    anything is sampled from them, never the target: it is exact.

    Each request learns for itself, from the same prior. Its draft lengths, hence its tokens, depend neither on the
    requests beside it nor on earlier ones, and a checkpoint has nothing to hold.
    """

    edges = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5)  # nats

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.limit, self.costs = config.limit, config.costs
        self.borders = torch.tensor(self.edges, device=slots.device)
        self.cost = self.costs.draft + self.costs.verify
        # A prior worth ten observations: acceptance falls with entropy.
        middles = [0.01, *(math.sqrt(a * b) for a, b in zip(self.edges, self.edges[1:], strict=False)), 3.0]
        tested = torch.full((len(middles),), 10.0, dtype=torch.float64)
        self.tested = slots.register_column("length/tested", tested)  # [S, buckets] drafts
        passed = tested * torch.exp(-0.7 * torch.tensor(middles, dtype=torch.float64))
        self.passed = slots.register_column("length/passed", passed)
        rate = torch.tensor([2.0, 1.0 + self.cost], dtype=torch.float64)
        self.rate = slots.register_column("length/rate", rate)  # [S, 2] tokens, time

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """Return which rows draft token ``step``: those whose expected gain exceeds its cost."""
        if step == 0:
            return torch.ones_like(entropies[:, 0], dtype=torch.bool)
        rows = slice(len(entropies))
        chance = (self.passed[rows] / self.tested[rows]).gather(1, self._bucket(entropies)).prod(1)
        return chance > self.rate[rows, 0] / self.rate[rows, 1] * self.cost

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Count tested and accepted drafts per bucket; keep the running rate, older cycles fading."""
        batch, drafts = draft.tokens.shape
        lengths = torch.full_like(accepted.lengths, drafts) if draft.lengths is None else draft.lengths
        steps = torch.arange(drafts, device=lengths.device)
        reached = (steps <= accepted.lengths[:, None]) & (steps < lengths[:, None])
        passed = steps < accepted.lengths[:, None]
        if draft.entropies is not None:
            bucket = self._bucket(draft.entropies)
            self.tested[:batch].scatter_add_(1, bucket, reached.double())
            self.passed[:batch].scatter_add_(1, bucket, passed.double())
        now = torch.stack([accepted.lengths + 1.0, 1.0 + lengths * self.cost], 1)
        self.rate[:batch] = 0.999 * self.rate[:batch] + now

    def _bucket(self, entropies: Tensor) -> Tensor:
        return torch.bucketize(entropies, self.borders)
