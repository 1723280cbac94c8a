"""A small checkpoint, rows of text, and a trainer over whatever processes there are."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bebop.config.job import HeadConfig, ModelConfig
from bebop.megatron_job.architecture import BackboneModel, build
from bebop.megatron_job.backend import FrozenBackend, FrozenTrainer
from bebop.megatron_job.parallel import ParallelConfig, Place
from bebop.megatron_job.source import Checkpoint
from bebop.megatron_job.weights import load
from bebop.model.checkpoint import save_policy
from bebop.trainer.chains import TokenRow
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from tests.builders import tiny_policy
from tests.commands import HANGING
from tests.tree import ROOT

VOCAB = 24
STEPS = 30
CPU = torch.device("cpu")


def checkpoint(folder: Path, seed: int = 0) -> Path:
    """Two layers, d=32, four heads of which two share keys, with an MTP head."""
    save_policy(tiny_policy(VOCAB, seed=seed), folder)
    return folder


def rows(step: int, count: int = 5) -> list[TokenRow]:
    """Text of unequal lengths; one row has no answer that could be drafted."""
    rng = random.Random(step)

    def text(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(2, most)))

    made = [TokenRow(prompt=text(5), answer=text(16)) for _ in range(count - 1)]
    return [*made, TokenRow(prompt=text(6), answer=())]


def trainer(folder: Path, parallel: ParallelConfig, place: Place, **settings: Any) -> Any:
    """Depth 3, lr 2e-3 unless ``settings`` say otherwise."""
    source = Checkpoint(ModelConfig(path=str(folder)))
    model = build(source.config, parallel, place, torch.float32, CPU, BackboneModel)
    load(model, source, place, source.config.num_key_value_heads)
    head = {"depth": 3, "lr": 2e-3, "lr_warmup_steps": 3, "max_tokens": 60, **settings}
    backend = FrozenBackend(model, Sampling(temperature=0.9), place, zero_first=source.zero_first)
    return FrozenTrainer(backend, HeadConfig(**head))


def run(training: HeadTrainer, steps: int = STEPS, start: int = 0) -> dict[str, list[float]]:
    """Losses and gradient norms of some updates."""
    numbers = [training.update(rows(step)) for step in range(start, start + steps)]
    return {name: [x[f"head/{name}"] for x in numbers] for name in ("loss", "grad_norm")}


def two_processes(checkpoint: Path, folder: Path, *what: str) -> list[dict[str, Any]]:
    """What each of two processes of ``worker`` has found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.integration.megatron.rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(checkpoint), str(folder), *what],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        _, errors = rank.communicate(timeout=HANGING)
        assert rank.returncode == 0, errors[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
