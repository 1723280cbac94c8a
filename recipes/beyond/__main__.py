"""``python -m recipes.beyond``: five questions that the paper leaves open; README.md says what counts."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bebop.intervals import Interval, across_seeds
from recipes.beyond import charts, cold
from recipes.beyond.estimators import ESTIMATORS, bias, estimate, together
from recipes.beyond.heads import (
    COUNT,
    ENGINE,
    GRID,
    PROBED,
    TOP_P,
    WATCHED,
    Found,
    Job,
    equal_time,
    prepare,
    run,
    step_seconds,
)
from recipes.beyond.judgement import difference, estimators, inside_gain
from recipes.common.cli import start
from recipes.common.record import Finding, keep
from recipes.common.study import SEEDS, Arm, everywhere, results_folder

HERE = results_folder(Path(__file__).parent)
STEPS = Arm(objective="", seed=0).steps
PRINTED, CORRECTED, TRUNCATED = "e2e_tv", "e2e_tv_corrected", "e2e_tv on top_p"
Heads = Mapping[tuple[str, int], Found]
Curves = Mapping[tuple[str, int], cold.Curve]


def main() -> None:
    """Sample, time, train, measure, judge, draw, write."""
    began = time.time()
    everywhere(prepare, SEEDS, "text")
    seconds = step_seconds((PRINTED, CORRECTED))
    fair = equal_time(seconds, STEPS)
    jobs: list[Job] = [(name, s, STEPS) for s in SEEDS for name in (*WATCHED, CORRECTED, TRUNCATED)]
    jobs += [(n, s, k) for n, k in zip((PRINTED, CORRECTED), fair, strict=True) for s in SEEDS if k != STEPS]
    found = dict(zip(jobs, everywhere(run, jobs, "heads"), strict=True))
    heads = {(name, seed): f for (name, seed, steps), f in found.items() if steps == STEPS}
    timed = {(n, s): found[n, s, k] for n, k in zip((PRINTED, CORRECTED), fair, strict=True) for s in SEEDS}
    ways = [(way, seed) for seed in SEEDS for way in cold.WAYS]
    curves = dict(zip(ways, everywhere(cold.run, ways, "cold starts"), strict=True))
    write(heads, timed, curves, seconds, fair, began)


def write(
    heads: Heads, timed: Heads, curves: Curves, seconds: tuple[float, float], fair: tuple[int, int], began: float
) -> None:
    """Judge, draw, keep."""
    pooled = {name: together([e for s in SEEDS if (e := heads[name, s].estimates)]) for name in WATCHED}
    estimates = {(name, e): estimate(e, pooled[name]) for name in WATCHED for e in ESTIMATORS}
    biases = {(name, e): bias(e, pooled[name]) for name in WATCHED for e in ESTIMATORS if e != "counts"}
    findings = [
        *estimators(biases, WATCHED),
        *corrected(heads, timed, seconds, fair),
        *(inside(heads, name) for name in WATCHED),
        truncation(heads),
        *cold_starts(curves),
    ]
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
    plan = {**asdict(Arm(objective="", seed=0)), "prompts": COUNT, "probed": PROBED, "seeds": SEEDS}
    plan |= {"seconds_per_step": seconds, "steps_at_equal_time": fair, "cold_steps": cold.STEPS}
    keep(HERE, findings, tables, figures, time.time() - began, plan)


def gain(a: Heads, b: Heads, first: str, second: str) -> Interval:
    """Accept length on text of one head minus another's, paired by seed."""
    return across_seeds([a[first, s].accept_length - b[second, s].accept_length for s in SEEDS])


def corrected(heads: Heads, timed: Heads, seconds: tuple[float, float], fair: tuple[int, int]) -> list[Finding]:
    """The corrected loss against the printed one."""
    cost = f" A step takes {seconds[1] / seconds[0]:.2f} times as long: {fair[1]} steps against {fair[0]}."
    return [
        difference(
            "The corrected end-to-end loss trains a better head than the printed one at equal steps.",
            gain(heads, heads, CORRECTED, PRINTED),
        ),
        difference(
            "It does so at equal compute time.",
            gain(timed, timed, CORRECTED, PRINTED),
            more=cost,
        ),
    ]


