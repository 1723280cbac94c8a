"""What a certificate asks for: settings, tokens, seeds; and one setting as it is being examined."""

import dataclasses
import hashlib
from dataclasses import dataclass, field

from bebop.certify.answers import Answer
from bebop.certify.declared import Mode
from bebop.certify.ledger import Ledger
from bebop.certify.two_sample import TwoSample
from bebop.config_certify import LogprobMode
from bebop.trajectory import SamplingParams

SEEDS = 1 << 31
STRIDE = 0x5DEECE6D  # odd: no two requests of a setting share a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sampling parameters to be examined; ``weight``: of its evidence in the whole, fixed beforehand."""

    name: str
    params: SamplingParams
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked, how much of it, and when it is enough."""

    settings: tuple[Setting, ...]
    white_box_weight: float
    vocabulary: int
    tokens: int  # at each setting
    cohort: int = 16
    alpha: float = 1e-4
    limit_tv: float = 0.02
    logprobs: LogprobMode = (
        "auto"  # what reported ones are declared to be: raw, temperature, processed, none; auto: found out
    )
    dtype: str = "float32"  # the engine's precision: how far a right log-prob may lie from the reference's
    seed: int = 0
    first_prompt: int = 0
    stop_when_found: bool = True
    progress: bool = False


def plan_settings(params: SamplingParams, stress: float, white_box: bool) -> tuple[tuple[Setting, ...], float]:
    """The settings with their weights, and that of the white box: what is there shares all of 1."""
    hot = stress > 0 and stress != params.temperature
    shares = {"as asked": 2.0, "stress": 1.0 if hot else 0.0, "white box": 1.0 if white_box else 0.0}
    total = sum(shares.values())
    settings = [Setting(name="as asked", params=params, weight=shares["as asked"] / total)]
    if hot:
        other = dataclasses.replace(params, temperature=stress)
        settings.append(Setting(name="stress", params=other, weight=shares["stress"] / total))
    return tuple(settings), shares["white box"] / total


@dataclass(slots=True, kw_only=True)
class Examination:
    """One setting as it is being examined."""

    setting: Setting
    ledger: Ledger
    against: TwoSample = field(default_factory=TwoSample)
    answers: int = 0
    unfinished: int = 0
    tokens: int = 0
    accepted: int = 0
    tested: int = 0
    contexts: dict[int, Answer] = field(default_factory=dict)
    mode: Mode | None = None  # what reported log-probs are of

    @property
    def log_e(self) -> float:
        """Evidence of this setting: of the ledger, or without a reference of the two samples."""
        return self.against.log_e if self.against.pairs else self.ledger.log_e

    @property
    def history(self) -> list[tuple[int, float]]:
        """Tokens, ln E."""
        return self.against.history if self.against.pairs else self.ledger.history


def seed_of(seed: int, number: int, stream: int, request: int) -> int:
    """A seed of 31 bits, which every server takes: no two of a setting are equal, those of another are as if drawn."""
    start = int.from_bytes(hashlib.sha256(f"{seed} {number} {stream}".encode()).digest()[:4], "big")
    return (start + request * STRIDE) % SEEDS
