"""The fused linear and draft loss against the unfused one: the same numbers and the same gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.linear_losses import linear_draft_loss, linear_e2e_tv_loss
from bebop.kernels.losses import tv_loss
from bebop.kernels.row_losses import KINDS
from bebop.kernels.truncation import truncate_
from tests.kernels.hidden_states import MASK, ROWS, VOCABULARY, Inputs, anchors, fused, states, unfused
from tests.kernels.unfused import close, labels_of, within


def exactly(inputs: Inputs) -> Inputs:
    """The same numbers in fp64; a draft that requires a gradient."""
    hidden, *others = (x.detach().double() for x in inputs)
    return hidden.requires_grad_(), *others


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_unfused_loss_for_any_upstream_gradient(kind: str) -> None:
    inputs = states()
    exact = exactly(inputs)
    upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    found, wanted = fused(inputs, kind, temperature=0.8, chunk_rows=4), unfused(exact, kind, 0.8)
    for name in ("loss", "alpha", "draft_entropy", "target_entropy"):
        within(getattr(found, name).detach(), getattr(wanted, name).detach())
    (gradient,) = torch.autograd.grad(found.loss, inputs[0], upstream.float())
    (exact_gradient,) = torch.autograd.grad(wanted.loss, exact[0], upstream)
    within(gradient, exact_gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_unfused_loss_in_fp64(kind: str) -> None:
    """What is left in fp32 is rounding."""
    inputs = states(dtype=torch.float64)
    upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    found, wanted = fused(inputs, kind, chunk_rows=4), unfused(inputs, kind)
    close(found.loss, wanted.loss, 1e-12)
    pair = [torch.autograd.grad(x.loss, inputs[0], upstream.to(x.loss.dtype))[0] for x in (found, wanted)]
    close(*pair, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_graph_that_is_kept_scales_states_once_a_pass(dtype: torch.dtype) -> None:
    """A gradient that was handed out may be written to; without the graph there is no second pass."""
    inputs = states(dtype=dtype)
    loss = fused(inputs, chunk_rows=4).loss
    upstream = torch.linspace(-1, 2, ROWS).to(loss)
    (wanted,) = torch.autograd.grad(loss, inputs[0], torch.ones_like(loss), retain_graph=True)
    kept = (wanted.double() * upstream.double()[:, None]).to(dtype)
    wanted.zero_()
    for last in (False, True):
        (grad,) = torch.autograd.grad(loss, inputs[0], upstream, retain_graph=not last)
        torch.testing.assert_close(grad, kept)
        grad.zero_()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs[0], upstream)


@pytest.mark.parametrize("kind", ("tv", "kl"))
def test_gradient_is_that_of_finite_differences(kind: str) -> None:
    hidden, *others = states(rows=3, vocabulary=9, width=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h: fused((h, *others), kind, chunk_rows=2).loss, hidden)


def test_the_head_gets_a_gradient_only_on_demand() -> None:
    hidden, weight, wide, head = states(dtype=torch.float64)
    for tensor in (weight, wide, head):
        tensor.requires_grad_()
    upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    fused((hidden, weight, wide, head), chunk_rows=4).loss.backward(upstream)
    assert hidden.grad is not None
    assert weight.grad is None and wide.grad is None and head.grad is None
    fused((hidden, weight, wide, head), chunk_rows=4, weight_grad=True).loss.backward(upstream)
    assert weight.grad is not None and wide.grad is None and head.grad is None
    (exact,) = torch.autograd.grad(unfused((hidden, weight, wide, head), "tv").loss, weight, upstream)
    close(weight.grad, exact, 1e-12)


def test_the_head_alone_may_learn() -> None:
    hidden, weight, wide, head = states(dtype=torch.float64)
    weight.requires_grad_()
    fused((hidden.detach(), weight, wide, head), "kl", chunk_rows=4, weight_grad=True).loss.sum().backward()
    (exact,) = torch.autograd.grad(unfused((hidden, weight, wide, head), "kl").loss.sum(), weight)
    assert weight.grad is not None
    close(weight.grad, exact, 1e-12)


def test_a_head_shared_with_the_target() -> None:
    """The same tensor twice: hidden states that agree give no loss and no gradient."""
    hidden, weight, *_ = states()
    found = fused((hidden, weight, hidden, weight), chunk_rows=4)
    found.loss.sum().backward()
    close(found.loss.detach(), torch.zeros(ROWS))
    close(hidden.grad, torch.zeros_like(hidden))


def test_chunks_do_not_change_the_numbers() -> None:
    inputs = states(dtype=torch.float64)
    whole = fused(inputs, "hybrid", chunk_rows=ROWS)
    (gradient,) = torch.autograd.grad(whole.loss.sum(), inputs[0])
    for chunk in (1, 5, 1000):
        found = fused(inputs, "hybrid", chunk_rows=chunk)
        close(found.loss.detach(), whole.loss.detach(), 1e-12)
        close(torch.autograd.grad(found.loss.sum(), inputs[0])[0], gradient, 1e-12)


def test_bf16_is_off_by_the_rounding_of_its_logits() -> None:
    """KL, whose gradient is smooth: one of TV jumps where rounding turns q <= p over."""
    rounded = states(dtype=torch.bfloat16)
    hidden, *others = (x.detach().float() for x in rounded)
    hidden.requires_grad_()
    found, wanted = fused(rounded, "kl", chunk_rows=4), fused((hidden, *others), "kl", chunk_rows=4)
    found.loss.sum().backward()
    wanted.loss.sum().backward()
    assert found.loss.dtype == torch.float32 and rounded[0].grad.dtype == torch.bfloat16
    close(found.loss.detach(), wanted.loss.detach(), 0.02)
    close(rounded[0].grad, hidden.grad, 0.02)


def tv_gradient(logits: Tensor, target: Tensor) -> Tensor:
    """d TV / d logits [N, V] in fp64."""
    q, p = logits.softmax(-1), target.softmax(-1)
    common = q <= p
    return q * (torch.where(common, q, 0).sum(-1, keepdim=True) - common.double())


def kl_gradient(logits: Tensor, target: Tensor) -> Tensor:
    return logits.softmax(-1) - target.softmax(-1)


def without_the_sum(logits: Tensor, target: Tensor) -> Tensor:
    """Eq. 11 without S: rows do not add up to 0."""
    q = logits.softmax(-1)
    return torch.where(q <= target.softmax(-1), -q, 0)


def overshoot(found: Tensor, gradient: Callable[[Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...]) -> float:
    """Largest deviation of the states' gradient from ``gradient @ weight``, over what bf16 allows.

    On the same bf16 logits (their rounding is the distribution's, not the loss's) three things are rounded: the
    gradient of the logits and the result, by half an ulp each, which is at most 2^-8 of a number; and q <= p, where q
    and p agree to 1e-6: such a token may turn over and change its gradient by q.
    """
    hidden, weight, wide, head = (x.detach() for x in inputs)
    logits, target = (hidden @ weight.T).double(), (wide @ head.T).double()
    exact, rounded, size = gradient(logits, target), 2.0**-8, weight.double()
    q, p = logits.softmax(-1), target.softmax(-1)
    turned = torch.where((q - p).abs() <= 1e-6 * q, q, 0)
    wanted = exact @ size
    allowed = (rounded * exact.abs() + turned) @ size.abs() + rounded * wanted.abs() + 1e-6
    return float(((found.double() - wanted).abs() / allowed).max())


def test_the_tv_gradient_of_bf16_states_is_off_by_its_rounding() -> None:
    inputs = states(40, 500, 16, torch.bfloat16)
    fused(inputs, chunk_rows=40).loss.sum().backward()
    assert inputs[0].grad is not None
    assert overshoot(inputs[0].grad, tv_gradient, inputs) < 1
    assert overshoot(inputs[0].grad, kl_gradient, inputs) > 3
    assert overshoot(inputs[0].grad, without_the_sum, inputs) > 3


def test_without_gradients_and_without_rows() -> None:
    hidden, *others = states()
    with torch.no_grad():
        assert not fused((hidden, *others)).loss.requires_grad
    assert not fused((hidden.detach(), *others)).loss.requires_grad
    assert not fused((hidden, *others)).alpha.requires_grad
    empty = fused((hidden[:0], others[0], others[1][:0], others[2]))
    empty.loss.sum().backward()
    assert empty.loss.shape == (0,) and hidden.grad.abs().sum() == 0


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 0), (1.0, 3), (0.7, 5), (1.0, 1000)])
def test_a_truncated_target(top_p: float, top_k: int) -> None:
    inputs = states(dtype=torch.float64)
    hidden, weight, wide, head = inputs
    found = fused(inputs, "tv", temperature=0.7, chunk_rows=4, target_top_p=top_p, target_top_k=top_k)
    target = truncate_((wide @ head.T).clone(), 0.7, top_p, top_k)
    wanted = tv_loss(hidden @ weight.T, target, temperature=0.7)
    close(found.loss.detach(), wanted.loss.detach(), 1e-12)
    close(found.target_entropy, wanted.target_entropy, 1e-12)
    close(*(torch.autograd.grad(x.loss.sum(), hidden)[0] for x in (found, wanted)), 1e-12)
    if top_k < VOCABULARY:
        assert (found.loss - fused(inputs, temperature=0.7).loss).abs().mean() > 1e-2


def test_truncations_without_a_meaning_are_refused() -> None:
    inputs = states()
    for options, message in (
        ({"target_top_p": 0.0}, "target_top_p must be above 0 and at most 1, not 0.0"),
        ({"target_top_k": -1}, "target_top_k must be at least 1, or 0 for all tokens, not -1"),
        ({"target_top_p": 0.9, "kind": "rkl"}, "'rkl' is infinite where the target is truncated"),
    ):
        with pytest.raises(UserError, match=message):
            linear_draft_loss(*inputs, **options)


def test_chains_that_do_not_fit_are_named() -> None:
    inputs = anchors()
    with pytest.raises(UserError, match=r"mask must be of \[N, K\] = \[4, 3\], not \[3, 4\]"):
        linear_e2e_tv_loss(*inputs, MASK.T)
    with pytest.raises(UserError, match="labels must be tokens in"):
        linear_e2e_tv_loss(*inputs, MASK, tokens=torch.full((4, 3), VOCABULARY))
    with pytest.raises(UserError, match="labels must be 11 integers"):
        linear_draft_loss(*states(), kind="hard_ce", labels=torch.zeros(12).long())
    with pytest.raises(UserError, match="kind is 'tv'"):
        linear_draft_loss(*states(), labels=labels_of(ROWS, VOCABULARY))


def test_shapes_that_do_not_fit_are_named() -> None:
    hidden, weight, wide, head = states()
    for wrong in ((hidden[:3], weight, wide, head), (hidden, weight[:5], wide, head), (hidden, head, wide, head)):
        with pytest.raises(UserError, match=r"do not fit.*hidden \["):
            linear_draft_loss(*wrong)
    with pytest.raises(UserError, match="chunk_rows must be at least 1, not 0"):
        linear_draft_loss(hidden, weight, wide, head, chunk_rows=0)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "width", "chunk"),
    [(11, 37, 8, 4), pytest.param(2048, 151_936, 64, 256, marks=pytest.mark.gpu)],
)
def test_full_vocabulary_on_a_gpu(rows: int, vocabulary: int, width: int, chunk: int) -> None:
    """In bf16: close to fp64, gradients of states and head too, and on a GPU a peak of chunks, not of rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight, wide, head = (x.detach().to(device) for x in states(rows, vocabulary, width, torch.bfloat16))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    found = linear_draft_loss(hidden.requires_grad_(), weight, wide, head, chunk_rows=chunk)
    found.loss.sum().backward()
    if device == "cuda":
        assert torch.cuda.max_memory_allocated() - before < 4 * chunk * vocabulary * 2
    some = slice(0, 64)
    few = hidden[some].detach().requires_grad_(), weight.clone().requires_grad_(), wide[some], head
    upstream = torch.linspace(0.5, 2, len(few[0]), device=device)
    exact = tuple(x.detach().double().requires_grad_() for x in few)
    close(found.loss[some].detach(), unfused(exact, "tv").loss.detach(), 0.03)
    # Of kl: the gradient of TV jumps where q = p, which rounded logits move.
    mine = linear_draft_loss(*few, kind="kl", chunk_rows=chunk, weight_grad=True).loss
    gradients = torch.autograd.grad((mine * upstream).sum(), few[:2])
    wanted = torch.autograd.grad((unfused(exact, "kl").loss * upstream).sum(), exact[:2])
    for one, other in zip(gradients, wanted, strict=True):
        assert (one.double() - other).norm() < 0.15 * other.norm()  # 0.08 at V = 60,000, from rounded logits
