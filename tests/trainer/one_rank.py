"""One rank of ``test_sharding``, as ``python -m tests.trainer.one_rank policy|head RANK WORLD FOLDER``."""

import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bebop.metrics.metrics import values
from bebop.model.checkpoint import load_policy
from bebop.monitor.certified import chosen
from bebop.monitor.probe_set import ProbeText
from bebop.trainer.certify import Certifier
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.optim import whole_copies
from bebop.trainer.policy import PolicyTrainer
from bebop.trainer.rank import TrainerRank
from bebop.trainer.scorer import Scorer, shard
from bebop.trajectory import Batch, Trajectory
from tests.builders import bare_policy
from tests.model.families import mixture
from tests.trainer.builders import batch, job, policy, traced
from tests.trainer.test_heads import rows, trainer

EPSILON = 1e-4  # a fiftieth of a usual entry of a gradient
ALGORITHM = {"minibatches": 2, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}


def steady(trainer: PolicyTrainer) -> PolicyTrainer:
    """With an AdamW that does not make a whole step of an entry that is only rounding, which ranks share otherwise.

    With torch's epsilon, how far one rank and two are apart is a matter of the processor: 4e-6 to 7e-5.
    """
    for group in trainer.optimizer.param_groups:
        group["eps"] = EPSILON
    return trainer


