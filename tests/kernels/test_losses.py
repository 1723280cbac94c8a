"""Draft losses against plain autograd of their formulas in fp64; no triton needed."""

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels import row_losses_cpu
from bebop.kernels.chain_losses import e2e_weights
from bebop.kernels.losses import tv_loss
from bebop.kernels.row_losses import KINDS, RowLosses, reference, row_losses
from tests.kernels.unfused import e2e_tv_loss

INF = float("inf")
ROOT = Path(__file__).resolve().parents[2]


def logits(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draft and target logits of distributions that overlap by about two thirds."""
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(rows, vocabulary, generator=generator) * 2
    return draft.to(dtype), (draft + torch.randn(rows, vocabulary, generator=generator)).to(dtype)


def labels_for(kind: str, rows: int, vocabulary: int) -> Tensor | None:
    return torch.arange(rows) * 7 % vocabulary if kind == "hard_ce" else None


def naive(draft: Tensor, target: Tensor, kind: str, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Loss and gradient [N, V] in fp64 by autograd through the definition."""
    z = draft.double().requires_grad_()
    q, p = (z / temperature).softmax(-1), (target.double() / temperature).softmax(-1)
    alpha = torch.minimum(q, p).sum(-1)
    kl = (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)
    weight = (-3 * alpha.detach()).exp()
    m = (p + q) / 2
    losses: dict[str, Callable[[], Tensor]] = {
        "tv": lambda: (q - p).abs().sum(-1) / 2,
        "ce": lambda: -torch.xlogy(p, q).sum(-1),
        "hard_ce": lambda: -q.log()[torch.arange(len(q)), torch.arange(len(q)) * 7 % q.shape[-1]],
        "kl": lambda: kl,
        "rkl": lambda: (torch.xlogy(q, q) - torch.xlogy(q, p)).sum(-1),
        "jsd": lambda: (torch.xlogy(p, p) + torch.xlogy(q, q)).sum(-1) / 2 - torch.xlogy(m, m).sum(-1),
        "nla": lambda: -alpha.log(),
        "hybrid": lambda: weight * kl + (1 - weight) * (1 - alpha),
    }
    loss = losses[kind]()
    return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]


