"""Rule that confirms that a job learns with vLLM as with the embedded engine, written before the run that it judges.

A result stores the hash of this code (``hash_of_rule``), so a rule that was changed after its result is detected.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce import rule_hash

# Pairs of jobs that differ only in the engine. The first five were judged separately, without a verdict (see
# benchmarks/cpu/vllm_job_first.md). These pairs are new, and there are more of them.
FIRST_SEED, SEEDS = 5, 12
STEPS = 10  # of the main job
ENDS = 3  # first and last steps, between which a job gains
REWARD = 0.03  # within which the difference of mean rewards lies, with its interval
LENGTH = 0.1  # tokens, the same of accept lengths
LOGPROB = 1e-4  # above any mean |log-prob - trainer's| of tokens of the current weights

Curves = Sequence[Sequence[float]]  # of jobs: seeds x steps


def gain(curves: Curves) -> Interval:
    """Return the mean of the last steps minus the mean of the first steps, over seeds."""
    return across_seeds([float(np.mean(curve[-ENDS:]) - np.mean(curve[:ENDS])) for curve in curves])


def difference(ours: Curves, theirs: Curves) -> Interval:
    """Return the difference of means over all steps, paired by seed, with its interval over seeds."""
    return across_seeds([float(np.mean(a) - np.mean(b)) for a, b in zip(ours, theirs, strict=True)])


def judge(
    rewards: Mapping[str, Curves], lengths: Mapping[str, Curves], logprobs: Mapping[str, Curves]
) -> Mapping[str, bool]:
    """Return each requirement and whether it is met; ``confirmed`` if all are. Keys: ``torch`` and ``vllm``."""
    curves = [curve for arm in rewards.values() for curve in arm]
    reward, length = (difference(arms["vllm"], arms["torch"]) for arms in (rewards, lengths))
    met = {
        f"{SEEDS} pairs of {STEPS} steps": len(curves) == 2 * SEEDS and all(len(curve) == STEPS for curve in curves),
        "embedded: gain of reward, its interval above 0": gain(rewards["torch"]).low > 0,
        "vLLM: gain of reward, its interval above 0": gain(rewards["vllm"]).low > 0,
        f"difference of rewards within {REWARD}": -REWARD < reward.low and reward.high < REWARD,
        f"difference of accept lengths within {LENGTH}": -LENGTH < length.low and length.high < LENGTH,
        f"vLLM's log-probs within {LOGPROB:.0e}": max(max(curve) for curve in logprobs["vllm"]) < LOGPROB,
    }
    return {**met, "confirmed": all(met.values())}


def hash_of_rule() -> str:
    """Return the hash of the definitions that make up ``judge``."""
    return rule_hash.of_sources([Path(__file__).read_text()], ("judge",))
