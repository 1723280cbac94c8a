"""Numbers of the rules, facts and the table, computed from the chunks."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from bebop.metrics.intervals import Array, Interval, ratio, resampled
from recipes.reproduce.frontier.arms import ARMS, DRAFTS_OF, PLAIN, Arm
from recipes.reproduce.frontier.findings import BATCHES
from recipes.reproduce.frontier.jobs import Everything, Timed, Watched
from recipes.reproduce.measured import Number, of
from recipes.reproduce.verdicts import LEVEL, holm

CHEAP = 0.05  # a cheap system loses at most this share of right answers against plain decoding
EXACT_ARMS = tuple(arm for arm in ARMS if arm.exact)
INEXACT_ARMS = tuple(arm for arm in ARMS if not arm.exact)
BASE = next(arm for arm in ARMS if arm.system == DRAFTS_OF and arm.exact)  # the planted rule at epsilon 0


def family(name: str) -> list[Arm]:
    """Return the arms of one family: those of a system at several options, or of the planted rule."""
    return [arm for arm in ARMS if arm.family == name]


# ---- an arm


def variation(one: Watched) -> Interval:
    """Return the sampled total variation per token."""
    return ratio(one.sums["witness"], one.tokens)


def computed(one: Watched) -> Interval:
    """Return the computed total variation per token; NaN where there is no formula."""
    return ratio(one.sums["computed"], one.tokens)


def misses(one: Watched) -> Interval:
    """Return the sampled minus the computed total variation per token."""
    return ratio(one.sums["witness"] - one.sums["computed"], one.tokens)


def utility(one: Watched) -> Interval:
    """Return the share of right answers."""
    return ratio(one.success, np.ones_like(one.success))


def against_plain(results: Everything, one: Watched) -> Interval:
    """Return the share of right answers minus that of plain decoding on the same prompts."""
    difference = one.success - results.watched[PLAIN.name].success
    return ratio(difference, np.ones_like(difference))


def logs(results: Everything, arm: Arm, batch: int, clock: str = "processor") -> Array:
    """Return ln of an arm's tokens per second over those of plain decoding, per chunk [chunks]."""
    own, plain = (results.timed[batch][name] for name in (arm.name, PLAIN.name))
    return np.log([speed(a, clock) / speed(b, clock) for a, b in zip(own, plain, strict=True)])


def speed(one: Timed, clock: str) -> float:
    """Return tokens per second."""
    return float(one.tokens / getattr(one, clock))


def times_plain(results: Everything, arm: Arm, batch: int, clock: str = "processor") -> Interval:
    """Return the speed relative to plain decoding: the geometric mean over chunks, with chunks resampled."""
    values = logs(results, arm, batch, clock)
    return resampled(lambda w: np.exp(w @ values / w.sum(1)), len(values))


def rate(results: Everything, arm: Arm, batch: int, clock: str) -> float:
    """Return tokens per second over all chunks."""
    chunks = results.timed[batch][arm.name]
    return sum(one.tokens for one in chunks) / sum(float(getattr(one, clock)) for one in chunks)


# ---- arms together


def slope(over: Callable[[Watched, Array], tuple[Array, Array]], parts: Sequence[Watched]) -> Number:
    """Return the slope minus 1 of a line through 0, over arms.

    ``over`` returns y and x [R] of an arm under weights [R, N].
    """

    def statistic(weights: Array) -> Array:
        y, x = (np.stack(column) for column in zip(*(over(one, weights) for one in parts), strict=True))
        found: Array = (y * x).sum(0) / (x * x).sum(0) - 1
        return found

    return of(resampled(statistic, len(parts[0].tokens)))


def sampled_on_computed(one: Watched, weights: Array) -> tuple[Array, Array]:
    """Return the sampled and the computed total variation per token."""
    tokens = weights @ one.tokens
    return weights @ one.sums["witness"] / tokens, weights @ one.sums["computed"] / tokens


def gained_on_spent(one: Watched, weights: Array) -> tuple[Array, Array]:
    """Return the acceptance beyond the overlap and the total variation, both per tested draft."""
    tested = weights @ one.sums["reached"]
    return weights @ (one.sums["accepted"] - one.sums["overlap"]) / tested, weights @ one.sums["computed"] / tested


