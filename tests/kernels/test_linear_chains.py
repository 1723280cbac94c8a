"""The fused loss of a chain of drafts against that of whole logits: the product, and its unbiased form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bebop.kernels.linear_losses import e2e_weights, linear_e2e_tv_loss
from bebop.kernels.truncation import truncate_
from tests.kernels.builders import logits
from tests.kernels.hidden_states import ANCHORS, MASK, STEPS, anchors, logits_of, states, tokens_of, unfused
from tests.kernels.unfused import INF, close, e2e_tv_loss


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
