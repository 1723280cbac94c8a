"""Rule that confirms that the built-in model learns the game, written before the run that it judges.

A result stores the hash of this code (``hash_of_rule``), so a rule that was changed after its result is detected.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bebop.metrics.intervals import Interval, across_seeds, resampled
from recipes.reproduce import rule_hash

SEEDS = 3  # jobs of the same start and settings, of other questions and draws
STEPS = 5  # the first and the last steps, of which rewards are compared
GAIN = 0.15  # least mean gain of reward; both intervals above 0
RATIO_ERROR = 1e-4  # above any |p / p - 1| between trainer and engine, on the policy's tokens
MINUTES = 6.0  # of one job

Rewards = Sequence[Sequence[float]]  # of a job: steps x prompts, mean over the members of a group


def first(rewards: Rewards) -> list[float]:
    """Return the rewards of the prompts of the first steps."""
    return [reward for step in rewards[:STEPS] for reward in step]


def last(rewards: Rewards) -> list[float]:
    """Return the rewards of the prompts of the last steps."""
    return [reward for step in rewards[-STEPS:] for reward in step]


ENDS = ((0, first), (1, last))  # with seeds of draws of their own


def over_seeds(jobs: Sequence[Rewards]) -> Interval:
    """Return the mean gain of the jobs, with an interval for other seeds."""
    return across_seeds([float(np.mean(last(job)) - np.mean(first(job))) for job in jobs])


def over_prompts(jobs: Sequence[Rewards]) -> Interval:
    """Return the mean gain with an interval for other prompts; first and last prompts are resampled independently."""
    before, after = (_mean([reward for job in jobs for reward in end(job)], seed) for seed, end in ENDS)
    value = after.value - before.value
    # Half-widths of independent means add in squares.
    low = value - float(np.hypot(after.value - after.low, before.high - before.value))
    high = value + float(np.hypot(after.high - after.value, before.value - before.low))
    return Interval(value, low, high)


def _mean(values: Sequence[float], seed: int) -> Interval:
    array = np.array(values)
    return resampled(lambda weights: weights @ array / len(array), len(array), seed)


def judge(jobs: Sequence[Rewards], ratio_errors: Sequence[float], minutes: Sequence[float]) -> Mapping[str, bool]:
    """Return each requirement and whether it is met; ``confirmed`` if all are.

    Args:
        jobs: rewards of each job.
        ratio_errors: the largest one of each job.
        minutes: each job's duration.
    """
    seeds, prompts = over_seeds(jobs), over_prompts(jobs)
    enough = len(jobs) >= SEEDS and all(len(job) >= 2 * STEPS for job in jobs)
    met = {
        f"{SEEDS} seeds, {2 * STEPS} steps or more": enough,
        f"gain of {GAIN} or more": seeds.value >= GAIN,
        "its interval over seeds above 0": seeds.low > 0,
        "its interval over prompts above 0": prompts.low > 0,
        f"ratio errors below {RATIO_ERROR:.0e}": max(ratio_errors) < RATIO_ERROR,
        f"each job within {MINUTES:.0f} minutes": max(minutes) < MINUTES,
    }
    return {**met, "confirmed": all(met.values())}


def hash_of_rule() -> str:
    """Return the hash of the definitions that make up ``judge``."""
    return rule_hash.of_sources([Path(__file__).read_text()], ("judge",))
