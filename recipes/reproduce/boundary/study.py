"""Positions on either side of the boundary, for the initial head and for heads of six losses; see README.md."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bebop.adaptation.probe import probe
from bebop.metrics.intervals import Interval
from bebop.trainer.objectives import Sampling
from recipes.reproduce.boundary.charts import bins, planes
from recipes.reproduce.boundary.sides import Quantity, Sides, sides
from recipes.reproduce.claims import BUILT_IN
from recipes.reproduce.harness import Figure, Results, Row, Study, Value
from recipes.reproduce.rules import Stat, above
from recipes.reproduce.study import DEPTH, HELD_OUT, TASKS, Arm, head, policy, prepare, text
from recipes.reproduce.temperature.slopes import EDGES, bin_names

HEADS = ("start", "hard_ce", "ce", "tv", "e2e_tv", "nla", "rkl")
COMPARED = ("hard_ce", "ce", "e2e_tv")
WORTH = 0.01  # acceptance that a choice by position must add to be worth having


def mean(of: Quantity) -> Stat:
    """Return the mean of a number over all positions of a head."""
    return Stat(name=of.replace("_", " "), value=lambda one: one.mean(of), arm=f"{{arm}}, {of}")


def worth(of: Quantity) -> Stat:
    """Return the acceptance that a choice by position adds to the better of the two fixed ways."""
    value: Value = lambda one: one.mean(of) - max(one.mean("sampled"), one.mean("greedy"))  # noqa: E731
    return Stat(name=f"acceptance added by {NAMES[of]}", value=value, arm=f"{{arm}}, worth_{of}")


NAMES = {"best": "the better draft at each position", "switch": "a switch on the draft's entropy"}
MEANS: Mapping[str, Stat] = {
    "sampled_wins": mean("sampled_wins"), "clear_sampled": mean("clear_sampled"), "clear_greedy": mean("clear_greedy"),
    "sampled": mean("sampled"), "greedy": mean("greedy"), "best": mean("best"), "switch": mean("switch"),
}  # fmt: skip
ADVANTAGE = Stat(
    name="sampled minus greedy acceptance",
    value=lambda one: one.mean("sampled") - one.mean("greedy"),
    arm="{arm}, advantage",
)
BEST, SWITCH = worth("best"), worth("switch")

RULES = (
    *(
        above(
            "C2", ADVANTAGE(head), 0.0, noise=(MEANS["sampled"](head), MEANS["greedy"](head)),
            says=f"Sampled drafts of the head {head} are accepted more often than greedy ones, on average.",
            also={"sampled": MEANS["sampled"](head), "greedy": MEANS["greedy"](head)},
        )
        for head in COMPARED
    ),
    *(
        above(
            "C2", MEANS["sampled_wins"](head), 0.5, says=f"They are so at most positions, head {head}.",
            also={"by more than 0.01: sampled": MEANS["clear_sampled"](head), "greedy": MEANS["clear_greedy"](head)},
        )
        for head in COMPARED
    ),
    above(
        "beyond", BEST("e2e_tv"), WORTH, noise=(MEANS["best"]("e2e_tv"), MEANS["sampled"]("e2e_tv")),
        says="Choosing the better kind of draft at every position would be worth having, head e2e_tv.",
    ),
    above(
        "beyond", SWITCH("e2e_tv"), 0.0, noise=(MEANS["switch"]("e2e_tv"), MEANS["sampled"]("e2e_tv")),
        says="A switch on the draft's own entropy, which decoding can do, gains over one kind, head e2e_tv.",
    ),
)  # fmt: skip

COLUMNS: Mapping[str, Value] = {
    "sampled wins": MEANS["sampled_wins"].value, "by > 0.01": MEANS["clear_sampled"].value,
    "greedy wins by > 0.01": MEANS["clear_greedy"].value, "always sampled": MEANS["sampled"].value,
    "always greedy": MEANS["greedy"].value, "the better one": MEANS["best"].value,
    "switch on draft entropy": MEANS["switch"].value, "sampled - greedy": ADVANTAGE.value,
}  # fmt: skip


def measure(arm: Arm | None, seed: int) -> Sides:
    """Train or load a head and probe it on held-out text."""
    model = policy() if arm is None else head(Arm(objective=arm.objective, seed=seed))
    return sides(probe(model, text(seed, HELD_OUT), DEPTH, Sampling()))


def part(
    results: Results[Sides], task: str | None = None, position: int | None = None, bin: int | None = None
) -> Results[Sides]:
    """Return the positions of a task, of a draft position, or of a bin of the target's entropy."""

    def chosen(one: Sides) -> Sides:
        kept = np.ones(len(one.sampled), bool)
        kept &= True if task is None else one.task == task
        kept &= True if position is None else one.position == position
        kept &= True if bin is None else np.digitize(one.entropy, EDGES) == bin
        return one.only(kept)

    return Results(found={key: chosen(one) for key, one in results.found.items()}, seeds=results.seeds)


def pooled(results: Results[Sides], arm: str) -> Interval:
    """Return the acceptance of sampled minus greedy drafts, bootstrapped over the completions of all seeds."""
    every = results.of(arm)
    answers = {"answer": np.concatenate([one.answer + 10**6 * i for i, one in enumerate(every)])}
    columns = {c: np.concatenate([getattr(one, c) for one in every]) for c in Sides.__slots__ if c != "answer"}
    return Sides(**answers, **columns).advantage()


def line(results: Results[Sides], arm: str, **more: Any) -> Row:
    """Return a table row of a head."""
    return {"head": arm, **results.row(arm, COLUMNS), "(bootstrap)": pooled(results, arm), **more}


def tables(results: Results[Sides]) -> Mapping[str, Sequence[Row]]:
    """Return tables of all positions, and by task, draft position and entropy."""
    two = ("ce", "e2e_tv")
    by_bin = [(name, part(results, bin=j)) for j, name in enumerate(bin_names())]
    return {
        "All positions": [line(results, name) for name in HEADS],
        "By task": [line(part(results, task=t), name, task=t) for t in TASKS for name in two],
        "By position": [line(part(results, position=k), name, position=k) for k in (1, 2, 3) for name in two],
        "By the target's entropy": [
            line(some, name, entropy=label, positions=sum(len(one.sampled) for one in some.of(name)))
            for label, some in by_bin
            for name in two
        ],
    }


STUDY = Study(
    name="boundary",
    paper="the boundary TV = 1 - p(argmax q) of arXiv 2606.12370",
    model=BUILT_IN,
    arms={name: None if name == "start" else Arm(objective=name, seed=0) for name in HEADS},
    measure=measure,
    prepare=(prepare,),
    stats=tuple(stat(name) for name in HEADS for stat in (*MEANS.values(), ADVANTAGE, BEST, SWITCH)),
    rules=RULES,
    tables=tables,
    figures=(
        Figure(
            file="boundary.svg",
            caption="Positions by the distance of both distributions and by how often a greedy draft is rejected, all "
            "seeds (darker: more positions, logarithmic); below the line sampled drafts are accepted more often.",
            draw=planes,
        ),
        Figure(
            file="entropy.svg",
            caption="By the target's entropy: share of positions where sampled drafts win (left), and what the head "
            "e2e_tv is accepted with (right).",
            draw=bins,
        ),
    ),
    settings={**asdict(Arm(objective="", seed=0)), "prompts": HELD_OUT},
)
