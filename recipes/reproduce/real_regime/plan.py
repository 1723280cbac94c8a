"""What the study is made of: temperatures, the two forms of its program, the heads that are trained.

Rollouts, training and evaluation all take the model at a low temperature, where its mean entropy lies in the range of
the paper's policies, .1 to .5 nats. The two forms differ in size and device, and in where the shared head begins.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bebop.config.job import ModelConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from recipes.reproduce.real.plan import PLAN, SMOKE, Plan
from recipes.reproduce.study import FOLDER, QUICK

HERE = FOLDER / "real_regime"
TRAINED_AT = 0.4  # temperature of the rollouts that heads are trained on, and of their losses
TEMPERATURES = (0.2, 0.3, TRAINED_AT, 0.45)  # of the texts that heads are evaluated on, each with rollouts of its own
SHARED = "shared"  # the head that all others go on from, trained by soft cross-entropy
# Heads of each objective, one a seed. KL is not among them: soft cross-entropy has the same gradient, and with the same
# start and order the same head.
SEEDS = {"ce": 3, "tv": 2, "e2e_tv": 3, "rkl": 2}
SWEPT = ("ce", "tv", "e2e_tv")  # objectives whose heads are evaluated at every temperature
DEPTH = 5  # recursive steps of a chain in training, as in the paper
DRAFTS = 3  # drafts of a cycle that acceptance is reported for, as in the paper's tables
MANY = 8  # times as many questions of reasoning-gym for the large form: open questions are few


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRun:
    """HeadRun(name="e2e_tv-0", objective="e2e_tv", seed=0): a head, and what orders the rollouts that it sees."""

    name: str
    objective: str  # of ``bebop.trainer.objectives.OBJECTIVES``
    seed: int


RUNS = tuple(
    HeadRun(name=f"{objective}-{seed}", objective=objective, seed=seed)
    for seed in range(max(SEEDS.values()))
    for objective, count in SEEDS.items()
    if seed < count
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of the program: how much is sampled, trained and evaluated, and on which device."""

    name: str
    plan: Plan  # the prompts, and the lengths of prompts and completions
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    start: str  # of the shared head: a name of ``real.starts.STARTS``, or "built-in" for the head that comes with Bebop
    tokens: int  # of completions to train on
    shard: int  # completions that are sampled, and then trained on, at a time
    shared_shards: int  # the first ones, which train the shared head alone
    shared_passes: int  # over each of them, with other chains in each pass
    slots: int  # completions that are decoded side by side
    rows_per_step: int
    shared_rows_per_step: int
    every: int  # a step takes each so many-th chain of a completion
    shared_lr: float
    lr: float  # constant after the warm-up, as in the paper
    max_tokens: int  # of a micro-batch, padding included
    test_prompts: int  # that heads are evaluated on at the temperature of training, one completion each
    swept_prompts: int  # the first of these, for every other temperature
    unseen_prompts: int  # of kinds that no head was trained on
    test_every: int  # evaluation takes each so many-th chain
    states_batch: int  # completions that go through the backbone side by side
    reserve: float  # seconds kept for the evaluation, where the time is bounded
    resumable: bool  # whether shards and heads are written to disk as they are done


CPU = Form(
    name="cpu",
    plan=PLAN,
    dtype="bfloat16",
    start="built-in",
    tokens=1_000_000,
    shard=128,
    shared_shards=4,
    shared_passes=4,
    slots=128,
    rows_per_step=8,
    shared_rows_per_step=16,
    every=16,
    shared_lr=5e-4,
    lr=2.5e-4,
    max_tokens=8192,
    test_prompts=160,
    swept_prompts=60,
    unseen_prompts=60,
    test_every=32,
    states_batch=16,
    reserve=720.0,
    resumable=True,
)
LARGE = replace(PLAN, kinds=tuple(kind if kind.open else replace(kind, count=MANY * kind.count) for kind in PLAN.kinds))
GPU = Form(
    name="gpu",
    plan=LARGE,
    device="cuda",
    dtype="bfloat16",
    start="fitted",
    tokens=10_000_000,
    shard=8192,
    shared_shards=3,
    shared_passes=2,
    slots=2048,
    rows_per_step=256,
    shared_rows_per_step=64,
    every=8,
    shared_lr=1e-3,
    lr=5e-4,
    max_tokens=1 << 16,
    test_prompts=600,
    swept_prompts=300,
    unseen_prompts=200,
    test_every=16,
    states_batch=128,
    reserve=60.0,
    resumable=False,
)
TINY = {
    "plan": SMOKE, "device": "cpu", "dtype": "float32", "tokens": 1100, "shard": 16, "shared_shards": 1, "slots": 8,
    "shared_passes": 1, "rows_per_step": 8, "shared_rows_per_step": 8, "every": 2, "test_prompts": 6,
    "swept_prompts": 5, "unseen_prompts": 3, "test_every": 1, "states_batch": 8, "reserve": 0.0,
}  # fmt: skip


def tiny(form: Form) -> Form:
    """Return a form with the built-in model and next to nothing of everything, on the CPU."""
    return replace(form, **TINY)  # type: ignore[arg-type]


def cpu_form() -> Form:
    """Return the CPU form; in a smoke run a tiny one."""
    return tiny(CPU) if QUICK else CPU


def place_of(form: Form) -> Path:
    """Return the folder in which a form keeps what it makes."""
    return HERE / form.name


def load(form: Form) -> Policy:
    """Return the model of a form with a head: the one that comes with it, or a fresh one."""
    return load_policy(ModelConfig(path=form.plan.model, device=form.device, dtype=form.dtype, init_mtp=True))
