"""Drafts from hidden states of future tokens, made within the target's own passes (SPEC 3.3, on a chain).

In each pass every row has its pseudo states beside it, since it is known only after verification which row is the last
that stays. That one's are kept: they know the text up to the newest token without it, and predict what follows it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.kernels.verify import sample
from bebop.model.attention import SlotContext
from bebop.model.backbone import Policy
from bebop.model.firp import PseudoSlots, PseudoStates, hidden_with_pseudo
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput, counted
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots


class FirpDrafter:
    """Samples draft k from the distribution of pseudo state k; given the text before, drafts are independent."""

    layers: tuple[int, ...] = ()

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        network = policy.parts["firp"]
        assert isinstance(network, PseudoStates)
        network.check(policy)
        steps = len(network.layers)
        if config.draft_tokens > steps:
            raise UserError(
                f"decoding.draft_tokens={config.draft_tokens} is not possible: the part firp predicts {steps} tokens"
            )
        self.policy, self.network = policy, network.to(policy.backbone.dtype)
        self.temperature = config.temperature_of_drafts
        # [S, K, d] final states of the last token that was fed; zero where there is no context but one token
        fresh = torch.zeros(steps, policy.backbone.config.hidden_size, dtype=policy.backbone.dtype)
        self.states = slots.add("firp/states", fresh, of_context=True)

    def target_pass(
        self, tokens: Tensor, positions: Tensor, cache: SlotContext, anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``TargetPass``: pseudo states [B, A, K, d]."""
        context = PseudoSlots(cache, anchors, self.network.masked)
        return hidden_with_pseudo(self.policy, self.network, tokens, positions, anchors, context)

    def prefill(self, first: int, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """See ``Drafter``."""
        assert out.extra is not None
        for row, length in enumerate(lengths):
            self.states[first + row] = out.extra[row, 0] if length else 0

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """See ``Drafter``. It costs no pass: pseudo states wait for the language-model head."""
        wanted = length.start(rows)
        width = length.limit if wanted is None else int(wanted.max())
        if width == 0:
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None, lengths=wanted)
        logits = self.policy.logits(self.states[: rows.batch, :width])
        # Tokens are drawn side by side, so a penalty can only see the context.
        seen = None if rows.seen is None else rows.seen[:, None].expand_as(logits)
        probs = rows.probs(logits, seen, self.temperature)
        entropies = entropy(probs)
        return Draft(
            tokens=sample(probs, rows.uniforms[:, :width]),
            probs=None if self.temperature == 0 else probs,
            lengths=counted(length, wanted, entropies),
            entropies=entropies,
        )

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter``. Kept are the states of the last token that is in the cache now."""
        assert out.extra is not None
        self.states[: rows.batch] = out.extra[torch.arange(rows.batch, device=tokens.device), emitted - 1]


EntryClass = FirpDrafter
