"""Analysis of the runs: slopes of acceptance on entropy, drops, the direct mismatch, and online updates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bebop.metrics.intervals import Interval, across_seeds
from bebop.monitor.probe_set import ProbeReading, direct
from recipes.reproduce.drift.training import (
    ANSWERS,
    ARMS,
    DIRECTIONS,
    GROUPS,
    LEARNING_RATE,
    PROBED_ARMS,
    STEPS,
    Evaluation,
    Run,
    train,
)
from recipes.reproduce.figures import color, figure
from recipes.reproduce.measured import Number, of, over_seeds
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import SEEDS, everywhere, results_folder

HERE = results_folder(Path(__file__).parent)
ENDS = 3  # evaluations to average at the start and at the end
FROZEN = [name for name, (_, during) in ARMS.items() if during is None]


def main() -> None:
    """Run all jobs, judge, draw and write."""
    started = begin("drift")
    jobs = [(seed, direction) for seed in SEEDS for direction in DIRECTIONS]
    runs = everywhere(train, jobs, "drift")
    tables = {
        "Runs": [run_row(run) for run in runs],
        "Accept length at both ends": [ends_row(runs, d, arm, greedy) for d in DIRECTIONS for arm, greedy in series()],
        "Slope of accept length on entropy": [
            slope_row(runs, arm, greedy) for arm, greedy in series() if arm in FROZEN
        ],
        "Direct mismatch": [probe_set_row(runs, direction, arm) for direction in DIRECTIONS for arm in PROBED_ARMS],
    }
    draw(runs)
    figures = {
        "steps.svg": "Accept length over the steps of GRPO, entropy falling (left), rising (right); three seeds.",
        "entropy.svg": "Accept length against the policy's entropy, every look of every run: sampled drafts with four "
        "frozen heads (left), greedy drafts (right).",
        "updates.svg": "What updating the head during RL does: change against the frozen head of the same origin.",
    }
    plan = {"steps": STEPS, "groups": GROUPS, "answers": ANSWERS, "lr": LEARNING_RATE, "seeds": SEEDS}
    keep(HERE, started, numbers(runs), tables, figures, plan)


def series() -> list[tuple[str, bool]]:
    """Return pairs (arm, greedy): all arms with sampled drafts, then three with greedy ones."""
    return [*((arm, False) for arm in ARMS), ("hard_ce", True), ("ce", True), ("e2e_tv", True)]


def label(arm: str, greedy: bool) -> str:
    """Return the label of an arm in tables: TO is target-only, RS is rejection sampling."""
    return f"{'TO' if greedy else 'RS'} + {arm}"


def accept(evaluation: Evaluation, arm: str, greedy: bool) -> float:
    """Return the accept length of an arm at one evaluation."""
    totals, counts = (evaluation.greedy if greedy else evaluation.accept)[arm]
    return float(totals.sum() / counts.sum())


def ends(run: Run, arm: str, greedy: bool) -> tuple[float, float]:
    """Return the mean accept lengths over the first and over the last evaluations."""
    values = [accept(evaluation, arm, greedy) for evaluation in run.evaluations]
    count = min(ENDS, len(values) // 2)
    return float(np.mean(values[:count])), float(np.mean(values[-count:]))


def change(runs: Sequence[Run], direction: str, arm: str, greedy: bool = False) -> Interval:
    """Return the last minus the first accept length, as a mean over seeds."""
    pairs = [ends(run, arm, greedy) for run in runs if run.direction == direction]
    return across_seeds([last - first for first, last in pairs])


def slopes(runs: Sequence[Run], arm: str, greedy: bool) -> list[float]:
    """Return the slope per seed: least squares of accept length on entropy, over the evaluations of both its runs."""
    slopes = []
    for seed in SEEDS:
        evaluations = [evaluation for run in runs if run.seed == seed for evaluation in run.evaluations]
        slopes.append(
            float(np.polyfit([k.entropy for k in evaluations], [accept(k, arm, greedy) for k in evaluations], 1)[0])
        )
    return slopes


def mismatch(run: Run, arm: str) -> tuple[float, float, float]:
    """Return the change of the probe set's mean overlap at step 1, and its entropy and mismatch parts."""
    before, after, *sweep = (
        ProbeReading(overlap=p.numbers["overlap"][:, 0], entropy=p.numbers["target_entropy"][:, 0], unit=p.row)
        for p in (run.first[arm], run.last[arm], *run.tempered[arm])
    )
    parts = direct(before, after, sweep)
    return parts.change.point, parts.entropy.point, parts.mismatch.point


def numbers(runs: Sequence[Run]) -> dict[str, Number]:
    """Return the numbers that the rules test or quote."""
    by_name = {f"slope {label(arm, greedy)}": over_seeds(slopes(runs, arm, greedy)) for arm, greedy in series()}
    by_name["slope e2e_tv - ce"] = over_seeds(np.subtract(slopes(runs, "e2e_tv", False), slopes(runs, "ce", False)))
    for direction in DIRECTIONS:
        own = [run for run in runs if run.direction == direction]
        moved = [run_row(run)["entropy last"] - run_row(run)["entropy first"] for run in own]
        by_name[f"entropy change, {direction}"] = over_seeds(moved)
        by_name[f"mismatch, {direction}"] = over_seeds([mismatch(run, "e2e_tv")[2] for run in own])
        for arm in ARMS:
            last = [ends(run, arm, False)[1] for run in own]
            by_name[f"end {label(arm, False)}, {direction}"] = over_seeds(last)
    by_name["ce updates - frozen"] = of(updates(runs, "tv, ce updates", "tv"), len(SEEDS))
    by_name["tv updates - frozen"] = of(updates(runs, "tv, tv updates", "tv"), len(SEEDS))
    return by_name


