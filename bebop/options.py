"""Settings that one decoding system or one trained part has alone: a dataclass each, which its row names.

They are given as ``decoding.options.NAME=VALUE`` and ``options.NAME=VALUE``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bebop.parsing import above, at_least, check, check_settings, from_dict, setting, within


def parsed(cls: type | None, values: Mapping[str, Any], section: str, owner: str) -> Any:
    """The options ``cls`` of a system or part made of what was given; None where it has none.

    ``section``: what the names begin with; ``owner``: how a refusal calls whoever has no options.
    """
    if cls is None:
        check(not values, section.removesuffix("."), dict(values), f"{owner} has no options")
        return None
    options: Any = from_dict(cls, dict(values), section)
    check_settings(options, section)
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTraining:
    """Training of the block drafter (``bebop.adapt part=block``)."""

    steps: int = setting(2000, "updates", at_least(1))
    rows_per_step: int = setting(16, "answers in one update", at_least(1))
    anchors: int = setting(8, "random blocks in one answer", at_least(1))
    block: int = setting(8, "B, slots of a block in training, the anchor's included", within(2, 17))
    layers: int = setting(2, "Qwen3 layers of the drafter", at_least(1))
    width: int = setting(384, "of their MLPs", at_least(1))
    taps: int = setting(2, "layers of the target that it reads, evenly spaced from 1 to L - 3", at_least(1))
    objective: Literal["ce", "hard_ce", "kl", "rkl", "jsd", "tv", "nla", "hybrid", "e2e_tv"] = setting(
        "e2e_tv", "what is minimised after the warm-up; all but e2e_tv slot by slot"
    )
    warm: float = setting(0.7, "share of the steps that are trained on ce first", within(0, 1))
    decay: float = setting(4.0, "g: slot k weighs exp(-(k - 1) / g)", above(0))
    lr: float = setting(2e-3, "learning rate, after a warm-up; falls as a cosine", above(0))

    def __post_init__(self) -> None:
        check_settings(self, "options.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLengthTraining:
    """Training of the choice of block sizes (``bebop.adapt part=block_length``)."""

    smallest: int = setting(2, "smallest block size that can be chosen, the newest token included", within(1, 17))
    largest: int = setting(8, "largest block size that can be chosen", within(1, 17))
    label: Literal["tau", "speed"] = setting(
        "tau", "a prompt's best size: most tokens a cycle, or most tokens a second"
    )
    temperature: float = setting(0.0, "of the answers that sizes are compared on; 0 is greedy", at_least(0))
    seeds: int = setting(1, "answers to a prompt with each size; above 0 they are random: 4 or more", at_least(1))
    hidden: int = setting(64, "width of the two hidden layers", at_least(1))
    steps: int = setting(1500, "updates", at_least(1))
    batch: int = setting(64, "prompts in one update", at_least(1))
    lr: float = setting(1e-3, "learning rate", above(0))

    def __post_init__(self) -> None:
        check_settings(self, "options.")
        check(self.smallest < self.largest, "options.largest", self.largest, "it must exceed options.smallest")
