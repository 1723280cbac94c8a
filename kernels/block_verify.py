"""Block verification (Sun et al., arXiv 2403.10444): it judges a chain as a whole and accepts more drafts than chain
verification.

With prefix weights w_0 = 1, w_i = min(1, w_{i-1} * p_i(y_i) / q_i(y_i)), where row i is conditional on y_1..y_{i-1}:

    S_i = sum_v max(0, w_i * p_{i+1}(v) - q_{i+1}(v)),   h_i = S_i / (S_i + 1 - w_i),   h_K = w_K

Every i with u_i < h_i qualifies, and the *largest* such i is accepted (0 if there is none). No test ends the search.
The next token comes from max(0, w_i * p_{i+1} - q_{i+1}), or from row K + 1 of the target if all K drafts are accepted.
The output distribution is the target's. No rule that knows only the chain has a larger expected number of accepted
drafts. Chain verification is the special case that stops at the first failure. This file holds the plain PyTorch
reference; a CUDA device runs Triton kernels.
"""

import torch
from torch import Tensor

from bebop.kernels.verify import compiled, one_hot, sample


def block_verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of a drafted chain and draw the token after it, so that the output distribution is the target's.

    Arguments and results as in ``chain_verify``: tokens [B, K], draft distributions [B, K, V], target distributions
    [B, K + 1, V], uniforms [B, K + 2] in [0, 1) (K tests, the recovered token, the bonus), drafts per row ``lengths``
    [B] -> accepted [B], next token [B]. In fp32 at least. Drafts that were not sampled (None) count as one-hot.
    """
    if draft_probs is None:
        draft_probs = one_hot(draft_tokens, target_probs.shape[-1], target_probs.dtype)
    if draft_tokens.shape[1] and compiled(draft_probs, target_probs):
        from bebop.kernels import block_verify_triton

        return block_verify_triton.launch(draft_tokens, draft_probs, target_probs, uniforms, lengths)
    return reference(draft_tokens, draft_probs, target_probs, uniforms, lengths)


# ---- the reference


def reference(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``block_verify`` in plain PyTorch, in any dtype."""
    batch, drafts = draft_tokens.shape
    rows = torch.arange(batch, device=draft_tokens.device)
    if drafts == 0:
        return torch.zeros_like(rows), sample(target_probs[:, 0], uniforms[:, 1])
    lengths = torch.full_like(draft_tokens[:, 0], drafts) if lengths is None else lengths
    weights, thresholds = block_thresholds(draft_tokens, draft_probs, target_probs, lengths)
    positions = torch.arange(1, drafts + 1, device=draft_tokens.device)
    accepted = (positions * (uniforms[:, :drafts] < thresholds)).amax(-1)

    full = accepted == lengths
    target = target_probs[rows, accepted].to(weights.dtype)
    residual = residual_distribution(weights[rows, accepted], target, draft_probs[rows, accepted.clamp(max=drafts - 1)])
    # A residual without mass means p = q up to rounding, where p itself is the distribution.
    use_target = full | (residual.sum(-1) <= 0)
    probs = torch.where(use_target[:, None], target, residual)
    return accepted, sample(probs, torch.where(full, uniforms[:, drafts + 1], uniforms[:, drafts]))


def block_thresholds(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return prefix weights w_0..w_K [B, K + 1] and thresholds h_1..h_K [B, K], 0 beyond a row's length."""
    drafts = draft_tokens.shape[1]
    dtype = torch.promote_types(target_probs.dtype, torch.float32)
    index = draft_tokens[..., None]
    p = target_probs[:, :drafts].gather(-1, index)[..., 0].to(dtype)
    q = draft_probs.gather(-1, index)[..., 0].to(dtype)
    weights = [torch.ones_like(p[:, 0])]
    thresholds = []
    for i in range(drafts):
        # w p / q only where it is below 1: no division by a q of 0 or next to 0.
        below = weights[-1] * p[:, i] < q[:, i]
        weight = torch.where(below, weights[-1] * p[:, i] / q[:, i].where(below, 1), 1.0)
        # A token that the target cannot emit must never be accepted, whatever was before it (q = 0 included).
        weights.append(weight.where(p[:, i] > 0, 0.0))
        last = lengths == i + 1
        early = torch.zeros_like(weight) if i + 1 == drafts else _early(weights[-1], target_probs, draft_probs, i + 1)
        thresholds.append(torch.where(last, weights[-1], early).where(lengths > i, 0.0))
    return torch.stack(weights, -1), torch.stack(thresholds, -1)


def residual_distribution(weight: Tensor, target: Tensor, draft: Tensor) -> Tensor:
    """Return max(0, w * p - q), unnormalised: [B], [B, V], [B, V] -> [B, V]."""
    return (weight[:, None] * target - draft).clamp_min(0)


def _early(weight: Tensor, target_probs: Tensor, draft_probs: Tensor, row: int) -> Tensor:
    """Return the threshold h [B] of a prefix that is followed by another draft."""
    mass = residual_distribution(weight, target_probs[:, row].to(weight.dtype), draft_probs[:, row]).sum(-1)
    # Neither mass nor a deficit: w = 1 and the next distributions agree. Any value would do; 1 keeps 0 / 0 out.
    return torch.where(weight < 1, mass / (mass + 1 - weight).where(weight < 1, 1), 1.0)