def inside(heads: Heads, name: str) -> Finding:
    """Whether the best draft temperature lies between target-only and full sampling."""
    on_text = np.array([[heads[name, s].on_text[t] for t in GRID] for s in SEEDS])
    counted = np.array([[heads[name, s].engine[t] for t in ENGINE] for s in SEEDS])
    best = GRID[int(on_text.mean(0).argmax())]
    more = f" Best on text: {best}; counted by the engine {inside_gain(ENGINE, counted)}."
    return difference(
        f"A draft temperature between 0 (target-only) and 1 beats both, head {name}.",
        inside_gain(GRID, on_text),
        more=more,
    )


def truncation(heads: Heads) -> Finding:
    """Training on the truncated law, when rollouts truncate."""
    engine, text = (
        across_seeds([heads[TRUNCATED, s].truncated[how] - heads[PRINTED, s].truncated[how] for s in SEEDS])
        for how in ("engine", "text")
    )
    return difference(
        f"When rollouts use top_p = {TOP_P}, a head trained on that law beats one trained on the full law.",
        engine,
        more=f" On text: {text}.",
    )


def cold_starts(curves: Curves) -> list[Finding]:
    """TV from a head that has learned nothing."""

    def whole(way: str, seed: int) -> float:
        return float(np.mean([value for step, value in curves[way, seed].items() if step]))

    def end(way: str, seed: int) -> float:
        return curves[way, seed][max(curves[way, seed])]

    slower = across_seeds([whole("nla", s) - whole("tv", s) for s in SEEDS])
    soft = across_seeds([whole("ce", s) - whole("tv", s) for s in SEEDS])
    warm = across_seeds([end("ce_then_tv", s) - end("tv", s) for s in SEEDS])
    return [
        difference(
            "From a fresh head, TV is slower than -log(overlap) (nla).", slower, "tokens, mean over the curve",
            f" For ce against tv: {soft}.",
        ),
        difference("From a fresh head, cross-entropy first and then TV ends higher than TV throughout.", warm),
    ]  # fmt: skip


def estimator_table(
    estimates: Mapping[tuple[str, str], Interval], biases: Mapping[tuple[str, str], Interval]
) -> list[dict[str, Any]]:
    """Estimates, and how far they are from the counts."""
    return [
        {"head": name, "estimate": e, "E[A]": estimates[name, e], "minus counts": biases.get((name, e), "")}
        for name in WATCHED
        for e in ESTIMATORS
    ]


def corrected_table(
    heads: Heads, timed: Heads, seconds: tuple[float, float], fair: tuple[int, int]
) -> list[dict[str, Any]]:
    """Both losses at equal steps and at equal time."""
    rows = []
    for name, cost, steps in zip((PRINTED, CORRECTED), seconds, fair, strict=True):
        for label, source, count in (("steps", heads, STEPS), ("time", timed, steps)):
            values = across_seeds([source[name, s].accept_length for s in SEEDS])
            overlaps = across_seeds([source[name, s].overlap for s in SEEDS])
            rows.append({"loss": name, "equal": label, "steps": count, "seconds a step": cost})
            rows[-1] |= {"accept length": values, "overlap 1": overlaps}
    return rows


def temperature_table(heads: Heads) -> list[dict[str, Any]]:
    """Accept length over the draft's temperature: on text, and as counted."""

    def cell(name: str, t: float, of: str) -> Any:
        values = [getattr(heads[name, s], of) for s in SEEDS]
        return across_seeds([v[t] for v in values]) if t in values[0] else ""

    labels = {"on_text": "on text", "engine": "counted"}
    return [
        {"draft temperature": t} | {f"{name}, {labels[of]}": cell(name, t, of) for name in WATCHED for of in labels}
        for t in sorted({*GRID, *ENGINE})
    ]


def truncation_table(heads: Heads) -> list[dict[str, Any]]:
    """Both heads when rollouts truncate."""
    names = {PRINTED: "full law", TRUNCATED: "truncated law"}
    return [
        {"trained on": label}
        | {how: across_seeds([heads[n, s].truncated[how] for s in SEEDS]) for how in heads[n, SEEDS[0]].truncated}
        | {"rollouts with the full law, on text": across_seeds([heads[n, s].accept_length for s in SEEDS])}
        for n, label in names.items()
    ]


def cold_table(curves: Curves) -> list[dict[str, Any]]:
    """Curves as numbers."""
    return [
        {"loss": way} | {str(k): across_seeds([curves[way, s][k] for s in SEEDS]) for k in curves[way, SEEDS[0]]}
        for way in cold.WAYS
    ]


if __name__ == "__main__":
    start(main, __doc__)
