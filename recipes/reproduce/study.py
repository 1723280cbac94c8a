"""Sequences and heads that recipes share, made once per seed and kept under ``runs/reproduce``.

Every head starts from the built-in model's own head (hard-label cross-entropy, 600 steps). It sees the same sequences
in the same order as the other heads of its seed: two arms of a seed differ only in the objective.
"""

import copy
import dataclasses
import hashlib
import json
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from tqdm import tqdm

from bebop.adaptation.corpus import (
    backbone_states,
    drafting_config,
    question_streams,
    read_corpus,
    run_engine,
    token_rows,
    write_corpus,
)
from bebop.config.adapt import AdaptConfig
from bebop.config.job import HeadConfig, ModelConfig, ObjectiveName
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.trainer.chains import TokenRow, rows_of_step
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from bebop.trajectory import Prompt

# Child processes get the same arguments, so this holds in them too.
QUICK = "--quick" in sys.argv  # a smoke run: every step, on tiny inputs
SEEDS = (0, 1, 2)
FOLDER = Path(os.environ.get("BEBOP_REPRODUCE", "runs/reproduce-quick" if QUICK else "runs/reproduce"))
SEQUENCES = 32 if QUICK else 800
HELD_OUT = 8 if QUICK else 144  # prompts of the three tasks that heads are probed on
TASKS = ("number_sorting", "gcd", "chain_sum")
DEPTH = 3  # drafts, where they are not swept
T = TypeVar("T")
J = TypeVar("J")


def results_folder(recipe: Path) -> Path:
    """Return the output folder of a recipe: its own, or one for smoke runs, so that those overwrite nothing."""
    return FOLDER / recipe.name if QUICK else recipe


def once(recipe: str, name: str, settings: object, make: Callable[[], T]) -> T:
    """Return the result of ``make``, from disk if it was made before with these settings.

    A file is written completely or not at all, so a stopped study can resume.
    """
    key = hashlib.sha256(repr(settings).encode()).hexdigest()[:10]
    path = FOLDER / recipe / f"{name}-{key}.pickle"
    if not path.is_file():
        began = time.process_time()
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.new")
        scratch.write_bytes(pickle.dumps({"made": made, "seconds": time.process_time() - began}))
        scratch.replace(path)
    found: T = pickle.loads(path.read_bytes())["made"]
    return found


