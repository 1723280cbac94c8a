"""Tables of every loss.

An arm of one seed has intervals over prompts alone, and an arm without heads has no line.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bebop.adaptation.probe import Probe
from bebop.metrics.intervals import Interval
from recipes.reproduce.real import arms
from recipes.reproduce.real.arms import Arm, each, flat_curves
from recipes.reproduce.real.effects import Statistic, accept_length, mean_of
from recipes.reproduce.real.runs import ADDED, BRIEF
from recipes.reproduce.real_losses.comparison import (
    AT_MARKS,
    BEST,
    COMPARED,
    FRESH,
    NAMES,
    ON_UNSEEN,
    SLOPED,
    TIMES,
    UNSEEN,
    WAYS,
    greedy_length,
    heads,
    lost_overlap,
)
from recipes.reproduce.study import SEEDS

Line = dict[str, Any]
STOPPED = (*BRIEF, "kl")  # arms whose runs end at the last mark


def number(name: str, step: int | None = None) -> Callable[[Probe], Statistic]:
    """Return the statistic of the mean of a probed number at one step of the chains, from 0; None: over all steps."""

    def what(chains: Probe) -> Statistic:
        table = chains.numbers[name]
        return mean_of(chains, table if step is None else table[:, step])

    return what


def shown(statistics: Arm[Statistic]) -> Interval | None:
    """Return the interval of a number over an arm; None without heads."""
    return arms.interval(arms.of_arm(statistics)) if statistics else None


def difference(first: Arm[Statistic], second: Arm[Statistic]) -> Interval | None:
    """Return the difference of two arms; None without common seeds."""
    found = arms.of_difference(first, second)
    return arms.interval(found) if found else None


def depth(place: Path) -> int:
    """Return the number of steps of a chain."""
    return max((one.numbers["overlap"].shape[1] for name in NAMES for one in heads(place, name).values()), default=0)


def best_lines(place: Path) -> list[Line]:
    """Return one line per arm for its best heads."""
    steps = range(depth(place))
    columns = {
        "accept length": accept_length, "greedy drafts": greedy_length,
        **{f"overlap {k + 1}": number("overlap", k) for k in steps}, "lost along a chain": lost_overlap,
        "p(argmax q)": number("target_only"), "draft entropy": number("draft_entropy"),
        "target entropy": number("target_entropy"),
    }  # fmt: skip
    lines = []
    for name in NAMES:
        if found := heads(place, name):
            flat = flat_curves(place, name.removeprefix(FRESH), fresh=name.startswith(FRESH))
            line: Line = {"loss": name, "seeds": len(found), "flat curves": f"{sum(flat)} of {len(flat)}"}
            line |= {column: shown(each(found, what)) for column, what in columns.items()}
            lines.append(line | {"accept length, unseen kinds": shown(ON_UNSEEN.statistics(place, name))})
    return lines


def mark_lines(place: Path) -> list[Line]:
    """Return the accept lengths at the marks of training."""
    lines: list[Line] = []
    for name in NAMES:
        found = {when.words.removeprefix(" at "): shown(when.statistics(place, name)) for when in AT_MARKS}
        if any(found.values()):
            lines.append({"loss": name, **found, "best": shown(BEST.statistics(place, name))})
    return lines


def gain_lines(place: Path) -> list[Line]:
    """Return the accept lengths minus that of ``ce``, fresh heads against fresh ones, paired by seed.

    Runs that end at the last mark have no best heads comparable with those of ``ce``, which trained for longer.
    """
    lines: list[Line] = []
    for name in NAMES:
        base = f"{FRESH}ce" if name.startswith(FRESH) else "ce"
        if name != base:
            times = AT_MARKS if name in STOPPED else TIMES
            found = {title(when.words): gain(place, name, base, when.words) for when in times}
            if any(found.values()):
                lines.append({"loss": name, **found})
    return lines


def look_lines(place: Path) -> list[Line]:
    """Return gains in accept length of the seeds of the first evaluation, and of the seeds added after it."""
    lines: list[Line] = []
    for first, second in COMPARED:
        ours, theirs = (BEST.statistics(place, name) for name in (first, second))
        if set(ADDED).intersection(ours, theirs):
            looks = {"seeds of the first look": SEEDS, "seeds that were added": ADDED}
            found = {when: difference(_only(ours, seeds), _only(theirs, seeds)) for when, seeds in looks.items()}
            lines.append({"loss": first, "over": second, **found})
    return lines


def _only(arm: Arm[Statistic], seeds: Collection[int]) -> Arm[Statistic]:
    return {seed: one for seed, one in arm.items() if seed in seeds}


def title(words: str) -> str:
    """Return a column's name."""
    return words.strip().removeprefix("at ") or "best"


def gain(place: Path, name: str, base: str, words: str) -> Interval | None:
    """Return the accept length of one arm minus that of another at one of ``TIMES``."""
    when = next(one for one in TIMES if one.words == words)
    return difference(when.statistics(place, name), when.statistics(place, base))


def slope_lines(place: Path) -> list[Line]:
    """Return the slopes of acceptance on entropy per nat, and these slopes minus that of ``ce``."""
    lines: list[Line] = []
    for name in SLOPED:
        found: Line = {}
        for way, of in WAYS.items():
            found[way] = shown(of(place, name))
            if name != "ce":
                found[f"{way}, minus ce"] = difference(of(place, name), of(place, "ce"))
        if any(found.values()):
            lines.append({"loss": name, **found})
    return lines


def kind_lines(place: Path) -> list[Line]:
    """Return the gain over ``ce`` by kind of prompt, for the best heads."""
    lines = []
    for split in ("test", UNSEEN):
        bases = heads(place, "ce", split=split)
        for kind in sorted({str(kind) for one in bases.values() for kind in one.task}):
            line: Line = {"kind": kind + (" (unseen)" if split == UNSEEN else "")}
            of = _of_kind(kind)
            line["ce"] = shown(each(bases, of))
            for name in ("hard_ce", "tv", "e2e_tv"):
                line[f"{name} - ce"] = difference(each(heads(place, name, split=split), of), each(bases, of))
            lines.append(line)
    return lines


def _of_kind(kind: str) -> Callable[[Probe], Statistic]:
    """Return the statistic of the accept length over the chains of one kind; only its prompts are resampled."""

    def what(chains: Probe) -> Statistic:
        own = chains.task == kind
        arrays = {name: getattr(chains, name)[own] for name in ("row", "place", "task", "accept", "accept_greedy")}
        return accept_length(Probe(**arrays, numbers={name: table[own] for name, table in chains.numbers.items()}))

    return what


# ---- what the losses cost


def fused(place: Path) -> tuple[list[Line], dict[str, object]]:
    """Return lines and facts on time and memory of the fused losses and of plain autograd, from the file of
    ``real.fused``.

    Both are empty if it has not run.
    """
    path = place / "fused.json"
    if not path.is_file():
        return [], {}
    lines: list[Line] = json.loads(path.read_text())
    by_arm = {(line["loss"], line["arm"]): line for line in lines}
    facts: dict[str, object] = {}
    for loss in dict.fromkeys(line["loss"] for line in lines):
        one, other = (by_arm.get((loss, arm)) for arm in ("fused", "eager"))
        if one and other:
            for what in ("CPU seconds", "MB"):
                facts[f"fused {loss}, {what} of plain autograd"] = one[what] / other[what]
    return lines, facts
