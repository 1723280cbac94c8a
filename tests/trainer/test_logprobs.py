import pytest
import torch
from torch import Tensor

from bebop.trainer.scorer import token_logprobs

A, D, V = 23, 8, 37
TARGETS = torch.randint(0, V, (A,), generator=torch.Generator().manual_seed(1))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((A, D), (V, D), (V,))
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    return hidden, weight, bias


def objective(logp: Tensor, entropy: Tensor) -> Tensor:
    """Different weights a row, so that rows cannot be exchanged unnoticed."""
    rows = torch.arange(1.0, A + 1, dtype=logp.dtype)
    return (logp * rows).sum() + (entropy * rows.flip(0) ** 2).sum()


def full(temperature: float) -> list[Tensor]:
    hidden, weight, bias = inputs()
    logq = ((hidden @ weight.T + bias) / temperature).log_softmax(-1)
    logp, entropy = logq[torch.arange(A), TARGETS], -(logq.exp() * logq).sum(-1)
    return [logp, entropy, *torch.autograd.grad(objective(logp, entropy), (hidden, weight, bias))]


def chunked(temperature: float, rows: int) -> list[Tensor]:
    hidden, weight, bias = inputs()
    logp, entropy = token_logprobs(hidden, weight, TARGETS, temperature=temperature, bias=bias, chunk_elements=rows * V)
    return [logp, entropy, *torch.autograd.grad(objective(logp, entropy), (hidden, weight, bias))]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rows", [1, 5, A, 100])
def test_chunks_equal_the_full_logits_and_so_do_gradients(temperature: float, rows: int) -> None:
    for ours, wanted in zip(chunked(temperature, rows), full(temperature), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-11)


def test_a_forgotten_temperature_would_be_seen() -> None:
    assert (chunked(1.0, 5)[0] - full(0.7)[0]).abs().max() > 0.1


def test_no_rows_give_zero_gradients() -> None:
    hidden, weight, _ = inputs()
    logp, entropy = token_logprobs(hidden[:0], weight, TARGETS[:0], temperature=1.0)
    (logp.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


def test_bfloat16_products_give_fp32_log_probs_near_the_exact_ones() -> None:
    hidden, weight, _ = (x.detach().float() for x in inputs())
    exact, _ = token_logprobs(hidden, weight, TARGETS, temperature=1.0)
    rounded, _ = token_logprobs(hidden, weight, TARGETS, temperature=1.0, dtype=torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.1


def test_the_gradient_of_a_bfloat16_head_is_summed_up_in_fp32() -> None:
    """Over 1,024 chunks of one row, a half each: a sum in bfloat16 would stop at 128."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    logp, _ = token_logprobs(hidden, weight, torch.zeros(1024, dtype=torch.long), temperature=1.0, chunk_elements=2)
    logp.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad[:, 0].tolist() == [512.0, -512.0]
