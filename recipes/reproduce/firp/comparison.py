"""Numbers of the rules and tables, computed from the measurements of each arm and seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from bebop.metrics.intervals import Array, Interval, across_seeds, ratio, ratio_difference
from recipes.reproduce.firp.arms import ARMS, FIRST, FIRST_SWEEP, LAYERS, SECOND, SECOND_SWEEP, STEPS
from recipes.reproduce.firp.measures import CHAIN, NODES, TOP, Measured, cosines, measured
from recipes.reproduce.firp.texts import Seed
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.study import SEEDS, TASKS

MEDUSA = ("Medusa", "Medusa, KL")
PAIRS = (("FIRP", "early exits"), ("FIRP", "FIRP, masked"), ("FIRP, TV", "FIRP"), ("FIRP, e2e TV", "FIRP"),
         ("FIRP, e2e TV", "FIRP, TV"))  # fmt: skip
MEASURED = {**ARMS, **FIRST_SWEEP, **SECOND_SWEEP}
MIDDLE, HIGH = 5, 11  # layers of step 1 whose accuracy is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All measurements of a seed."""

    arms: Mapping[str, Measured]  # by name, those of the sweeps too
    cosines: Mapping[str, Array]  # see ``measures.cosines``


def jobs() -> list[tuple[int, str]]:
    """Return seed and arm of all measurements.

    They go arm by arm, because later arms continue from matrices of earlier ones of their seed.
    """
    return [(seed, name) for name in MEASURED for seed in SEEDS]


def measure_one(job: tuple[int, str]) -> None:
    """Train and measure an arm, unless its result is stored."""
    seed, name = job
    measured(texts_of(seed), MEASURED[name])


@lru_cache(maxsize=len(SEEDS))
def texts_of(seed: int) -> Seed:
    """Return the texts of a seed, which a process reads once for all its jobs."""
    return Seed(seed)


def run(seed: int) -> Found:
    """Return all measurements of a seed; missing ones are made now."""
    own = Seed(seed)
    arms = {name: measured(own, arm) for name, arm in MEASURED.items()}
    return Found(arms=arms, cosines=cosines(own, ARMS["FIRP"]))


def rule_numbers(results: Sequence[Found]) -> dict[str, Number]:
    """Return the numbers that the rules test or quote, over seeds."""
    values: dict[str, list[float]] = {}

    def put(name: str, value: Callable[[Found], float]) -> None:
        values[name] = [value(one) for one in results]

    for arm in ARMS:
        for nodes in (CHAIN, *NODES):
            put(f"length {nodes}, {arm}", lambda one, a=arm, n=nodes: one.arms[a].length(n))  # type: ignore[misc]
        for step in range(1, STEPS + 1):
            put(f"accuracy {step}, {arm}", lambda one, a=arm, k=step: one.arms[a].accuracy(k))  # type: ignore[misc]
        put(f"chain, {arm}", lambda one, a=arm: one.arms[a].chain)  # type: ignore[misc]
    kinds = [f"length {nodes}" for nodes in (CHAIN, *NODES)] + [f"accuracy {k + 1}" for k in range(STEPS)] + ["chain"]
    for kind in kinds:
        best = np.maximum(*(values[f"{kind}, {arm}"] for arm in MEDUSA))
        values[f"{kind}, best Medusa"] = best.tolist()
        for a, b in (*PAIRS, ("FIRP", "best Medusa")):
            values[f"{kind}, {a} - {b}"] = np.subtract(values[f"{kind}, {a}"], values[f"{kind}, {b}"]).tolist()
    values |= sweep_numbers(results) | cosine_numbers(results)
    gains = {arm: np.array(values[f"length 16, {arm}"]) - 1 for arm in ("FIRP", "best Medusa")}
    sizes = [results[0].arms[arm].parameters for arm in ("FIRP", "Medusa")]
    values["per parameter, 16"] = (gains["FIRP"] / sizes[0] / (gains["best Medusa"] / sizes[1])).tolist()
    return {name: over_seeds(column) for name, column in values.items()}


def sweep_numbers(results: Sequence[Found]) -> dict[str, list[float]]:
    """Return the numbers on the layers at which steps 1 and 2 enter."""
    first = {t: np.array([one.arms[f"step 1 at {t}"].accuracy(1) for one in results]) for t in FIRST}
    second = {t: np.array([one.arms[f"step 2 at {t}"].accuracy(2) for one in results]) for t in SECOND}
    low = np.array([first[t] for t in FIRST if t <= MIDDLE])
    spread, fall = low.max(0) - low.min(0), first[MIDDLE] - first[HIGH]
    found = {
        "spread, step 1": spread,
        "fall, step 1": fall,
        "spread over fall, step 1": spread / fall,
        "fall, step 2": second[6] - second[10],
        "rise, step 2": second[6] - second[5],
    }
    found |= {f"accuracy, step 1 at {t}": column for t, column in first.items()}
    found |= {f"accuracy, step 2 at {t}": column for t, column in second.items()}
    return {name: column.tolist() for name, column in found.items()}


