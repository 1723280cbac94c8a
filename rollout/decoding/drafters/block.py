"""Drafts of a block-diffusion drafter: all of a cycle's tokens from one pass of a small network (SPEC 5.1)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.kernels.verify import sample
from bebop.model.attention import SlotContext, Span
from bebop.model.backbone import Policy
from bebop.model.block import BlockDraftNetwork
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput, counted
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots


class BlockDrafter:
    """Samples each slot of a block from that slot's own distribution; at temperature 0 drafts are greedy.

    A block has b = K + 1 slots, the newest token and K masks, and each row may have a b of its own.
    """

    target_pass = None

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        network = policy.parts["block"]
        assert isinstance(network, BlockDraftNetwork)
        depth = policy.backbone.config.num_hidden_layers
        if max(network.taps) >= depth:
            raise UserError(
                f"the block drafter reads layer {max(network.taps)}, and the model has layers 0..{depth - 1}"
            )
        self.policy, self.network = policy, network.to(policy.backbone.dtype)
        self.layers = network.taps
        self.temperature = config.temperature_of_drafts
        self.cache = slots.own("block", self._cache)

    def _cache(self, slots: Slots) -> SlotContext:
        network, sizes = self.network, slots.sizes
        return SlotContext(
            len(network.layers), sizes.slots, slots.capacity, network.kv_heads, network.head_dim, network.mask
        )

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """See ``Drafter``."""
        with self.cache.at_span(span):
            self.network.read(out.layers, span.positions, self.cache)

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """See ``Drafter``. The batch is as wide as its longest block; a shorter one does not see the slots beyond."""
        wanted = length.start(rows)
        width = length.limit if wanted is None else int(wanted.max())
        if width == 0:
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None, lengths=wanted)
        logits = self.policy.logits(self._pass(rows, width + 1, wanted)[:, 1:])
        # The tokens of a block are drawn side by side, so a penalty can only see the context.
        seen = None if rows.seen is None else rows.seen[:, None].expand_as(logits)
        probs = rows.probs(logits, seen, self.temperature)
        entropies = entropy(probs)
        tokens = sample(probs, rows.uniforms[:, :width])
        return Draft(
            tokens=tokens,
            probs=None if self.temperature == 0 else probs,
            lengths=counted(length, wanted, entropies),
            entropies=entropies,
            forwards=1,
        )

    def _pass(self, rows: Rows, block: int, wanted: Tensor | None) -> Tensor:
        """States [B, b, d] of a block a row, of which the first ``wanted`` [B] + 1 slots count; None: all b."""
        positions = rows.fed[:, None] + torch.arange(block, device=rows.fed.device)
        end = rows.fed + block if wanted is None else rows.fed + wanted + 1
        # Entries before ``fed`` are text, those from there on this pass writes itself.
        seen = torch.arange(rows.used, device=end.device) < end[:, None, None]
        self.cache.place(positions, rows.used, seen.expand(-1, block, -1))
        return self.network(self.network.slots(self.policy.embed(rows.last), block), positions, self.cache)

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter``. What it reads of rejected drafts is overwritten before anything sees it."""
        self._read(out, rows.fed[:, None] + torch.arange(tokens.shape[1], device=tokens.device))

    def _read(self, out: TargetOutput, positions: Tensor) -> None:
        self.cache.place(positions, 0)
        self.network.read(out.layers, positions, self.cache)


EntryClass = BlockDrafter
