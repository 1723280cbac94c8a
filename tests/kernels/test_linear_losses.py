"""The fused linear and draft loss against the unfused one: same numbers, same gradients, a fraction of the memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bebop.errors import UserError
from bebop.kernels.linear_losses import linear_draft_loss, linear_e2e_tv_loss
from bebop.kernels.losses import DraftLoss
from bebop.kernels.row_losses import KINDS

ROWS, VOCABULARY = 11, 37
LABELS = torch.arange(ROWS) % VOCABULARY


def states(
    rows: int = ROWS, vocabulary: int = VOCABULARY, width: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and heads of a draft and a wider target whose laws overlap by about half."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * 0.6
    wide = torch.cat((hidden, torch.randn(rows, 3, generator=generator, dtype=torch.float64)), 1)
    head = torch.cat((weight, torch.randn(vocabulary, 3, generator=generator, dtype=torch.float64) * 0.3), 1)
    hidden, weight, wide, head = (x.to(dtype) for x in (hidden, weight, wide, head))
    return hidden.requires_grad_(), weight, wide, head


def unfused(
    hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor, kind: str, temperature: float
) -> DraftLoss:
    """Plain autograd over all logits, formula by formula."""
    log_q = (hidden @ weight.T / temperature).log_softmax(-1)
    log_p = (target_hidden @ target_weight.T / temperature).log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(q, p).sum(-1)
    kl = (p * (log_p - log_q)).sum(-1)
    blend = (-3 * alpha.detach()).exp()
    losses: dict[str, Callable[[], Tensor]] = {
        "tv": lambda: 1 - alpha,
        "ce": lambda: -(p * log_q).sum(-1),
        "hard_ce": lambda: -log_q.gather(-1, LABELS[: len(q), None])[:, 0],
        "kl": lambda: kl,
        "rkl": lambda: (q * (log_q - log_p)).sum(-1),
        "nla": lambda: -alpha.log(),
        "hybrid": lambda: blend * kl + (1 - blend) * (1 - alpha),
    }
    entropies = {"draft_entropy": -(q * log_q).sum(-1), "target_entropy": -(p * log_p).sum(-1)}
    return DraftLoss(loss=losses[kind](), alpha=alpha, **entropies)


def fused(inputs: tuple[Tensor, Tensor, Tensor, Tensor], kind: str = "tv", **options: Any) -> DraftLoss:
    """``linear_draft_loss`` with labels where the kind takes them."""
    labels = LABELS[: len(inputs[0])] if kind == "hard_ce" else None
    return linear_draft_loss(*inputs, kind=kind, labels=labels, **options)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    """Equal to an absolute tolerance."""
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_unfused_loss_for_any_upstream_gradient(kind: str) -> None:
    inputs, exact = states(), states(dtype=torch.float64)
    upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    found, wanted = fused(inputs, kind, temperature=0.8, chunk_rows=4), unfused(*exact, kind, 0.8)
    for name in ("loss", "alpha", "draft_entropy", "target_entropy"):
        # fp32 numbers of up to 8 nats; the products alone are off by some 1e-7.
        close(getattr(found, name).detach(), getattr(wanted, name).detach(), 3e-6)
    (gradient,) = torch.autograd.grad(found.loss, inputs[0], upstream.float())
    (exact_gradient,) = torch.autograd.grad(wanted.loss, exact[0], upstream)
    close(gradient, exact_gradient, 3e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_unfused_loss_in_fp64(kind: str) -> None:
    """What is left in fp32 is rounding."""
    inputs = states(dtype=torch.float64)
    upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    found, wanted = fused(inputs, kind, chunk_rows=4), unfused(*inputs, kind, 1.0)
    close(found.loss, wanted.loss, 1e-12)
    pair = [torch.autograd.grad(x.loss, inputs[0], upstream.to(x.loss.dtype))[0] for x in (found, wanted)]
    close(*pair, 1e-12)


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
    (exact,) = torch.autograd.grad(unfused(hidden, weight, wide, head, "tv", 1.0).loss, weight, upstream)
    close(weight.grad, exact, 1e-12)


def test_the_head_alone_may_learn() -> None:
    hidden, weight, wide, head = states(dtype=torch.float64)
    weight.requires_grad_()
    fused((hidden.detach(), weight, wide, head), "kl", chunk_rows=4, weight_grad=True).loss.sum().backward()
    (exact,) = torch.autograd.grad(unfused(hidden, weight, wide, head, "kl", 1.0).loss.sum(), weight)
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


def test_without_gradients_and_without_rows() -> None:
    hidden, *others = states()
    with torch.no_grad():
        assert not fused((hidden, *others)).loss.requires_grad
    assert not fused((hidden.detach(), *others)).loss.requires_grad
    assert not fused((hidden, *others)).alpha.requires_grad
    empty = fused((hidden[:0], others[0], others[1][:0], others[2]))
    empty.loss.sum().backward()
    assert empty.loss.shape == (0,) and hidden.grad.abs().sum() == 0


# ---- memory


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return out


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that ``call`` held at a time, from the profiler's record of every allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).cumsum(0)
    return int(held.max())


def test_logits_of_all_rows_never_exist() -> None:
    rows, vocabulary, width, chunk = 256, 1000, 4, 16
    inputs = states(rows, vocabulary, width)

    def learn(loss: Callable[[], DraftLoss]) -> None:
        loss().loss.sum().backward()

    with Largest() as seen:
        learn(lambda: fused(inputs, chunk_rows=chunk))
    assert seen.elements <= chunk * vocabulary
    with Largest() as seen:
        learn(lambda: unfused(*inputs, "tv", 1.0))
    assert seen.elements >= rows * vocabulary

    one_chunk, all_rows = 4 * chunk * vocabulary, 4 * rows * vocabulary
    # Two logits, a gradient, and what the loss of a chunk needs for itself, whatever the number of rows.
    assert peak_bytes(lambda: learn(lambda: fused(inputs, chunk_rows=chunk))) < 10 * one_chunk < all_rows
    assert peak_bytes(lambda: learn(lambda: unfused(*inputs, "tv", 1.0))) > 3 * all_rows


# ---- the product of acceptances


ANCHORS, STEPS = 4, 3
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]]).bool()


def anchors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The states of ``states`` as [N, K, .]."""
    hidden, weight, wide, head = states(ANCHORS * STEPS, dtype=dtype)
    return hidden.detach().view(ANCHORS, STEPS, -1).requires_grad_(), weight, wide.view(ANCHORS, STEPS, -1), head


