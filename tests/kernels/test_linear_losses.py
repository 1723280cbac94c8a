"""The fused linear and draft loss against the unfused one: the same numbers and the same gradients."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bebop.bench.memory import peak_bytes
from bebop.errors import UserError
from bebop.kernels import linear_losses
from bebop.kernels.linear_losses import e2e_weights, linear_draft_loss, linear_e2e_tv_loss
from bebop.kernels.losses import DraftLossOutput, tv_loss
from bebop.kernels.row_losses import KINDS
from bebop.kernels.truncation import truncate_
from tests.cases import slow_but
from tests.kernels.builders import logits
from tests.kernels.hidden_states import (
    ANCHORS,
    MASK,
    ROWS,
    STEPS,
    VOCABULARY,
    Inputs,
    anchors,
    fused,
    logits_of,
    states,
    tokens_of,
    unfused,
)
from tests.kernels.unfused import INF, close, e2e_tv_loss, labels_of, within


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


# ---- What the fused losses hold and compute: chunks of logits alone, and each product once


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return out


def test_logits_of_all_rows_never_exist() -> None:
    rows, vocabulary, width, chunk = 256, 1000, 4, 16
    inputs = states(rows, vocabulary, width)

    def learn(loss: Callable[[], DraftLossOutput]) -> None:
        loss().loss.sum().backward()

    with Largest() as seen:
        learn(lambda: fused(inputs, chunk_rows=chunk))
    assert seen.elements <= chunk * vocabulary
    with Largest() as seen:
        learn(lambda: unfused(inputs, "tv"))
    assert seen.elements >= rows * vocabulary
    assert peak_bytes(lambda: learn(lambda: unfused(inputs, "tv"))) > 3 * 4 * rows * vocabulary


def chunks_held(**options: Any) -> float:
    """Peak of a step beyond its inputs, in logits of one chunk; 3 chunks in all."""
    rows, vocabulary, chunk = 96, 16_384, 32
    hidden, weight, wide, head = states(rows, vocabulary, 4)
    weight.requires_grad_(options.get("weight_grad", False))
    tokens = options.pop("tokens", False)

    def step() -> None:
        if not tokens:
            fused((hidden, weight, wide, head), chunk_rows=chunk, **options).loss.sum().backward()
            return
        steps = [x.view(rows // 4, 4, -1) for x in (hidden, wide)]
        of_data = torch.zeros(rows // 4, 4, dtype=torch.long)
        mask = torch.ones(rows // 4, 4)
        linear_e2e_tv_loss(steps[0], weight, steps[1], head, mask, tokens=of_data, chunk_rows=chunk).backward()

    return peak_bytes(step) / (4 * chunk * vocabulary)


@pytest.mark.parametrize(
    "options",
    slow_but([], [{}, {"kind": "hybrid"}, {"weight_grad": True}, {"tokens": True}]),
    ids=str,
)
def test_peak_memory_is_three_logits_of_a_chunk(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of draft and target and a gradient; the loss itself works on 1 / 32 of the chunk at a time."""
    monkeypatch.setenv("BEBOP_COMPILE", "0")  # the eager core holds more, and a compiler takes seconds
    assert 2.9 < chunks_held(**options) < 3.4


@pytest.mark.slow
def test_a_variant_that_keeps_logits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it keeps but those of the chunk before."""
    monkeypatch.setenv("BEBOP_COMPILE", "0")
    make = linear_losses._logits
    for count in (1, 3):
        kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=count)

        def keep(*arguments: Any, kept: deque[tuple[Tensor, Tensor]] = kept) -> tuple[Tensor, Tensor]:
            kept.append(make(*arguments))
            return kept[-1]

        monkeypatch.setattr(linear_losses, "_logits", keep)
        assert chunks_held() > max(3.4, 2 * count)


class Products(TorchDispatchMode):
    """How many products there were with a head [d, V]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.count = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm and args[1].shape[1] == self.vocabulary:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_one_product_with_each_head_per_chunk() -> None:
    inputs = anchors()
    with Products(VOCABULARY) as seen:
        linear_e2e_tv_loss(*inputs, MASK, tokens=tokens_of(inputs[0]), chunk_rows=2).backward()
    assert int(MASK.cumprod(-1).sum()) == 6 and seen.count == 2 * 3


