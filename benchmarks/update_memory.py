"""Memory of an update: bytes per token and layer for the backward pass, copies of weights, and peaks of a 0.1 B model.

The first two are counted by the record of every allocation of a forward pass. They are linear in tokens and in layers,
so that two lengths and two depths give both. The peaks are resident memory of processes that make two updates.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bebop.bench.gpu.models import SHAPES, Shape, batch_of, policy_of
from bebop.bench.memory import left_bytes
from bebop.bench.record import noted
from bebop.config.job import JobConfig, ModelConfig, RolloutConfig, SamplingConfig, TrainerConfig
from bebop.model.checkpoint import save_policy
from bebop.trainer.packing import PackedRows, Row, pack
from bebop.trainer.rank import TrainerRank
from bebop.trainer.scorer import Scorer, recompute_layers, shard

CPU = torch.device("cpu")
# The ratios of Qwen3-8B at a sixteenth of its width: an MLP of 3 h, as many queries as h, a quarter as many keys.
NARROW = Shape(qwen=True, layers=2, hidden=256, inner=768, heads=8, kv_heads=2, head_dim=32, vocabulary=1024)
DEPTHS, LENGTHS = (2, 6), (256, 512)  # layers and tokens whose difference is counted
WEIGHTS = 2 * NARROW.hidden * (NARROW.heads + NARROW.kv_heads) * NARROW.head_dim + 3 * NARROW.hidden * NARROW.inner
ARMS = {  # of a rank's process: ranks, checkpointing
    "1 rank": (1, False),
    "1 rank, checkpointing": (1, True),
    "2 ranks": (2, False),
    "2 ranks, checkpointing": (2, True),
}


@contextmanager
def one_rank_group() -> Iterator[None]:
    """Form a process group of one rank within this block: FSDP2 gathers and releases weights as with several."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def packed(tokens: int, rows: int = 4, vocabulary: int = NARROW.vocabulary) -> PackedRows:
    """Return a micro-batch of random rows of equal lengths."""
    groups = batch_of(rows, tokens // rows, vocabulary, 0).groups
    pairs = [(group.prompt, t.completion) for group in groups for t in group.trajectories]
    made = [Row(prompt=p.token_ids, completion=c, advantage=1.0, weight=0.1) for p, c in pairs]
    [one] = pack(made, tokens)
    return one


def kept(layers: int, tokens: int, checkpointing: bool, sharded: bool) -> int:
    """Return the bytes that a bfloat16 forward pass keeps; ``sharded`` needs a process group."""
    policy = policy_of(replace(NARROW, layers=layers), CPU)
    policy.backbone.float().requires_grad_(True)
    scorer = Scorer(policy, 1.0, mixed=True)
    if checkpointing:
        recompute_layers(policy)
    if sharded:
        shard(scorer, init_device_mesh("cpu", (1,)))
    rows = packed(tokens)
    scorer(rows)  # FSDP2 makes its buffers in the first pass
    return left_bytes(lambda: scorer(rows))


def counted(checkpointing: bool, sharded: bool) -> dict[str, float]:
    """Return the bytes that a token keeps in a layer, as multiples of the width h, and the kept bytes of weights.

    The bytes of weights are per parameter of a layer.
    """
    (a, b), (c, d) = ([kept(layers, n, checkpointing, sharded) for n in LENGTHS] for layers in DEPTHS)
    layers, tokens = DEPTHS[1] - DEPTHS[0], LENGTHS[1] - LENGTHS[0]
    each = ((d - c) - (b - a)) / (layers * tokens)
    copies = ((d - b) / layers - each * LENGTHS[1]) / WEIGHTS
    return {"bytes / (token, layer, h)": each / NARROW.hidden, "bytes of weights / parameter": copies}


# ---- resident memory of processes


def rank_process(rank: int, world: int, folder: Path, checkpointing: bool, tokens: int) -> dict[str, float]:
    """Make two updates as one rank of a trainer; return peak gigabytes after loading the model, and at the end."""
    config = JobConfig(
        model=ModelConfig(path=str(folder / "model"), device="cpu", check=False),
        rollout=RolloutConfig(staleness=0, max_length=4096, sampling=SamplingConfig(max_new_tokens=2048)),
        trainer=TrainerConfig(
            ranks=world, groups_per_step=2, group_size=4, max_tokens=tokens, lr=1e-6, checkpointing=checkpointing
        ),
    )
    worker = TrainerRank(config, rank, world, f"file://{folder}/meeting")
    loaded, vocabulary = highest(), worker.trainer.policy.vocab_size
    for step in range(2):
        worker.update(batch_of(8, world * tokens // 8, vocabulary, step))
    worker.close()
    return {"GB loaded": loaded, "GB": highest()}


def highest() -> float:
    """Return the peak memory of this process so far, in gigabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def processes(model: Path, world: int, checkpointing: bool, tokens: int) -> dict[str, float]:
    """Run the ranks as processes; return the larger of their numbers."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "model").symlink_to(model)
        asked = json.dumps([world, str(folder), checkpointing, tokens])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        commands = [[sys.executable, "-m", "bebop.bench.update_memory", str(rank), asked] for rank in range(world)]
        ranks = [subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, text=True) for one in commands]
        said = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    return {name: max(one[name] for one in said) for name in said[0]}


def run(tokens: int) -> list[dict[str, Any]]:
    """Return a row for each way to compute, then one for each arm of processes with ``tokens`` per micro-batch."""
    rows: list[dict[str, Any]] = []
    with one_rank_group():
        for sharded in (False, True):
            for checkpointing in (False, True):
                about = {"arm": "sharded" if sharded else "one rank", "checkpointing": checkpointing}
                rows.append(noted({**about, **counted(checkpointing, sharded)}))
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        save_policy(policy_of(SHAPES["SmolLM2-135M"], CPU), model)
        for arm, (world, checkpointing) in ARMS.items():
            found = processes(model, world, checkpointing, tokens)
            rows.append(noted({"arm": arm, "checkpointing": checkpointing, "tokens": tokens, **found}))
    return rows


if __name__ == "__main__":
    own_world, own_folder, own_checkpointing, own_tokens = json.loads(sys.argv[2])
    result = rank_process(int(sys.argv[1]), own_world, Path(own_folder), own_checkpointing, own_tokens)
    sys.stdout.write(json.dumps(result) + "\n")
