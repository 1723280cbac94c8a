"""Cold starts: heads that begin as a copy of the backbone's last layer, trained in five ways, with a curve for each."""

import dataclasses

from bebop.adaptation.probe import probe
from bebop.config.job import HeadConfig
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead, init_from_backbone
from bebop.trainer.chains import rows_of_step
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from recipes.reproduce.study import QUICK, Arm, backbone_states, corpus, policy, text

WAYS = ("ce", "tv", "nla", "hybrid", "ce_then_tv")
STEPS = 4 if QUICK else 30
EVERY = 2 if QUICK else 10  # steps between measurements
COUNT = 4 if QUICK else 48  # prompts measured on

Job = tuple[str, int]  # way, seed
Curve = dict[int, float]  # steps done -> accept length


def run(job: Job) -> Curve:
    """Train a fresh head; return its accept length on held-out text by number of steps."""
    way, seed = job
    model = fresh()
    arm = Arm(objective=way, seed=seed)
    rows = corpus(seed)
    config = HeadConfig(depth=arm.depth, lr=arm.lr, lr_warmup_steps=6, max_tokens=2048)
    order = [rows_of_step(len(rows), arm.rows_per_step, 1000 * seed, step) for step in range(STEPS)]
    needed = sorted({i for step in order for i in step})
    states = dict(zip(needed, backbone_states(model, [rows[i] for i in needed]), strict=True))
    trainer = HeadTrainer(FSDPBackend(model, Sampling()), config)
    curve = {0: accept_length(model, seed, arm.depth)}
    for step, chosen in enumerate(order):
        trainer.update([rows[i] for i in chosen], objective(way, step), [states[i] for i in chosen])
        if (step + 1) % EVERY == 0:
            curve[step + 1] = accept_length(model, seed, arm.depth)
    return curve


def objective(way: str, step: int) -> str:
    """Return the objective of a step: ``ce_then_tv`` uses cross-entropy for the first third, as adaptation does."""
    if way != "ce_then_tv":
        return way
    return "ce" if 3 * step < STEPS else "tv"


def fresh() -> Policy:
    """Return the built-in model with a fresh head, which has learned nothing yet."""
    model = policy()
    assert model.mtp is not None
    head = MTPHead(model.backbone, model.mtp.zero_first)
    init_from_backbone(head, model.backbone)
    return dataclasses.replace(model, mtp=head)


def accept_length(model: Policy, seed: int, depth: int) -> float:
    """Return the mean accept length on held-out text."""
    return float(probe(model, text(seed, COUNT), depth, Sampling()).accept.mean())
