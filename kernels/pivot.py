"""Chain verification that overrides rejections which do not matter (PAD, SPEC 4.2), and its output distribution (4.4).

A draft that fails the standard test is still accepted if the target finds it possible and a classifier says that it is
no pivot: p(y) > 0, p(y) >= p_min and score(y) < tau. Let N be the set of such tokens at one position, R = TV(p, q) and
R_N = sum over N of max(0, q - p). The emitted distribution of a position is then

    P(v) = min(p, q) + 1[v in N] max(0, q - p) + (R - R_N) max(0, p - q) / R

and TV(P, p) = R_N: each point of acceptance gained is a point of the distribution lost.
"""

import torch
from torch import Tensor

from bebop.kernels.verify import chain_verify


def overridable(scores: Tensor, p: Tensor, stops: Tensor, *, tau: float, p_min: float) -> Tensor:
    """Return which candidates are accepted whatever the test says.

    Scores, probabilities p and ``stops`` are [...], and so is the result (bool).

    ``scores`` are the probabilities in [0, 1] that the candidates are pivots. ``stops`` marks candidates that would end
    the completion; they are never overridden. tau = 0 overrides nothing, tau > 1 everything with p >= p_min. A token
    that the target cannot emit (p = 0, as after truncation) is never accepted, not even at p_min = 0.
    """
    return (scores < tau) & (p >= p_min) & (p > 0) & ~stops


def pivot_verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    allowed: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify as ``chain_verify`` does, but accept the drafts ``allowed`` [B, K] (bool) whether or not they pass.

    The block goes on after such a draft. The other arguments are those of ``chain_verify``. A draft with p = 0 is never
    accepted.

    Returns:
        accepted [B], the next token [B], and which of the accepted drafts were overridden [B, K] (bool): these would
        have been rejected. With nothing allowed the first two are those of ``chain_verify`` to the bit.
    """
    drafts = draft_tokens.shape[1]
    tests = uniforms[:, :drafts]
    # The test u q < p passes for every p > 0 at u = 0, so that no kernel has to know of overrides.
    forced = torch.cat([tests.masked_fill(allowed, 0.0), uniforms[:, drafts:]], 1)
    accepted, token = chain_verify(draft_tokens, draft_probs, target_probs, forced, lengths)
    index = draft_tokens[..., None]
    p = target_probs[:, :drafts].gather(-1, index)[..., 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(-1, index)[..., 0]
    steps = torch.arange(drafts, device=draft_tokens.device)
    return accepted, token, allowed & ~(tests * q < p) & (steps < accepted[:, None])


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution after a rejection: max(0, p - q) [..., V], normalised.

    It is p where max(0, p - q) has no mass (p = q up to rounding).
    """
    excess = (p - q).clamp_min(0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass.clamp_min(torch.finfo(p.dtype).tiny), p)


def bias(p: Tensor, q: Tensor, allowed: Tensor) -> Tensor:
    """Return R_N [...] = TV(P, p) for distributions p, q and the set N, ``allowed`` [..., V].

    Only tokens with q > p count in it.
    """
    return ((q - p).clamp_min(0) * allowed).sum(-1)


def emitted_probs(p: Tensor, q: Tensor, allowed: Tensor) -> Tensor:
    """Return the distribution P [..., V] of the token that a position emits if its draft is reached (SPEC 4.4).

    p and q are the distributions of target and draft [..., V]. ``allowed`` [..., V] (bool) is N, without stop tokens.
    """
    kept = torch.minimum(p, q) + (q - p).clamp_min(0) * allowed
    rejected = ((q - p).clamp_min(0) * ~allowed).sum(-1, keepdim=True)  # R - R_N
    return kept + rejected * residual(p, q)
