"""Options of PAD: which rejected drafts it accepts, and how its classifier is trained."""

from dataclasses import dataclass
from typing import Literal

from bebop.config.fields import (
    FROM_0_BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SystemOptions,
    TrainingOptions,
    above,
    setting,
    within,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadOptions(SystemOptions):
    """Options of PAD: which rejected drafts are accepted nevertheless (SPEC 4.2)."""

    tau: float = setting(0.3, "rejected drafts whose pivot score is below it are accepted; 0: none", SHARE)
    p_min: float = setting(1e-3, "least probability of such a draft under the target", FROM_0_BELOW_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PivotTraining(TrainingOptions):
    """Training of the pivot classifier: labels of rejected drafts, and the network (SPEC 4.2, 4.3)."""

    rollouts: int = setting(16, "K, continuations of each kind for one candidate", within(1, 1 << 10))
    places: int = setting(4, "positions of a completion whose rejected drafts are labelled", POSITIVE)
    depth: int = setting(3, "drafts of a block whose rejections are looked at", within(1, 16))
    p_min: float = setting(1e-3, "least probability of a candidate under the target", FROM_0_BELOW_1)
    draft_temperature: float | None = setting(None, "of the drafts; null: the target's", above(0))
    definition: Literal["paper", "residual"] = setting("residual", "what a candidate is compared with")
    tol: float = setting(0.1, "a pivot lowers the chance of success by more", SHARE)
    success: float = setting(1.0, "least reward of a completion that succeeds")
    judge: bool = setting(True, "check the worked steps of a candidate's success: it may become a pivot")
    twice: float = setting(
        0.25, "share of the prompts labelled twice, to see how far labels can be trusted", within(0, 1)
    )
    feat_pos: Literal["pred", "cand"] = setting("pred", "state that predicts the candidate, or the candidate's own")
    features: Literal["all", "hidden", "scalars"] = setting("all", "what the classifier sees: h, and p, log p, H(p)")
    layer: int | None = setting(None, "of the target, from 0; null: three quarters up", NOT_NEGATIVE)
    inner: int = setting(64, "width of what a state is turned into", POSITIVE)
    middle: int = setting(32, "width of the hidden layer over that and the scalars", POSITIVE)
    lr: float = setting(1e-3, "learning rate", above(0))
    weight_decay: float = setting(1e-2, "decoupled", NOT_NEGATIVE)
