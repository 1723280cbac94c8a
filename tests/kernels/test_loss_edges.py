"""Draft losses at their edges: equal, one-hot, disjoint and masked distributions, and rows that are none."""

import math

import pytest
import torch
from torch import Tensor

from bebop.kernels.losses import tv_loss
from bebop.kernels.row_losses import KINDS, reference, row_losses
from tests.kernels.builders import found, logits, naive
from tests.kernels.unfused import INF, close, labels_for, within


def test_identities_of_the_gradient_and_a_planted_fault() -> None:
    """Rows add up to 0 and have an L1 norm of 2 S (1 - S), ties too; with a comparison unlike that of S they do not."""
    draft, target = logits(6, 200, torch.float64)
    target[:, :50] = draft[:, :50]
    target[3:] = draft[3:].flip(-1)
    q, p = draft.softmax(-1), target.softmax(-1)
    p[0], q[0] = torch.full((200,), 1 / 200), torch.full((200,), 1 / 200)
    draft[0] = target[0] = 0
    draft[1], target[1] = 0, torch.cat((torch.zeros(100), torch.full((100,), -INF))).double()
    q, p = draft.softmax(-1), target.softmax(-1)
    below = torch.where(q <= p, q, 0).sum(-1)
    grad = found(draft, target)[1]
    close(grad.sum(-1), torch.zeros(6), 1e-12)
    close(grad.abs().sum(-1), 2 * below * (1 - below), 1e-12)
    planted = q * (below[:, None] - (q < p).double())
    assert planted.sum(-1).abs().max() > 0.1


def test_equal_distributions() -> None:
    draft, _ = logits(3, 77)
    for kind in ("tv", "kl", "rkl", "nla", "hybrid"):
        loss, grad = found(draft, draft, kind)
        assert loss.abs().max() < 1e-6 and grad.abs().max() < 1e-6


def test_one_hot_and_disjoint_distributions() -> None:
    """By hand: p = one-hot at 0 gives alpha = q_0; without a common token the TV loss is 1 and its gradient 0."""
    draft, target = torch.zeros(2, 4), torch.full((2, 4), -INF)
    target[0, 0] = target[1, 3] = 0.0
    draft[1, 2:] = -INF
    loss, grad = found(draft, target)
    assert loss.tolist() == [0.75, 1.0]
    assert grad.tolist() == [[-0.1875, 0.0625, 0.0625, 0.0625], [0.0, 0.0, 0.0, 0.0]]
    result = tv_loss(draft, target)
    assert result.target_entropy.tolist() == [0.0, 0.0]
    close(result.draft_entropy, torch.tensor([math.log(4), math.log(2)]))
    loss, grad = found(draft, target, "nla")
    close(loss[:1], torch.tensor([math.log(4)]))
    assert loss[1] == INF and grad[1].abs().max() == 0
    loss, grad = found(draft, target, "kl")  # the target's token has no draft mass in row 1
    assert loss[1] == INF and torch.isfinite(grad).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hard_ce"])
def test_masked_logits(kind: str) -> None:
    """Where speculators 0.9.0 gives NaN (kl: any -inf; tv: loss 0 and NaN gradients for a masked first tile)."""
    draft, target = logits(3, 5000)
    draft[:, :4096] = target[:, :4096] = -INF
    if kind != "rkl":
        target[1, 4500:] = -INF
    else:
        draft[1, 4500:] = -INF
    wanted = reference(draft.double(), target.double(), kind=kind)
    live = slice(4096, 4500)
    by_hand = naive(draft[:1, 4096:], target[:1, 4096:], kind)
    for loss, grad in (found(draft, target, kind), (wanted.loss, wanted.grad)):
        assert torch.isfinite(loss).all() and torch.isfinite(grad).all()
        assert grad[:, :4096].abs().max() == 0 and grad[:, live].abs().max() > 0
        within(loss, wanted.loss)
        close(grad, wanted.grad)
        within(loss[:1], by_hand[0])
        close(grad[:1, 4096:], by_hand[1])


def tiled_normaliser(logits: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Running maximum and sum of one row as speculators 0.9.0 has them: from -inf, not from a finite number."""
    top, total = torch.tensor(-INF), torch.tensor(0.0)
    for part in logits.split(tile):
        raised = torch.maximum(top, part.max())
        total = total * (top - raised).exp() + (part - raised).exp().sum()
        top = raised
    return top, total


def test_where_the_formulas_of_others_give_nan() -> None:
    """The same number as with the masked tokens cut off. Theirs: 0 (log 0 - log 0), or -inf - -inf in a first tile."""
    draft, target = logits(1, 600)
    draft[:, :200] = target[:, :200] = -INF
    q_log, p_log = draft.log_softmax(-1), target.log_softmax(-1)
    for kind, theirs in (("kl", p_log.exp() * (p_log - q_log)), ("rkl", q_log.exp() * (q_log - p_log))):
        assert theirs.sum().isnan()
        loss, grad = found(draft, target, kind)
        wanted = naive(draft[:, 200:], target[:, 200:], kind)
        within(loss, wanted[0])
        close(grad[:, 200:], wanted[1])
        assert grad[:, :200].abs().max() == 0
    assert tiled_normaliser(draft[0], 128)[1].isnan()
    for kind in ("tv", "nla", "hybrid", "jsd"):
        loss, grad = found(draft, target, kind)
        wanted = naive(draft[:, 200:], target[:, 200:], kind)
        within(loss, wanted[0])
        close(grad[:, 200:], wanted[1])
        assert grad[:, :200].abs().max() == 0


def test_divergences_of_distributions_without_the_token_stay_in_their_row() -> None:
    draft, target = logits(2, 30)
    target[0, 3] = -INF
    loss, grad = found(draft, target, "rkl")
    assert loss[0] == INF and torch.isfinite(loss[1]) and torch.isfinite(grad[1]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_no_distributions(kind: str, dtype: torch.dtype) -> None:
    """No finite logit on a side: NaN in every number and all of the gradient, as in the reference; others keep it."""
    draft, target = logits(5, 30, dtype)
    clean = row_losses(draft, target, kind=kind, labels=labels_for(kind, 5, 30))
    draft[1] = target[2] = -INF
    draft[3] = target[3] = -INF
    labels = labels_for(kind, 5, 30)
    for result in (
        row_losses(draft, target, kind=kind, labels=labels),
        reference(draft, target, kind=kind, labels=labels),
    ):
        for a, b in zip((*result.numbers(), result.grad), (*clean.numbers(), clean.grad), strict=True):
            assert a is not None and b is not None
            assert a[1:4].isnan().all()
            torch.testing.assert_close(a[[0, 4]], b[[0, 4]], rtol=2.0**-8 if a.dtype == dtype else 1e-6, atol=1e-6)


def test_no_common_token_in_nla() -> None:
    """alpha = 0: an infinite loss with gradient 0; beside it, an overlap of 1e-30 has a gradient of order 1."""
    draft, target = torch.zeros(2, 4), torch.full((2, 4), -INF)
    draft[0, 2:] = -INF
    target[0, 2] = 0
    draft[1, 0], target[1, 0] = -70, 0
    loss, grad = found(draft, target, "nla")
    assert loss[0] == INF and grad[0].abs().max() == 0
    within(loss[1:], naive(draft[1:], target[1:], "nla")[0])
    close(grad[1:], naive(draft[1:], target[1:], "nla")[1])
    assert grad[1, 0] == pytest.approx(-1)
