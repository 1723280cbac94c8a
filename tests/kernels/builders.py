"""Logits for tests of draft losses, and what the public function makes of them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bebop.kernels.losses import tv_loss
from tests.kernels.unfused import by_definition, labels_for


def logits(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draft and target logits of distributions that overlap by about two thirds."""
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(rows, vocabulary, generator=generator) * 2
    return draft.to(dtype), (draft + torch.randn(rows, vocabulary, generator=generator)).to(dtype)


def naive(draft: Tensor, target: Tensor, kind: str, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Loss and gradient [N, V] in fp64 by autograd through the definition."""
    z = draft.double().requires_grad_()
    loss = by_definition(z, target.double(), kind, temperature).loss
    return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]


def found(draft: Tensor, target: Tensor, kind: str = "tv", **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient through the public function."""
    z = draft.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    loss = tv_loss(z, target, kind=kind, labels=labels_for(kind, *draft.shape), **options).loss
    return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]


@contextlib.contextmanager
def on(threads: int) -> Iterator[None]:
    """As many threads of PyTorch's within."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
