"""Six losses, three seeds, six temperatures: acceptance against entropy; see README.md."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from bebop.adaptation.probe import probe
from bebop.metrics.intervals import across_seeds
from bebop.trainer.objectives import Sampling
from recipes.reproduce.claims import BUILT_IN
from recipes.reproduce.harness import Figure, Results, Row, Study, Value, rows
from recipes.reproduce.rules import Condition, Declared, Stat, above, below, gain, rise, some
from recipes.reproduce.study import DEPTH, HELD_OUT, TASKS, Arm, corpus, head, policy
from recipes.reproduce.temperature import charts
from recipes.reproduce.temperature.slopes import Points, points, slope_difference
from recipes.reproduce.temperature.sweep import ARMS, DRAFTS, TEMPERATURES, HeadResult, means, sampled

STRAIGHT = 0.9  # R squared above which a relation is called linear
LOSSES = ("e2e_tv", "tv", "nla", "rkl")  # what could flatten the slope of cross-entropy
WHERE = {
    "temperatures": "over temperatures",
    "tokens": "between tokens at temperature 1",
    "answers": "between answers at temperature 1",
}


def slope(name: str, way: str, task: str | None = None) -> Value:
    """Return a function that computes, for a head, the slope of a probed number on the target's entropy."""
    if way == "temperatures":
        return lambda one: one.swept(name)[0]
    return lambda one: float(points(one.plain, name, way, task).slope()[0])


def slopes(drafts: str, way: str) -> Stat:
    """Return the statistic of the slope of one kind of draft's acceptance on the target's entropy."""
    name = f"slope per nat of {drafts} acceptance, {WHERE[way]},"
    arm, gains = f"{{arm}}, {drafts}, {way}", f"{{a}} - {{b}}, {way}"
    return Stat(name=name, value=slope(DRAFTS[drafts], way), arm=arm, gains=gains)


def straight(drafts: str) -> Stat:
    """Return the statistic of the share of variance over temperatures that a straight line explains."""
    name = DRAFTS[drafts]
    return Stat(name="R squared", value=lambda one: one.swept(name)[1], arm=f"R squared, {drafts}")


SLOPES = {(drafts, way): slopes(drafts, way) for drafts in ("sampled", "greedy") for way in WHERE}


def falls(drafts: str, way: str) -> Declared:
    """Return the rule of C1 for one kind of draft: acceptance falls with entropy."""
    where = "over temperatures" if way == "temperatures" else "from token to token at temperature 1"
    says = f"Acceptance of {drafts} drafts of a cross-entropy head falls with the target's entropy, {where}."
    return below("C1", SLOPES[drafts, way]("ce"), 0.0, says=says, also={"with hard_ce": SLOPES[drafts, way]("hard_ce")})


def linear(drafts: str) -> Declared:
    """Return the rule of C1 that acceptance falls linearly over temperatures."""
    return above(
        "C1", straight(drafts)("ce"), STRAIGHT, says=f"With {drafts} drafts it does so linearly over temperatures."
    )


def flattens(base: str, way: str) -> Declared:
    """Return the rule of the second half of C3: end-to-end TV flattens the slope."""
    stat = SLOPES["sampled", way]
    says = f"End-to-end TV takes entropy dependence from sampled drafts: flatter than {base}, {WHERE[way]}."
    fallen = Condition(quantity=stat(base), side="below", otherwise=f"{base} does not fall")
    return gain("C3", stat, "e2e_tv", over=base, says=says, needs=(fallen,))


RULES = (
    *(falls(drafts, way) for drafts in ("greedy", "sampled") for way in ("temperatures", "tokens")),
    linear("greedy"),
    linear("sampled"),
    flattens("ce", "temperatures"),
    flattens("ce", "tokens"),
    flattens("ce", "answers"),
    flattens("hard_ce", "temperatures"),
    some(
        "beyond",
        "Some loss flattens the slope of soft cross-entropy.",
        *([rise(SLOPES["sampled", way], loss, "ce") for way in ("temperatures", "tokens")] for loss in LOSSES),
    ),
)


def measure(arm: Arm | None, seed: int) -> HeadResult:
    """Train a head, unless it is kept already, and probe it at every temperature."""
    model = policy() if arm is None else head(Arm(objective=arm.objective, seed=seed))
    probes = {t: probe(model, sampled(seed, t), DEPTH, Sampling(temperature=t)) for t in TEMPERATURES}
    return HeadResult(means={t: means(p) for t, p in probes.items()}, plain=probes[1.0])


