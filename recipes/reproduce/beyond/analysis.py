"""Numbers that the rules of findings.py test, and facts that their evidence quotes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce.beyond import cold
from recipes.reproduce.beyond.heads import ENGINE, GRID, WATCHED, HeadResult
from recipes.reproduce.measured import Number, of, over_seeds
from recipes.reproduce.study import SEEDS

PRINTED, CORRECTED, TRUNCATED = "e2e_tv", "e2e_tv_corrected", "e2e_tv on top_p"
Heads = Mapping[tuple[str, int], HeadResult]
Curves = Mapping[tuple[str, int], cold.Curve]
Biases = Mapping[tuple[str, str], Interval]  # (head, estimator) -> estimate minus counts


def numbers(heads: Heads, timed: Heads, curves: Curves, biases: Biases) -> dict[str, Number]:
    """Return all numbers by name."""
    by_name = {f"{head}, {estimator}": of(bias) for (head, estimator), bias in biases.items()}
    for label, source in (("steps", heads), ("time", timed)):
        pairs = [(source[PRINTED, s].accept_length, source[CORRECTED, s].accept_length) for s in SEEDS]
        by_name[f"printed, {label}"] = over_seeds([printed for printed, _ in pairs])
        by_name[f"corrected, {label}"] = over_seeds([corrected for _, corrected in pairs])
        by_name[f"corrected - printed, {label}"] = over_seeds([corrected - printed for printed, corrected in pairs])
    for name in WATCHED:
        by_name |= inside(heads, name)
    for how, label in (("engine", "counted"), ("text", "text")):
        pairs = [(heads[PRINTED, s].truncated[how], heads[TRUNCATED, s].truncated[how]) for s in SEEDS]
        by_name[f"full, {label}"] = over_seeds([full for full, _ in pairs])
        by_name[f"truncated, {label}"] = over_seeds([truncated for _, truncated in pairs])
        by_name[f"truncated - full, {label}"] = over_seeds([truncated - full for full, truncated in pairs])
    return by_name | cold_starts(curves)


def inside(heads: Heads, name: str) -> dict[str, Number]:
    """Return the numbers on whether the best draft temperature lies between target-only (0) and full sampling (1)."""
    on_text = np.array([[heads[name, s].on_text[t] for t in GRID] for s in SEEDS])
    counted = np.array([[heads[name, s].engine[t] for t in ENGINE] for s in SEEDS])
    at = {"0.0": 0.0, "best": best(heads, name), "1.0": 1.0}
    by_name = {f"{name}, at {label}": over_seeds(on_text[:, GRID.index(t)]) for label, t in at.items()}
    by_name[f"{name}, inside gain"] = of(inside_gain(GRID, on_text), len(SEEDS))
    by_name[f"{name}, inside gain counted"] = of(inside_gain(ENGINE, counted), len(SEEDS))
    return by_name


def inside_gain(temperatures: ArrayLike, lengths: ArrayLike) -> Interval:
    """Return the gain of the best draft temperature strictly between 0 and 1 over the better end, over seeds.

    ``lengths`` [seeds, temperatures]. The temperature is chosen on the other seeds and judged on the one left out,
    because a maximum of noise gains where it is chosen. The better end is chosen on the judged seed itself, which errs
    against the claim.
    """
    table, grid = np.asarray(lengths, float), np.asarray(temperatures, float)
    inner, ends = np.flatnonzero((grid > 0) & (grid < 1)), np.flatnonzero((grid == 0) | (grid == 1))
    gains = []
    for seed in range(len(table)):
        rest = np.delete(table, seed, 0).mean(0)
        chosen = inner[rest[inner].argmax()]
        gains.append(table[seed, chosen] - table[seed, ends].max())
    return across_seeds(gains)


def best(heads: Heads, name: str) -> float:
    """Return the draft temperature with the longest accept length on text."""
    return GRID[int(np.mean([[heads[name, s].on_text[t] for t in GRID] for s in SEEDS], 0).argmax())]


def cold_starts(curves: Curves) -> dict[str, Number]:
    """Return the numbers on training from a fresh head: accept lengths at the end and over the whole curve."""

    def whole(way: str, seed: int) -> float:
        return float(np.mean([value for step, value in curves[way, seed].items() if step]))

    def end(way: str, seed: int) -> float:
        return curves[way, seed][max(curves[way, seed])]

    by_name = {f"cold: end {way}": over_seeds([end(way, s) for s in SEEDS]) for way in cold.WAYS}
    by_name["cold: nla - tv"] = over_seeds([whole("nla", s) - whole("tv", s) for s in SEEDS])
    by_name["cold: ce - tv"] = over_seeds([whole("ce", s) - whole("tv", s) for s in SEEDS])
    by_name["cold: ce_then_tv - tv"] = over_seeds([end("ce_then_tv", s) - end("tv", s) for s in SEEDS])
    return by_name


def facts(heads: Heads, seconds: tuple[float, float], fair: tuple[int, int]) -> dict[str, Any]:
    """Return the relative cost of the corrected loss, the steps at equal time, and the best temperatures."""
    by_name: dict[str, Any] = {"cost": f"{seconds[1] / seconds[0]:.2f}"}
    by_name |= {"printed steps": fair[0], "corrected steps": fair[1]}
    return by_name | {f"{name}, best": best(heads, name) for name in WATCHED}