def p_values(numbers: Sequence[Interval]) -> list[float]:
    """Return two-sided p-values that each number is 0, corrected by Holm's method."""
    found = [of(one) for one in numbers]
    return holm([min(1.0, 2 * min(one.above(0), one.below(0))) for one in found])


def farthest(results: Everything) -> tuple[Arm, Number]:
    """Return the exact arm whose interval reaches farthest from 0, and its variation with a positive sign."""
    found = {arm.name: variation(results.watched[arm.name]) for arm in EXACT_ARMS}
    arm = max(EXACT_ARMS, key=lambda one: max(abs(found[one.name].low), abs(found[one.name].high)))
    own = found[arm.name]
    turned = own if own.value >= 0 else Interval(-own.value, -own.high, -own.low)
    return arm, of(turned)


def at_equal_variation(results: Everything) -> dict[str, Array]:
    """Return right answers [N] of each PAD arm minus those of the planted rule at equal computed total variation.

    Those of the planted rule are interpolated. PAD arms beyond the strongest planted arm are left out.
    """
    line = [(0.0, results.watched[BASE.name].success)]
    line += [(computed(one).value, one.success) for one in (results.watched[arm.name] for arm in family("planted"))]
    found = {}
    for arm in family("pad"):
        one = results.watched[arm.name]
        at = computed(one).value
        for (low, worse), (high, better) in pairwise(line):
            if low <= at <= high:
                share = (at - low) / (high - low)
                found[arm.name] = one.success - (1 - share) * worse - share * better
                break
    return found


def cheap(results: Everything) -> list[Arm]:
    """Return the inexact arms that lose no more than ``CHEAP`` of the right answers."""
    return [arm for arm in INEXACT_ARMS if against_plain(results, results.watched[arm.name]).value >= -CHEAP]


def fastest(results: Everything, arms: Sequence[Arm], batch: int) -> Arm:
    """Return the fastest arm by processor time."""
    return max(arms, key=lambda arm: float(logs(results, arm, batch).mean()))


def over_exact(results: Everything, arms: Sequence[Arm], batch: int) -> Number:
    """Return the speed of the fastest of ``arms`` over that of the fastest exact arm, minus 1.

    Both are chosen anew in every draw of the bootstrap.
    """
    ours, theirs = (np.stack([logs(results, arm, batch) for arm in group]) for group in (arms, EXACT_ARMS))

    def statistic(weights: Array) -> Array:
        best = [(weights @ group.T / weights.sum(1, keepdims=True)).max(1) for group in (ours, theirs)]
        found: Array = np.exp(best[0] - best[1]) - 1
        return found

    return of(resampled(statistic, ours.shape[1]))


# ---- what is kept


def counted(number: float) -> Number:
    """Return a count as a number without error."""
    return Number(value=number, low=number, high=number)


def rule_numbers(results: Everything) -> dict[str, Number]:
    """Return the numbers that the rules test."""
    seen = results.watched
    exact = p_values([variation(seen[arm.name]) for arm in EXACT_ARMS])
    numbers = {
        "exact arms that differ": counted(sum(p <= LEVEL for p in exact)),
        "farthest exact": farthest(results)[1],
    }
    for name in ("planted", "pad"):
        parts = [seen[arm.name] for arm in family(name)]
        missed = sum(p <= LEVEL for p in p_values([misses(one) for one in parts]))
        numbers[f"{name} arms that miss"] = counted(missed)
        numbers[f"{name}, sampled on computed"] = slope(sampled_on_computed, parts)
        numbers[f"{name}, gained on spent"] = slope(gained_on_spent, parts)
    numbers["planted, strongest"] = of(variation(seen[family("planted")[-1].name]))
    if differences := at_equal_variation(results):
        mean = np.mean(list(differences.values()), 0)
        numbers["pad over planted"] = of(ratio(mean, np.ones_like(mean)))
    for batch in BATCHES:
        numbers[f"inexact over exact, batch {batch}"] = over_exact(results, INEXACT_ARMS, batch)
        if some := cheap(results):
            numbers[f"cheap over exact, batch {batch}"] = over_exact(results, some, batch)
    return numbers


