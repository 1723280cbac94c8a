"""How the runs are made: two directions of entropy, some seeds, and which heads are looked at beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.reproduce.real.heads import BEST
from recipes.reproduce.real.runs import SHARED
from recipes.reproduce.study import FOLDER, QUICK

PLACE = FOLDER / "real" / "rl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RLPlan:
    """What the runs depend on: another plan is another study. ``seeds`` may grow."""

    model: str = "smollm2"
    dtype: str = "bfloat16"  # of the job; its weights are looked at in fp32
    seeds: int = 3
    steps: int = 60
    segment: int = 10  # steps whose checkpoints, some 2 GB each, are kept until the heads have seen them
    groups: int = 6  # prompts of a step
    group_size: int = 8
    max_new_tokens: int = 32
    max_length: int = 128  # prompt + answer
    lr: float = 1e-5
    bonus: float = 0.15  # ``algorithm.entropy_coefficient`` where entropy is to rise; see README.md, Pilots
    entropy_target: float = 3.7  # nats: the bonus is for answers whose mean entropy lies below
    questions: int = 552  # to learn from; those behind them are for the fixed texts
    answers_each: int = 3  # of the first policy to each of these questions, that heads are trained on before RL
    held_out: int = 52  # of these questions: their answers are for validation
    fixed: int = 48  # texts of the direct measure, one answer of the first policy each
    look_every: int = 5  # steps between two looks at all heads
    depth: int = 3  # K
    every: int = 4  # of the chains of an answer, in an update and a look
    head_lr: float = 1e-4
    head_warmup: int = 3
    mixed: bool = True  # products of head updates in bfloat16
    planted_answers: int = 24  # of a step of a planted stream
    planted_orders: int = 8  # shuffles of the answers of a seed, each a stream of its own

    def settled(self, bonus: bool = True) -> dict[str, Any]:
        """What the runs of one study agree in; ``bonus``: whether that is of them, as of runs with rising entropy."""
        left_out = {"seeds"} if bonus else {"seeds", "bonus", "entropy_target"}
        return {name: getattr(self, name) for name in self.__slots__ if name not in left_out}


SMOKE = RLPlan(
    model="tiny", dtype="float32", mixed=False, seeds=2, steps=4, segment=2, groups=2, group_size=2, max_new_tokens=10,
    questions=20, held_out=4, answers_each=1, fixed=6, look_every=2, depth=2, every=2, planted_answers=4,
    planted_orders=2,
)  # fmt: skip
RL_PLAN = SMOKE if QUICK else RLPlan()

FALLING, RISING = "falling", "rising"


def directions(plan: RLPlan) -> Mapping[str, tuple[str, ...]]:
    """Direction of entropy -> what its jobs are given beside the rest."""
    return {
        FALLING: (),
        RISING: (f"algorithm.entropy_coefficient={plan.bonus}", f"algorithm.entropy_target={plan.entropy_target}"),
    }


# Arm -> the head that it begins with, and the loss that it is updated by at every step (None: frozen).
ARMS: Mapping[str, tuple[str, str | None]] = {
    "ce": ("ce", None),
    "tv": ("tv", None),
    "e2e_tv": ("e2e_tv", None),
    "ce, ce updates": ("ce", "ce"),
    "tv, ce updates": ("tv", "ce"),
    "tv, kl updates": ("tv", "kl"),
    "tv, tv updates": ("tv", "tv"),
}
FROZEN = tuple(arm for arm, (_, during) in ARMS.items() if during is None)
ONLINE = tuple(arm for arm, (_, during) in ARMS.items() if during is not None)

TRAINED = ("ce", "tv", "e2e_tv")  # heads, each trained before RL by the loss that it is named after
# Head -> what it begins with: a file of ``recipes.reproduce.real --stage heads``, or a start of ``starts.py``.
# ``other`` is not trained further: planted mismatch.
ORIGINS: Mapping[str, str] = (
    {**dict.fromkeys(TRAINED, "fitted"), "other": "passing"}
    if QUICK
    else {
        **dict.fromkeys(TRAINED, str(Path(FOLDER, "real", "heads", SHARED, BEST))),
        "other": str(Path(FOLDER, "real", "heads", SHARED, "step-00200.safetensors")),
    }
)
