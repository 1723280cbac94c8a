"""Blocks with everything in them, whose tokens are drawn from the claim or from a fault."""

from collections.abc import Callable

import torch
from torch import Tensor

from bebop.certify.answers import Block

Fault = Callable[[Block], Tensor]


def rows(count: int, columns: int, generator: torch.Generator, sharpness: float = 1.5) -> Tensor:
    """Distributions [count, columns]."""
    return (sharpness * torch.randn(count, columns, generator=generator, dtype=torch.float64)).softmax(-1)


def block(
    count: int, columns: int, *, seed: int = 0, length: int = 20, first: int = 0, fault: Fault | None = None,
    sharpness: float = 1.5,
) -> Block:  # fmt: skip
    """A cohort of answers of ``length`` tokens, request ``first`` and those that follow; ``fault`` gives [N, M]."""
    g = torch.Generator().manual_seed(seed)
    p = rows(count, columns, g, sharpness)
    noise = torch.randn(count, columns, generator=g, dtype=torch.float64)
    blank = torch.zeros(count, dtype=torch.int64)
    position = torch.arange(count) % length
    made = Block(
        tokens=blank,
        cells=blank,
        probs=p,
        logprobs=blank.double(),
        request=first + torch.arange(count) // length,
        position=position,
        last=torch.randint(columns, (count,), generator=g),
        stops=(1, 3),
        before=torch.where((position > 0)[:, None], p.roll(1, 0), p),
        raw=(p.log() + 0.5 * torch.randn(count, columns, generator=g, dtype=torch.float64)).softmax(-1),
        draft=(p.log() + 0.7 * noise).softmax(-1),
        seen=torch.rand(count, columns, generator=g) < 0.3,
        cycle=torch.arange(count) % 6 - 1,
        twin=torch.where(torch.rand(count, generator=g) < 0.5, torch.randint(columns, (count,), generator=g), -1),
    )
    return sampled(made, p if fault is None else fault(made), g)


def sampled(given: Block, truth: Tensor, generator: torch.Generator) -> Block:
    """The block with tokens drawn from ``truth`` [N, M], and right log-probs."""
    cells = torch.multinomial(truth, 1, generator=generator)[:, 0]
    logprobs = given.probs.gather(1, cells[:, None])[:, 0].log()
    tokens = cells if given.ids is None else given.ids.gather(1, cells[:, None])[:, 0].clamp_min(0)
    own = {name: getattr(given, name) for name in given.__slots__}
    own |= {"tokens": tokens, "cells": cells, "logprobs": logprobs, "reported": logprobs, "declared": logprobs}
    return Block(**own)


def coarse(given: Block, vocabulary: int, seed: int = 0) -> Block:
    """The block's columns as those of a few tokens of each row, the last as all others."""
    g = torch.Generator().manual_seed(seed)
    columns = given.probs.shape[1]
    first = torch.randint(vocabulary, (len(given), 1), generator=g)
    step = torch.randint(1, vocabulary // columns, (len(given), 1), generator=g)
    ids = (first + step * torch.arange(columns)) % vocabulary  # each once
    ids[:, -1] = -1
    own = {name: getattr(given, name) for name in given.__slots__} | {"ids": ids}
    return sampled(Block(**own), given.probs, g)
