"""Draft losses of a drafter with a head of its own, which may cover a part of the target's vocabulary.

q is 0 outside of the draft vocabulary D, so the overlap is a sum over D, with the target's probabilities unchanged.
Losses that depend on the overlap alone (tv, nla, end-to-end) get one more token, the rest of the vocabulary. The others
would be infinite wherever the target has mass outside of D. So they compare q with the target's distribution
renormalised on D. Rows whose label is not in D do not count for hard_ce.

Logits exist for a chunk of rows at a time, and the backward pass computes them again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from bebop.kernels.draft_losses import LOSSES, needs_labels
from bebop.kernels.linear_losses import CHUNK_ROWS, corrected_loss, counted, product_loss
from bebop.kernels.losses import tv_loss
from bebop.kernels.row_losses import accumulator
from bebop.kernels.truncation import truncate_


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """A language-model head of W rows, with the token of each row."""

    weight: Tensor  # [W, d]; receives the gradient
    tokens: Tensor  # [W] the target's ids, rising; all of them where W = V

    def ids(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return draft ids [...] of tokens [...], and which of the tokens have one [...] (bool)."""
        found = torch.searchsorted(self.tokens, tokens.contiguous()).clamp_max(len(self.tokens) - 1)
        return found, self.tokens[found] == tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNumbers:
    """The numbers of a loss by row, each [N]; gradients flow through ``loss`` and ``draft_log``."""

    loss: Tensor
    alpha: Tensor  # overlap of draft and target
    draft_log: Tensor  # log q(label); a very negative number where it is 0. 0 without labels
    target_log: Tensor  # log p(label); 0 without labels
    counts: Tensor  # (bool) rows that the loss is about


NEVER = -1e4  # log q of a token that cannot be drafted: its exponential is 0


def row_numbers(
    draft: Tensor,
    head: DraftHead,
    target: Tensor,
    weight: Tensor,
    *,
    kind: str,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    target_top_p: float = 1.0,
    target_top_k: int = 0,
) -> RowNumbers:
    """Return the numbers of the loss for rows of states.

    Args:
        draft: [N, d], the draft's; receives the gradient, as ``head.weight`` does.
        head: of the draft.
        target: [N, D], the target's.
        weight: [V, D], the target's head.
        kind: a name in ``kernels/draft_losses.py``.
        labels: [N] tokens, for hard_ce and where ``draft_log`` is needed.
        temperature, target_top_p, target_top_k: as in ``linear_draft_loss``.
    """
    size = CHUNK_ROWS.get(draft.device.type, 1024)
    cut = {"temperature": temperature, "top_p": target_top_p, "top_k": target_top_k}
    parts = []
    for rows in _slices(len(draft), size):
        own = None if labels is None else labels[rows]
        given = (draft[rows], head.weight, head.tokens, target[rows].detach(), weight.detach(), own, kind, cut)
        parts.append(checkpoint(_chunk, *given, use_reentrant=False, preserve_rng_state=False))
    return RowNumbers(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def _slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` rows, at least one slice."""
    yield from (slice(start, start + size) for start in range(0, max(1, count), size))


def _chunk(
    draft: Tensor,
    own: Tensor,
    tokens: Tensor,
    target: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    kind: str,
    cut: dict[str, Any],
) -> dict[str, Tensor]:
    """Return the fields of ``RowNumbers`` of a chunk."""
    temperature, head = cut["temperature"], DraftHead(weight=own, tokens=tokens)
    q = linear(draft, own)
    with torch.no_grad():
        p = truncate_(linear(target, weight), **cut)
        exact = accumulator(q, p)
        whole = (p.to(exact) / temperature).logsumexp(-1, keepdim=True)
        inside = p[:, tokens]
    counts = torch.ones_like(whole[:, 0], dtype=torch.bool)
    found, known = (None, counts) if labels is None else head.ids(labels)
    draft_log = target_log = torch.zeros_like(whole[:, 0])
    if labels is not None and found is not None:
        log_q = (q.to(exact) / temperature).log_softmax(-1).gather(1, found[:, None])[:, 0]
        draft_log = torch.where(known, log_q, NEVER)
        target_log = (p.to(exact) / temperature).gather(1, labels[:, None])[:, 0] - whole[:, 0]
    if LOSSES[kind].divergence is None:
        outside = p.to(exact).index_fill(1, tokens, -torch.inf)
        rest = temperature * (outside / temperature).logsumexp(-1, keepdim=True)
        nothing = torch.full_like(q[:, :1], -torch.inf)
        losses = tv_loss(
            torch.cat([q, nothing], 1), torch.cat([inside, rest.to(p.dtype)], 1), temperature=temperature, kind=kind
        )
    else:
        counts = (inside > -torch.inf).any(-1) & (known if needs_labels(kind) else counts)
        inside = torch.where(counts[:, None], inside, torch.zeros_like(inside))
        given = found if needs_labels(kind) else None
        losses = tv_loss(q, inside, temperature=temperature, kind=kind, labels=given)
    zero = torch.zeros_like(losses.loss)
    return {
        "loss": torch.where(counts, losses.loss, zero),
        "alpha": losses.alpha,
        "draft_log": draft_log,
        "target_log": target_log,
        "counts": counts,
    }


def mean_of_rows(numbers: RowNumbers) -> Tensor:
    """Return the mean loss over all rows, of which those that do not count have 0.

    So micro-batches add up, whatever the share of their rows that counts.
    """
    return numbers.loss.sum() / max(1, len(numbers.counts))


def end_to_end_of_rows(rows: Callable[[Tensor], RowNumbers], mask: Tensor, corrected: bool) -> Tensor:
    """Return 1 - expected accepted drafts / K_eff of chains with ``mask`` [N, K] (SPEC Eq. 13), averaged over anchors.

    ``rows`` is a function from a choice of rows [N * K] (bool) to their numbers.
    """
    valid = counted(mask)
    numbers = rows(valid.flatten())

    def back(values: Tensor) -> Tensor:
        return values.new_zeros(valid.numel()).masked_scatter(valid.flatten(), values).view_as(valid)

    loss, alpha = back(numbers.loss), back(numbers.alpha)
    if not corrected:
        return product_loss(loss, alpha, valid)
    return corrected_loss(loss, back(numbers.draft_log), back(numbers.target_log), valid)
