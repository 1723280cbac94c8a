"""Every interval that adaptation, recipes and benchmarks print holds the truth in 90 of 100 repetitions or more.

A row per kind; what an interval of a study varies over is in the row. The monitor's are in ``tests/monitor``.
"""

from collections.abc import Mapping
from functools import cache, partial

import numpy as np
import pytest

from bebop.adaptation.evaluation import Measured, change
from bebop.adaptation.probe import NUMBERS, Probe
from bebop.adaptation.results import boundary_share
from bebop.bench.monitor import percent
from bebop.metrics.intervals import Interval, across_seeds, ratio, ratio_difference
from bebop.trajectory import DRAFT_STATS
from recipes.reproduce.beyond.analysis import inside_gain
from recipes.reproduce.beyond.estimators import ESTIMATORS, Sums, bias, estimate, sums
from recipes.reproduce.beyond.recording import Cycles
from recipes.reproduce.boundary.sides import sides
from recipes.reproduce.temperature.slopes import Points, points, slope_difference
from recipes.reproduce.throughput.analysis import correlation
from tests.covering import Row, Trial, cases, of_interval, shares, short

Rng = np.random.Generator
TASKS = ("gcd", "chain_sum", "number_sorting")

# ---- bebop.metrics.intervals: sequences


def rates(seed: int, sequences: int, shape: tuple[float, float] = (3.5, 1.5)) -> Mapping[str, Trial]:
    """Sequences with an acceptance of their own, before and after a change that helps most of them."""
    rng = np.random.default_rng([60, seed, sequences])
    counts = rng.integers(5, 30, sequences)
    before = rng.beta(*shape, sequences)
    after = before + (1 - before) * rng.beta(1.0, 4.0, sequences)
    was, now = (rng.binomial(counts, rate).astype(float) for rate in (before, after))
    mean = shape[0] / sum(shape)
    found = {"ratio": of_interval(ratio(was, counts), mean)}
    if shape[1] < 1:
        return found
    moved = ratio_difference((now, counts), (was, counts))
    return found | {"difference": of_interval(moved, (1 - mean) * 0.2)}


# ---- bebop.metrics.intervals: seeds


def seeds(seed: int, count: int) -> Mapping[str, Trial]:
    """Runs that scatter evenly, lopsidedly, and as a spread over 100 steps does (top_k)."""
    rng = np.random.default_rng([61, seed, count])
    paired = rng.normal(size=count) - rng.normal(size=count)
    spreads = rng.normal(size=(2, count, 100)).std(-1, ddof=1)
    samples = {
        "gain": (0.1 + paired, 0.1),
        "speed-up": (np.exp(0.3 * rng.normal(size=count)), float(np.exp(0.045))),
        "added spread": (spreads[0] - spreads[1], 0.0),
    }
    return {name: of_interval(across_seeds(values), truth) for name, (values, truth) in samples.items()}


TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = np.array([2.0, 2.1, 2.16, 2.1, 2.05])


def inside(seed: int) -> Mapping[str, Trial]:
    """A draft temperature between 0 and 1, chosen on the other seeds: it may only err against the claim."""
    rng = np.random.default_rng([62, seed])
    table = LENGTHS + 0.05 * rng.normal(size=(3, 1)) + 0.02 * rng.normal(size=(3, 5))
    found = inside_gain(TEMPERATURES, table)
    return {"at most": Trial(found.value, found.low, found.value + abs(found.value), LENGTHS[2] - LENGTHS[4])}


# ---- adaptation: decoded answers and probed texts

DEPTH = 3
SLOPE = -0.35  # of overlap on entropy, per nat