def pooled(results: Results[HeadResult], arm: str, way: str) -> Points:
    """Return the points of all seeds together, for a bootstrap over completions."""
    parts = [points(one.plain, "overlap", way) for one in results.of(arm)]
    return Points(**{f: np.concatenate([getattr(p, f) for p in parts]) for f in ("n", "x", "y", "xx", "xy")})


def swept_row(results: Results[HeadResult], arm: str) -> Row:
    """Return the slopes over temperatures with their R squared."""
    line: dict[str, Any] = {"head": arm}
    for drafts, name in DRAFTS.items():
        line[drafts] = results.mean(arm, slope(name, "temperatures"))
        line[f"R2, {drafts}"] = float(np.mean([one.swept(name)[1] for one in results.of(arm)]))
    for k in range(1, DEPTH + 1):
        by_seed = [one.swept(f"overlap/{k}", f"target_entropy/{k}")[0] for one in results.of(arm)]
        line[f"sampled, position {k}"] = across_seeds(by_seed)
    lengths = {"sampled": "accept_length", "greedy": "accept_greedy"}
    return line | {
        f"accept length, {drafts}": results.mean(arm, slope(name, "temperatures")) for drafts, name in lengths.items()
    }


def plain_row(results: Results[HeadResult], arm: str) -> Row:
    """Return the slopes at temperature 1, with intervals over seeds and bootstrap intervals over completions."""
    line: dict[str, Any] = {"head": arm}
    for way in ("tokens", "answers"):
        line |= {f"{way}, {drafts}": results.mean(arm, slope(name, way)) for drafts, name in DRAFTS.items()}
        own, base = pooled(results, arm, way), pooled(results, "ce", way)
        line[f"{way}, sampled (bootstrap)"] = own.interval()
        line[f"{way}, sampled, minus ce (bootstrap)"] = slope_difference(own, base)
    return line


NAMES = {
    "entropy": "target_entropy", "accept length": "accept_length", "greedy drafts": "accept_greedy",
    "overlap": "overlap", "p(greedy draft)": "target_only", "alpha p>q": "alpha_p_gt_q", "alpha q>=p": "alpha_q_ge_p",
}  # fmt: skip


def mean_at(temperature: float, name: str) -> Value:
    """Return a function that reads a head's mean at a temperature."""
    return lambda one: one.means[temperature][name]


def tables(results: Results[HeadResult]) -> Mapping[str, Sequence[Row]]:
    """Return the slopes in three ways, and the means by temperature."""
    by_task = [
        {"drafts": drafts, **line}
        for drafts, name in DRAFTS.items()
        for line in rows(results, {task: slope(name, "tokens", task) for task in TASKS}, head="head")
    ]
    return {
        "Slopes over temperatures, per nat": [swept_row(results, arm) for arm in ARMS],
        "Slopes between tokens and between answers at temperature 1, per nat": [plain_row(results, a) for a in ARMS],
        "Slopes between tokens by task, per nat": by_task,
        "Means by temperature": [
            {"head": arm, "temperature": t, **results.row(arm, {label: mean_at(t, n) for label, n in NAMES.items()})}
            for arm in ARMS
            for t in TEMPERATURES
        ],
    }


STUDY = Study(
    name="temperature",
    paper="Fig 12 and the slopes of Figs 1a and 8 of arXiv 2606.12370",
    model=BUILT_IN,
    arms={name: None if name == "start" else Arm(objective=name, seed=0) for name in ARMS},
    measure=measure,
    prepare=(corpus, *(partial(sampled, temperature=t) for t in TEMPERATURES)),
    stats=(
        *(stat(arm) for stat in SLOPES.values() for arm in ARMS),
        *(
            SLOPES["sampled", way].gain(arm, base)
            for way in WHERE
            for arm in ARMS
            for base in ("ce", "hard_ce")
            if arm != base
        ),
    ),
    rules=RULES,
    tables=tables,
    figures=(
        Figure(
            file="temperature.svg",
            caption="Acceptance against the target's entropy over the temperatures (mean of all positions and three "
            "seeds): sampled drafts (left), greedy drafts (right).",
            draw=charts.temperatures,
        ),
        Figure(
            file="positions.svg",
            caption="Acceptance of sampled drafts against entropy over the temperatures, at each draft position.",
            draw=charts.positions,
        ),
        Figure(
            file="tokens.svg",
            caption="Acceptance against the target's entropy between tokens at temperature 1, all positions.",
            draw=charts.bins,
        ),
        Figure(
            file="split.svg",
            caption="The two parts of the overlap against temperature: where the target gives more than the draft "
            "(left), and where the draft gives at least as much (right).",
            draw=charts.split,
        ),
    ),
    settings={**asdict(Arm(objective="", seed=0)), "prompts": HELD_OUT, "temperatures": TEMPERATURES},
)
