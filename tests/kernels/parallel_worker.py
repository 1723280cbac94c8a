"""A process of a split vocabulary, for test_losses.py: python -m tests.kernels.parallel_worker RANK SIZE PATH."""

import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bebop.kernels.losses import e2e_tv_loss, tv_loss
from bebop.kernels.row_losses import KINDS

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
    if kind == "rkl":
        target[0, :10] = 0
    labels = torch.tensor([36, 0, 8, 9, 20]) if kind == "hard_ce" else None
    options = {"kind": kind, "temperature": 0.7, "labels": labels}
    whole = draft.double().requires_grad_()
    wanted = tv_loss(whole, target.double(), **options)
    shard = draft[:, mine].clone().requires_grad_()
    with (
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
    ):
        found = tv_loss(shard, target[:, mine], group=group, **options)
        upstream = torch.linspace(-1, 1, 5)
        found.loss.backward(upstream)
    assert (gathers.call_count, sums.call_count) == (1, 1)
    wanted.loss.backward(upstream.double())
    for name in ("loss", "alpha", "draft_entropy", "target_entropy"):
        pair = getattr(found, name).detach().double(), getattr(wanted, name).detach()
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-6)
    assert shard.grad is not None and whole.grad is not None
    torch.testing.assert_close(shard.grad.double(), whole.grad[:, mine], rtol=0, atol=1e-6)


def check_steps(group: dist.ProcessGroup, mine: slice) -> None:
    """The product of acceptances."""
    draft, target = logits(3, 2, 37, seed=2), logits(3, 2, 37, seed=3)
    mask = torch.tensor([[1, 1], [1, 0], [0, 1]])
    whole = draft.double().requires_grad_()
    wanted = e2e_tv_loss(whole, target.double(), mask)
    shard = draft[..., mine].clone().requires_grad_()
    found = e2e_tv_loss(shard, target[..., mine], mask, group=group)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(found.detach().double(), wanted.detach(), rtol=0, atol=1e-6)
    assert shard.grad is not None and whole.grad is not None
    torch.testing.assert_close(shard.grad.double(), whole.grad[..., mine], rtol=0, atol=1e-6)


def main(rank: int, size: int, store: str) -> None:
    """Groups of the first 1, 2 and 4 processes, one after the other."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for width, shards in SPLITS.items():
        group = dist.new_group(list(range(width)))
        if rank < width:
            mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
            for kind in KINDS:
                check_rows(group, kind, mine)
            check_steps(group, mine)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
