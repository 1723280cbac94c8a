"""From timed runs to tables, and to the numbers that the rules speak of."""

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
    """The speed-up by SPEC 0.8: tokens per cycle over the cost of a cycle in units of a plain step."""
    return accept_length / (drafts * draft_cost + verify_cost)


def model_of(measured: Measured, arm: TimedArm) -> float:
    """The modelled speed-up of an arm, with its own accept length and the costs of the same run."""
    drafts = arm[2]
    return modelled(measured.accept_length(arm), drafts, measured.draft_cost(), measured.verify_cost(drafts))


def slope(x: Array, y: Array) -> float:
    """Least squares with an intercept."""
    return float(np.polyfit(x, y, 1)[0])


def correlation(x: Array, y: Array) -> Interval:
    """Pearson's r over the points [S, P] of S seeds; its interval says what other seeds would give.

    Points of a seed share what they are held against, so they err together: a bootstrap over points held the truth in
    69 to 93 % of cases. This jackknife leaves out one seed after another, on Fisher's scale: 91 to 95 %.
    """
    assert x.shape == y.shape
    rest = [[np.delete(part, seed, 0) for part in (x, y)] for seed in range(len(x))]
    whole, *without = (np.arctanh(np.clip(pearson(*pair), -1 + ROUNDING, 1 - ROUNDING)) for pair in ([x, y], *rest))
    away = (len(without) - 1) * (whole - np.array(without))  # pseudo-values around the whole
    half = student_t(len(x) - 1) * float(away.std(ddof=1)) / len(x) ** 0.5
    return Interval(float(np.tanh(whole)), float(np.tanh(whole - half)), float(np.tanh(whole + half)))


def pearson(x: Array, y: Array) -> float:
    """Over all points together."""
    return float(np.corrcoef(x.ravel(), y.ravel())[0, 1])


def gains(results: Results, accepted: Accepted, seed: int, batch: int) -> tuple[Array, Array]:
    """Of each head but the first: relative gain in accept length and in tokens per second over the head as it came."""
    base = ("start", "bebop", DRAFTS)
    names = [name for name in HEADS if name != "start"]
    length = [(1 + accepted[seed][name]) / (1 + accepted[seed]["start"]) - 1 for name in names]
    speed = [results[seed, batch].ratio((name, "bebop", DRAFTS), base) - 1 for name in names]
    return np.array(length), np.array(speed)


def over_seeds(results: Results, batch: int, number: Callable[[Measured], float]) -> Interval:
    """A number of each seed's runs at a batch size: mean with its interval."""
    return across_seeds([number(results[seed, batch]) for seed in SEEDS])


def speed_up(results: Results, batch: int, arm: TimedArm, base: TimedArm = PLAIN) -> Interval:
    """Ratio of the speeds of two arms, over seeds."""
    return over_seeds(results, batch, lambda m: m.ratio(arm, base))


def speed_up_modelled(results: Results, batch: int, arm: TimedArm) -> Interval:
    """The same over plain decoding, by the cost model."""
    return over_seeds(results, batch, lambda m: model_of(m, arm))


def heads_table(results: Results) -> list[dict[str, Any]]:
    """A line per batch size and arm at ``DRAFTS`` drafts."""
    return [line(results, batch, arm) for batch in BATCHES for arm in ARMS if arm[2] in (0, DRAFTS)]


def lengths_table(results: Results) -> list[dict[str, Any]]:
    """A line per batch size and number of drafts, for the best head."""
    return [line(results, batch, (BEST, "bebop", k)) for batch in BATCHES for k in LENGTHS]


def line(results: Results, batch: int, arm: TimedArm) -> dict[str, Any]:
    """Speed, speed-up measured and modelled, and where the time went."""
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
    """Part of the time of an arm, mean over seeds."""
    return over_seeds(results, batch, lambda m: m.share(arm, part)).value


def costs_table(results: Results) -> list[dict[str, Any]]:
    """c and v(K) per batch size."""
    return [
        {"batch": batch, "c": over_seeds(results, batch, Measured.draft_cost)}
        | {f"v({k})": verify_cost(results, batch, k) for k in LENGTHS}
        for batch in BATCHES
    ]


def verify_cost(results: Results, batch: int, length: int) -> Interval:
    """v(K), over seeds."""
    return over_seeds(results, batch, lambda m: m.verify_cost(length))


def fits_table(results: Results, accepted: Accepted) -> list[dict[str, Any]]:
    """Per batch size: slope of throughput gain on the gain in accept length, and their correlation."""
    return [
        {"batch": b, "slope": gain_slope(results, accepted, b), "r": gain_correlation(results, accepted, b)}
        for b in BATCHES
    ]


def gain_slope(results: Results, accepted: Accepted, batch: int) -> Interval:
    """Slope of ``gains``, one fit a seed."""
    return across_seeds([slope(*gains(results, accepted, seed, batch)) for seed in SEEDS])


def gain_correlation(results: Results, accepted: Accepted, batch: int) -> Interval:
    """Correlation of ``gains`` over the points of all seeds."""
    x, y = np.stack([gains(results, accepted, seed, batch) for seed in SEEDS], axis=1)
    return correlation(x, y)


def numbers(results: Results, accepted: Accepted) -> dict[str, Number]:
    """What the rules speak of."""
    by_name = {f"accepted {head}": mean_over_seeds([accepted[s][head] for s in SEEDS]) for head in HEADS}
    risen = [accepted[s][BEST] / accepted[s]["hard_ce"] - 1 for s in SEEDS]
    by_name["accepted: e2e_tv / hard_ce - 1"] = mean_over_seeds(risen)
    for batch in BATCHES:
        by_name |= {f"batch {batch}: {name}": number for name, number in _of_batch(results, accepted, batch).items()}
    return by_name


def facts(results: Results) -> dict[str, object]:
    """What the evidence tells beside them: the best number of drafts, and what it gives."""
    by_name: dict[str, object] = {}
    for batch in BATCHES:
        top = {k: speed_up(results, batch, (BEST, "bebop", k)) for k in LENGTHS}
        peak = max(top, key=lambda k: top[k].value)
        by_name |= {f"batch {batch}: best K": peak, f"batch {batch}: at best K": str(top[peak])}
    return by_name


def minus_one(interval: Interval) -> Interval:
    """A ratio as a relative gain."""
    return Interval(interval.value - 1, interval.low - 1, interval.high - 1)


def beside_model(measured: Measured) -> float:
    """Measured over modelled speed-up - 1, averaged over the arms that draft."""
    return float(np.mean([measured.ratio(arm, PLAIN) / model_of(measured, arm) for arm in ARMS[1:]])) - 1


def _of_batch(results: Results, accepted: Accepted, batch: int) -> dict[str, Number]:
    """The numbers of one batch size."""
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
