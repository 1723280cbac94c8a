"""Acceptance rules."""

from dataclasses import dataclass

from torch import Tensor

from bebop.kernels.verify import chain_verify, sample
from bebop.rollout.decoding.protocols import Draft, Verdict


@dataclass(frozen=True, slots=True)
class Rejection:
    """Rejection sampling (SPEC 0.3): accepts with the full overlap sum_v min(p, q), and the output distribution is p.

    With a one-hot draft distribution this *is* target-only verification, which accepts with p(argmax q).
    """

    exact: bool = True

    def accept(self, draft: Draft, target_probs: Tensor, uniforms: Tensor) -> Verdict:
        """See ``AcceptanceRule``."""
        accepted, token = chain_verify(draft.tokens, draft.probs, target_probs, uniforms, draft.lengths)
        return Verdict(accepted=accepted, next_token=token)


@dataclass(frozen=True, slots=True)
class Plain:
    """No drafts: every token is drawn from the target."""

    exact: bool = True

    def accept(self, draft: Draft, target_probs: Tensor, uniforms: Tensor) -> Verdict:
        """See ``AcceptanceRule``; the draft is empty."""
        token = sample(target_probs[:, 0], uniforms[:, -1])
        return Verdict(accepted=token.new_zeros(token.shape), next_token=token)
