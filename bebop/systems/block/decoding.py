"""Block drafter with one pass of a small network per block (SPEC 5.1), and two rules for the block size.

``BlockLength`` chooses one size per request from its prompt (BlockPilot, SPEC 5). ``EmaLength`` chooses a size for each
cycle from the number of accepted drafts in earlier cycles (SPEC 5.6).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.kernels.verify import sample
from bebop.model.attention import SlotContext, Span
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, DraftLength, Rows, TargetOutput, counted
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots
from bebop.systems.block.network import BlockDraftNetwork, BlockLengthNetwork, PromptEnd
from bebop.systems.block.options import EmaOptions


class BlockDrafter:
    """Drafter that samples each slot of a block from that slot's own distribution; greedy at temperature 0.

    A block has b = K + 1 slots, the newest token and K masks, and each row may have its own b.
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
        self.cache = slots.register_cache("block", self._cache)

    def _cache(self, slots: Slots) -> SlotContext:
        network = self.network
        return slots.kv_cache((len(network.layers), network.kv_heads, network.head_dim), network.mask)

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Read the text of a prefill into the drafter's cache."""
        with self.cache.at_span(span):
            self.network.read(out.layers, span.positions, self.cache)

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft the next tokens of every row.

        The batch is as wide as its longest block; a shorter block does not see the slots beyond its end.
        """
        wanted = length.start(rows)
        width = length.limit if wanted is None else int(wanted.max())
        if width == 0:
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None, lengths=wanted)
        logits = self.policy.logits(self._pass(rows, width + 1, wanted)[:, 1:])
        # The tokens of a block are drawn in parallel, so a penalty can only see the context.
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
        """Return states [B, b, d] of one block per row; only the first ``wanted`` [B] + 1 slots count; None: all b."""
        positions = rows.fed[:, None] + torch.arange(block, device=rows.fed.device)
        # Entries before ``fed`` are text, those from there on this pass writes itself.
        ways = (
            torch.ones_like(positions, dtype=torch.bool)
            if wanted is None
            else positions <= (rows.fed + wanted)[:, None]
        )
        self.cache.place(positions, rows.used, (rows.fed, ways[:, None].expand(-1, block, -1)))
        return self.network(self.network.slots(self.policy.embed(rows.last), block), positions, self.cache)

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Read the target's states of the cycle; those of rejected drafts are overwritten before anything sees them."""
        self._read(out, rows.fed[:, None] + torch.arange(tokens.shape[1], device=tokens.device))

    def _read(self, out: TargetOutput, positions: Tensor) -> None:
        self.cache.place(positions, 0)
        self.network.read(out.layers, positions, self.cache)


# ---- block sizes


class BlockLength(DraftLength):
    """Block size from a network, chosen once per request from its prompt.

    The target's logits at the last token of a prompt come with the first cycle, which therefore drafts a block of the
    default size; the choice applies from the second cycle on. No block exceeds ``draft_tokens`` + 1.

    The choice depends on the prompt alone, never on later samples: the output distribution is the target's.
    """

    counts = ("block_size",)

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        network = policy.parts["block_length"]
        assert isinstance(network, BlockLengthNetwork)
        self.network, self.limit, self.costs = network, config.limit, config.costs
        default = torch.tensor(min(network.default - 1, self.limit))
        self.drafts = slots.register_column("block_length/drafts", default)  # [S] wanted in a cycle
        self.chosen = slots.register_column("block_length/chosen", torch.tensor(False))  # [S] whether that was chosen

    def start(self, rows: Rows) -> Tensor | None:
        """Return the wanted number of drafts of each row."""
        return self.drafts[: rows.batch].clamp_max(self.limit)

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Choose the size for new rows."""
        fresh = (~self.chosen[: rows.batch]).nonzero()[:, 0]
        if len(fresh):
            end = PromptEnd(logits=out.logits[fresh, 0], hidden=out.hidden[fresh, 0], lengths=rows.sizes[fresh])
            self.drafts[fresh] = self.network.choose(end) - 1
            self.chosen[fresh] = True

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        """Return the size of each row's block."""
        return {"block_size": draft.widths()}


PRIOR = (4.0, 5.0)  # initial counts of accepted and tested drafts of a request


class EmaLength(DraftLength):
    """Block size that maximises tokens per unit of time, if each draft is accepted at the request's recent rate.

    The rate counts tested drafts, the first rejected one included, with older cycles fading. K drafts at rate a give
    1 + a + ... + a^K tokens in the time 1 + ``cost_ratio`` + K * ``verify_ratio``: one drafter pass, one pass of the
    target. Only earlier cycles count, nothing of the coming one, so decoding is exact.
    """

    counts = ("block_size",)

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.limit, self.decay, self.costs = config.limit, config.of(EmaOptions).decay, config.costs
        # [S, 2] accepted, tested
        self.seen = slots.register_column("ema/seen", torch.tensor(PRIOR, dtype=torch.float64))

    def start(self, rows: Rows) -> Tensor | None:
        """Return the wanted number of drafts of each row; ties go to the smallest."""
        accepted, tested = self.seen[: rows.batch].unbind(1)
        drafts = torch.arange(self.limit + 1, dtype=torch.float64, device=accepted.device)
        tokens = ((accepted / tested)[:, None] ** drafts).cumsum(1)  # [B, K + 1]
        rate = tokens / (1 + self.costs.draft + drafts * self.costs.verify)
        return rate[:, 1:].argmax(1) + 1

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Add the cycle's accepted and tested drafts; let earlier counts fade."""
        drafted = torch.full_like(accepted.lengths, draft.tokens.shape[1]) if draft.lengths is None else draft.lengths
        now = torch.stack([accepted.lengths, torch.minimum(accepted.lengths + 1, drafted)], 1)
        self.seen[: rows.batch] = self.decay * self.seen[: rows.batch] + now

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        """Return the size of each row's block."""
        return {"block_size": draft.widths()}
