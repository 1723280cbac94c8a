"""Options of block drafters: how a block size is chosen, and how drafter and choice are trained."""

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
class EmaOptions(SystemOptions):
    """Options of the block size that follows recent acceptance (SPEC 5.6)."""

    decay: float = setting(0.9, "weight of a cycle over that of the one after it", FROM_0_BELOW_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTraining(TrainingOptions):
    """Training of the block drafter (``bebop.adapt part=block``)."""

    steps: int = setting(2000, "updates", POSITIVE)
    rows_per_step: int = setting(16, "completions in one update", POSITIVE)
    anchors: int = setting(8, "random blocks in one completion", POSITIVE)
    block: int = setting(8, "B, slots of a block in training, the anchor's included", within(2, 17))
    layers: int = setting(2, "Qwen3 layers of the drafter", POSITIVE)
    width: int = setting(384, "of their MLPs", POSITIVE)
    taps: int = setting(2, "layers of the target that it reads, evenly spaced from 1 to L - 3", POSITIVE)
    objective: Literal["ce", "hard_ce", "kl", "rkl", "jsd", "tv", "nla", "hybrid", "e2e_tv"] = setting(
        "e2e_tv", "what is minimised after the warm-up; all but e2e_tv slot by slot"
    )
    warm: float = setting(0.7, "share of the steps that are trained on ce first", SHARE)
    decay: float = setting(4.0, "g: slot k weighs exp(-(k - 1) / g)", above(0))
    lr: float = setting(2e-3, "learning rate, after a warm-up; falls as a cosine", above(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLengthTraining(TrainingOptions):
    """Training of the choice of block sizes (``bebop.adapt part=block_length``)."""

    smallest: int = setting(2, "smallest block size that can be chosen, the newest token included", within(1, 17))
    largest: int = setting(8, "largest block size that can be chosen", within(1, 17))
    label: Literal["tau", "speed"] = setting(
        "tau", "a prompt's best size: most tokens a cycle, or most tokens a second"
    )
    features: Literal["logits", "sorted", "hidden", "length"] = setting(
        "logits",
        "what it looks at: the logits at the end of the prompt, the largest of them sorted with entropy and margin, "
        "the last state, or the prompt's length",
    )
    target: Literal["classify", "regress"] = setting(
        "classify", "what is learned: which size is best, or the score of every size"
    )
    temperature: float = setting(0.0, "of the completions that sizes are compared on; 0 is greedy", NOT_NEGATIVE)
    seeds: int = setting(1, "completions of a prompt with each size; above 0 they are random: 4 or more", POSITIVE)
    hidden: int = setting(64, "width of the two hidden layers", POSITIVE)
    steps: int = setting(1500, "updates", POSITIVE)
    batch: int = setting(64, "prompts in one update", POSITIVE)
    lr: float = setting(1e-3, "learning rate", above(0))

    def _validate(self) -> None:
        self.require(self.smallest < self.largest, "largest", "it must exceed options.smallest")