def easy(rng: Rng, answers: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Task of each answer, and how easy it is: tasks differ, and answers of one."""
    task = rng.integers(3, size=answers)
    return np.array(TASKS)[task], 0.75 - 0.05 * task + 0.08 * rng.normal(size=answers)


def decoded(rng: Rng, tasks: np.ndarray, rate: np.ndarray) -> Measured:  # type: ignore[type-arg]
    """Sums of answers whose drafts are accepted at a rate each, at every position."""
    cycles = rng.integers(10, 60, len(rate))
    chain = [cycles]
    for _ in range(DEPTH):
        chain.append(rng.binomial(chain[-1], np.clip(rate, 0, 1)))
    reached, accepted = (np.stack(part, 1).astype(float) for part in (chain[:-1], chain[1:]))
    temperature = reached * (1.5 - rate)[:, None]
    sums = dict(
        zip(
            DRAFT_STATS,
            (reached, accepted, reached * rate[:, None], reached * rate[:, None] * 0.9, temperature, temperature),
            strict=True,
        )
    )
    return Measured(
        tasks=tuple(tasks), cycles=cycles.astype(float), tokens=(cycles + accepted.sum(1)).astype(float), **sums
    )


def evaluated(rng: Rng, answers: int) -> dict[str, Interval]:
    """Everything that an adaptation prints of decoded answers."""
    tasks, rate = easy(rng, answers)
    before, after = decoded(rng, tasks, rate), decoded(rng, tasks, rate + 0.05 + 0.02 * rng.normal(size=answers))
    moved = {
        f"change of {name}": change(after, before, name) for name in ("accept_length", "accepted", "target_entropy")
    }
    later = {"change of accepted/2": change(after, before, "accepted", 2)}
    return before.summary() | moved | later | {"one task": before.of("gcd").interval("accept_length")}


def probed(rng: Rng, texts: int) -> Probe:
    """Anchors of texts: overlap falls with entropy, around a level of each text's own."""
    tasks, rate = easy(rng, texts)
    row = np.repeat(np.arange(texts), rng.integers(5, 60, texts))
    # Every third text is warm: tokens, and texts, of high entropy are rare.
    warmth = np.exp(0.4 * rng.normal(size=texts))[row, None] * np.ones((1, DEPTH))
    temperature = 0.3 * warmth * rng.gamma(1.0, 1.0, (len(row), DEPTH))
    steep = (SLOPE + 0.05 * rng.normal(size=texts))[row, None]
    overlap = 0.1 + rate[row, None] + steep * temperature + 0.1 * rng.normal(size=temperature.shape)
    greedy = overlap - 0.02 + 0.1 * rng.normal(size=temperature.shape) + 0.03 * rng.normal(size=texts)[row, None]
    numbers = dict.fromkeys(NUMBERS, overlap) | {
        "target_only": greedy,
        "target_entropy": temperature,
        "draft_entropy": temperature,
    }
    accept, accept_greedy = (1 + np.clip(x, 0, 1).cumprod(1).sum(1) for x in (overlap, greedy))
    place = np.arange(len(row))
    return Probe(row=row, place=place, task=tasks[row], numbers=numbers, accept=accept, accept_greedy=accept_greedy)


def on_text(rng: Rng, texts: int) -> dict[str, Interval]:
    """Everything that is printed of a probe: by adaptation, by temperature and by boundary."""
    before = probed(rng, texts)
    rise = 0.02 + 0.1 * before.numbers["target_entropy"] + 0.05 * rng.normal(size=texts)[before.row, None]
    after = {**before.numbers, "overlap": before.numbers["overlap"] + rise + 0.05 * rng.normal(size=rise.shape)}
    better = Probe(row=before.row, place=before.place, task=before.task, numbers=after, accept=before.accept,
                   accept_greedy=before.accept_greedy)  # fmt: skip
    found = {"accept length": before.accept_length(), "accept length, greedy": before.accept_length(greedy=True)}
    warm = before.numbers["target_entropy"][:, 0] > 0.5
    found |= {"a bin": before.mean(np.where(warm, before.numbers["overlap"][:, 0], np.nan))}
    found |= {"boundary share": boundary_share(before), "advantage": sides(before).advantage()}
    for of in ("tokens", "answers"):
        slopes: list[Points] = [points(probe, "overlap", of) for probe in (before, better)]
        found |= {f"slope over {of}": slopes[0].interval(), f"rise over {of}": slope_difference(slopes[1], slopes[0])}
    return found


# ---- beyond: estimates of the accepted drafts of a cycle


def estimated(rng: Rng, answers: int) -> dict[str, Interval]:
    """Two drafts a cycle from distributions over two tokens, answers with distributions of their own; and text of the
    target."""
    ease = np.clip(0.6 + 0.1 * rng.normal(size=answers), 0.2, 0.9)
    answer = np.repeat(np.arange(answers), rng.integers(5, 40, answers))
    off = rng.normal(0.15, 0.06, answers)[answer]
    p, q = ease[answer], np.clip(ease[answer] + off, 0.05, 0.95)  # chance of token 1 under target and draft
    overlap = 1 - np.abs(p - q)
    drafts, words = rng.random((len(answer), 2)) < q[:, None], rng.random((len(answer), 2)) < p[:, None]
    survive = np.minimum(1, np.where(drafts, p[:, None] / q[:, None], (1 - p[:, None]) / (1 - q[:, None])))
    accepted = np.cumprod(rng.random(survive.shape) < survive, 1).sum(1).astype(float)
    table, place = np.stack([overlap, overlap], 1), np.arange(len(answer))
    weight = np.minimum(1, np.where(words[:, 0], q / p, (1 - q) / (1 - p)))
    cycles = Cycles(
        answer=answer, start=place, accepted=accepted, survive=survive, overlap=table, live=np.ones((len(answer), 2))
    )
    text = Probe(row=answer, place=place, task=np.full(len(answer), "x"), numbers=dict.fromkeys(NUMBERS, table),
                 accept=1 + overlap + weight * overlap, accept_greedy=np.ones(len(answer)))  # fmt: skip
    found: Sums = sums(cycles, text)
    values = {name: estimate(name, found) for name in ESTIMATORS}
    return values | {f"{name}, bias": bias(name, found) for name in ESTIMATORS if name != "counts"}


# ---- what truth a simulator has is told by its own endless data

SIMULATED = {"evaluated": evaluated, "on_text": on_text, "estimated": estimated}


@cache
def endless(kind: str) -> dict[str, float]:
    rng, size = np.random.default_rng(9), {"evaluated": 5_000, "on_text": 6_000, "estimated": 10_000}[kind]
    parts = [SIMULATED[kind](rng, size // 20) for _ in range(20)]
    return {name: float(np.mean([part[name].value for part in parts])) for name in parts[0]}


def simulated(seed: int, kind: str, sequences: int) -> Mapping[str, Trial]:
    found = SIMULATED[kind](np.random.default_rng([63, seed, sequences]), sequences)
    return {name: of_interval(interval, endless(kind)[name]) for name, interval in found.items()}


# ---- studies: points of seeds; rounds of a benchmark

HEADS = np.array([-0.15, -0.05, 0.05, 0.12, 0.2])  # what heads gain in accept length


def paired(rng: Rng, count: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Gains [seeds, heads] in length and in speed; those of a seed share the head that they are held against."""
    length = HEADS + 0.01 * rng.normal(size=(count, 5)) + 0.02 * rng.normal(size=(count, 1))
    return length, 0.8 * length + 0.03 * rng.normal(size=(count, 5)) + 0.04 * rng.normal(size=(count, 1))


@cache
def true_correlation() -> float:
    length, speed = paired(np.random.default_rng(10), 100_000)
    return float(np.corrcoef(length.ravel(), speed.ravel())[0, 1])


def correlated(seed: int) -> Mapping[str, Trial]:
    return {"r": of_interval(correlation(*paired(np.random.default_rng([64, seed]), 3)), true_correlation())}


def timed(seed: int, rounds: int) -> Mapping[str, Trial]:
    """Rounds with and without statistics, on a machine whose speed drifts from round to round."""
    rng = np.random.default_rng([65, seed])
    pace = 10 * np.exp(0.1 * rng.normal(size=rounds))
    spent = {on: list(pace * (1.03 if on else 1.0) * np.exp(0.02 * rng.normal(size=rounds))) for on in (True, False)}
    found = percent(spent)
    return {"added %": Trial(found["added %"], found["low %"], found["high %"], 3.0)}


ROWS = (
    Row("rates and their change", "4 sequences", partial(rates, sequences=4), quick=200),
    *(Row("rates and their change", f"{n} sequences", partial(rates, sequences=n)) for n in (2, 8, 40)),
    Row("rates near 1", "40 sequences", partial(rates, sequences=40, shape=(9.5, 0.5)), runs=400, quick=80),
    Row("means and gains", "3 seeds", partial(seeds, count=3), quick=200),
    *(Row("means and gains", f"{n} seeds", partial(seeds, count=n)) for n in (2, 12)),
    Row("gain of a temperature inside", "3 seeds", inside, quick=200),
    Row("decoded answers", "24 prompts", partial(simulated, kind="evaluated", sequences=24), quick=40),
    Row("decoded answers", "64 prompts", partial(simulated, kind="evaluated", sequences=64)),
    Row("a head on text", "144 texts", partial(simulated, kind="on_text", sequences=144)),
    Row("estimates of accepted drafts", "144 answers", partial(simulated, kind="estimated", sequences=144)),
    Row("correlation of gains", "3 seeds", correlated, quick=200),
    *(Row("cost of statistics", f"{n} rounds", partial(timed, rounds=n), quick=200) for n in (2, 8)),
)


@pytest.mark.parametrize("row", cases(ROWS), ids=str)
def test_intervals_hold_the_truth(row: Row) -> None:
    assert short(row) == {}


@pytest.mark.parametrize("row", cases(ROWS), ids=str)
def test_intervals_ten_times_narrower_are_caught(row: Row) -> None:
    assert set(short(row, narrower=10)) == set(shares(row))