def facts(results: Everything) -> dict[str, Any]:
    """Return the facts that evidence quotes beside the numbers."""
    seen = results.watched
    told: dict[str, Any] = {"exact arms": len(EXACT_ARMS), "farthest exact arm": farthest(results)[0].name}
    exact = p_values([variation(seen[arm.name]) for arm in EXACT_ARMS])
    told["exact arms that differ, which"] = which(EXACT_ARMS, exact)
    told["smallest p, exact"] = f"{min(exact):.2g}"
    for name in ("planted", "pad"):
        arms = family(name)
        missed = [misses(seen[arm.name]) for arm in arms]
        told[f"{name} arms"] = len(arms)
        told[f"{name} arms that miss, which"] = which(arms, p_values(missed))
        each = (f"{arm.name} {percent(one)} %" for arm, one in zip(arms, missed, strict=True))
        told[f"{name} misses"] = ", ".join(each)
    told["pad over planted, by tau"] = ", ".join(
        f"{name} {ratio(values, np.ones_like(values))}" for name, values in at_equal_variation(results).items()
    )
    for batch in BATCHES:
        groups = {"exact": EXACT_ARMS, "inexact": INEXACT_ARMS, "cheap": cheap(results)}
        for name, group in groups.items():
            if group:
                best = fastest(results, group, batch)
                told[f"fastest {name}, batch {batch}"] = f"{best.name} ({times_plain(results, best, batch)} x plain)"
    told["timed answers that are not the watched ones"] = changed(results)
    return told


def which(arms: Sequence[Arm], corrected: Sequence[float]) -> str:
    """Return the names of the arms whose p is at or below the level."""
    return ", ".join(arm.name for arm, p in zip(arms, corrected, strict=True) if p <= LEVEL) or "none"


def changed(results: Everything) -> str:
    """Return how many timed completions differ from the observed ones, by batch size."""
    told = []
    for batch in BATCHES:
        pairs = [
            pair
            for arm in ARMS
            for pair in zip(
                (checksum for one in results.timed[batch][arm.name] for checksum in one.answers),
                results.watched[arm.name].answers,
                strict=False,
            )
        ]
        told.append(f"batch {batch}: {sum(a != b for a, b in pairs)} of {len(pairs)}")
    return ", ".join(told)


def table(results: Everything) -> list[dict[str, Any]]:
    """Return the table with one row per arm."""
    return [row(results, arm) for arm in ARMS]


def row(results: Everything, arm: Arm) -> dict[str, Any]:
    """Return the row of an arm, with columns for its batch sizes."""
    one = results.watched[arm.name]
    plain = results.watched[PLAIN.name]
    formula = computed(one)
    line: dict[str, Any] = {
        "arm": arm.name,
        "exact": "yes" if arm.exact else "no",
        "TV, sampled, %": percent(variation(one)),
        "TV, computed, %": "" if np.isnan(formula.value) else round(100 * formula.value, 2),
        "right answers": round(utility(one).value, 3),
        "less plain's": against_plain(results, one),
        "tokens/pass": ratio(one.tokens, one.passes),
        "passes/token": round(float(one.passes.sum() / one.tokens.sum()), 3),
        "MFLOP/token": round(float(one.operations.sum() / one.emitted.sum() / 1e6), 1),
        "cache, x plain": round(held(one) / held(plain), 3),
        "positions/token": round(float(one.sums["positions"].sum() / one.tokens.sum()), 2),
    }
    for batch in BATCHES:
        line[f"x plain, batch {batch}"] = times_plain(results, arm, batch)
        line[f"tokens/s, batch {batch}"] = round(rate(results, arm, batch, "processor"))
        line[f"by the wall, batch {batch}"] = round(rate(results, arm, batch, "wall"))
    return line


def percent(one: Interval) -> Interval:
    """Return an interval times 100."""
    return Interval(100 * one.value, 100 * one.low, 100 * one.high)


def held(one: Watched) -> float:
    """Return layers times cache entries held at the end of a completion, per token of prompt and completion."""
    return float(one.sums["entries"].sum() / (one.tokens + one.asked).sum())