def unfused_e2e(hidden: Tensor, weight: Tensor, wide: Tensor, head: Tensor) -> Tensor:
    """Anchor by anchor under MASK: 3, 2, 0 and 1 steps count."""
    alpha = unfused(hidden.flatten(0, 1), weight, wide.flatten(0, 1), head, "tv", 1.0).alpha.view(ANCHORS, STEPS)
    first = 1 - (alpha[0, 0] + alpha[0, 0] * alpha[0, 1] + alpha[0].prod()) / 3
    second = 1 - (alpha[1, 0] + alpha[1, 0] * alpha[1, 1]) / 2
    return (first + second + 1 - alpha[3, 0]) / 3


def test_e2e_equals_the_unfused_product() -> None:
    inputs = anchors()
    found, wanted = linear_e2e_tv_loss(*inputs, MASK, chunk_rows=2), unfused_e2e(*inputs)
    close(found.detach(), wanted.detach(), 1e-12)
    gradient, exact = (torch.autograd.grad(2 * loss, inputs[0])[0] for loss in (found, wanted))
    close(gradient, exact, 1e-12)
    # The mean of the steps' losses, a plausible mistake, has another gradient.
    mean = unfused(inputs[0].flatten(0, 1), inputs[1], inputs[2].flatten(0, 1), inputs[3], "tv", 1.0).loss
    (planted,) = torch.autograd.grad(2 * mean[MASK.flatten()].mean(), inputs[0])
    assert (planted - exact).abs().max() > 1e-3


def test_e2e_does_not_read_what_is_masked() -> None:
    hidden, weight, wide, head = anchors()
    clean = linear_e2e_tv_loss(hidden, weight, wide, head, MASK)
    counted = MASK.cumprod(-1).bool()[..., None]
    garbage = hidden.detach().where(counted, float("nan")).requires_grad_()
    found = linear_e2e_tv_loss(garbage, weight, wide.where(counted, float("nan")), head, MASK)
    found.backward()
    close(found.detach(), clean.detach(), 1e-12)
    assert torch.isfinite(garbage.grad).all()
    assert garbage.grad[2].abs().max() == 0


def test_e2e_without_a_step_is_zero() -> None:
    inputs = anchors()
    loss = linear_e2e_tv_loss(*inputs, torch.zeros_like(MASK))
    loss.backward()
    assert loss.item() == 0 and inputs[0].grad.abs().max() == 0


# ---- what is refused


def test_shapes_that_do_not_fit_are_named() -> None:
    hidden, weight, wide, head = states()
    for wrong in ((hidden[:3], weight, wide, head), (hidden, weight[:5], wide, head), (hidden, head, wide, head)):
        with pytest.raises(UserError, match=r"do not fit.*hidden \["):
            linear_draft_loss(*wrong)
    with pytest.raises(UserError, match="chunk_rows must be at least 1, not 0"):
        linear_draft_loss(hidden, weight, wide, head, chunk_rows=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_full_vocabulary_on_a_gpu() -> None:
    """bf16 at V = 151,936: close to fp64, and a peak of chunks, not of rows."""
    rows, vocabulary, width, chunk = 2048, 151_936, 64, 256
    hidden, weight, wide, head = (x.cuda() for x in states(rows, vocabulary, width, torch.bfloat16))
    hidden = hidden.detach().requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = linear_draft_loss(hidden, weight, wide, head, chunk_rows=chunk)
    found.loss.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * chunk * vocabulary * 2
    some = slice(0, 64)
    exact = unfused(hidden[some].double(), weight.double(), wide[some].double(), head.double(), "tv", 1.0)
    close(found.loss[some].detach(), exact.loss.detach(), 0.03)
