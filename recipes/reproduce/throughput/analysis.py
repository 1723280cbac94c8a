"""Tables, and the numbers that the rules use, computed from timed runs."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.metrics.intervals import Interval, across_seeds, student_t
from recipes.reproduce.measured import Number, of
from recipes.reproduce.measured import over_seeds as mean_over_seeds
from recipes.reproduce.study import SEEDS
from recipes.reproduce.throughput.heads import BEST, DRAFTS, HEADS
from recipes.reproduce.throughput.timing import ARMS, BATCHES, LENGTHS, PLAIN, Measured, TimedArm

Array = NDArray[np.float64]
ROUNDING = 1e-15  # an r of 1 has no place on Fisher's scale
Results = Mapping[tuple[int, int], Measured]  # seed, batch
Accepted = Mapping[int, Mapping[str, float]]  # seed -> head -> expected accepted drafts


def modelled(accept_length: float, drafts: int, draft_cost: float, verify_cost: float) -> float:
    """Return the speed-up by SPEC 0.8: tokens per cycle over the cost of a cycle in units of a plain step."""
    return accept_length / (drafts * draft_cost + verify_cost)


def model_of(measured: Measured, arm: TimedArm) -> float:
    """Return the modelled speed-up of an arm, from its own accept length and the costs of the same run."""
    drafts = arm[2]
    return modelled(measured.accept_length(arm), drafts, measured.draft_cost(), measured.verify_cost(drafts))


def slope(x: Array, y: Array) -> float:
    """Return the slope of a least-squares line with an intercept."""
    return float(np.polyfit(x, y, 1)[0])


def correlation(x: Array, y: Array) -> Interval:
    """Return Pearson's r over the points [S, P] of S seeds, with an interval for other seeds.

    Points of a seed share their baseline, so their errors are correlated: a bootstrap over points covered the truth in
    69 to 93 % of cases. This jackknife leaves out one seed after another, on Fisher's scale: 91 to 95 %.
    """
    assert x.shape == y.shape
    rest = [[np.delete(part, seed, 0) for part in (x, y)] for seed in range(len(x))]
    whole, *without = (np.arctanh(np.clip(pearson(*pair), -1 + ROUNDING, 1 - ROUNDING)) for pair in ([x, y], *rest))
    away = (len(without) - 1) * (whole - np.array(without))  # pseudo-values around the whole
    half = student_t(len(x) - 1) * float(away.std(ddof=1)) / len(x) ** 0.5
    return Interval(float(np.tanh(whole)), float(np.tanh(whole - half)), float(np.tanh(whole + half)))


def pearson(x: Array, y: Array) -> float:
    """Return Pearson's r over all points together."""
    return float(np.corrcoef(x.ravel(), y.ravel())[0, 1])


def gains(results: Results, accepted: Accepted, seed: int, batch: int) -> tuple[Array, Array]:
    """Return the relative gains of each other head over ``start``: in accept length, and in tokens per second."""
    base = ("start", "bebop", DRAFTS)
    names = [name for name in HEADS if name != "start"]
    length = [(1 + accepted[seed][name]) / (1 + accepted[seed]["start"]) - 1 for name in names]
    speed = [results[seed, batch].ratio((name, "bebop", DRAFTS), base) - 1 for name in names]
    return np.array(length), np.array(speed)


def over_seeds(results: Results, batch: int, number: Callable[[Measured], float]) -> Interval:
    """Return the mean over seeds, with its interval, of one number of the runs at a batch size."""
    return across_seeds([number(results[seed, batch]) for seed in SEEDS])


def speed_up(results: Results, batch: int, arm: TimedArm, base: TimedArm = PLAIN) -> Interval:
    """Return the ratio of the speeds of two arms, over seeds."""
    return over_seeds(results, batch, lambda m: m.ratio(arm, base))


def speed_up_modelled(results: Results, batch: int, arm: TimedArm) -> Interval:
    """Return the speed-up over plain decoding by the cost model, over seeds."""
    return over_seeds(results, batch, lambda m: model_of(m, arm))


def heads_table(results: Results) -> list[dict[str, Any]]:
    """Return one row per batch size and arm at ``DRAFTS`` drafts, plain decoding included."""
    return [line(results, batch, arm) for batch in BATCHES for arm in ARMS if arm[2] in (0, DRAFTS)]


def lengths_table(results: Results) -> list[dict[str, Any]]:
    """Return one row per batch size and number of drafts, for the best head."""
    return [line(results, batch, (BEST, "bebop", k)) for batch in BATCHES for k in LENGTHS]


