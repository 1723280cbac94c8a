"""One block size a request, chosen from what the target makes of its prompt (BlockPilot, SPEC 5)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.model.block_length import BlockLengthNetwork, PromptEnd
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.slots import Slots


class BlockLength:
    """The target's logits at the last token of a prompt come with a request's first cycle, which therefore drafts a
    block of the default size; what they say holds from the second cycle on. No block exceeds ``draft_tokens`` + 1.

    The choice depends on the prompt alone, never on what was sampled after it: the output distribution is the target's.
    """

    counts = ("block_size",)

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        network = policy.parts["block_length"]
        assert isinstance(network, BlockLengthNetwork)
        self.network, self.limit, self.costs = network, config.limit, config.costs
        default = torch.tensor(min(network.default - 1, self.limit))
        self.drafts = slots.add("block_length/drafts", default)  # [S] wanted in a cycle
        self.chosen = slots.add("block_length/chosen", torch.tensor(False))  # [S] whether that was chosen

    def start(self, rows: Rows) -> Tensor | None:
        """See ``DraftLength``."""
        return self.drafts[: rows.batch].clamp_max(self.limit)

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """All slots of a block are drafted at once."""
        return None

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Choose for the rows that are new."""
        fresh = (~self.chosen[: rows.batch]).nonzero()[:, 0]
        if len(fresh):
            end = PromptEnd(logits=out.logits[fresh, 0], hidden=out.hidden[fresh, 0], lengths=rows.sizes[fresh])
            self.drafts[fresh] = self.network.choose(end) - 1
            self.chosen[fresh] = True

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        """See ``Draft.widths``."""
        return {"block_size": draft.widths()}


EntryClass = BlockLength
