"""Options of PIPO: which second tokens of pairs are kept, and how its network is trained."""

import math
from dataclasses import dataclass
from typing import Literal

from bebop.config.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Limit,
    SystemOptions,
    TrainingOptions,
    above,
    setting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipoOptions(SystemOptions):
    """Options of PIPO: which drafts are kept as second token of a pair (SPEC 2.5)."""

    tau: float | None = setting(
        None,
        "drafts are kept from this confidence on; below 0: all of them, 1 or more: none; null: what the part says",
        Limit(math.isfinite, "give a number, or null"),
    )
    gate: Literal["confidence", "random"] = setting(
        "confidence", "what keeps drafts; random: chance, whatever they are, an ablation"
    )
    keep: float = setting(0.5, "share of the drafts that gate=random keeps", SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipoTraining(TrainingOptions):
    """Training of the network of pairs (SPEC 2.3, 2.4)."""

    stage: Literal["sft", "opd"] = setting(
        "sft",
        "on the model's own correct completions, or by distillation on completions of the network in model.parts.pipo",
    )
    steps: int = setting(700, "updates", POSITIVE)
    rows_per_step: int = setting(12, "completions in one update", POSITIVE)
    lr: float | None = setting(
        None, "learning rate, after a warm-up; falls as a cosine; null: 2e-3 in sft, 5e-4 in opd", above(0)
    )
    mtp_weight: float = setting(1.0, "of the second token's loss, beside the first one's", NOT_NEGATIVE)
    confidence_weight: float = setting(1.0, "of the confidence head's loss", NOT_NEGATIVE)
    compressor: Literal["mlp", "random"] = setting(
        "mlp", "sft: a + b + MLP, or a linear map that begins as noise, an ablation"
    )
    layers: int | None = setting(
        None, "sft: of the network's backbone, evenly spaced layers of the policy's; null: all of them", POSITIVE
    )
    pad: int | None = setting(
        None,
        "sft: id of the token that fills half pairs, one that no text has; null: the tokenizer's pad",
        NOT_NEGATIVE,
    )
    samples: int = setting(2, "sft: completions of each question, of which those of a reward of 1 are kept", POSITIVE)
    rho: float = setting(0.5, "sft: PADs are put after at most this share of a completion's tokens", SHARE)
    rollouts: int = setting(96, "opd: completions that are drawn at a time, and trained on once", POSITIVE)
    gate: float | None = setting(
        None,
        "opd: threshold of the confidence in those completions; null: what the part says",
        Limit(math.isfinite, "give a number, or null"),
    )
    pad_ratio: float = setting(0.35, "the share of half pairs that the threshold of the part is chosen for", SHARE)

    @property
    def rate(self) -> float:
        """Return the learning rate of the stage."""
        return self.lr if self.lr is not None else {"sft": 2e-3, "opd": 5e-4}[self.stage]