def train(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What the process has to show for it; weights on rank 0 alone.

    Two updates, a checkpoint, a resume from it, one more update; then updates of a policy with tied embeddings and
    checkpointing, whose ranks sum up once or after every micro-batch; one of a policy in bfloat16; then two with the
    head trained beside the policy, and the monitor's texts read.
    """
    config = job(str(folder / "model"), algorithm=ALGORITHM)
    worker = TrainerRank(config, rank, world, f"file://{folder}/meeting")
    steady(worker.trainer)
    metrics = [values(worker.update(traced(batch(seed=seed)))[0]) for seed in (1, 2)]
    logprobs = {place: torch.from_numpy(found) for place, found in worker.logprobs().items()}
    checkpoint = folder / f"of-{world}" / "step_000002"
    worker.save(checkpoint, {"cursor": 8})
    second = worker.weights().weights
    worker.update(batch(seed=9))  # forgotten by the resume
    if world > 1:
        dist.barrier()  # rank 0 has written
    assert worker.load(checkpoint) == {"cursor": 8}
    worker.update(batch(seed=3))
    tied = {}
    for sync in ("minibatch", "micro_batch"):  # of three micro-batches or more on each rank
        memory = {"checkpointing": True, "gradient_sync": sync, "max_tokens": 16}
        one = steady(PolicyTrainer(policy(tied=True), job(algorithm=ALGORITHM, trainer=memory), rank, world))
        one.update(batch(seed=1))
        tied[sync] = one.weights()
    kl = {"kl_coefficient": 0.1}  # so that there is a reference model
    narrow = job(str(folder / "model"), model={"dtype": "bfloat16"}, algorithm=kl)
    mixed = steady(PolicyTrainer(load_policy(narrow.model, sharded=world > 1), narrow, rank, world))
    mixed_metrics = values(mixed.update(batch(seed=1)))
    shown = {"mixture": experts(rank, world)} | beside(rank, world, folder)
    shown |= {f"lora_{dtype}": adapted(rank, world, folder, dtype) for dtype in ("float32", "bfloat16")}
    shown |= {
        "loaded": [loaded(folder, rank, world, sharded) for sharded in (False, True)] if world > 1 else [],
        "logprobs": logprobs,
        "metrics": metrics,
        "mixed": whole_copies(mixed.policy.weights()),
        "mixed_metrics": mixed_metrics,
        "second": second,
        "third": worker.weights(mtp=True).weights,
        "tied": tied,
    }
    worker.close()
    return shown


def loaded(folder: Path, rank: int, world: int, sharded: bool) -> dict[str, Any]:
    """One update of a checkpoint in bfloat16, and the types in which policy and reference are split.

    Each rank loads it whole or, with ``sharded``, reads its own rows.
    """
    config = job(str(folder / "narrow"), model={"dtype": "bfloat16"}, algorithm={"kl_coefficient": 0.1})
    types = []

    def recorded(scorer: Scorer, mesh: DeviceMesh) -> None:
        types.append(str(next(scorer.backbone.parameters()).dtype))
        shard(scorer, mesh)

    with patch("bebop.trainer.policy.shard", recorded):
        one = steady(PolicyTrainer(load_policy(config.model, sharded=sharded), config, rank, world))
    one.update(batch(seed=1))
    return {"types": types, "weights": whole_copies(one.policy.weights())}


def experts(rank: int, world: int) -> dict[str, Any]:
    """Two updates of a mixture of experts whose layers are computed again, one with the engine's routing replayed."""
    sampled, found = mixed_batch(), {}
    for replay in (False, True):
        settings = {"checkpointing": True, "max_tokens": 64, "routing_replay": replay}
        one = steady(PolicyTrainer(mixture(), job(algorithm=ALGORITHM, trainer=settings), rank, world))
        metrics = [values(one.update(sampled)) for _ in range(2)]
        found[str(replay)] = {"metrics": metrics, "weights": one.weights()}
    balanced = PolicyTrainer(mixture(), job(trainer={"router_aux_loss": 0.1, "max_tokens": 64}), rank, world)
    return found | {"balance": values(balanced.update(sampled))["train/router_aux_loss"]}


def mixed_batch() -> Batch:
    """A batch with a routing that no router would choose, so that replay shows."""

    def routed(t: Trajectory, prompt: int) -> Trajectory:
        tokens = t.completion.token_ids % 24
        places = np.arange(prompt + len(tokens))[:, None, None] + np.array([[0, 3], [1, 6]])
        routing = (places % 8).astype(np.int8)
        routing[-1] = -1
        return Trajectory.single(dataclasses.replace(t.completion, token_ids=tokens, routing=routing), t.reward)

    groups = []
    for group in batch(seed=1).groups:
        prompt = tuple(token % 24 for token in group.prompt.token_ids)
        own = tuple(routed(t, len(prompt)) for t in group.trajectories)
        asked = dataclasses.replace(group.prompt, token_ids=prompt)
        groups.append(dataclasses.replace(group, prompt=asked, trajectories=own))
    return Batch(groups=tuple(groups))


def adapted(rank: int, world: int, folder: Path, dtype: str) -> dict[str, Any]:
    """An adapter with a KL term and the head trained beside it: two updates, and the last one again from its state."""
    head = {"objective": "e2e_tv", "depth": 3, "lr": 1e-3, "max_tokens": 64}
    config = job(
        str(folder / "model"),
        model={"path": str(folder / "model"), "device": "cpu", "dtype": dtype},
        algorithm=ALGORITHM,
        trainer={"lora": {"rank": 3, "target_modules": ["q_proj", "down_proj"]}},  # 3 rows, of which ranks get 2 and 1
        cotrain={"mode": "always", "head": head},
    )
    one = steady(PolicyTrainer(policy(dtype=getattr(torch, dtype)), config, rank, world))
    learned = [values(one.update(batch(seed=1), cotrain=True))]
    state = one.state_dict()
    learned.append(values(one.update(batch(seed=2), cotrain=True)))
    found = {"metrics": learned, "weights": one.weights(mtp=True), "state": state}
    again = steady(PolicyTrainer(policy(dtype=getattr(torch, dtype)), config, rank, world))
    states = [state]
    if world > 1:
        dist.broadcast_object_list(states)  # what rank 0 has written, all of them read
    again.load_state_dict(states[0])
    again.update(batch(seed=2), cotrain=True)
    return found | {"resumed": again.weights(mtp=True)}


def beside(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Co-training on two batches, and a reading of the bank after it."""
    head = {"objective": "e2e_tv", "depth": 3, "lr": 1e-3, "max_tokens": 64}  # AdamW makes rounding a part of a step
    config = job(str(folder / "model"), cotrain={"mode": "always", "head": head})
    one = steady(PolicyTrainer(policy(), config, rank, world))
    learned = [values(one.update(batch(seed=seed), cotrain=True)) for seed in (1, 2)]
    texts = [ProbeText(prompt=(3, 4), answer=tuple(range(5, 5 + n))) for n in (2, 9, 4)]
    reading, sweep = one.read_probe_set(texts, sweep=True)
    assert sweep is not None
    bank = [torch.tensor(column) for column in (reading.overlap, reading.entropy, reading.unit, sweep.length)]
    said = certified(one, rank, world)
    found = {"head": one.weights(mtp=True), "head_metrics": learned, "bank": bank, "mark": one.head_fingerprint()}
    return found | {"certified": said, "moments": one.state_dict()["head"]["optimizer"]}


def certified(one: PolicyTrainer, rank: int, world: int) -> list[dict[str, Any] | None]:
    """Readings of answers of this version and, in turns, the one before, of which the trainer has kept its part."""
    certifier = Certifier(one.scorer, one.old_policies, one.config, rank, world)
    said = []
    for reading in range(3):
        groups = []
        for group in batch(seed=reading, groups=6, version=one.version - reading % 2).groups:
            asked = dataclasses.replace(group.prompt, index=10 * reading + group.prompt.index)
            groups.append(dataclasses.replace(group, prompt=asked))
        found = certifier.read(chosen(groups), 0, one.version)
        said.append(None if found is None else found.to_row())
    return said


def train_head(rank: int, world: int) -> dict[str, Any]:
    """A head by itself: two updates, a checkpoint, one more; then another head goes on from the checkpoint."""

    def made(seed: int) -> HeadTrainer:
        own = bare_policy()
        own.mtp = bare_policy(seed=seed).mtp
        return trainer(own, rank=rank, world=world, lr_warmup_steps=0, max_tokens=100)

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
    own, size, place = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    if sys.argv[1] == "policy":
        shown = train(own, size, place)
    else:
        dist.init_process_group("gloo", f"file://{place}/meeting", rank=own, world_size=size)
        shown = train_head(own, size)
        dist.destroy_process_group()
    torch.save(shown, place / f"rank{own}.pt")
