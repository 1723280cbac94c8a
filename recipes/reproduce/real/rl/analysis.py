"""Numbers of the rules, tables and figures of the RL study, computed from evaluations of heads and from metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.metrics.intervals import Interval, across_seeds
from bebop.monitor.probe_set import ProbeReading, Sweep, direct
from bebop.monitor.slope import temperature_slope
from recipes.reproduce.measured import Number, of, over_seeds
from recipes.reproduce.real.rl.plan import ARMS, FALLING, FROZEN, RISING
from recipes.reproduce.real.rl.planted import CASES, share_right

ENDS = 5  # steps averaged at either end, for reward and entropy
MAIN = "ce"  # the frozen head of the rule
# Arms of the paper's figures: name -> frozen head and kind of its drafts.
FIGURED = {
    "TO + CE": ("ce", "greedy"),
    "RS + CE": ("ce", "accept"),
    "RS + TV": ("tv", "accept"),
    "RS + e2e TV": ("e2e_tv", "accept"),
}
UPDATED = {name: f"tv, {name} updates" for name in ("ce", "kl", "tv")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a direction and seed: the metrics of its job, and every evaluation of the heads beside it."""

    direction: str
    seed: int
    metrics: Sequence[Mapping[str, float]]  # a row a step
    looks: Sequence[Mapping[str, Any]]
    sweeps: Mapping[str, Sweep]  # frozen arm -> the fixed texts at other temperatures, under the first weights
    curves: Mapping[str, Mapping[str, Any]]  # head -> how its training before RL ended
    device: str = ""