def spent(recipe: str) -> float:
    """Return the processor seconds of all stored jobs; a job that made another's input includes its time."""
    return float(sum(pickle.loads(path.read_bytes())["seconds"] for path in (FOLDER / recipe).glob("*.pickle")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How a head was trained: Arm(objective="e2e_tv", seed=0)."""

    objective: str
    seed: int
    steps: int = 2 if QUICK else 100
    rows_per_step: int = 16
    depth: int = 3
    lr: float = 2e-3
    sequences: int = SEQUENCES  # fewer: the first ones, seen more often
    order: int = 0  # another value gives another order of the same sequences, to measure chance
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def path(self) -> Path:
        """Return the path of the trained head."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return FOLDER / "heads" / f"{self.objective}-{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.pt"


def settings(seed: int, *overrides: str) -> AdaptConfig:
    """Return the configuration of a seed: the built-in model, its three tasks, and prompts of the seed's own."""
    own = (f"seed={seed}", f"task.seed={100 + seed}", f"data.sequences={SEQUENCES}", "train.threads=1")
    from bebop.config.compose import adapt_config  # Hydra, which a machine that only measures on a GPU lacks

    return adapt_config([*own, *overrides])


def policy() -> Policy:
    """Load the built-in model on the CPU and set torch to one thread."""
    torch.set_num_threads(1)
    return load_policy(ModelConfig(path="tiny", device="cpu"))


def prompts(seed: int, count: int = 192) -> list[Prompt]:
    """Return the held-out prompts of a seed."""
    return question_streams(settings(seed, f"evaluation.prompts={count}"), policy())[1]


def corpus(seed: int, *overrides: str) -> list[TokenRow]:
    """Return sequences sampled from the built-in model, kept as JSONL."""
    config = settings(seed, *overrides)
    key = hashlib.sha256(json.dumps(dataclasses.asdict(config.data), sort_keys=True).encode()).hexdigest()[:10]
    path = FOLDER / "corpora" / f"seed{seed}-{key}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        model = policy()
        training, _ = question_streams(config, model)
        write_corpus(token_rows(training, run_engine(model, training, config.data, drafting_config(model), seed)), path)
    return read_corpus(path)


def text(seed: int, count: int, *overrides: str) -> list[TokenRow]:
    """Return completions of the built-in model to held-out prompts, kept as JSONL, on which heads are probed."""
    config = settings(seed, f"evaluation.prompts={count}", *overrides)
    chosen = json.dumps([count, *overrides])
    path = FOLDER / "text" / f"seed{seed}-{hashlib.sha256(chosen.encode()).hexdigest()[:10]}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        model = policy()
        _, held_out = question_streams(config, model)
        write_corpus(
            token_rows(held_out, run_engine(model, held_out, config.data, drafting_config(model), seed + 1)), path
        )
    return read_corpus(path)


def prepare(seed: int, *overrides: str) -> None:
    """Sample the data that the heads of a seed share, once, so that no two processes do it at the same time."""
    corpus(seed, *overrides)
    text(seed, HELD_OUT, *overrides)


def head(arm: Arm) -> Policy:
    """Return the built-in model with the head of an arm, which is trained unless it is stored."""
    model = policy()
    assert model.mtp is not None
    if not arm.path.is_file():
        data = [f"data.sampling.top_p={arm.sampling.target_top_p}"] if arm.sampling.target_top_p < 1 else []
        rows, states = _with_states(arm.seed, *data)
        train(model, arm, rows[: arm.sequences], states=states[: arm.sequences])
        arm.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.mtp.state_dict(), arm.path)
    model.mtp.load_state_dict(torch.load(arm.path, weights_only=True))
    model.mtp.eval().requires_grad_(False)
    return model


@lru_cache(maxsize=len(SEEDS))
def _with_states(seed: int, *overrides: str) -> tuple[list[TokenRow], list[Tensor]]:
    """Return the sequences of a seed and the states of the built-in backbone, shared by all heads of the seed."""
    rows = corpus(seed, *overrides)
    return rows, backbone_states(policy(), rows)


def train(
    model: Policy,
    arm: Arm,
    rows: Sequence[TokenRow],
    objective: Any = None,
    states: Sequence[Tensor] | None = None,
) -> list[dict[str, float]]:
    """Train the head of ``model`` in place and return the metrics of each step.

    The backbone does not change, so the states of ``rows`` are computed once, unless they are given.
    """
    config = HeadConfig(
        objective=cast(ObjectiveName, arm.objective), depth=arm.depth, lr=arm.lr, lr_warmup_steps=6, max_tokens=2048
    )
    trainer = HeadTrainer(FSDPBackend(model, arm.sampling), config)
    states = backbone_states(model, rows) if states is None else states
    numbers = []
    for step in range(arm.steps):
        chosen = rows_of_step(len(rows), arm.rows_per_step, 1000 * arm.seed + arm.order, step)
        numbers.append(trainer.update([rows[i] for i in chosen], objective, [states[i] for i in chosen]))
    return numbers


def untrained(model: Policy) -> Policy:
    """Return a copy of the model with a head of its own, ready to be trained."""
    return dataclasses.replace(model, mtp=copy.deepcopy(model.mtp))


def everywhere(work: Callable[[J], T], jobs: Sequence[J], label: str, workers: int = 2) -> list[T]:
    """Run ``work`` on every job in processes of one thread each; return results in the order of the jobs.

    ``work`` must be in a module that can be imported: a fresh process does not import ``__main__`` of a package.
    """
    assert work.__module__ != "__main__", "put it in a module beside __main__.py"
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(tqdm(pool.map(work, jobs), total=len(jobs), desc=label, unit="job"))