def found(draft: Tensor, target: Tensor, kind: str = "tv", **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient through the public function."""
    z = draft.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    loss = tv_loss(z, target, kind=kind, labels=labels_for(kind, *draft.shape), **options).loss
    return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance)


def within(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    """Absolute up to 1, relative above: an fp32 number between 8 and 16 nats is itself rounded by up to 5e-7."""
    scale = wanted.abs().nan_to_num(posinf=1).clamp_min(1).double()
    pair = found.double() / scale, wanted.double() / scale
    torch.testing.assert_close(*pair, rtol=0, atol=tolerance, equal_nan=True)


# ---- against the definition


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


def test_the_target_gets_no_gradient_and_no_grad_none_at_all() -> None:
    draft, target = logits(2, 9)
    target.requires_grad_()
    assert not tv_loss(draft, target).loss.requires_grad
    draft.requires_grad_()
    tv_loss(draft, target).loss.sum().backward()
    assert target.grad is None
    with torch.no_grad():
        assert not tv_loss(draft, target).loss.requires_grad


# ---- identities and edges


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


def test_equal_laws() -> None:
    draft, _ = logits(3, 77)
    for kind in ("tv", "kl", "rkl", "nla", "hybrid"):
        loss, grad = found(draft, draft, kind)
        assert loss.abs().max() < 1e-6 and grad.abs().max() < 1e-6


def test_one_hot_and_disjoint_laws() -> None:
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


def test_divergences_of_laws_without_the_token_stay_in_their_row() -> None:
    draft, target = logits(2, 30)
    target[0, 3] = -INF
    loss, grad = found(draft, target, "rkl")
    assert loss[0] == INF and torch.isfinite(loss[1]) and torch.isfinite(grad[1]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_no_laws(kind: str, dtype: torch.dtype) -> None:
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


# ---- the CPU path


def agree(a: RowLosses, b: RowLosses) -> None:
    assert a.grad is not None and b.grad is not None
    for found_number, wanted in zip(a.numbers(), b.numbers(), strict=True):
        within(found_number, wanted)
    ulp = 2.0**-8 if a.grad.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(a.grad.double(), b.grad.double(), rtol=ulp, atol=1e-6, equal_nan=True)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("kind", "dtype"), [("tv", torch.bfloat16), pytest.param("hybrid", torch.float32, marks=pytest.mark.slow)]
)
def test_the_compiled_core(kind: str, dtype: torch.dtype) -> None:
    """Rows that start at odd addresses; the last chunk goes back over finished rows instead of being smaller."""
    draft, target = logits(132, 5001, dtype)
    draft[:, :2500] = target[:, :2500] = -INF
    draft[70] = -INF
    compiled = row_losses_cpu.CompiledCore()
    assert row_losses_cpu.chunk_rows(131, 5001) == 3
    agree(
        row_losses_cpu.run_in_chunks(compiled, draft[1:], target[1:], kind, 0.7, None, 3.0, True),
        reference(draft[1:].double(), target[1:].double(), kind=kind, temperature=0.7),
    )
    assert compiled.call is not row_losses_cpu.core, "compilation failed"


def test_without_a_compiler_the_eager_core_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler here")

    fallen = row_losses_cpu.CompiledCore(backend=broken)
    draft, target = logits(9, 50)
    for _ in range(2):
        result = row_losses_cpu.run_in_chunks(fallen, draft, target, "tv", 1.0, None, 3.0, True)
        agree(result, reference(draft.double(), target.double(), kind="tv"))
    assert fallen.call is row_losses_cpu.core
    (warning,) = (x.message for x in caplog.records if x.name == row_losses_cpu.__name__)
    assert "no C++ compiler here" in warning and "\n" not in warning


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.empty(4, 1000), torch.empty(512, 32_768, device="meta")
    assert not row_losses_cpu.worth_compiling(small)
    assert not row_losses_cpu.worth_compiling(large)  # not on a CPU
    big = torch.empty(1, 1).expand(512, 32_768)
    assert row_losses_cpu.worth_compiling(big)
    often, middle = row_losses_cpu.COMPILE_AFTER, torch.empty(1, 1).expand(32, 32_768)
    assert not row_losses_cpu.worth_compiling(middle, often - 1) and row_losses_cpu.worth_compiling(middle, often)
    assert not row_losses_cpu.worth_compiling(small, often)
    monkeypatch.setenv("BEBOP_COMPILE", "0")
    assert not row_losses_cpu.worth_compiling(big)


def test_chunks_do_not_change_the_numbers() -> None:
    draft, target = logits(131, 700)
    step = row_losses_cpu.chunk_rows(*draft.shape)
    assert 1 < step < 131 and 131 % step != 0
    agree(row_losses(draft, target, kind="tv"), reference(draft.double(), target.double(), kind="tv"))


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that ``call`` held at a time, from the profiler's record of every allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).cumsum(0)
    return int(held.max())


def test_memory_is_the_gradient_and_a_little_more() -> None:
    draft, target = logits(256, 4096)
    draft.requires_grad_()
    tensor = draft.numel() * 4

    def autograd() -> None:
        (1 - torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)).sum().backward()

    mine = peak_bytes(lambda: tv_loss(draft, target).loss.sum().backward())
    draft.grad = None
    others = peak_bytes(autograd)
    assert mine < 1.3 * tensor
    assert 3 * mine < others


# ---- the product of acceptances


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


def test_capacity_toy() -> None:
    """T13: one q for contexts with one-hot targets of weights .5/.3/.2: CE ends at sum w^2 = .38, TV at max w = .5."""
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    target = torch.where(torch.eye(3).bool(), 0.0, -INF).double()
    accepted = {}
    for kind in ("ce", "tv"):
        z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([z], lr=0.1)
        for _ in range(400):
            optimizer.zero_grad()
            (weights * tv_loss(z.expand(3, 3), target, kind=kind).loss).sum().backward()
            optimizer.step()
        accepted[kind] = (weights * z.detach().softmax(-1)).sum().item()
    assert accepted["ce"] == pytest.approx(0.38, abs=1e-4)
    assert accepted["tv"] == pytest.approx(0.5, abs=1e-2)


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "l2"}, "unknown kind of draft loss 'l2'; known are tv, ce"),
        ({"temperature": 0.0}, "temperature must be positive and finite, not 0.0"),
        ({"target_logits": torch.zeros(3, 5)}, r"both be \[N, V\] with V > 0, not \[2, 5\] and \[3, 5\]"),
        ({"draft_logits": torch.zeros(2, 5).int()}, "draft logits must be fp32, bf16, fp16 or fp64, not torch.int32"),
        ({"kind": "hard_ce"}, "labels are for kind='hard_ce' and needed there; kind is 'hard_ce'"),
        ({"labels": torch.zeros(2).long()}, "kind is 'tv'"),
        ({"kind": "hard_ce", "labels": torch.zeros(2)}, "labels must be 2 integers, not torch.float32"),
        ({"kind": "hard_ce", "labels": torch.tensor([0, 5])}, r"labels must be tokens in \[0, 5\), not 0 to 5"),
    ],
)
def test_one_line_for_what_a_user_can_get_wrong(change: dict[str, Any], message: str) -> None:
    arguments = {"draft_logits": torch.zeros(2, 5), "target_logits": torch.zeros(2, 5), **change}
    with pytest.raises(UserError, match=message) as refusal:
        tv_loss(arguments.pop("draft_logits"), arguments.pop("target_logits"), **arguments)
    assert "\n" not in str(refusal.value)


# ---- the vocabulary split between processes


def test_a_split_vocabulary(tmp_path: Path) -> None:
    """1, 2 and 4 processes over gloo, with shards of different widths; every process checks its own numbers."""
    command = [sys.executable, "-m", "tests.kernels.parallel_worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "4", str(tmp_path / "store")], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(4)
    ]
    ends = time.monotonic() + 120
    while time.monotonic() < ends and any(x.poll() is None for x in processes) and not any(x.poll() for x in processes):
        time.sleep(0.1)
    for process in processes:  # those that wait for one that has failed, or too long
        process.kill()
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(errors)[-3000:]
