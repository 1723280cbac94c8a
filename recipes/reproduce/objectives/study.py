"""Nine losses with three seeds and two amounts of data; README.md says what counts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bebop.adaptation.corpus import drafting_config
from bebop.adaptation.evaluation import Measured
from bebop.adaptation.evaluation import measure as decode
from bebop.adaptation.probe import Probe, probe
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling
from recipes.reproduce.claims import BUILT_IN
from recipes.reproduce.figures import Curve, Panel, bars, draw, figure
from recipes.reproduce.harness import Figure, Results, Row, Study, Value, rows
from recipes.reproduce.rules import Stat, above, gain, half_of, less, unmoved
from recipes.reproduce.study import (
    HELD_OUT,
    QUICK,
    TASKS,
    Arm,
    corpus,
    head,
    policy,
    prompts,
    settings,
    text,
)

OBJECTIVES = ("hard_ce", "ce", "kl", "rkl", "tv", "e2e_tv", "e2e_tv_corrected", "nla", "hybrid")
LOW_DATA = ("hard_ce", "ce", "nla", "e2e_tv")
FEW = 16 if QUICK else 100  # sequences in the low-data regime: each is seen sixteen times
DECODED = ("start", "hard_ce", "ce", "e2e_tv")  # arms that decode as well
OUTSIDE = 4 if QUICK else 48  # prompts of a task that neither heads nor backbone were trained on
DRAFTS = {"bebop": "sampled", "target_only": "greedy"}  # decoding system -> its drafts
STILL = 0.009  # tokens: .3 % of three drafts, by which the paper's greedy drafts move at most


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    """Measurements of one head on the held-out text of its seed."""

    inside: Probe
    outside: Probe  # on a task (lcm) that nothing was trained on
    decoded: dict[str, Measured]  # decoding system -> measurements; empty for most arms

    def mean(self, name: str, position: int | None = None, task: str | None = None) -> float:
        """Return the mean of a probed number at a position, or over all; ``task``: lcm is the one from outside."""
        probed = self.outside if task == "lcm" else self.inside
        chosen = np.ones(len(probed.row), bool) if task in (None, "lcm") else probed.task == task
        table = probed.numbers[name][chosen]
        return float(np.nanmean(table.ravel() if position is None else table[:, position - 1]))


def held_out(seed: int) -> list[TokenRow]:
    """Sample the text that heads of a seed are probed on."""
    return text(seed, HELD_OUT)


def unseen(seed: int) -> list[TokenRow]:
    """Sample text of a task that nothing was trained on."""
    return text(seed, OUTSIDE, "task=lcm")


def measure(arm: tuple[Arm | None, bool], seed: int) -> HeadResult:
    """Train or load a head, probe it, and decode with it if the arm says so."""
    trained, decodes = arm
    model = policy() if trained is None else head(replace(trained, seed=seed))
    decoded = {}
    if decodes:
        asked, data = prompts(seed, HELD_OUT), settings(seed).data
        decoded = {s: decode(model, asked, data, drafting_config(model, s), seed + 1) for s in DRAFTS}
    inside, outside = (probe(model, rows, 3, Sampling()) for rows in (held_out(seed), unseen(seed)))
    return HeadResult(inside=inside, outside=outside, decoded=decoded)


LENGTH = Stat(name="accept length", value=lambda head: float(np.nanmean(head.inside.accept)), arm="length {arm}")
GREEDY = Stat(
    name="greedy accept length",
    value=lambda head: float(np.nanmean(head.inside.accept_greedy)),
    arm="greedy {arm}",
    gains="greedy: {a} - {b}",
)
LCM = Stat(
    name="overlap on lcm",
    value=lambda head: head.mean("overlap", task="lcm"),
    arm="lcm {arm}",
    gains="lcm: {a} - {b}",
)
SAMPLED_LESS_GREEDY = less("sampled - greedy", LENGTH("e2e_tv"), GREEDY("e2e_tv"))
HALF_LESS_GREEDY = less(
    "half the gain - greedy gain", half_of(LENGTH.gain("e2e_tv", "ce")), GREEDY.gain("e2e_tv", "ce")
)
JUDGED = ("hard_ce", "ce", "kl", "tv", "e2e_tv")

RULES = (
    gain(
        "C3", LENGTH, "e2e_tv", over="hard_ce",
        says="End-to-end TV raises the accept length over hard-label cross-entropy of equal compute.",
        also={"with 100 sequences": LENGTH.gain("e2e_tv, few", "hard_ce, few")},
    ),
    gain(
        "C3", LENGTH, "e2e_tv", over="ce", noise=("kl",),
        says="It does so over soft-label cross-entropy, the honest baseline.",
        also={"two runs of one gradient (ce, kl) differ by": LENGTH.gain("kl", "ce")},
    ),
    gain(
        "C3", LENGTH, "e2e_tv", over="tv", says="The end-to-end form is better than TV of single steps."
    ),
    unmoved(
        "C3", GREEDY, "e2e_tv", over="ce", within=STILL, noise=("kl",),
        says="Greedy drafts neither gain nor lose by it (the paper: acceptance moves by less than 0.3 %).",
        also={"sampled drafts": LENGTH.gain("e2e_tv", "ce")},
    ),
    above(
        "C2", SAMPLED_LESS_GREEDY, 0.0, noise=(LENGTH("e2e_tv"), GREEDY("e2e_tv")),
        says="With the head so trained, sampled drafts are accepted for longer than greedy ones.",
    ),
    gain(
        "C3", LCM, "e2e_tv", over="ce", noise=("kl",),
        says="The gain carries over to a task that neither head nor backbone was trained on.",
    ),
)  # fmt: skip


def at(name: str, position: int | None = None, task: str | None = None) -> Value:
    """Return a function that reads the mean of a probed number from a head."""
    return lambda head: head.mean(name, position, task)


PROBED = ("target_only", "draft_entropy", "target_entropy", "kl_pq")
COLUMNS = {
    "accept length": LENGTH.value,
    "greedy drafts": GREEDY.value,
    **{f"overlap {k}": at("overlap", k) for k in (1, 2, 3)},
    **{name.replace("_", " "): at(name) for name in PROBED},
}
BY_TASK = {task: at("overlap", task=task) for task in (*TASKS, "lcm")}  # lcm is out of distribution


def counted(system: str, name: str, position: int | None = None) -> Value:
    """Return a function that reads a number that the engine counted while a head decoded."""
    return lambda head: head.decoded[system].interval(name, position).value


def decoded_rows(results: Results[HeadResult]) -> list[Row]:
    """Return rows of the decoded heads: accept length and acceptance by position, one per kind of draft."""
    columns = {
        system: {"accept length": counted(system, "accept_length")}
        | {f"acceptance {k}": counted(system, "accepted", k) for k in (1, 2, 3)}
        for system in DRAFTS
    }
    return [
        {"objective": arm, "drafts": drafts, **results.row(arm, columns[system])}
        for arm in DECODED
        for system, drafts in DRAFTS.items()
    ]


def tables(results: Results[HeadResult]) -> Mapping[str, Sequence[Row]]:
    """Return the tables of losses, tasks and decoding."""
    whole = [arm for arm in results.arms if not arm.endswith("few")]
    return {
        "Objectives": rows(results, COLUMNS, head="objective"),
        "Overlap by task": rows(results, BY_TASK, whole, head="objective"),
        "Decoded": decoded_rows(results),
    }


def draw_lengths(results: Results[HeadResult], path: Path) -> None:
    """Draw the accept lengths of all arms: sampled drafts on the left, greedy ones on the right."""
    names = [arm.removesuffix(", few") for arm in results.arms]
    with figure(path, 2, 5.6, sharey=True) as panels:
        for axes, stat, drafts in zip(panels, (LENGTH, GREEDY), DRAFTS.values(), strict=True):
            bars(axes, names, [results.mean(arm, stat.value) for arm in results.arms], results.arms)
            axes.set(title=f"{drafts} drafts", ylabel="accept length (accepted + 1)")


def draw_positions(results: Results[HeadResult], path: Path) -> None:
    """Draw the overlap at each position, and by task."""

    def curves(values: Sequence[Value], x: Sequence[int]) -> list[Curve]:
        arms = ("start", "hard_ce", "ce", "nla", "tv", "e2e_tv")
        return [Curve(label=arm, x=x, y=[results.mean(arm, v).value for v in values]) for arm in arms]

    by_position = curves([at("overlap", k) for k in (1, 2, 3)], (1, 2, 3))
    by_task = curves([*BY_TASK.values()], range(4))
    left = Panel(curves=by_position, x="draft position", y="overlap of draft and target")
    right = Panel(curves=by_task, y="overlap, all positions", ticks=(*TASKS, "lcm (new)"), legend=True)
    draw(path, (left, right), width=5.2)


def trained(objective: str, **other: Any) -> tuple[Arm, bool]:
    """Return an arm for ``measure``: the training of a head, and whether it decodes as well."""
    arm = Arm(objective=objective, seed=0, **other)
    return arm, arm.sequences != FEW and objective in DECODED


# ``kl`` has the gradient of ``ce``. It gets another order of the data, so that it shows chance.
ARMS: dict[str, Any] = {"start": (None, True)}
ARMS |= {name: trained(name, order=int(name == "kl")) for name in OBJECTIVES}
ARMS |= {f"{name}, few": trained(name, sequences=FEW) for name in LOW_DATA}
PREPARE = (corpus, held_out, unseen)
STUDY = Study(
    name="objectives",
    paper="Table 2 and Figs 4, 5, 1b and 10 of arXiv 2606.12370",
    model=BUILT_IN,
    arms=ARMS,
    measure=measure,
    prepare=PREPARE,
    stats=(*(stat(arm) for arm in JUDGED for stat in (LENGTH, GREEDY, LCM)), HALF_LESS_GREEDY),
    rules=RULES,
    tables=tables,
    figures=(
        Figure(
            file="objectives.svg",
            caption="Accept length at temperature 1, K = 3: sampled drafts (left), greedy drafts (right); mean of "
            "three seeds and its 95 % interval.",
            draw=draw_lengths,
        ),
        Figure(
            file="positions.svg",
            caption="Overlap at each draft position (left) and by task (right), mean of three seeds.",
            draw=draw_positions,
        ),
    ),
    settings={**asdict(Arm(objective="", seed=0)), "few": FEW, "prompts": HELD_OUT},
)
