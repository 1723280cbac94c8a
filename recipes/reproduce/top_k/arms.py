"""Arms of the study: the start, loss and data of each head, and the results of its run."""

import copy
import dataclasses
from dataclasses import dataclass
from itertools import product

from bebop.adaptation.probe import probe
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead, init_from_backbone
from bebop.trainer.objectives import Sampling
from recipes.reproduce.study import HELD_OUT, QUICK, Arm, corpus, policy, text
from recipes.reproduce.top_k.curves import Curves, fit
from recipes.reproduce.top_k.losses import MODES

STARTS = ("built-in", "fresh")
SIZES = (4,) if QUICK else (4, 64)  # K; beside the whole vocabulary of 512
STEPS, ROWS = (5, 2) if QUICK else (80, 8)  # steps, answers in each
WATCHED = 2 if QUICK else 3  # answers of the fixed text that is looked at after every step
SKIP = 1 if QUICK else 6  # steps of warm-up, left out of the spreads
LEARNING_RATE = 2e-3

Job = tuple[str, str, int]  # start, label, seed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Results of one run: accept lengths and training curves."""

    sampled: float  # accept length on held-out text
    greedy: float
    curves: Curves | None  # None: the head was not trained


def labels() -> list[str]:
    """Return ``start`` (not trained), ``all``, and each K in each reading: ``K = 4, full``."""
    return ["start", "all", *(f"K = {k}, {mode}" for k, mode in product(SIZES, MODES))]


def options(label: str) -> tuple[int | None, str]:
    """Return K and reading of a label."""
    if label == "all":
        return None, "full"
    size, mode = label.removeprefix("K = ").split(", ")
    return int(size), mode


def begin(start: str) -> Policy:
    """Return the built-in model with its own head, or with a fresh one initialized from its last layer."""
    model = policy()
    if start == "built-in":
        return dataclasses.replace(model, mtp=copy.deepcopy(model.mtp))
    fresh = MTPHead(model.backbone)
    init_from_backbone(fresh, model.backbone)
    return dataclasses.replace(model, mtp=fresh)


def run(job: Job) -> RunResult:
    """Train one head and probe it on held-out text."""
    start, label, seed = job
    model, held_out = begin(start), text(seed, HELD_OUT)
    curves = None
    if label != "start":
        arm = Arm(objective="tv", seed=seed, steps=STEPS, rows_per_step=ROWS, lr=LEARNING_RATE)
        curves = fit(model, arm, corpus(seed), held_out[:WATCHED], *options(label))
    probed = probe(model, held_out, 3, Sampling())
    return RunResult(sampled=float(probed.accept.mean()), greedy=float(probed.accept_greedy.mean()), curves=curves)
