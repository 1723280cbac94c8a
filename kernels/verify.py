"""Chain verification by rejection sampling (SPEC 0.3): the plain PyTorch reference, and Triton on a CUDA device.

One code path serves rejection sampling and target-only verification: the latter is a one-hot draft distribution.
"""

from importlib.util import find_spec

import torch
from torch import Tensor


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens [...] from distributions [..., V] (unnormalised) by inverting the CDF at uniforms [...] in [0, 1).

    The result is the first token with cumsum > u * total. Where rounding leaves none, it is the last token of positive
    mass, never index V - 1 as such. A token of probability zero is never drawn. On a GPU parallel sums need not be
    monotone, so a token of probability zero that comes out is replaced by the likeliest token.
    """
    cdf = probs.cumsum(-1)
    total = cdf[..., -1:].contiguous()
    bound = uniforms[..., None].to(cdf.dtype) * total
    if cdf.is_cuda:
        return _count(probs, cdf, bound, total)
    # Sums one after another are monotone: there is no need to look at all of them. The CDF is flat over a tail of
    # zeros, so the first index that reaches the total is the last of positive mass.
    token = torch.searchsorted(cdf, bound, right=True)
    token = torch.minimum(token, torch.searchsorted(cdf, total))
    return token.clamp_max(probs.shape[-1] - 1)[..., 0]  # beyond the end where probabilities are NaN


def _count(probs: Tensor, cdf: Tensor, bound: Tensor, total: Tensor) -> Tensor:
    """Draw tokens as ``sample`` does, where sums may not be monotone."""
    token = (cdf <= bound).sum(-1)
    token = torch.minimum(token, (cdf < total).sum(-1))
    possible = probs.gather(-1, token[..., None])[..., 0] > 0
    return torch.where(possible, token, probs.argmax(-1))


def chain_verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of a drafted chain and draw the token after it, so that the output distribution is the target's.

    Args:
        draft_tokens: [B, K], each sampled from its row of ``draft_probs``; K = 0 is plain decoding.
        draft_probs: [B, K, V], exactly the distributions that the drafts were sampled from. None: one-hot, as of
            drafts that were not sampled (greedy, or looked up); the dense one-hot distribution gives the same tokens.
        target_probs: [B, K + 1, V]; row j is the target's distribution after the first j drafts.
        uniforms: [B, K + 2] in [0, 1): K tests, then one for the recovered and one for the bonus token.
        lengths: [B], drafts per row (ragged chains); K for all if None.

    Returns:
        accepted [B] in 0..K, and the next token [B]: from the residual max(0, p - q) after a rejection, from row K + 1
        of the target (not row K, as printed in the paper's Algorithms 3 and 4) after a full chain.
    """
    if draft_tokens.shape[1] and compiled(draft_probs, target_probs):
        from bebop.kernels import verify_triton

        return verify_triton.launch(draft_tokens, draft_probs, target_probs, uniforms, lengths)
    return reference(draft_tokens, draft_probs, target_probs, uniforms, lengths)


def compiled(draft: Tensor | None, target: Tensor) -> bool:
    """Return whether the Triton kernels take these inputs; fp64 and machines without Triton use the reference."""
    double = torch.float64 in (target.dtype, target.dtype if draft is None else draft.dtype)
    return target.is_cuda and find_spec("triton") is not None and not double


def one_hot(tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Return the one-hot distributions [..., V] of tokens [...]."""
    distributions = torch.zeros(*tokens.shape, vocabulary, dtype=dtype, device=tokens.device)
    return distributions.scatter_(-1, tokens[..., None], 1.0)


# ---- the reference


def reference(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``chain_verify`` in plain PyTorch, in any dtype."""
    batch, drafts = draft_tokens.shape
    rows = torch.arange(batch, device=draft_tokens.device)
    if drafts == 0:
        return torch.zeros_like(rows), sample(target_probs[:, 0], uniforms[:, 1])
    steps = torch.arange(drafts, device=draft_tokens.device)
    lengths = torch.full_like(draft_tokens[:, 0], drafts) if lengths is None else lengths
    index = draft_tokens[..., None]
    p = target_probs[:, :drafts].gather(-1, index)[..., 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(-1, index)[..., 0]
    # Multiplied, not divided, and strict: p = 0 can never be accepted, q = 0 needs no guard.
    passed = (uniforms[:, :drafts] * q < p) & (steps < lengths[:, None])
    accepted = passed.long().cumprod(-1).sum(-1)

    target = target_probs[rows, accepted]
    rejected = accepted < lengths
    tested = accepted.clamp(max=drafts - 1)
    if draft_probs is None:  # max(0, p - q) of a one-hot distribution is p without the token
        residual = target.scatter(-1, draft_tokens[rows, tested][:, None], 0.0)
    else:
        residual = (target - draft_probs[rows, tested]).clamp_min(0)
    # A residual without mass means p = q up to rounding, where p itself is the distribution.
    use_residual = rejected & (residual.sum(-1) > 0)
    probs = torch.where(use_residual[:, None], residual, target)
    u = torch.where(rejected, uniforms[:, drafts], uniforms[:, drafts + 1])
    return accepted, sample(probs, u)
