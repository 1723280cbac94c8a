"""One rank of ``test_sharding``, run as a process: ``python -m tests.trainer.one_head_rank RANK WORLD FOLDER``.

Two updates of a head, a checkpoint, one more update; then another head goes on from the checkpoint.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bebop.trainer.heads import HeadTrainer
from tests.builders import bare_policy
from tests.trainer.test_heads import rows, trainer


def train(rank: int, world: int) -> dict[str, Any]:
    """What the process has to show for it."""

    def made(seed: int) -> HeadTrainer:
        policy = bare_policy()
        policy.mtp = bare_policy(seed=seed).mtp
        return trainer(policy, rank=rank, world=world, lr_warmup_steps=0, max_tokens=100)

    training = made(0)
    numbers = [training.update(rows(seed, 9)) for seed in (1, 2)]
    numbers.append(training.update(rows(6, 7), "tv"))
    state = training.state_dict()
    training.update(rows(3))
    again = made(4)
    again.load_state_dict(state)
    again.update(rows(3))
    return {"numbers": numbers, "state": state, "last": training.weights(), "resumed": again.weights()}


if __name__ == "__main__":
    own, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=own, world_size=size)
    torch.save(train(own, size), folder / f"rank{own}.pt")
    dist.destroy_process_group()
