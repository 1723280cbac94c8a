"""Numbers of the rules and tables, computed from the measurements of the jobs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bebop.metrics.intervals import Interval, across_seeds, resampled
from bebop.systems.block.losses import CLOSE
from recipes.reproduce.blockpilot import marker
from recipes.reproduce.blockpilot.costs import SPENT, TIMED, Costs
from recipes.reproduce.blockpilot.decoding import Array
from recipes.reproduce.blockpilot.marker import Planted
from recipes.reproduce.blockpilot.protocol import (
    Compared,
    compare,
    described,
    local,
    noise_gain,
    tied,
    transfer,
)
from recipes.reproduce.blockpilot.sweeps import CANDIDATES, FULL, SIZES, Swept
from recipes.reproduce.measured import Number, of, over_seeds

SCORES = ("tau", "speed")
ARMS = ("fixed B", "best fixed", "per task", "majority", "random", "predictor", "shipped", "on validation", "permuted",
        "ema", "oracle")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All measurements of a seed."""

    seed: int
    swept: Swept
    best: int  # the size that is best for the training prompts
    timed: Costs
    planted: Planted
    twice: Array  # see ``sweeps.twice``
    compared: dict[str, Compared]  # score -> arms
    values: dict[str, Array]  # score -> [N, C] of the candidates


def found(
    seed: int, swept: Swept, best: int, timed: Costs, planted: Planted, twice: Array, curve: Sequence[float]
) -> Found:
    """Return the comparisons of a seed; ``curve``: seconds of a cycle of each size in ``TIMED``."""
    cycle = dict(zip(TIMED, curve, strict=True))
    seconds = np.array([cycle[size] for size in CANDIDATES])
    tau = swept.candidates().tau
    compared = {
        "tau": compare(swept, seed, None, CANDIDATES),
        "speed": compare(swept, seed, seconds, CANDIDATES),
    }
    # A cycle of EMA costs as much as the curve says for its size; sizes that were not timed are interpolated.
    known = np.array(sorted(cycle))
    spent = np.interp(swept.ema.drafted + 1, known, [cycle[size] for size in known])
    spent = np.where(swept.ema.drafted > 0, spent, 0).sum(1)
    compared["tau"].values["ema"] = swept.ema.tokens / swept.ema.cycles
    compared["speed"].values["ema"] = swept.ema.tokens / spent
    return Found(
        seed=seed, swept=swept, best=best, timed=timed, planted=planted, twice=twice, compared=compared,
        values={"tau": tau, "speed": tau / seconds},
    )  # fmt: skip


def relative(results: Sequence[Found], score: str, arm: str, base: str) -> Number:
    """Return the relative gain of an arm over another, over seeds."""
    pairs = [(one.compared[score][arm].mean(), one.compared[score][base].mean()) for one in results]
    return over_seeds([a / b - 1 for a, b in pairs])


def pooled_share(parts: Sequence[tuple[Array, Array, Array]]) -> Interval:
    """Return an arm's share of the oracle's gain, from (arm, fixed, oracle) of each seed.

    The prompts of all seeds are resampled together.
    """
    arm, fixed, oracle = (np.concatenate(column) for column in zip(*parts, strict=True))
    return resampled(lambda w: (w @ (arm - fixed)) / np.maximum(w @ (oracle - fixed), CLOSE), len(arm))


def share_of(results: Sequence[Found], score: str, arm: str) -> Interval:
    """Return an arm's share of the oracle's gain over the best fixed size."""
    tables = [one.compared[score] for one in results]
    return pooled_share([(c[arm], c["best fixed"], c["oracle"]) for c in tables])


def planted_share(results: Sequence[Found], arm: str) -> Interval:
    """Return an arm's share of the oracle's gain in real decoding with the planted marker."""
    return pooled_share([(p.decoded[arm], p.fixed, p.tau.max(1)) for p in (one.planted for one in results)])


def rule_numbers(results: Sequence[Found]) -> dict[str, Number]:
    """Return the numbers that the rules test or quote."""

    def seeds(value: Callable[[Found], float]) -> Number:
        return over_seeds([value(one) for one in results])

    def rate(one: Found, arm: str) -> float:
        return one.timed.arms[arm][0]

    numbers: dict[str, Number] = {}
    for arm in [*results[0].timed.arms][1:]:
        numbers[f"speedup, {arm}"] = seeds(lambda one, arm=arm: rate(one, arm) / rate(one, "plain"))  # type: ignore[misc]
        numbers[f"tau, {arm}"] = seeds(lambda one, arm=arm: one.timed.arms[arm][1])  # type: ignore[misc]
    numbers["block over bebop"] = seeds(lambda one: rate(one, "block") / rate(one, "bebop"))
    for score in SCORES:
        numbers[f"oracle gain, {score}"] = relative(results, score, "oracle", "best fixed")
        numbers[f"noise gain, {score}"] = seeds(
            lambda one, s=score: noise_gain(one.values[s], one.seed) / one.compared[s]["best fixed"].mean()  # type: ignore[misc]
        )
        names = {"share": "predictor", "permuted share": "permuted", "task share": "per task",
                 "validation share": "on validation", "shipped share": "shipped"}  # fmt: skip
        numbers |= {f"{name}, {score}": of(share_of(results, score, arm)) for name, arm in names.items()}
        numbers[f"ema over predictor, {score}"] = relative(results, score, "ema", "predictor")
        numbers[f"ema over fixed, {score}"] = relative(results, score, "ema", "best fixed")
    at = [SIZES.index(size) for size in CANDIDATES]
    halved = [transfer(*one.swept.halves[:, :, at]) for one in results]
    numbers["second half gain"], numbers["first half gain"] = (over_seeds([h[i] for h in halved]) for i in (0, 1))
    sampled = [transfer(*one.twice) for one in results]
    for i, name in enumerate(("transferred gain", "apparent gain", "label agreement")):
        numbers[name] = over_seeds([s[i] for s in sampled])
    numbers["planted accuracy"] = seeds(lambda one: marker.accuracy(one.planted))
    numbers["planted share"] = of(planted_share(results, "predictor"))
    numbers["planted permuted share"] = of(planted_share(results, "permuted"))
    numbers["overhead"] = seeds(lambda one: one.timed.prediction)
    numbers["local"] = seeds(lambda one: local(one.swept))
    return numbers