# ---- The fused loss of a chain of drafts against that of whole logits: the product, and its unbiased form


def unfused_e2e(hidden: Tensor, weight: Tensor, wide: Tensor, head: Tensor) -> Tensor:
    """Anchor by anchor under MASK: 3, 2, 0 and 1 steps count."""
    alpha = unfused((hidden.flatten(0, 1), weight, wide.flatten(0, 1), head), "tv").alpha.view(ANCHORS, STEPS)
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
    mean = unfused((inputs[0].flatten(0, 1), inputs[1], inputs[2].flatten(0, 1), inputs[3]), "tv").loss
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_unbiased_form_equals_that_of_logits(dtype: torch.dtype) -> None:
    """Gradients through both factors: that of the overlap alone, a plausible mistake, is far off."""
    inputs, exact = anchors(dtype), anchors()
    tokens = tokens_of(inputs[0])
    found = linear_e2e_tv_loss(*inputs, MASK, tokens=tokens, temperature=0.8, chunk_rows=2)
    wanted = e2e_tv_loss(*logits_of(*exact), MASK, tokens=tokens, temperature=0.8)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    close(found.detach(), wanted.detach(), tolerance)
    gradient, exact_gradient = (torch.autograd.grad(2 * x, y[0])[0] for x, y in ((found, inputs), (wanted, exact)))
    close(gradient, exact_gradient, tolerance)
    plain = linear_e2e_tv_loss(*inputs, MASK, temperature=0.8)
    assert (torch.autograd.grad(2 * plain, inputs[0])[0] - exact_gradient).abs().max() > 1e-3


