"""What the draft losses are by definition: plain autograd over whole logits, against which the kernels are held."""

from collections.abc import Callable

import torch
from torch import Tensor

from bebop.kernels.linear_losses import corrected_loss, counted, product_loss
from bebop.kernels.losses import DraftLossOutput, tv_loss

INF = float("inf")
ETA = 3.0  # of hybrid, where a test does not say otherwise


def overlap(q: Tensor, p: Tensor) -> Tensor:
    return torch.minimum(q, p).sum(-1)


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(a||b) of rows."""
    return (torch.xlogy(a, a) - torch.xlogy(a, b)).sum(-1)


def hybrid(q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    weight = (-ETA * overlap(q, p).detach()).exp()
    return weight * divergence(p, q) + (1 - weight) * (1 - overlap(q, p))


# A row for each of ``LOSSES``: of q and p [N, V] and a token of each row.
FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "tv": lambda q, p, labels: (q - p).abs().sum(-1) / 2,
    "ce": lambda q, p, labels: -torch.xlogy(p, q).sum(-1),
    "hard_ce": lambda q, p, labels: -q.log().gather(-1, labels[:, None])[:, 0],
    "kl": lambda q, p, labels: divergence(p, q),
    "rkl": lambda q, p, labels: divergence(q, p),
    "jsd": lambda q, p, labels: (divergence(p, (p + q) / 2) + divergence(q, (p + q) / 2)) / 2,
    "nla": lambda q, p, labels: -overlap(q, p).log(),
    "hybrid": hybrid,
}


def labels_of(rows: int, vocabulary: int) -> Tensor:
    """A token of each row."""
    return torch.arange(rows) * 7 % vocabulary


def labels_for(kind: str, rows: int, vocabulary: int) -> Tensor | None:
    """The same where a loss takes them."""
    return labels_of(rows, vocabulary) if kind == "hard_ce" else None


def by_definition(draft: Tensor, target: Tensor, kind: str, temperature: float = 1.0) -> DraftLossOutput:
    """Numbers of logits [N, V], with a graph through all of them."""
    q, p = ((logits / temperature).softmax(-1) for logits in (draft, target))
    entropies = {"draft_entropy": torch.special.entr(q).sum(-1), "target_entropy": torch.special.entr(p).sum(-1)}
    return DraftLossOutput(loss=FORMULAS[kind](q, p, labels_of(*q.shape)), alpha=overlap(q, p), **entropies)


def e2e_tv_loss(
    draft: Tensor, target: Tensor, mask: Tensor, *, temperature: float = 1.0, tokens: Tensor | None = None
) -> Tensor:
    """As ``linear_e2e_tv_loss``, of logits [N, K, V]; steps that do not count are not read."""
    valid = counted(mask)
    rows = valid.flatten().nonzero()[:, 0]
    pair = [x.flatten(0, 1)[rows] for x in (draft, target)]

    def back(number: Tensor | None) -> Tensor:
        """[N, K] of the rows; 0 for the others."""
        assert number is not None
        return number.new_zeros(valid.numel()).index_put((rows,), number).view_as(valid)

    tv = tv_loss(*pair, temperature=temperature)
    if tokens is None:
        return product_loss(back(tv.loss), back(tv.alpha), valid)
    chosen = tv_loss(*pair, temperature=temperature, kind="hard_ce", labels=tokens.flatten()[rows])
    return corrected_loss(back(tv.loss), back(-chosen.loss), back(chosen.target_log), valid)


# ---- how numbers are compared, and what a call costs


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    """Equal to an absolute tolerance."""
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=tolerance)


def within(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    """Absolute up to 1, relative above: an fp32 number between 8 and 16 nats is itself rounded by up to 5e-7."""
    scale = wanted.abs().nan_to_num(posinf=1).clamp_min(1).double()
    pair = found.double() / scale, wanted.double() / scale
    torch.testing.assert_close(*pair, rtol=0, atol=tolerance, equal_nan=True)
