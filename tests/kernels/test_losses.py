"""Draft losses of every kind against plain autograd of their definitions in fp64; no triton needed."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels import draft_losses
from bebop.kernels.draft_losses import LOSSES
from bebop.kernels.losses import tv_loss
from bebop.kernels.row_losses import KINDS, reference, row_losses
from tests.kernels.builders import found, logits, naive
from tests.kernels.unfused import FORMULAS, INF, close, labels_for, within


def test_every_loss_has_a_definition_here() -> None:
    assert list(FORMULAS) == list(LOSSES) == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 3.0])
def test_every_kind_in_fp32(kind: str, temperature: float) -> None:
    draft, target = logits(5, 1003)
    wanted = naive(draft, target, kind, temperature)
    loss, grad = found(draft, target, kind, temperature=temperature)
    within(loss, wanted[0])
    close(grad, wanted[1])
    assert torch.isfinite(loss).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_fp64_and_in_the_reference(kind: str) -> None:
    draft, target = logits(5, 37, torch.float64)
    wanted = naive(draft, target, kind)
    exact = reference(draft, target, kind=kind, labels=labels_for(kind, 5, 37))
    assert exact.grad is not None
    for loss, grad in (found(draft, target, kind), (exact.loss, exact.grad)):
        close(loss, wanted[0], 1e-12)
        close(grad, wanted[1], 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bf16_gradient_is_rounded_once(kind: str) -> None:
    draft, target = logits(4, 501, torch.bfloat16)
    wanted = naive(draft, target, kind)
    loss, grad = found(draft, target, kind)
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    within(loss, wanted[0])
    # Half a unit in the last place of 8 bits is 2^-8 of a power of two; 1e-6 is what fp32 adds.
    ulp = torch.exp2(wanted[1].abs().clamp_min(1e-30).log2().floor() - 7)
    assert ((grad.double() - wanted[1]).abs() <= ulp / 2 + 1e-6).all()


def test_numbers_beside_the_loss() -> None:
    draft, target = logits(3, 50)
    q, p = draft.double().softmax(-1), target.double().softmax(-1)
    result = tv_loss(draft.requires_grad_(), target, kind="kl")
    close(result.alpha, torch.minimum(q, p).sum(-1))
    within(result.draft_entropy, torch.special.entr(q).sum(-1))
    within(result.target_entropy, torch.special.entr(p).sum(-1))
    assert result.loss.requires_grad and not result.alpha.requires_grad and not result.draft_entropy.requires_grad


def test_gradients_are_those_of_finite_differences() -> None:
    draft, target = logits(2, 6, torch.float64)
    for kind in KINDS:
        if kind != "hybrid":  # its weight is held fixed, which differences cannot know
            labels = labels_for(kind, 2, 6)
            check = lambda z, k=kind, y=labels: tv_loss(z, target, kind=k, labels=y, temperature=0.8).loss  # noqa: E731
            assert torch.autograd.gradcheck(check, draft.clone().requires_grad_())


def test_upstream_gradients_scale_rows_also_when_the_graph_is_kept() -> None:
    draft, target = logits(3, 20)
    draft.requires_grad_()
    once = found(draft, target)[1]
    loss = tv_loss(draft, target).loss
    upstream = torch.tensor([2.0, 0.0, -0.5])
    for _ in range(2):
        (grad,) = torch.autograd.grad(loss, draft, upstream, retain_graph=True)
        close(grad, once * upstream[:, None], 1e-9)
    loss.backward(upstream)
    assert draft.grad is not None
    close(draft.grad, once * upstream[:, None], 1e-9)
    with pytest.raises(RuntimeError, match="second time"):  # not scaled twice
        loss.backward(upstream)


@pytest.mark.parametrize("kind", ["tv", "hard_ce"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_of_rows_multiply_loss_and_gradient(kind: str, dtype: torch.dtype) -> None:
    """As a multiplication afterwards does, and beside one: (w loss) . upstream."""
    draft, target = logits(4, 30, dtype)
    weights, upstream = torch.tensor([2.0, 1.0, 0.0, -0.5]), torch.tensor([1.0, 3.0, 1.0, 1.0])
    wanted = naive(draft, target, kind)
    draft.requires_grad_()
    weights.requires_grad_()
    result = tv_loss(draft, target, kind=kind, labels=labels_for(kind, 4, 30), row_weights=weights)
    scaled = wanted[1] * (weights * upstream).detach().double()[:, None]
    relative = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(result.loss.double(), wanted[0] * weights.double(), rtol=1e-6, atol=1e-6)
    assert not result.alpha.requires_grad and result.alpha.min() > 0
    for _ in range(2):  # the gradient that is kept is not the one that is given away
        (grad,) = torch.autograd.grad(result.loss, draft, upstream.to(result.loss), retain_graph=True)
        torch.testing.assert_close(grad.double(), scaled, rtol=relative, atol=1e-6)
        grad.zero_()
    result.loss.sum().backward()
    assert weights.grad is None


def test_the_target_gets_no_gradient_and_no_grad_none_at_all() -> None:
    draft, target = logits(2, 9)
    target.requires_grad_()
    assert not tv_loss(draft, target).loss.requires_grad
    draft.requires_grad_()
    tv_loss(draft, target).loss.sum().backward()
    assert target.grad is None
    with torch.no_grad():
        assert not tv_loss(draft, target).loss.requires_grad


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 7), (3, 4099), (70, 3)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    draft, target = logits(*shape)
    for pair in zip(found(draft, target), naive(draft, target, "tv"), strict=True):
        close(*pair)


def test_rows_of_any_stride_and_turned_logits() -> None:
    wide, target = logits(6, 400)
    pairs = [
        (wide[::2, 40:340], target[:3, :300]),
        (wide[:, :300].T, target[:, :300].T),
        (wide[:1].expand(6, -1), target),
    ]
    for draft, other in pairs:
        for pair in zip(found(draft, other), naive(draft, other, "tv"), strict=True):
            close(*pair)


def test_large_logits() -> None:
    """exp(z - logsumexp z), the shorter core, loses its digits here."""
    draft, target = logits(20, 300)
    shifted = draft + 3000, target - 2000
    loss, grad = found(*shifted)
    wanted = naive(*shifted, "tv")
    close(loss, wanted[0])
    close(grad, wanted[1])
    q, p = ((z - z.logsumexp(-1, keepdim=True)).exp() for z in shifted)
    assert (1 - torch.minimum(q, p).sum(-1) - wanted[0]).abs().max() > 1e-5


def test_mixed_dtypes() -> None:
    draft, target = logits(2, 40)
    loss, grad = found(draft.bfloat16(), target)
    assert grad.dtype == torch.bfloat16
    close(loss, naive(draft.bfloat16(), target, "tv")[0])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocabulary=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    kind=st.sampled_from([kind for kind in KINDS if kind != "hard_ce"]),
    masked=st.booleans(),
)
def test_any_values(
    rows: int, vocabulary: int, seed: int, spread: float, temperature: float, kind: str, masked: bool
) -> None:
    """The public function in fp64 equals the reference; rows add up to 0 and no loss is negative."""
    generator = torch.Generator().manual_seed(seed)
    draft, target = (torch.randn(rows, vocabulary, generator=generator).double() * spread for _ in range(2))
    if masked:
        hidden = torch.rand(rows, vocabulary, generator=generator) < 0.5
        hidden[:, 0] = False
        draft, target = draft.masked_fill(hidden, -INF), target.masked_fill(hidden, -INF)
    loss, grad = found(draft, target, kind, temperature=temperature)
    wanted = reference(draft, target, kind=kind, temperature=temperature)
    assert wanted.grad is not None
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(grad, wanted.grad, rtol=1e-9, atol=1e-9)
    assert grad.sum(-1).abs().max() < 1e-8 and loss.min() > -1e-12


def test_capacity_toy() -> None:
    """T13: one q for contexts with one-hot targets of weights .5/.3/.2: CE ends at sum w^2 = .38, TV at max w = .5."""
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    target = torch.where(torch.eye(3).bool(), 0.0, -INF).double()
    accepted = {}
    for kind in ("ce", "tv"):
        z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        for _ in range(100):  # plain steps of 3: an optimizer's own cost would be most of the time
            (gradient,) = torch.autograd.grad((weights * tv_loss(z.expand(3, 3), target, kind=kind).loss).sum(), z)
            z = (z - 3 * gradient).detach().requires_grad_()
        accepted[kind] = (weights * z.detach().softmax(-1)).sum().item()
    assert accepted["ce"] == pytest.approx(0.38, abs=1e-4)
    assert accepted["tv"] == pytest.approx(0.5, abs=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "l2"}, "unknown kind of draft loss 'l2'; known are tv, ce"),
        ({"temperature": 0.0}, "temperature must be positive and finite, not 0.0"),
        ({"target_logits": torch.zeros(3, 5)}, r"both be \[N, V\] with V > 0, not \[2, 5\] and \[3, 5\]"),
        ({"draft_logits": torch.zeros(2, 5).int()}, "draft logits must be fp32, bf16, fp16 or fp64, not torch.int32"),
        ({"kind": "hard_ce"}, "labels are for kind='hard_ce' and needed there; kind is 'hard_ce'"),
        ({"labels": torch.zeros(2).long()}, "kind is 'tv'"),
        ({"row_weights": torch.ones(3)}, r"row_weights must be 2 floating-point numbers on cpu, not .* of shape \[3\]"),
        ({"row_weights": torch.ones(2).long()}, "row_weights must be 2 floating-point numbers on cpu, not torch.int64"),
        ({"kind": "hard_ce", "labels": torch.zeros(2)}, "labels must be 2 integers, not torch.float32"),
        ({"kind": "hard_ce", "labels": torch.tensor([0, 5])}, r"labels must be tokens in \[0, 5\), not 0 to 5"),
    ],
)
def test_one_line_for_what_a_user_can_get_wrong(change: dict[str, Any], message: str) -> None:
    arguments = {"draft_logits": torch.zeros(2, 5), "target_logits": torch.zeros(2, 5), **change}
    with pytest.raises(UserError, match=message) as refusal:
        tv_loss(arguments.pop("draft_logits"), arguments.pop("target_logits"), **arguments)
    assert "\n" not in str(refusal.value)


# ---- Draft losses at their edges: equal, one-hot, disjoint and masked distributions, and rows that are none


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
    draft, target = torch.tensor([[0, -95, -200.0]]), torch.tensor([[-95, 0, -200.0]])
    loss, grad = found(draft, target, "nla")  # the inverse of an overlap of 1e-41 is no number
    assert loss.isfinite().all() and grad.abs().max() == 0


def test_a_probability_of_the_smallest_number_keeps_jsd_finite() -> None:
    draft, target = torch.tensor([[0, -103.5, -1, -200]]), torch.tensor([[0, -120, -1.2, -30]])
    loss, grad = found(draft, target, "jsd")
    wanted, gradient = naive(draft.double(), target.double(), "jsd")
    within(loss, wanted.float())
    close(grad, gradient.float())
    assert grad.isfinite().all() and 0 < loss[0] < 0.01


def test_the_table_of_losses_has_them_all() -> None:
    lines = [line.split(" ")[0] for line in str(draft_losses.__doc__).splitlines()]
    assert {*LOSSES} <= {*lines}
