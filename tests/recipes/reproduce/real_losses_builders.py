"""Files of an evaluation that never ran: every arm of the study of losses, with what is claimed of them planted."""

from pathlib import Path

import numpy as np

from bebop.adaptation.probe import Probe
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real import arms
from recipes.reproduce.real.evaluation import TEMPERATURES, read_chains
from recipes.reproduce.real.runs import SHARED
from recipes.reproduce.real_losses import comparison
from recipes.reproduce.real_losses.comparison import ALL_MARKS, NAMES
from tests.recipes.reproduce.synthetic import end, synthetic, write_head

SEEDS = (0, 1, 2)
SWEEP = [Sampling(temperature=t) for t in TEMPERATURES]
LIFT = {"e2e_tv": 0.08, "tv": 0.04, "ce": 0.02, "hard_ce": 0.0}  # of acceptance; others: .03


def made(name: str, seed: int, sampling: Sampling, more: float) -> Probe:
    """A head's chains: end-to-end TV is better, falls less with entropy and loses less along a chain, sampled alone."""
    chains = synthetic(seed + 10 * NAMES.index(name), sampling, lift=LIFT.get(name, 0.03) + more)
    entropy, overlap = chains.numbers["target_entropy"], chains.numbers["overlap"]
    if name != "e2e_tv":
        steps = np.arange(overlap.shape[1])
        chains.numbers["overlap"] = overlap - 0.15 * (entropy - 1) - 0.03 * steps
    chains.numbers["target_only"] = overlap - LIFT.get(name, 0.03) - 0.1
    accept, greedy = (1 + np.nan_to_num(chains.numbers[n]).cumprod(1).sum(1) for n in ("overlap", "target_only"))
    return Probe(
        row=chains.row, place=chains.place, task=chains.task, numbers=chains.numbers, accept=accept,
        accept_greedy=greedy,
    )  # fmt: skip


def write_study(place: Path, seeds: tuple[int, ...] = SEEDS, worse: bool = False, only: str = "") -> None:
    """As the stages leave it; ``worse``: with what is claimed to be better and worse exchanged."""
    names = {"e2e_tv": "ce", "ce": "e2e_tv"} if worse else {}
    for name in [name for name in NAMES if not only or name == only]:
        fresh, objective = name.startswith(comparison.FRESH), name.removeprefix(comparison.FRESH)
        like = names.get(objective, objective)
        like = f"fresh {like}" if fresh else like
        for seed in seeds[:1] if name in (SHARED, "kl") else seeds:
            run = SHARED if name == SHARED else f"{'fresh-' if fresh else ''}{objective}-{seed}"
            end(place, run)
            swept = SWEEP if objective in comparison.SLOPED and not fresh else [Sampling()]
            for sampling in swept:
                write_head(place, run, made(like, seed, sampling, 0), sampling=sampling)
            write_head(place, run, made(like, seed, Sampling(), -0.1), split="unseen")
            for i, mark in enumerate(ALL_MARKS):
                early = made(like, seed, Sampling(), 0.01 * i - 0.05 - 0.1 * fresh * (objective == "e2e_tv"))
                write_head(place, run, early, at=arms.stem(mark))


def chains(place: Path, run: str, at: str = "best", temperature: float = 1.0, split: str = "test") -> Probe:
    return read_chains(place / "evaluation" / f"{run}, {at}, T{temperature:.2f}, {split}.npz")
