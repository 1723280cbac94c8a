"""The loss of a chain of drafts: the product of acceptances, and its unbiased form."""

import torch
from torch import Tensor

from bebop.kernels.chain_losses import e2e_weights
from tests.kernels.builders import found, logits
from tests.kernels.unfused import INF, close, e2e_tv_loss


def chains(anchors: int, steps: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    draft, target = logits(anchors * steps, vocabulary, torch.float64)
    return draft.view(anchors, steps, vocabulary), target.view(anchors, steps, vocabulary)


def product_loss(draft: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Eq. 13 anchor by anchor with Python loops."""
    alpha = torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)
    losses = []
    for row, exists in zip(alpha, mask.tolist(), strict=True):
        length = next((k for k, step in enumerate(exists) if not step), len(exists))
        if length:
            losses.append(1 - sum(row[: j + 1].prod() for j in range(length)) / length)
    return torch.stack(losses).mean()


MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]])


def test_e2e_equals_autograd_through_the_product() -> None:
    draft, target = chains(4, 3, 20)
    mine, plain = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    loss, wanted = e2e_tv_loss(mine, target, MASK), product_loss(plain, target, MASK)
    close(loss.detach(), wanted.detach(), 1e-12)
    (2 * loss).backward()
    (2 * wanted).backward()
    assert mine.grad is not None and plain.grad is not None
    close(mine.grad, plain.grad, 1e-12)
    mean_of_steps = plain.grad.abs().sum((-1, -2))[0]  # the planted fault: same weight for every step
    steps = found(draft[0], target[0])[1].abs().sum() * 2 / 9
    assert (mean_of_steps - steps).abs() > 1e-3


def test_e2e_weights_by_hand_and_without_division() -> None:
    alpha = torch.tensor([[0.5, 0.0, 0.8], [0.5, 0.4, 0.9]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    wanted = torch.tensor([[1 / 3, 0.5 * 1.8 / 3, 0.0], [1.4 / 2, 0.5 / 2, 0.0]])
    close(e2e_weights(alpha.detach(), mask), wanted, 1e-7)
    accepted = (alpha[0].cumprod(-1).sum() / 3) + (alpha[1, :2].cumprod(-1).sum() / 2)
    close(torch.autograd.grad(accepted, alpha)[0], wanted, 1e-6)


def tree(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Logits of two steps: row 0 after the root, row 1 + y after the token y."""
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1 + vocabulary, vocabulary, generator=generator).double() * 1.5 for _ in range(2))  # type: ignore[return-value]


def exact_accepted(draft: Tensor, target: Tensor) -> Tensor:
    """E[A] of two drafted tokens: the second one's overlap under the distribution min(p, q) of accepted first ones."""
    q, p = draft.softmax(-1), target.softmax(-1)
    overlap = torch.minimum(q, p).sum(-1)
    return overlap[0] + (torch.minimum(q[0], p[0]) * overlap[1:]).sum()


def expected_loss(draft: Tensor, target: Tensor, corrected: bool) -> Tensor:
    """The loss of two steps, averaged over all data y ~ p."""
    vocabulary = draft.shape[-1]
    probs = target[0].softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for y in range(vocabulary):
        path = torch.tensor([0, 1 + y])
        tokens = torch.tensor([[y, 0]]) if corrected else None
        total = total + probs[y] * e2e_tv_loss(draft[path][None], target[path][None], torch.ones(1, 2), tokens=tokens)
    return total


def test_the_corrected_loss_is_unbiased_and_the_product_is_not() -> None:
    """V = 3, K = 2, enumerated: value and gradient of 1 - E[A] / 2."""
    draft, target = tree(3)
    draft.requires_grad_()
    wanted = 1 - exact_accepted(draft, target) / 2
    (exact,) = torch.autograd.grad(wanted, draft)
    corrected, product = (expected_loss(draft, target, flag) for flag in (True, False))
    close(corrected.detach(), wanted.detach(), 1e-12)
    close(torch.autograd.grad(corrected, draft)[0], exact, 1e-12)
    assert (product - wanted).abs().item() > 1e-3
    assert (torch.autograd.grad(product, draft)[0] - exact).abs().max() > 1e-3


def test_the_corrected_loss_of_impossible_tokens_is_finite() -> None:
    draft, target = chains(1, 2, 5)
    draft[0, 0, 1] = target[0, 0, 2] = -INF
    draft[0, 0, 3] = target[0, 0, 3] = -INF  # and one that neither has
    for token in (1, 2, 3):
        z = draft.clone().requires_grad_()
        e2e_tv_loss(z, target, torch.ones(1, 2), tokens=torch.tensor([[token, 0]])).backward()
        assert z.grad is not None and torch.isfinite(z.grad).all()
