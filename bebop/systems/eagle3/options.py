"""Options of the training of an EAGLE-3 drafter."""

from dataclasses import dataclass
from typing import Literal

from bebop.config.fields import POSITIVE, SHARE, Limit, TrainingOptions, above, setting, within


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Training(TrainingOptions):
    """Training of an EAGLE-3 drafter (``bebop.adapt part=eagle3``)."""

    steps: int = setting(400, "updates", POSITIVE)
    rows_per_step: int = setting(16, "completions in one update", POSITIVE)
    depth: int = setting(3, "recursive steps of a chain, each on the drafter's own output", within(1, 16))
    every: int = setting(2, "of so many neighbouring chains of a completion one is trained on in an update", POSITIVE)
    draft_vocab: int | None = setting(
        None,
        "tokens that can be drafted: those that are most frequent in the sampled completions; null: all",
        Limit(lambda size: size is None or size >= 2, "give 2 or more, or null"),
    )
    width: int | None = setting(
        None, "of its MLP; null: the target's", Limit(lambda size: size is None or size >= 1, "give 1 or more, or null")
    )
    objective: Literal["tv", "ce", "hard_ce", "kl", "rkl", "jsd", "nla", "hybrid", "e2e_tv", "e2e_tv_corrected"] = (
        setting("e2e_tv", "what is minimised after the warm-up: a row of trainer/objectives.py")
    )
    warm: float = setting(0.3, "share of the steps that are trained on ce first", SHARE)
    lr: float = setting(1e-3, "learning rate, after a warm-up; falls as a cosine", above(0))
