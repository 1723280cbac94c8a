"""A small checkpoint, rows of text, and a trainer over whatever processes there are."""

import random
from pathlib import Path
from typing import Any

import torch

from bebop.config.job import HeadConfig, ModelConfig
from bebop.megatron_job.architecture import BackboneModel, build
from bebop.megatron_job.backend import FrozenBackend
from bebop.megatron_job.parallel import ParallelConfig, Place
from bebop.megatron_job.source import Checkpoint
from bebop.megatron_job.weights import load
from bebop.model.checkpoint import save_policy
from bebop.trainer.chains import TokenRow
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from tests.builders import tiny_policy

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
    return HeadTrainer(backend, HeadConfig(**head))


def run(training: HeadTrainer, steps: int = STEPS, start: int = 0) -> dict[str, list[float]]:
    """Losses and gradient norms of some updates."""
    numbers = [training.update(rows(step)) for step in range(start, start + steps)]
    return {name: [x[f"head/{name}"] for x in numbers] for name in ("loss", "grad_norm")}
