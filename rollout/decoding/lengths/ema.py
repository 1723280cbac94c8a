"""A block size for each cycle, from how many drafts the last ones had accepted (SPEC 5.6)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.options import EmaOptions
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.slots import Slots

PRIOR = (4.0, 5.0)  # accepted and tested drafts that a request begins with


class EmaLength:
    """As many drafts as give most tokens per unit of time, if each is accepted at the rate of the request so far.

    The rate is that of drafts which were tested, the first rejected one included, older cycles fading. K drafts at rate
    a give 1 + a + ... + a^K tokens in the time 1 + ``cost_ratio`` + K * ``verify_ratio``: one drafter pass, one pass of
    the target. Only what earlier cycles had accepted counts, nothing of the one to come: exact.
    """

    counts = ("block_size",)

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.limit, self.decay, self.costs = config.limit, config.of(EmaOptions).decay, config.costs
        self.seen = slots.add("ema/seen", torch.tensor(PRIOR, dtype=torch.float64))  # [S, 2] accepted, tested

    def start(self, rows: Rows) -> Tensor | None:
        """See ``DraftLength``; of sizes that tie, the smallest."""
        accepted, tested = self.seen[: rows.batch].unbind(1)
        drafts = torch.arange(self.limit + 1, dtype=torch.float64, device=accepted.device)
        tokens = ((accepted / tested)[:, None] ** drafts).cumsum(1)  # [B, K + 1]
        rate = tokens / (1 + self.costs.draft + drafts * self.costs.verify)
        return rate[:, 1:].argmax(1) + 1

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """All slots of a block are drafted at once."""
        return None

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Count what was accepted and what was tested; let what was there fade."""
        drafted = torch.full_like(accepted.lengths, draft.tokens.shape[1]) if draft.lengths is None else draft.lengths
        now = torch.stack([accepted.lengths, torch.minimum(accepted.lengths + 1, drafted)], 1)
        self.seen[: rows.batch] = self.decay * self.seen[: rows.batch] + now

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        """See ``Draft.widths``."""
        return {"block_size": draft.widths()}


EntryClass = EmaLength