def moved(run: Run, name: str) -> float:
    """Return how far a metric of the job moved: mean of the last steps minus that of the first."""
    values = [row[name] for row in run.metrics]
    count = min(ENDS, len(values) // 2)
    return float(np.mean(values[-count:]) - np.mean(values[:count]))


def accept(look: Mapping[str, Any], arm: str, kind: str = "accept") -> float:
    """Return the accept length of K drafts at an evaluation; ``kind``: ``greedy`` for greedy drafts."""
    own = look["arms"][arm]
    return float(sum(own[kind]) / sum(own["anchors"]))


def means(look: Mapping[str, Any], arm: str) -> dict[str, float]:
    """Return means over the places of an evaluation.

    They are the acceptance of a first draft, sampled and greedy, and the entropies of draft and target, nats.
    """
    records = look["arms"][arm]["records"]
    names = {"sampled": "overlap", "greedy": "target_only", "draft entropy": "draft_entropy", "entropy": "entropy_sum"}
    count = np.sum(records["cycles"])
    return {name: float(np.sum(records[column]) / count) for name, column in names.items()}


def slope(run: Run, arm: str, kind: str) -> float:
    """Return the tokens of accept length per nat of entropy, by least squares over the evaluations of a run."""
    entropies = [means(look, arm)["entropy"] for look in run.looks]
    return float(np.polyfit(entropies, [accept(look, arm, kind) for look in run.looks], 1)[0])


def split_by_entropy(run: Run, arm: str, kind: str) -> NDArray[np.float64]:
    """Return the terms of Eq. 16 at every evaluation [n, 2].

    They are the entropy part and the rest of the change of a first draft's acceptance. The slope is that over the
    completions of the first evaluation, under the first weights.
    """
    records = run.looks[0]["arms"][arm]["records"]
    cycles = np.array(records["cycles"])
    column = {"sampled": "overlap", "greedy": "target_only"}[kind]
    rates, entropies = (np.ravel(records[name]) / cycles for name in (column, "entropy_sum"))
    own = float(np.polyfit(entropies, rates, 1, w=np.sqrt(cycles))[0])
    found = [means(look, arm) for look in run.looks]
    by_entropy = own * (np.array([one["entropy"] for one in found]) - found[0]["entropy"])
    change = np.array([one[kind] for one in found]) - found[0][kind]
    return np.stack([by_entropy, change - by_entropy], 1)


def parts(run: Run, arm: str) -> tuple[float, float]:
    """Return entropy and mismatch parts of the change of overlap on the fixed texts, first to last evaluation."""
    before, after = (ProbeReading.from_row(look["arms"][arm]["fixed"]) for look in (run.looks[0], run.looks[-1]))
    found = direct(before, after, run.sweeps[arm].readings)
    return found.entropy.point, found.mismatch.point


def residual(run: Run, arm: str) -> float:
    """Return the rest that Eq. 16 leaves of the change of the first draft's acceptance, first to last evaluation.

    The change is that on the run's own completions.
    """
    rate, entropy = zip(*(_first(look, arm) for look in (run.looks[0], run.looks[-1])), strict=True)
    sweep = run.sweeps[arm]
    slope = temperature_slope(sweep.entropy, sweep.length, sweep.sums).value.point
    return (rate[1] - rate[0]) - slope * (entropy[1] - entropy[0])


def _first(look: Mapping[str, Any], arm: str) -> tuple[float, float]:
    """Return the acceptance of the first draft and the entropy of the target, nats."""
    records = look["arms"][arm]["records"]
    count = np.sum(records["cycles"])
    return float(np.sum(records["overlap"]) / count), float(np.sum(records["entropy_sum"]) / count)


def numbers(runs: Sequence[Run], planted: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Number]:
    """Return the numbers of the rules by name; ``planted``: rows of the confusion table by seed."""
    flat = [bool(told["flat"]) for run in runs for told in run.curves.values()]
    named = {"flat curves": _exactly(sum(flat) / len(flat))}
    for direction, bound, name in ((FALLING, max, "greatest"), (RISING, min, "least")):
        own = [run for run in runs if run.direction == direction]
        named[f"{name} entropy change, {direction}"] = _exactly(bound(moved(run, "policy/entropy") for run in own))
        named[f"least reward change, {direction}"] = _exactly(min(moved(run, "reward/mean") for run in own))
        split = [parts(run, MAIN) for run in own]
        named[f"direct mismatch, {direction}"] = over_seeds([mismatch for _, mismatch in split])
        named[f"residual mismatch, {direction}"] = over_seeds([residual(run, MAIN) for run in own])
        named[f"entropy part, {direction}"] = over_seeds([entropy for entropy, _ in split])
        sizes = [abs(entropy) - abs(mismatch) for entropy, mismatch in split]
        named[f"entropy part - mismatch part, {direction}"] = over_seeds(sizes)
        for arm in ARMS:
            named[f"end {arm}, {direction}"] = over_seeds([accept(run.looks[-1], arm) for run in own])
        for name, (arm, kind) in FIGURED.items():
            named[f"slope {name}, {direction}"] = over_seeds([slope(run, arm, kind) for run in own])
    for name, arm in UPDATED.items():
        named[f"{name} updates - frozen"] = of(_gain(runs, arm), len({run.seed for run in runs}))
    for truth in dict.fromkeys(case.truth for case in CASES):
        named[f"monitor right, {truth}"] = over_seeds([share_right(rows, truth) for rows in planted.values()])
    return named


def _exactly(value: float) -> Number:
    """Return a number of the runs themselves, without an interval.

    It says whether an arm did what its name says.
    """
    return Number(value=value, low=value, high=value)


def _gain(runs: Sequence[Run], arm: str) -> Interval:
    """Return the final accept length of an updated TV head minus that of the frozen one.

    It is averaged over directions, then over seeds.
    """
    seeds = sorted({run.seed for run in runs})
    gaps = [[accept(r.looks[-1], arm) - accept(r.looks[-1], "tv") for r in runs if r.seed == seed] for seed in seeds]
    return across_seeds([float(np.mean(gap)) for gap in gaps])


# ---- tables


def head_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the outcome of the heads' training before RL, once for all runs that share the same heads."""
    rows = [{"head": name, **told} for run in runs for name, told in run.curves.items()]
    return [row for place, row in enumerate(rows) if row not in rows[:place]]


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return reward, entropy and completion length at both ends of each run: whether the policy learns."""
    names = {"reward": "reward/mean", "entropy": "policy/entropy", "tokens": "response/length"}
    ends = {"first": slice(ENDS), "last": slice(-ENDS, None)}
    return [
        {
            "entropy is": run.direction, "seed": run.seed, "device": run.device,
            **{f"{short} {end}": float(np.mean([row[name] for row in run.metrics[part]]))
               for short, name in names.items() for end, part in ends.items()},
        }
        for run in runs
    ]  # fmt: skip


def arm_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the accept length of every arm at both ends."""
    rows = []
    for direction in dict.fromkeys(run.direction for run in runs):
        own = [run for run in runs if run.direction == direction]
        for arm in ARMS:
            first, last = ([accept(run.looks[end], arm) for run in own] for end in (0, -1))
            change = across_seeds(np.subtract(last, first))
            ends = {"first": across_seeds(first), "last": across_seeds(last), "change": change}
            rows.append({"entropy is": direction, "head": arm, **ends})
    return rows


def part_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return both parts of the change on fixed texts and the residual, for the frozen heads."""
    rows = []
    for direction in dict.fromkeys(run.direction for run in runs):
        own = [run for run in runs if run.direction == direction]
        for arm in FROZEN:
            entropy, mismatch = zip(*(parts(run, arm) for run in own), strict=True)
            left = across_seeds([residual(run, arm) for run in own])
            named = {"entropy part": across_seeds(entropy), "mismatch part": across_seeds(mismatch), "residual": left}
            rows.append({"entropy is": direction, "head": arm, **named})
    return rows