def cosine_numbers(results: Sequence[Found]) -> dict[str, list[float]]:
    """Return the growth of cosines from the layer where a step enters to the last layer."""
    found = {}
    for k, layer in enumerate(LAYERS):
        for name, kind in (("cosine", "own"), ("centred", "centred")):
            grown = [one.cosines[kind][k, -1] - one.cosines[kind][k, layer] for one in results]
            found[f"{name} growth {k + 1}"] = [float(x) for x in grown]
        gaps = [one.cosines["own"][k] - one.cosines["other"][k] for one in results]
        found[f"own growth {k + 1}"] = [float(gap[-1] - gap[layer]) for gap in gaps]
    return found


def tables(results: Sequence[Found]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the study."""
    return {
        "Tokens a cycle at temperature 0, by nodes (over seeds)": [length_line(results, arm) for arm in ARMS],
        "The same over prompts of all seeds, and by task with 16 nodes": [task_line(results, arm) for arm in ARMS],
        "FIRP less others, over prompts of all seeds": [gap_line(results, arm) for arm in (*MEDUSA, "early exits")],
        "Accuracy on greedy answers": [accuracy_line(results, arm) for arm in ARMS],
        "Sampled answers, temperature 1": [sampled_line(results, arm) for arm in ARMS],
        "Layer at which a step enters": [layer_line(results, name) for name in (*FIRST_SWEEP, *SECOND_SWEEP)],
        "Cosine with the real state": [cosine_line(results, k) for k in range(STEPS)],
    }


def over(results: Sequence[Found], arm: str, value: Callable[[Measured], float]) -> Interval:
    """Return the mean of a number of an arm over seeds, with its interval."""
    return across_seeds([value(one.arms[arm]) for one in results])


def length_line(results: Sequence[Found], arm: str) -> dict[str, Any]:
    """Return the row of an arm: tokens per cycle by number of nodes."""
    line: dict[str, Any] = {"arm": arm, "parameters": results[0].arms[arm].parameters}
    line["chain of 3"] = over(results, arm, lambda m: m.length(CHAIN))
    return line | {f"{n} nodes": over(results, arm, lambda m, n=n: m.length(n)) for n in NODES}  # type: ignore[misc]


def pooled(results: Sequence[Found], arm: str, nodes: int, task: str = "") -> tuple[Array, Array]:
    """Return tokens and cycles of all prompts of all seeds, or of those of a task."""
    parts = [one.arms[arm] for one in results]
    kept = [np.array([task in ("", t) for t in part.tasks]) for part in parts]
    tokens = np.concatenate([part.tokens[k] for part, k in zip(parts, kept, strict=True)])
    return tokens, np.concatenate([part.cycles[nodes][k] for part, k in zip(parts, kept, strict=True)])


def task_line(results: Sequence[Found], arm: str) -> dict[str, Any]:
    """Return the row of an arm: tokens per cycle, resampled by prompt."""
    line: dict[str, Any] = {"arm": arm}
    line |= {f"{n} nodes": ratio(*pooled(results, arm, n)) for n in NODES}
    return line | {task: ratio(*pooled(results, arm, NODES[0], task)) for task in TASKS}


def gap_line(results: Sequence[Found], arm: str) -> dict[str, Any]:
    """Return the row of an arm: tokens per cycle of FIRP minus its own, on the same prompts."""
    pairs = {n: (pooled(results, "FIRP", n), pooled(results, arm, n)) for n in NODES}
    return {"FIRP less": arm, **{f"{n} nodes": ratio_difference(*pair) for n, pair in pairs.items()}}


def accuracy_line(results: Sequence[Found], arm: str) -> dict[str, Any]:
    """Return the row of an arm: top-1 and top-5 accuracy by step."""
    steps = range(1, STEPS + 1)
    cells = {
        f"step {k}, top {top}": over(results, arm, lambda m, k=k, top=top: m.accuracy(k, top))  # type: ignore[misc]
        for top in TOP
        for k in steps
    }
    return {"arm": arm, **cells}


def sampled_line(results: Sequence[Found], arm: str) -> dict[str, Any]:
    """Return the row of an arm: overlap and KL by step, and tokens per cycle of a chain."""
    line: dict[str, Any] = {"arm": arm, "tokens a cycle, chain of 3": over(results, arm, lambda m: m.chain)}
    for name in ("overlap", "divergence"):
        for k in range(STEPS):
            line[f"{'KL' if name == 'divergence' else name} {k + 1}"] = over(
                results, arm, lambda m, n=name, k=k: float(getattr(m, n)[:, k].sum() / m.anchors.sum())  # type: ignore[misc]
            )  # fmt: skip
    return line


def layer_line(results: Sequence[Found], name: str) -> dict[str, Any]:
    """Return the row of a sweep's arm: accuracy and overlap of the step whose layer varies."""
    step = int(name.split()[1])
    return {
        "arm": name,
        "top 1": over(results, name, lambda m: m.accuracy(step)),
        "top 5": over(results, name, lambda m: m.accuracy(step, 5)),
        "overlap": over(results, name, lambda m: float(m.overlap[:, step - 1].sum() / m.anchors.sum())),
    }


def cosine_line(results: Sequence[Found], k: int) -> dict[str, Any]:
    """Return the row of step k + 1: cosines at the layer where it enters and after the last layer."""
    line: dict[str, Any] = {"step": k + 1}
    for kind in ("own", "other", "centred"):
        for name, at in (("enters", LAYERS[k]), ("last", -1)):
            line[f"{kind}, {name}"] = across_seeds([one.cosines[kind][k, at] for one in results])
    return line
