"""Runs whose entropy part and mismatch part are known, as decoding statistics with all the noise of real ones."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bebop.monitor.collect import from_stats
from bebop.monitor.estimate import Array
from bebop.monitor.records import StepRecords
from bebop.trajectory import DecodeStats

DRAFTS = 3
STEPS = 23
_RATES = np.linspace(0.02, 0.999, 4000)
_LENGTHS = 1 + _RATES + _RATES**2 + _RATES**3


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A run: per step, the mean entropy and what mismatch takes from the accept length (or from every rate)."""

    entropy: Callable[[int], float]
    mismatch: Callable[[int], float]
    slope: float = -0.8  # per nat
    level: float = 2.8  # accept length (or rate) at an entropy of 0.5
    rates: bool = False  # linear in the rates instead of the accept length
    spread: float = 0.15  # nats, between prompts and between answers
    noise: float = 0.08  # accept length, between prompts and between answers
    cycles: int = 30


def constant(value: float) -> Callable[[int], float]:
    return lambda step: value


def ramp(start: float, by: float, steps: int = STEPS) -> Callable[[int], float]:
    return lambda step: start + by * step / (steps - 1)


def step_records(truth: Truth, step: int, rng: np.random.Generator, prompts: int = 12, answers: int = 4) -> StepRecords:
    """One step: answers of one prompt share part of their entropy and of their ease."""
    unit = np.repeat(np.arange(prompts), answers)
    shared = rng.normal(size=(2, prompts))[:, unit]
    own = rng.normal(size=(2, prompts * answers))
    heat, ease = (shared + own) / np.sqrt(2)
    entropy = truth.entropy(step) + truth.spread * heat
    value = truth.level + truth.slope * (entropy - 0.5) + truth.mismatch(step) + truth.noise * ease
    rate = np.clip(value if truth.rates else np.interp(value, _LENGTHS, _RATES), 0, 1)
    cycles = rng.integers(truth.cycles // 2, 3 * truth.cycles // 2, size=len(rate))
    unit_tasks = ["even" if u % 2 == 0 else "odd" for u in unit]
    return from_stats(_decoded(rng, cycles, rate, entropy), step, unit=unit.tolist(), task=unit_tasks)


def _decoded(rng: np.random.Generator, cycles: Array, rate: Array, entropy: Array) -> list[DecodeStats]:
    """Statistics of answers [N] whose drafts are accepted with one rate at every position."""
    chain = [cycles]
    for _ in range(DRAFTS):
        chain.append(rng.binomial(chain[-1], rate))
    reached, accepted = np.stack(chain[:-1], 1).astype(float), np.stack(chain[1:], 1).astype(float)
    return [
        DecodeStats(
            cycles=int(cycles[i]),
            tokens=int(cycles[i] + accepted[i].sum()),
            reached=reached[i],
            accepted=accepted[i],
            overlap=reached[i] * rate[i],
            target_only=reached[i] * rate[i] * 0.9,
            draft_entropy=reached[i] * entropy[i],
            target_entropy=reached[i] * entropy[i],
        )
        for i in range(len(cycles))
    ]


def run(truth: Truth, seed: int, steps: int = STEPS) -> list[StepRecords]:
    rng = np.random.default_rng([99, seed])
    return [step_records(truth, step, rng) for step in range(steps)]


def expected(truth: Truth, window: int = 3, reference: int = 5, steps: int = STEPS) -> tuple[float, float]:
    """True entropy part and mismatch part at the end of the run."""

    def moved(series: Callable[[int], float]) -> float:
        now = np.mean([series(step) for step in range(steps - window, steps)])
        return float(now - np.mean([series(step) for step in range(reference)]))

    return truth.slope * moved(truth.entropy), moved(truth.mismatch)
