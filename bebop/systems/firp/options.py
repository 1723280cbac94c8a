"""Options of FIRP: its trees, and how pseudo hidden states are trained."""

from dataclasses import dataclass
from typing import Literal

from bebop.config.fields import (
    POSITIVE,
    SHARE,
    TrainingOptions,
    above,
    setting,
)
from bebop.config.tree_shape import CHANCES, TreeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FirpOptions(TreeOptions):
    """Options of FIRP: which tree is drafted, and from which of its nodes another one may grow (SPEC 3.3)."""

    ranks: tuple[float, ...] = setting(
        lambda: (0.3, 0.15, 0.1, 0.07, 0.05, 0.04, 0.03, 0.02),
        "chance of a first, second, ... child to be accepted, where the part has no chances of its own",
        CHANCES,
    )
    pseudo_paths: int | None = setting(
        None,
        "M: pseudo states beside nodes on the M likeliest paths alone, a plain step after any other; null: all",
        POSITIVE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirpTraining(TrainingOptions):
    """Training of pseudo hidden states (``bebop.adapt part=firp``, SPEC 3.2)."""

    layers: tuple[int, ...] | None = setting(
        None, "t_k, layers of the target after which step k enters, from 1 on; null: three from the middle up"
    )
    steps: int = setting(600, "updates of each step; those before it are there and frozen", POSITIVE)
    rows_per_step: int = setting(16, "completions in one update", POSITIVE)
    anchors: int = setting(24, "random anchors in one completion", POSITIVE)
    objective: Literal["kl", "tv", "e2e_tv"] = setting(
        "kl", "what is minimised after the warm-up; e2e_tv weighs an anchor by the acceptance of the earlier steps"
    )
    warm: float = setting(0.3, "share of the updates of a step that are on kl first", SHARE)
    calibration: int = setting(
        64, "prompts of the training on whose greedy completions ranks are counted, for the shape of trees", POSITIVE
    )
    lr: float = setting(1e-2, "learning rate, after a warm-up; falls as a cosine within each step", above(0))
