"""Plan of the RL runs: two directions of entropy, several seeds, and the heads evaluated beside them."""

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
    """Settings that the runs depend on: another plan is another study. ``seeds`` may grow."""

    model: str = "smollm2"
    dtype: str = "bfloat16"  # of the job; evaluations load its weights in fp32
    seeds: int = 3
    steps: int = 60
    segment: int = 10  # steps whose checkpoints, some 2 GB each, are kept until the heads have seen them
    groups: int = 6  # prompts per step
    group_size: int = 8
    max_new_tokens: int = 32
    max_length: int = 128  # prompt + answer
    lr: float = 1e-5
    bonus: float = 0.15  # ``algorithm.entropy_coefficient`` where entropy is to rise; see README.md, Pilots
    entropy_target: float = 3.7  # nats: only completions with a lower mean entropy get the bonus
    questions: int = 552  # to learn from; the questions after them are for the fixed texts
    answers_each: int = 3  # completions of the first policy per question, to train heads on before RL
    held_out: int = 52  # questions whose completions are for validation
    fixed: int = 48  # texts of the direct measure, each one completion of the first policy
    look_every: int = 5  # steps between two evaluations of all heads
    depth: int = 3  # K
    every: int = 4  # every 4th chain of a completion is used, in an update and an evaluation
    head_lr: float = 1e-4
    head_warmup: int = 3
    mixed: bool = True  # products of head updates in bfloat16
    planted_answers: int = 24  # completions in a step of a planted stream
    planted_orders: int = 8  # shuffles of a seed's completions, each a separate stream

    def settled(self, bonus: bool = True) -> dict[str, Any]:
        """Return the settings that all runs of one study share.

        ``bonus``: whether to include the entropy bonus, which only runs with rising entropy use.
        """
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
    """Return the extra job settings of each direction of entropy."""
    return {
        FALLING: (),
        RISING: (f"algorithm.entropy_coefficient={plan.bonus}", f"algorithm.entropy_target={plan.entropy_target}"),
    }


# Arm -> its initial head, and the loss that updates it at every step (None: frozen).
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
# Head -> its initial weights: a file of ``recipes.reproduce.real --stage heads``, or a start of ``starts.py``.
# ``other`` is not trained further: planted mismatch.
ORIGINS: Mapping[str, str] = (
    {**dict.fromkeys(TRAINED, "fitted"), "other": "passing"}
    if QUICK
    else {
        **dict.fromkeys(TRAINED, str(Path(FOLDER, "real", "heads", SHARED, BEST))),
        "other": str(Path(FOLDER, "real", "heads", SHARED, "step-00200.safetensors")),
    }
)
