"""One rank of ``test_sharding``, run as a process: ``python -m tests.trainer.one_rank RANK WORLD FOLDER``.

Two updates, a checkpoint, a resume from it, one more update; then one update of a policy with tied embeddings.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from bebop.metrics import values
from bebop.trainer.actor import TrainerWorker
from bebop.trainer.policy import PolicyTrainer
from tests.trainer.builders import batch, job, policy

ALGORITHM = {"minibatches": 2, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}


def train(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What the process has to show for it; weights on rank 0 alone."""
    config = job(str(folder / "model"), algorithm=ALGORITHM)
    worker = TrainerWorker(config, rank, world, f"file://{folder}/meeting")
    metrics = [values(worker.update(batch(policy(), seed=seed))[0]) for seed in (1, 2)]
    checkpoint = folder / f"of-{world}" / "step_000002"
    worker.save(checkpoint, {"cursor": 8})
    second = worker.weights()
    worker.update(batch(policy(), seed=9))  # forgotten by the resume
    if world > 1:
        torch.distributed.barrier()  # rank 0 has written
    assert worker.load(checkpoint) == {"cursor": 8}
    worker.update(batch(policy(), seed=3))
    tied = PolicyTrainer(policy(tied=True), config, rank, world)
    tied.update(batch(policy(), seed=1))
    shown = {"metrics": metrics, "second": second, "third": worker.weights(mtp=True), "tied": tied.weights()}
    worker.close()
    return shown


if __name__ == "__main__":
    torch.save(train(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])), f"{sys.argv[3]}/rank{sys.argv[1]}.pt")