def updates(runs: Sequence[Run], arm: str, frozen: str) -> Interval:
    """Return the final accept length with updates minus that of the frozen head: mean over directions, then seeds."""
    return across_seeds(
        [
            np.mean([ends(r, arm, False)[1] - ends(r, frozen, False)[1] for r in runs if r.seed == seed])
            for seed in SEEDS
        ]
    )


# ---- tables


def run_row(run: Run) -> dict[str, Any]:
    """Return the row of a run: reward and entropy at its start and end."""
    count = min(ENDS, len(run.evaluations) // 2)
    first, last = run.evaluations[:count], run.evaluations[-count:]
    row: dict[str, Any] = {"seed": run.seed, "entropy": run.direction}
    for name in ("reward", "entropy"):
        row |= {f"{name} first": float(np.mean([getattr(k, name) for k in first]))}
        row |= {f"{name} last": float(np.mean([getattr(k, name) for k in last]))}
    return row


def ends_row(runs: Sequence[Run], direction: str, arm: str, greedy: bool) -> dict[str, Any]:
    """Return the row of an arm: its accept length at both ends of the runs of a direction."""
    pairs = [ends(run, arm, greedy) for run in runs if run.direction == direction]
    first, last = (across_seeds(values) for values in zip(*pairs, strict=True))
    moved = change(runs, direction, arm, greedy)
    return {"entropy": direction, "arm": label(arm, greedy), "first": first, "last": last, "change": moved}


def slope_row(runs: Sequence[Run], arm: str, greedy: bool) -> dict[str, Any]:
    """Return the row of an arm: its slope in tokens per nat."""
    return {"arm": label(arm, greedy), "slope": across_seeds(slopes(runs, arm, greedy))}


def probe_set_row(runs: Sequence[Run], direction: str, arm: str) -> dict[str, Any]:
    """Return the row of a head: the parts of its change of overlap on the fixed contexts."""
    parts = [mismatch(run, arm) for run in runs if run.direction == direction]
    named = zip(("change", "entropy part", "mismatch part"), zip(*parts, strict=True), strict=True)
    return {"entropy": direction, "head": arm} | {name: across_seeds(values) for name, values in named}


# ---- figures


def mean_curve(runs: Sequence[Run], direction: str, arm: str, greedy: bool) -> list[float]:
    """Return the accept length at each evaluation, as a mean over seeds."""
    rows = [
        [accept(evaluation, arm, greedy) for evaluation in run.evaluations]
        for run in runs
        if run.direction == direction
    ]
    return [float(x) for x in np.mean(rows, 0)]


def draw(runs: Sequence[Run]) -> None:
    """Draw the three figures."""
    steps = [evaluation.step for evaluation in runs[0].evaluations]
    with figure(HERE / "figures" / "steps.svg", 2, 5.0, sharey=True) as panels:
        for axes, direction in zip(panels, DIRECTIONS, strict=True):
            for arm in FROZEN:
                axes.plot(steps, mean_curve(runs, direction, arm, False), color=color(arm), label=label(arm, False))
            greedy = mean_curve(runs, direction, "ce", True)
            axes.plot(steps, greedy, color=color("ce"), linestyle="--", label=label("ce", True))
            axes.set(title=f"{direction} entropy", xlabel="step")
        panels[0].set(ylabel="accept length (accepted + 1)")
        panels[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    with figure(HERE / "figures" / "entropy.svg", 2, 5.0, sharey=True) as panels:
        for axes, greedy in zip(panels, (False, True), strict=True):
            for arm in ("hard_ce", "ce", "e2e_tv") if greedy else FROZEN:
                evaluations = [evaluation for run in runs for evaluation in run.evaluations]
                x, y = [k.entropy for k in evaluations], [accept(k, arm, greedy) for k in evaluations]
                axes.scatter(x, y, s=8, color=color(arm), alpha=0.5, linewidths=0)
                fit = np.polyfit(x, y, 1)
                ends_x = np.array([min(x), max(x)])
                axes.plot(
                    ends_x,
                    np.polyval(fit, ends_x),
                    color=color(arm),
                    label=f"{label(arm, greedy)}: {fit[0]:+.2f} per nat",
                )
            axes.set(xlabel="entropy of the policy, nats")
            axes.legend()
        panels[0].set(ylabel="accept length (accepted + 1)")
    with figure(HERE / "figures" / "updates.svg", 2, 5.0, sharey=True) as panels:
        for axes, direction in zip(panels, DIRECTIONS, strict=True):
            for arm, (origin, during) in ARMS.items():
                if during is None:
                    continue
                gap = np.subtract(mean_curve(runs, direction, arm, False), mean_curve(runs, direction, origin, False))
                axes.plot(steps, gap, color=color(arm), label=arm)
            axes.axhline(0, color="#52606d", linewidth=0.8)
            axes.set(title=f"{direction} entropy", xlabel="step")
        panels[0].set(ylabel="accept length minus frozen")
        panels[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
