"""Runs whose entropy part and mismatch part are known, as decoding statistics with all the noise of real ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bebop.monitor.estimate import Array
from bebop.monitor.probe_set import Sweep
from bebop.monitor.records import StepRecords, from_stats
from bebop.monitor.window import Measure, per_unit, table
from bebop.trajectory import Completion, DecodeStats, Group, Prompt, Trajectory

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
    greedy: float = 0.9  # p(argmax q) over the overlap


def constant(value: float) -> Callable[[int], float]:
    return lambda step: value


def ramp(start: float, by: float, steps: int = STEPS) -> Callable[[int], float]:
    return lambda step: start + by * step / (steps - 1)


def step_records(truth: Truth, step: int, rng: np.random.Generator, prompts: int = 12, answers: int = 4) -> StepRecords:
    """One step: answers of one prompt share part of their entropy and of their ease."""
    unit = np.repeat(np.arange(prompts), answers)
    tasks = ["even" if u % 2 == 0 else "odd" for u in unit]
    return from_stats(_answers(truth, step, rng, unit), step, unit=unit.tolist(), task=tasks)


def step_groups(truth: Truth, step: int, seed: int = 0, prompts: int = 12, answers: int = 4) -> tuple[Group, ...]:
    """The same as finished groups, with texts that say where they come from."""
    rng = np.random.default_rng([77, seed, step])
    stats = _answers(truth, step, rng, np.repeat(np.arange(prompts), answers))
    groups = []
    for p in range(prompts):
        index = step * prompts + p
        completions = [
            Completion(
                token_ids=np.array([index, a, 1]), logprobs=np.zeros(3, dtype=np.float32), versions=np.full(3, step),
                stats=stats[p * answers + a],
            )
            for a in range(answers)
        ]  # fmt: skip
        prompt = Prompt(index=index, task="even" if p % 2 == 0 else "odd", text="", token_ids=(index,), item={})
        groups.append(
            Group(prompt=prompt, trajectories=tuple(Trajectory.single(completion=c, reward=0.0) for c in completions))
        )
    return tuple(groups)


def _answers(truth: Truth, step: int, rng: np.random.Generator, unit: NDArray[np.int64]) -> list[DecodeStats]:
    """Statistics of a step's answers [N]; those of one unit are dependent."""
    shared = rng.normal(size=(2, int(unit.max()) + 1))[:, unit]
    own = rng.normal(size=(2, len(unit)))
    temperature, ease = (shared + own) / np.sqrt(2)
    entropy = truth.entropy(step) + truth.spread * temperature
    value = truth.level + truth.slope * (entropy - 0.5) + truth.mismatch(step) + truth.noise * ease
    rate = np.clip(value if truth.rates else np.interp(value, _LENGTHS, _RATES), 0, 1)
    cycles = rng.integers(truth.cycles // 2, 3 * truth.cycles // 2, size=len(rate))
    return _decoded(rng, cycles, rate, entropy, truth.greedy)


def _decoded(rng: np.random.Generator, cycles: Array, rate: Array, entropy: Array, greedy: float) -> list[DecodeStats]:
    """Statistics of answers [N] whose drafts are accepted with one rate at every position."""
    chain = [cycles]
    for _ in range(DRAFTS):
        chain.append(rng.binomial(chain[-1], rate))
    reached, accepted = np.stack(chain[:-1], 1).astype(float), np.stack(chain[1:], 1).astype(float)
    return [
        DecodeStats(
            cycles=int(cycles[i]), tokens=int(cycles[i] + accepted[i].sum()), reached=reached[i], accepted=accepted[i],
            overlap=reached[i] * rate[i], target_only=np.minimum(reached[i], reached[i] * rate[i] * greedy),
            draft_entropy=reached[i] * entropy[i], target_entropy=reached[i] * entropy[i],
        )
        for i in range(len(cycles))
    ]  # fmt: skip


def stats(
    cycles: int, *accepted: float, overlap: float = 0.8, target_only: float = 0.6, entropy: float = 0.5
) -> DecodeStats:
    """Statistics with so many accepted drafts at each position, and rates and entropies that are the same at all."""
    reached = np.array([cycles, *accepted[:-1]], dtype=float)
    sums = {"overlap": overlap * reached, "target_only": target_only * reached}
    sums |= {"draft_entropy": entropy * reached, "target_entropy": entropy * reached}
    taken = np.array(accepted, dtype=float)
    return DecodeStats(cycles=cycles, tokens=cycles + int(taken.sum()), reached=reached, accepted=taken, **sums)


def run(truth: Truth, seed: int, steps: int = STEPS) -> list[StepRecords]:
    rng = np.random.default_rng([99, seed])
    return [step_records(truth, step, rng) for step in range(steps)]


def expected(truth: Truth, window: int = 3, reference: int = 5, steps: int = STEPS) -> tuple[float, float]:
    """True entropy part and mismatch part at the end of the run."""

    def moved(series: Callable[[int], float]) -> float:
        now = np.mean([series(step) for step in range(steps - window, steps)])
        return float(now - np.mean([series(step) for step in range(reference)]))

    return truth.slope * moved(truth.entropy), moved(truth.mismatch)


def sweep_of(steps: Sequence[StepRecords], measure: Measure) -> Sweep:
    """A sweep of answers to the same prompts (units), the records of one temperature each."""
    units = np.unique(np.concatenate([records.unit for records in steps]))
    sums = np.zeros((len(steps), len(units), 4))
    for records, own in zip(steps, sums, strict=True):
        present = np.searchsorted(units, np.unique(records.unit))
        own[present] = np.stack(measure.sums(per_unit(records.unit, table(records))), 1)
    length, count, entropy, positions = np.moveaxis(sums.sum(1), 1, 0)
    return Sweep(entropy=tuple(entropy / positions), length=tuple(length / count), sums=sums)
