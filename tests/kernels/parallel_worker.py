"""A process of a split vocabulary, for test_row_losses_cpu.py: ``-m tests.kernels.parallel_worker RANK SIZE PATH``."""

import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bebop.kernels.linear_losses import linear_draft_loss, linear_e2e_tv_loss
from bebop.kernels.row_losses import KINDS, NUMBERS, row_losses
from bebop.kernels.vocab_parallel import parallel_row_losses

SPLITS = {1: [37], 2: [20, 17], 4: [9, 9, 9, 10]}


def logits(*shape: int, seed: int) -> Tensor:
    """The same in every process; the first tokens have no mass, so the first shard of four has none in row 0."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(*shape, generator=generator) * 2
    made[0, ..., :10] = float("-inf")
    return made


def check_rows(group: dist.ProcessGroup, kind: str, mine: slice) -> None:
    """Numbers, the shard's gradient and the number of collectives of one kind."""
    draft, target = logits(5, 37, seed=0), logits(5, 37, seed=1)
    target[4] = float("-inf")  # no distribution: NaN everywhere
    if kind == "rkl":
        target[0, :10] = 0
    labels = torch.tensor([36, 0, 8, 9, 20]) if kind == "hard_ce" else None
    options: dict[str, Any] = {"kind": kind, "temperature": 0.7, "labels": labels}
    wanted = row_losses(draft.double(), target.double(), **options)
    with (
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
    ):
        found = parallel_row_losses(draft[:, mine], target[:, mine], group=group, **options)
    assert (gathers.call_count, sums.call_count) == (1, 1)
    for name in NUMBERS if kind == "hard_ce" else NUMBERS[:4]:
        pair = getattr(found, name).double(), getattr(wanted, name)
        scale = pair[1].abs().nan_to_num(posinf=1).clamp_min(1)  # relative above 1, where fp32 itself ends
        torch.testing.assert_close(*(x / scale for x in pair), rtol=0, atol=1e-6, equal_nan=True)
        assert pair[0][4].isnan() and not pair[0][:4].isnan().any()
    assert found.grad is not None and wanted.grad is not None
    torch.testing.assert_close(found.grad.double(), wanted.grad[:, mine], rtol=0, atol=2e-6, equal_nan=True)


MASK = torch.tensor([[1, 1], [1, 0], [0, 1]])
TOKENS = torch.tensor([[36, 11], [12, -100], [-100, 3]])


def check_linear(group: dist.ProcessGroup, mine: slice, tokens: Tensor | None) -> None:
    """From hidden states and parts of the heads: the gradient of the states is whole, that of the head is a part."""
    generator = torch.Generator().manual_seed(4)
    hidden, states = (torch.randn(3, 2, 8, generator=generator) for _ in range(2))
    weight, head = (torch.randn(37, 8, generator=generator) * 0.5 for _ in range(2))
    results = []
    for convert, part, owner in ((torch.Tensor.double, slice(None), None), (torch.Tensor.clone, mine, group)):
        h, w = (convert(x).requires_grad_() for x in (hidden, weight[part]))
        heads = convert(states), convert(head[part])
        options: dict[str, Any] = {"chunk_rows": 2, "weight_grad": True, "group": owner}
        found = linear_draft_loss(h.flatten(0, 1), w, heads[0].flatten(0, 1), heads[1], kind="hybrid", **options)
        steps = linear_e2e_tv_loss(h, w, *heads, MASK, tokens=tokens, temperature=0.8, **options)
        (steps + (found.loss * torch.linspace(-1, 1, 6)).sum()).backward()
        results.append((found.loss, found.alpha, steps, h.grad, w.grad))
    wanted, found_here = results
    for a, b in zip(found_here[:4], wanted[:4], strict=True):
        close(a, b)
    close(found_here[4], None if wanted[4] is None else wanted[4][mine])


def close(found: Tensor | None, wanted: Tensor | None) -> None:
    assert found is not None and wanted is not None
    torch.testing.assert_close(found.detach().double(), wanted.detach(), rtol=0, atol=1e-6)


def main(rank: int, size: int, store: str) -> None:
    """Groups of the first 1, 2 and 4 processes, one after the other."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for width, shards in SPLITS.items():
        group = dist.new_group(list(range(width)))
        if rank < width:
            mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
            for kind in KINDS:
                check_rows(group, kind, mine)
            for tokens in (None, TOKENS):
                check_linear(group, mine, tokens)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
