"""Verification of a tree of drafts: rejection sampling from sibling to sibling, down to the first node without a pass.

Recursive rejection sampling (SpecInfer, arXiv 2305.09781; without replacement: Recursive Speculative Decoding, arXiv
2402.14160, and Sequoia, arXiv 2402.12374). The children x_1, x_2, ... of an accepted node are tried in their order. p_1
is the target's distribution after that node. q_j is the distribution that x_j was drawn from, given the siblings before
it:

    x_j is accepted if u < p_j(x_j) / q_j(x_j), else p_{j+1} = norm(max(0, p_j - q_j))

The first accepted child is the next node. If none is, the next token comes from the last residual, and after a node
without children from the target itself. The output distribution is the target's, however the children were drawn: q_j
may depend on the siblings before. Without replacement, q_j is q without them, renormalised; for greedy drafts, one-hot.

This is plain PyTorch, on any device: a pass over the nodes without waiting for the device. There is no fused version.
"""

import torch
from torch import Tensor

from bebop.kernels.verify import sample


def tree_verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    parents: Tensor,
    depth: int,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Accept a path of a drafted tree and draw the token after it, so that the output distribution is the target's.

    Args:
        draft_tokens: [B, K], nodes of a tree, parents before children; siblings are tried from left to right.
        draft_probs: [B, K, V], exactly the distributions that the nodes were sampled from, given their siblings to the
            left. None: one-hot.
        target_probs: [B, K + 1, V]; row 0 is the target's distribution at the root, row 1 + k that after node k.
        uniforms: [B, K + 2] in [0, 1): a test a node, then one for the recovered and one for the bonus token.
        parents: [B, K], the node that each follows, -1: the root.
        depth: D, of the deepest node.
        lengths: [B], nodes that count in each row, the first ones; K for all if None.

    Returns:
        accepted nodes [B] in 0..D; the next token [B]; the rows [B, D + 1] of ``target_probs`` along the path (0, then
        1 + each accepted node; 0 beyond); and how many children [B, D] were tried at each depth.
    """
    batch, nodes = draft_tokens.shape
    row = torch.arange(batch, device=draft_tokens.device)
    accepted, last = torch.zeros_like(row), torch.full_like(row, -1)
    path, tried = row.new_zeros(batch, depth + 1), row.new_zeros(batch, depth + 1)
    # p_j unnormalised, and its mass: as long as nothing was rejected it is the target, of mass 1.
    probs, mass = target_probs[:, 0], torch.ones_like(target_probs[:, 0, 0])
    rejected = torch.zeros_like(row, dtype=torch.bool)
    for node in range(nodes):
        here = parents[:, node] == last
        if lengths is not None:
            here = here & (node < lengths)
        index = draft_tokens[:, node, None]
        if draft_probs is None:
            q, left = torch.ones_like(mass), probs.scatter(-1, index, 0.0)
        else:
            q = draft_probs[:, node].gather(-1, index)[:, 0]
            left = (probs - mass[:, None] * draft_probs[:, node]).clamp_min(0)
        # Multiplied, not divided, and strict: p = 0 can never be accepted, and a residual without mass accepts nothing.
        passed = here & (uniforms[:, node] * q * mass < probs.gather(-1, index)[:, 0])
        rejected = torch.where(here, ~passed, rejected)
        failed = here & rejected
        probs = torch.where(passed[:, None], target_probs[:, node + 1], torch.where(failed[:, None], left, probs))
        mass = torch.where(passed, 1.0, torch.where(failed, left.sum(-1), mass))
        tried[row, accepted] += here
        accepted, last = accepted + passed, torch.where(passed, node, last)
        path[row, accepted] = last + 1
    # A residual without mass means p = q up to rounding, where p itself is the distribution.
    target = target_probs[row, last + 1]
    probs = torch.where((probs.sum(-1) > 0)[:, None], probs, target)
    return (
        accepted,
        sample(probs, torch.where(rejected, uniforms[:, nodes], uniforms[:, nodes + 1])),
        path,
        tried[:, :-1],
    )


# ---- ancestors of nodes, and the cache entries that a node sees; nodes are numbered, parents before children


def ancestry(parents: Tensor) -> Tensor:
    """Return the ancestors of each node [B, K, K] (bool), itself included, from ``parents`` [B, K], -1 at the top."""
    nodes = parents.shape[1]
    # The step to a parent, squared again and again: after m times it covers 2 ** m generations.
    step = (parents[..., None] == torch.arange(nodes, device=parents.device)).float()
    way = torch.eye(nodes, device=parents.device) + step
    for _ in range(max(nodes - 1, 1).bit_length() - 1):
        step = step @ step
        way = way + step @ way
    return way > 0


def visible(first: Tensor, ways: Tensor, used: int) -> Tensor:
    """Return the cache entries [B, n, used] (bool) that queries see: those before ``first`` [B], and nodes of the tree.

    ``ways`` [B, n, K] marks the nodes that each query sees; node k has entry ``first`` + k.
    """
    batch, width, nodes = ways.shape
    text = torch.arange(used, device=first.device) < first[:, None, None]
    places = first[:, None, None] + torch.arange(nodes, device=first.device)
    return text.repeat(1, width, 1).scatter_(2, places.expand(batch, width, nodes), ways)
