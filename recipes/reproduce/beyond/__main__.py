"""``python -m recipes.reproduce.beyond``: five questions that the paper leaves open; README.md says what counts."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce.beyond import charts, cold
from recipes.reproduce.beyond.analysis import CORRECTED, PRINTED, TRUNCATED, Curves, Heads, facts, numbers
from recipes.reproduce.beyond.estimators import ESTIMATORS, bias, concatenated, estimate
from recipes.reproduce.beyond.heads import (
    COUNT,
    ENGINE,
    GRID,
    TOP_P,
    WATCHED,
    Job,
    equal_time,
    prepare_all,
    run,
    step_seconds,
)
from recipes.reproduce.cli import start
from recipes.reproduce.record import Started, begin, keep
from recipes.reproduce.study import HELD_OUT, SEEDS, Arm, everywhere, results_folder

HERE = results_folder(Path(__file__).parent)
STEPS = Arm(objective="", seed=0).steps


def main() -> None:
    """Sample, time, train, measure, judge, draw and write."""
    started = begin("beyond")
    everywhere(prepare_all, SEEDS, "text")
    seconds = step_seconds((PRINTED, CORRECTED))
    fair = equal_time(seconds, STEPS)
    jobs: list[Job] = [(name, s, STEPS) for s in SEEDS for name in (*WATCHED, CORRECTED, TRUNCATED)]
    jobs += [(n, s, k) for n, k in zip((PRINTED, CORRECTED), fair, strict=True) for s in SEEDS if k != STEPS]
    trained = dict(zip(jobs, everywhere(run, jobs, "heads"), strict=True))
    heads = {(name, seed): f for (name, seed, steps), f in trained.items() if steps == STEPS}
    timed = {(n, s): trained[n, s, k] for n, k in zip((PRINTED, CORRECTED), fair, strict=True) for s in SEEDS}
    ways = [(way, seed) for seed in SEEDS for way in cold.WAYS]
    curves = dict(zip(ways, everywhere(cold.run, ways, "cold starts"), strict=True))
    write(heads, timed, curves, seconds, fair, started)


def write(
    heads: Heads, timed: Heads, curves: Curves, seconds: tuple[float, float], fair: tuple[int, int], started: Started
) -> None:
    """Judge, draw and store the results."""
    pooled = {name: concatenated([e for s in SEEDS if (e := heads[name, s].estimates)]) for name in WATCHED}
    estimates = {(name, e): estimate(e, pooled[name]) for name in WATCHED for e in ESTIMATORS}
    biases = {(name, e): bias(e, pooled[name]) for name in WATCHED for e in ESTIMATORS if e != "counts"}
    tables = {
        "Estimates of E[A], accepted drafts a cycle": estimator_table(estimates, biases),
        "The corrected end-to-end loss": corrected_table(heads, timed, seconds, fair),
        "Draft temperature: accept length": temperature_table(heads),
        f"Rollouts with top_p = {TOP_P}: accept length": truncation_table(heads),
        "From a fresh head: accept length by training steps": cold_table(curves),
    }
    names = [name for name in ESTIMATORS if name != "counts"]
    figures = {
        "estimators.svg": charts.biases(biases, names, HERE / "figures" / "estimators.svg"),
        "draft_temperature.svg": charts.draft_temperature(heads, HERE / "figures" / "draft_temperature.svg"),
        "cold_start.svg": charts.cold_start(curves, HERE / "figures" / "cold_start.svg"),
    }
    plan = {**asdict(Arm(objective="", seed=0)), "prompts": COUNT, "probed": HELD_OUT, "seeds": SEEDS}
    plan |= {"seconds_per_step": seconds, "steps_at_equal_time": fair, "cold_steps": cold.STEPS}
    by_name = numbers(heads, timed, curves, biases)
    keep(HERE, started, by_name, tables, figures, plan, facts(heads, seconds, fair))


def estimator_table(
    estimates: Mapping[tuple[str, str], Interval], biases: Mapping[tuple[str, str], Interval]
) -> list[dict[str, Any]]:
    """Return the estimates of E[A] and their differences from the counts, one row per head and estimator."""
    return [
        {"head": name, "estimate": e, "E[A]": estimates[name, e], "minus counts": biases.get((name, e), "")}
        for name in WATCHED
        for e in ESTIMATORS
    ]


def corrected_table(
    heads: Heads, timed: Heads, seconds: tuple[float, float], fair: tuple[int, int]
) -> list[dict[str, Any]]:
    """Return both losses at equal steps and at equal time."""
    rows = []
    for name, cost, steps in zip((PRINTED, CORRECTED), seconds, fair, strict=True):
        for label, source, count in (("steps", heads, STEPS), ("time", timed, steps)):
            values = across_seeds([source[name, s].accept_length for s in SEEDS])
            overlaps = across_seeds([source[name, s].overlap for s in SEEDS])
            rows.append({"loss": name, "equal": label, "steps": count, "seconds a step": cost})
            rows[-1] |= {"accept length": values, "overlap 1": overlaps}
    return rows


def temperature_table(heads: Heads) -> list[dict[str, Any]]:
    """Return the accept length by draft temperature: on text, and as counted by the engine."""

    def cell(name: str, t: float, of: str) -> Any:
        values = [getattr(heads[name, s], of) for s in SEEDS]
        return across_seeds([v[t] for v in values]) if t in values[0] else ""

    labels = {"on_text": "on text", "engine": "counted"}
    return [
        {"draft temperature": t} | {f"{name}, {labels[of]}": cell(name, t, of) for name in WATCHED for of in labels}
        for t in sorted({*GRID, *ENGINE})
    ]


def truncation_table(heads: Heads) -> list[dict[str, Any]]:
    """Return the accept lengths of both heads when rollouts truncate the distribution."""
    names = {PRINTED: "full distribution", TRUNCATED: "truncated distribution"}
    return [
        {"trained on": label}
        | {how: across_seeds([heads[n, s].truncated[how] for s in SEEDS]) for how in heads[n, SEEDS[0]].truncated}
        | {"rollouts with the full distribution, on text": across_seeds([heads[n, s].accept_length for s in SEEDS])}
        for n, label in names.items()
    ]


def cold_table(curves: Curves) -> list[dict[str, Any]]:
    """Return the learning curves as numbers, one row per way of training."""
    return [
        {"loss": way} | {str(k): across_seeds([curves[way, s][k] for s in SEEDS]) for k in curves[way, SEEDS[0]]}
        for way in cold.WAYS
    ]


if __name__ == "__main__":
    start(main, __doc__)