def test_the_unbiased_form_is_unbiased_and_its_gradient_too() -> None:
    """V = 4, K = 2, all data y ~ p enumerated: 1 - E[A] / 2; Eq. 13 is off. Rows of states: the root, then after y."""
    hidden, weight, wide, head = states(5, 4, 3, torch.float64)
    distributions = [(x @ w.T).softmax(-1) for x, w in ((hidden, weight), (wide, head))]
    common = torch.minimum(*distributions)
    exact = 1 - (common[0].sum() + (common[0] * common[1:].sum(-1)).sum()) / 2
    (exact_gradient,) = torch.autograd.grad(exact, hidden, retain_graph=True)

    def expected(corrected: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for y in range(4):
            path, tokens = torch.tensor([[0, 1 + y]]), torch.tensor([[y, 0]]) if corrected else None
            steps = hidden[path], weight, wide[path], head
            total = total + distributions[1][0, y] * linear_e2e_tv_loss(*steps, torch.ones(1, 2), tokens=tokens)
        return total

    unbiased, product = expected(True), expected(False)
    close(unbiased.detach(), exact.detach(), 1e-12)
    close(torch.autograd.grad(unbiased, hidden)[0], exact_gradient, 1e-12)
    assert (product - exact).abs() > 1e-4
    assert (torch.autograd.grad(product, hidden)[0] - exact_gradient).abs().max() > 1e-4


def test_the_unbiased_form_does_not_read_what_is_masked() -> None:
    hidden, weight, wide, head = anchors()
    counted, tokens = MASK.cumprod(-1).bool(), tokens_of(hidden)
    clean = linear_e2e_tv_loss(hidden, weight, wide, head, MASK, tokens=tokens)
    garbage = hidden.detach().where(counted[..., None], float("nan")).requires_grad_()
    hidden_tokens = tokens.where(counted, -100)
    found = linear_e2e_tv_loss(garbage, weight, wide, head, MASK, tokens=hidden_tokens)
    found.backward()
    close(found.detach(), clean.detach(), 1e-12)
    assert torch.isfinite(garbage.grad).all() and garbage.grad[2].abs().max() == 0


def test_the_unbiased_form_gives_the_head_a_gradient_on_demand() -> None:
    hidden, weight, wide, head = anchors()
    weight.requires_grad_()
    tokens = tokens_of(hidden)
    loss = linear_e2e_tv_loss(hidden, weight, wide, head, MASK, tokens=tokens, chunk_rows=2, weight_grad=True)
    exact = e2e_tv_loss(*logits_of(hidden, weight, wide, head), MASK, tokens=tokens)
    close(torch.autograd.grad(loss, weight)[0], torch.autograd.grad(exact, weight)[0], 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 5),
    steps=st.integers(1, 4),
    vocabulary=st.integers(1, 20),
    chunk=st.integers(1, 25),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.5, 4.0]),
    corrected=st.booleans(),
    top_k=st.integers(0, 4),
)
def test_any_chain(
    count: int, steps: int, vocabulary: int, chunk: int, seed: int, spread: float, corrected: bool, top_k: int
) -> None:
    """Any shape, mask and chunk: value and gradient of the loss of logits, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    hidden, wide = (torch.randn(count, steps, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, head = (torch.randn(vocabulary, 3, generator=generator, dtype=torch.float64) * spread for _ in range(2))
    mask = torch.rand(count, steps, generator=generator) < 0.8
    tokens = torch.randint(0, vocabulary, (count, steps), generator=generator) if corrected else None
    hidden.requires_grad_()
    options = {"tokens": tokens, "target_top_k": top_k, "chunk_rows": chunk}
    found = linear_e2e_tv_loss(hidden, weight, wide, head, mask, **options)
    draft, target = logits_of(hidden, weight, wide, head)
    cut = truncate_(target.flatten(0, 1).clone(), 1.0, 1.0, top_k).view_as(target)
    wanted = e2e_tv_loss(draft, cut, mask, tokens=tokens)
    close(found.detach(), wanted.detach(), 1e-12)
    close(*(torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (found, wanted)), 1e-11)


def test_a_truncated_target_end_to_end() -> None:
    """With tokens of the truncated distribution and with one outside of it, which counts as accepted."""
    inputs, tokens = anchors(), torch.zeros(ANCHORS, STEPS, dtype=torch.long)
    draft, target = logits_of(*inputs)
    cut = truncate_(target.flatten(0, 1).clone(), 1.0, 0.6, 4).view_as(target)
    tokens[:] = cut.argmax(-1)
    tokens[0, 0] = cut[0, 0].argmin()
    for chosen in (None, tokens):
        found = linear_e2e_tv_loss(*inputs, MASK, tokens=chosen, target_top_p=0.6, target_top_k=4)
        wanted = e2e_tv_loss(draft, cut, MASK, tokens=chosen)
        close(found.detach(), wanted.detach(), 1e-12)
        gradients = [torch.autograd.grad(x, inputs[0], retain_graph=True)[0] for x in (found, wanted)]
        close(*gradients, 1e-12)


def test_e2e_weights_by_hand_and_without_division() -> None:
    alpha = torch.tensor([[0.5, 0.0, 0.8], [0.5, 0.4, 0.9]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    wanted = torch.tensor([[1 / 3, 0.5 * 1.8 / 3, 0.0], [1.4 / 2, 0.5 / 2, 0.0]])
    close(e2e_weights(alpha.detach(), mask), wanted, 1e-7)
    accepted = (alpha[0].cumprod(-1).sum() / 3) + (alpha[1, :2].cumprod(-1).sum() / 2)
    close(torch.autograd.grad(accepted, alpha)[0], wanted, 1e-6)


def test_the_corrected_loss_of_impossible_tokens_is_finite() -> None:
    """Tokens that one of the two distributions, or neither, can have."""
    draft, target = (x.view(1, 2, 5) for x in logits(2, 5, torch.float64))
    draft[0, 0, 1] = target[0, 0, 2] = -INF
    draft[0, 0, 3] = target[0, 0, 3] = -INF  # and one that neither has
    for token in (1, 2, 3):
        z = draft.clone().requires_grad_()
        e2e_tv_loss(z, target, torch.ones(1, 2), tokens=torch.tensor([[token, 0]])).backward()
        assert z.grad is not None and torch.isfinite(z.grad).all()