def line(results: Results, batch: int, arm: TimedArm) -> dict[str, Any]:
    """Return the row of an arm: speed, measured and modelled speed-up, and the shares of its time."""
    drafted = arm != PLAIN
    row: dict[str, Any] = {"batch": batch, "head": arm[0] if drafted else "none", "system": arm[1], "K": arm[2]}
    row |= {"tokens/s": over_seeds(results, batch, lambda m: m.typical(arm)).value}
    row |= {"tokens/s by the wall": over_seeds(results, batch, lambda m: m.typical(arm, "wall")).value}
    row |= {"x plain": speed_up(results, batch, arm)}
    row |= {"x modelled": speed_up_modelled(results, batch, arm) if drafted else None}
    row |= {"accept length": over_seeds(results, batch, lambda m: m.accept_length(arm))}
    shares = {f"{part} %": 100 * share(results, batch, arm, part) for part in ("verify", "draft", "prefill")}
    return row | shares | {"other %": 100 - sum(shares.values())}


def share(results: Results, batch: int, arm: TimedArm, part: str) -> float:
    """Return one part's share of an arm's time, mean over seeds."""
    return over_seeds(results, batch, lambda m: m.share(arm, part)).value


def costs_table(results: Results) -> list[dict[str, Any]]:
    """Return the costs c and v(K) per batch size."""
    return [
        {"batch": batch, "c": over_seeds(results, batch, Measured.draft_cost)}
        | {f"v({k})": verify_cost(results, batch, k) for k in LENGTHS}
        for batch in BATCHES
    ]


def verify_cost(results: Results, batch: int, length: int) -> Interval:
    """Return v(K), mean over seeds with its interval."""
    return over_seeds(results, batch, lambda m: m.verify_cost(length))


def fits_table(results: Results, accepted: Accepted) -> list[dict[str, Any]]:
    """Return, per batch size, the slope of throughput gain on accept-length gain, and their correlation."""
    return [
        {"batch": b, "slope": gain_slope(results, accepted, b), "r": gain_correlation(results, accepted, b)}
        for b in BATCHES
    ]


def gain_slope(results: Results, accepted: Accepted, batch: int) -> Interval:
    """Return the slope of ``gains``, with one fit per seed."""
    return across_seeds([slope(*gains(results, accepted, seed, batch)) for seed in SEEDS])


def gain_correlation(results: Results, accepted: Accepted, batch: int) -> Interval:
    """Return the correlation of ``gains`` over the points of all seeds."""
    x, y = np.stack([gains(results, accepted, seed, batch) for seed in SEEDS], axis=1)
    return correlation(x, y)


def numbers(results: Results, accepted: Accepted) -> dict[str, Number]:
    """Return the numbers that the rules use, by name."""
    by_name = {f"accepted {head}": mean_over_seeds([accepted[s][head] for s in SEEDS]) for head in HEADS}
    risen = [accepted[s][BEST] / accepted[s]["hard_ce"] - 1 for s in SEEDS]
    by_name["accepted: e2e_tv / hard_ce - 1"] = mean_over_seeds(risen)
    for batch in BATCHES:
        by_name |= {f"batch {batch}: {name}": number for name, number in _of_batch(results, accepted, batch).items()}
    return by_name


def facts(results: Results) -> dict[str, object]:
    """Return facts for the evidence: the best number of drafts, and its speed-up."""
    by_name: dict[str, object] = {}
    for batch in BATCHES:
        top = {k: speed_up(results, batch, (BEST, "bebop", k)) for k in LENGTHS}
        peak = max(top, key=lambda k: top[k].value)
        by_name |= {f"batch {batch}: best K": peak, f"batch {batch}: at best K": str(top[peak])}
    return by_name


def minus_one(interval: Interval) -> Interval:
    """Turn a ratio into a relative gain."""
    return Interval(interval.value - 1, interval.low - 1, interval.high - 1)


def beside_model(measured: Measured) -> float:
    """Return measured over modelled speed-up - 1, averaged over the arms that draft."""
    return float(np.mean([measured.ratio(arm, PLAIN) / model_of(measured, arm) for arm in ARMS[1:]])) - 1


def _of_batch(results: Results, accepted: Accepted, batch: int) -> dict[str, Number]:
    """Return the numbers of one batch size."""
    best, hard, greedy = (BEST, "bebop", DRAFTS), ("hard_ce", "bebop", DRAFTS), (BEST, "target_only", DRAFTS)
    arms = {"plain": PLAIN, BEST: best, "hard_ce": hard, f"{BEST} greedy": greedy}
    intervals = {f"x plain {name}": speed_up(results, batch, arm) for name, arm in arms.items()}
    intervals["faster"] = speed_up(results, batch, best)
    intervals["e2e_tv / hard_ce - 1"] = minus_one(speed_up(results, batch, best, hard))
    intervals["sampled / greedy - 1"] = minus_one(speed_up(results, batch, best, greedy))
    intervals["slope"] = gain_slope(results, accepted, batch)
    intervals["beside model"] = over_seeds(results, batch, beside_model)
    by_name = {name: of(interval, len(SEEDS)) for name, interval in intervals.items()}
    return by_name | {"r": of(gain_correlation(results, accepted, batch))}