def tables(results: Sequence[Found]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the study."""
    return {
        "Ways to choose, held-out prompts": [arm_line(results, arm) for arm in ARMS],
        "Predictors": [arm_line(results, arm) for arm in predictors(results)],
        "Sizes": [size_line(results, i) for i in range(len(SIZES))],
        "Labels": [label_line(results, score) for score in SCORES],
        "One request at a time": [speed_line(results, arm) for arm in results[0].timed.arms],
        "Seconds of a cycle": [cost_line(results, i) for i in range(len(TIMED))],
        "Planted marker": [planted_line(results, i) for i in range(2)],
    }


def predictors(results: Sequence[Found]) -> list[str]:
    """Return the names of the predictor variants."""
    return [n for n in results[0].compared["tau"].values if n.endswith((" classify", " regress"))]


def arm_line(results: Sequence[Found], arm: str) -> dict[str, Any]:
    """Return the row of an arm: tokens per cycle and per second over seeds, and its shares of the oracle's gain."""
    line: dict[str, Any] = {"arm": arm}
    for score, unit in (("tau", "tokens a cycle"), ("speed", "tokens a second")):
        line[unit] = across_seeds([one.compared[score][arm].mean() for one in results])
        line[f"share of the gain, {score}"] = share_of(results, score, arm)
    return line


def size_line(results: Sequence[Found], i: int) -> dict[str, Any]:
    """Return the row of a block size: tokens per cycle, with and without those of the last cycle beyond the end."""
    swept = [one.swept for one in results]
    tau = [s.tokens[:, i] / s.cycles[:, i] for s in swept]
    whole = [s.whole[:, i] / s.cycles[:, i] for s in swept]
    full = [(s.tokens / s.cycles)[:FULL].argmax(1) == i for s in swept]
    return {
        "b": SIZES[i],
        "tokens a cycle": across_seeds([np.nanmean(t) for t in tau]),
        "with the last cycle whole": across_seeds([np.nanmean(w) for w in whole]),
        "best of all sizes, share": across_seeds([f.mean() for f in full]),
    }


def label_line(results: Sequence[Found], score: str) -> dict[str, Any]:
    """Return the row of a score: the distribution of labels, and the quality of the predictor."""
    compared = [one.compared[score] for one in results]
    counts = np.sum([np.bincount(c.label, minlength=len(CANDIDATES)) for c in compared], 0)
    told = [described(c) for c in compared]
    return {
        "label": score,
        **{f"b = {size}": int(count) for size, count in zip(CANDIDATES, counts, strict=True)},
        "ties": across_seeds([tied(one.values[score]) for one in results]),
        **{name: across_seeds([t[name] for t in told]) for name in told[0]},
    }


def speed_line(results: Sequence[Found], arm: str) -> dict[str, Any]:
    """Return the row of an arm at batch 1 and temperature 0."""
    arms = [one.timed.arms for one in results]
    return {
        "arm": arm,
        "times plain decoding": across_seeds([a[arm][0] / a["plain"][0] for a in arms]),
        "tokens a second": across_seeds([a[arm][0] for a in arms]),
        "tokens a cycle": across_seeds([a[arm][1] for a in arms]),
    }


def cost_line(results: Sequence[Found], i: int) -> dict[str, Any]:
    """Return the row of a block size: milliseconds of a cycle and its parts."""
    parts = {name: across_seeds([1e3 * one.timed.curves[i, k] for one in results]) for k, name in enumerate(SPENT)}
    return {"b": TIMED[i], **{f"{name}, ms": interval for name, interval in parts.items()}}


def planted_line(results: Sequence[Found], which: int) -> dict[str, Any]:
    """Return the row of prompts with (1) or without (0) the marker."""
    planted = [one.planted for one in results]
    sizes = {f"b = {b}": across_seeds([p.tau[p.marked == which, i].mean() for p in planted])
             for i, b in enumerate(marker.SIZES)}  # fmt: skip
    arms = {n: across_seeds([p.decoded[n][p.marked == which].mean() for p in planted]) for n in planted[0].decoded}
    return {"wide blocks fail": bool(which), **sizes, **arms}
