"""When it is confirmed that a job learns with vLLM as it does with the embedded engine: older than the run it judges.

A result stores the hash of this code (``hash_of_rule``), so a rule that was changed after its result is found out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce import rule_hash

# Pairs of jobs that differ in the engine alone. The first five were judged by themselves and left it open (see
# benchmarks/cpu/vllm_job_first.md): these are others, and more of them.
FIRST_SEED, SEEDS = 5, 12
STEPS = 10  # of the main job
ENDS = 3  # first and last steps, between which a job gains
REWARD = 0.03  # within which the difference of mean rewards lies, with its interval
LENGTH = 0.1  # tokens, the same of accept lengths
LOGPROB = 1e-4  # above any mean |log-prob - trainer's| of tokens of the current weights

Curves = Sequence[Sequence[float]]  # of jobs: seeds x steps


def gain(curves: Curves) -> Interval:
    """Last steps less first ones, over seeds."""
    return across_seeds([float(np.mean(curve[-ENDS:]) - np.mean(curve[:ENDS])) for curve in curves])


def difference(ours: Curves, theirs: Curves) -> Interval:
    """Of means over all steps, by seed; the interval is over seeds."""
    return across_seeds([float(np.mean(a) - np.mean(b)) for a, b in zip(ours, theirs, strict=True)])


def judge(
    rewards: Mapping[str, Curves], lengths: Mapping[str, Curves], logprobs: Mapping[str, Curves]
) -> Mapping[str, bool]:
    """What was asked for, and whether it is so; ``confirmed`` if all of it is. Keys: ``torch`` and ``vllm``."""
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
    """Of the definitions that make up ``judge``."""
    return rule_hash.of_sources([Path(__file__).read_text()], ("judge",))
