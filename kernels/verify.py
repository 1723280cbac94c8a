"""Chain verification by rejection sampling (SPEC 0.3): the plain PyTorch reference, and Triton on a CUDA device.

One code path serves rejection sampling and target-only verification: the latter is a one-hot draft law.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from bebop.errors import UserError


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from laws [..., V] (unnormalised) by inverting the CDF at uniforms [...] in [0, 1) -> tokens [...].

    Takes the first token with cumsum > u * total. Where rounding leaves none, the last token of positive mass, never
    index V - 1 as such. A token of probability zero cannot come out, not even on a GPU, whose parallel sums need not
    be monotone: what such a flaw would let through is replaced by the likeliest token.
    """
    cdf = probs.cumsum(-1)
    total = cdf[..., -1:]
    token = (cdf <= uniforms[..., None].to(cdf.dtype) * total).sum(-1)
    # The CDF is flat over a tail of zeros, so the first index that reaches the total is the last of positive mass.
    token = torch.minimum(token, (cdf < total).sum(-1))
    possible = probs.gather(-1, token[..., None])[..., 0] > 0
    return torch.where(possible, token, probs.argmax(-1))


def chain_verify(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of a drafted chain and draw the token after it, so that the output law is the target's.

    Args:
        draft_tokens: [B, K], each sampled from its row of ``draft_probs``.
        draft_probs: [B, K, V], exactly the laws that the drafts were sampled from.
        target_probs: [B, K + 1, V]; row j is the target's law after the first j drafts.
        uniforms: [B, K + 2] in [0, 1): K tests, then one for the residual and one for the bonus token.
        lengths: [B], drafts per row (ragged chains); K for all if None.

    Returns:
        accepted [B] in 0..K, and the next token [B]: from the residual max(0, p - q) after a rejection, from row K + 1
        of the target (not row K, as printed in the paper's Algorithms 3 and 4) after a full chain.
    """
    if compiled(draft_probs, target_probs):
        from bebop.kernels import verify_triton

        return verify_triton.launch(draft_tokens, draft_probs, target_probs, uniforms, lengths)
    return reference(draft_tokens, draft_probs, target_probs, uniforms, lengths)


def chain_verify_logits(
    draft_tokens: Tensor,
    draft_logits: Tensor,
    target_logits: Tensor,
    uniforms: Tensor,
    temperature: float | Tensor = 1.0,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``chain_verify`` from logits [B, K, V] and [B, K + 1, V], both divided by ``temperature`` (a number or [B]).

    The same uniforms decide as in ``chain_verify``. On a CUDA device no softmax is materialised.

    Raises:
        UserError: a temperature that is not positive (not checked in a tensor: that would wait for the device).
    """
    if isinstance(temperature, float | int) and not temperature > 0:
        raise UserError(f"temperature {temperature} is not possible: it must be positive; for greedy use a one-hot law")
    if compiled(draft_logits, target_logits):
        from bebop.kernels import verify_logits_triton

        return verify_logits_triton.launch(
            draft_tokens, draft_logits, target_logits, uniforms, temperature, lengths
        )  # fmt: skip
    return logits_reference(draft_tokens, draft_logits, target_logits, uniforms, temperature, lengths)


def compiled(draft: Tensor, target: Tensor) -> bool:
    """Whether the Triton kernels can take it; fp64 and machines without Triton stay with the reference."""
    return target.is_cuda and find_spec("triton") is not None and torch.float64 not in (draft.dtype, target.dtype)


# ---- the references


def logits_reference(
    draft_tokens: Tensor,
    draft_logits: Tensor,
    target_logits: Tensor,
    uniforms: Tensor,
    temperature: float | Tensor = 1.0,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch, in fp32 at least: both softmaxes, then ``reference``."""
    scale = torch.as_tensor(temperature, device=target_logits.device).reshape(-1, 1, 1)

    def law(logits: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return (logits.to(dtype) / scale.to(dtype)).softmax(-1)

    return reference(draft_tokens, law(draft_logits), law(target_logits), uniforms, lengths)


def reference(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch, any dtype."""
    batch, drafts = draft_tokens.shape
    steps = torch.arange(drafts, device=draft_tokens.device)
    lengths = torch.full_like(draft_tokens[:, 0], drafts) if lengths is None else lengths
    index = draft_tokens[..., None]
    p = target_probs[:, :drafts].gather(-1, index)[..., 0]
    q = draft_probs.gather(-1, index)[..., 0]
    # Multiplied, not divided, and strict: p = 0 can never be accepted, q = 0 needs no guard.
    passed = (uniforms[:, :drafts] * q < p) & (steps < lengths[:, None])
    accepted = passed.long().cumprod(-1).sum(-1)

    rows = torch.arange(batch, device=draft_tokens.device)
    target = target_probs[rows, accepted]
    rejected = accepted < lengths
    draft = draft_probs[rows, accepted.clamp(max=drafts - 1)]
    residual = (target - draft).clamp_min(0)
    # A residual without mass means p = q up to rounding, where p itself is the law.
    use_residual = rejected & (residual.sum(-1) > 0)
    law = torch.where(use_residual[:, None], residual, target)
    u = torch.where(rejected, uniforms[:, drafts], uniforms[:, drafts + 1])
    return accepted, sample(law, u)
