"""The numbers, facts and tables of the study, from the looks at all heads of a form."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.adaptation.probe import Probe
from bebop.metrics.intervals import Interval
from recipes.reproduce.real import slopes as entropy
from recipes.reproduce.real.arms import Arm, Measured, each, interval, of_arm, of_difference, same_chains
from recipes.reproduce.real.effects import Effect, Statistic, by_prompt, mean_of
from recipes.reproduce.real.slopes import ENTROPY, of_kind
from recipes.reproduce.real_regime.evaluation import TEST, UNSEEN, Archive, Look, chains
from recipes.reproduce.real_regime.findings import MOST
from recipes.reproduce.real_regime.plan import (
    DEPTH,
    DRAFTS,
    RUNS,
    SEEDS,
    SHARED,
    SWEPT,
    TEMPERATURES,
    TRAINED_AT,
)
from recipes.reproduce.real_regime.sitting import PROGRESS

OBJECTIVES = tuple(SEEDS)
COMPARED = (("e2e_tv", "ce"), ("tv", "ce"), ("e2e_tv", "tv"), ("e2e_tv", "rkl"), ("rkl", "ce"))
ADVANTAGE = ("ce", "e2e_tv")  # heads whose sampled and greedy drafts are compared
# Table 2 of the paper, its 35B-A3B model: acceptance of three drafts of cross-entropy in percent, and the points that
# other objectives add.
TASKS = ("Math", "Code", "SWE", "Agent", "MT-Bench")
PAPER_CE = (75.0, 71.3, 75.1, 90.3, 65.3)
PAPER_GAINS = {
    "rkl": (1.3, 1.0, -0.2, 1.0, 0.5), "tv": (2.4, 2.5, 3.3, 5.2, 1.4), "e2e_tv": (3.0, 3.3, 8.0, 6.7, 2.3),
}  # fmt: skip
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """The looks of a form, and what its sittings say of themselves."""

    archive: Archive
    progress: dict[str, Any]
    known: dict[str, Probe] = field(default_factory=dict)

    def arm(self, objective: str, temperature: float = TRAINED_AT, split: str = TEST) -> Arm[Probe]:
        """Return the chains of an objective's heads by seed; those that were not looked at are left out."""
        names = {run.seed: run.name for run in RUNS if run.objective == objective}
        looks = {seed: Look(head=name, temperature=temperature, split=split) for seed, name in names.items()}
        return {seed: self.chains(one.name) for seed, one in looks.items() if one.name in self.archive}

    def chains(self, name: str) -> Probe:
        """Return the chains of a look, read once."""
        if name not in self.known:
            self.known[name] = chains(self.archive.columns(name))
        return self.known[name]

    def swept(self, objective: str) -> Arm[list[Probe]]:
        """Return the chains of each head at all temperatures, those of prompts that have chains at every one."""
        arms = [self.arm(objective, temperature) for temperature in TEMPERATURES]
        found = {}
        for seed in arms[0]:
            if all(seed in arm for arm in arms):
                looks = [arm[seed] for arm in arms]
                common = set.intersection(*(set(look.row.tolist()) for look in looks))
                found[seed] = [_of_rows(look, sorted(common)) for look in looks]
        return found


def _of_rows(found: Probe, rows: Sequence[int]) -> Probe:
    """Return the chains of some texts alone."""
    chosen = np.isin(found.row, rows)
    return Probe(
        row=found.row[chosen], place=found.place[chosen], task=found.task[chosen], accept=found.accept[chosen],
        accept_greedy=found.accept_greedy[chosen],
        numbers={name: values[chosen] for name, values in found.numbers.items()},
    )  # fmt: skip


def read(path: Path) -> Found:
    """Return what a form has left: the file of its looks, and ``progress.json`` beside it."""
    return Found(Archive(path), json.loads((path.parent / PROGRESS).read_text()))


# ---- numbers of one head


def acceptance(found: Probe) -> Statistic:
    """Return the share of three sampled drafts that is accepted."""
    return mean_of(found, (found.accept - 1) / DRAFTS)


def greedy_acceptance(found: Probe) -> Statistic:
    """Return the share of three greedy drafts that is accepted."""
    return mean_of(found, (found.accept_greedy - 1) / DRAFTS)


def kinds_won(found: Probe) -> Statistic:
    """Return the share of kinds of prompts in which sampled drafts are accepted more often, on average."""
    own = of_kind(found)
    (gain,) = by_prompt(found, [found.accept - found.accept_greedy]).T
    count = by_prompt(found, [np.ones(len(found.row))])[:, 0]
    columns = np.concatenate([own * gain[:, None], own * count[:, None]], 1)

    def number(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        gains, counts = np.split(sums, 2, 1)
        there = counts > 0
        won: NDArray[np.float64] = ((gains > 0) & there).sum(1) / np.maximum(1, there.sum(1))
        return won

    return Statistic(columns, number)


def greedy_points(found: Probe) -> Statistic:
    """Return the same in points."""
    return mean_of(found, 100 * (found.accept_greedy - 1) / DRAFTS)


# Names of numbers, and what they are of a head.
STATISTICS: dict[str, Callable[[Probe], Statistic]] = {
    "acceptance": acceptance, "acceptance greedy": greedy_acceptance, "greedy points": greedy_points,
}  # fmt: skip


# ---- numbers of a form


def measure(form: str, found: Found) -> Measured:
    """Return the numbers and facts of a form under the names of ``findings.py``.

    Raises:
        UserError: Not all heads were looked at on the same chains.
    """
    told = Measured()
    plain = {name: found.arm(name) for name in OBJECTIVES}
    same_chains([one for arm in plain.values() for one in arm.values()])
    told.add("entropy", of_arm(each(plain["ce"], lambda one: mean_of(one, one.numbers[ENTROPY]))))
    told.add(f"entropy - {MOST:g}", of_arm(each(plain["ce"], lambda one: mean_of(one, one.numbers[ENTROPY] - MOST))))
    for name, arm in plain.items():
        told.arm(f"{name}, accept length", each(arm, lambda one: mean_of(one, one.accept)))
        for words, what in STATISTICS.items():
            told.arm(f"{name}, {words}", each(arm, what))
        told.arm(f"{name}, acceptance on unseen kinds", each(found.arm(name, split=UNSEEN), acceptance))
    for first, second in COMPARED:
        for words, what in STATISTICS.items():
            told.difference(f"{first} - {second}, {words}", each(plain[first], what), each(plain[second], what))
        elsewhere = (each(found.arm(name, split=UNSEEN), acceptance) for name in (first, second))
        told.difference(f"{first} - {second}, acceptance on unseen kinds", *elsewhere)
    for name in ADVANTAGE:
        told.difference(
            f"{name}, sampled - greedy", each(plain[name], acceptance), each(plain[name], greedy_acceptance)
        )
        told.arm(f"{name}, kinds", each(plain[name], kinds_won))
    _slopes(told, found, plain)
    numbers = {f"{form}, {name}": number for name, number in told.numbers.items()}
    facts = {f"{form}, {name}": value for name, value in told.facts.items()}
    return Measured(numbers=numbers, facts=facts | {f"{form}, trained on": trained_on(found)})


def _slopes(told: Measured, found: Found, plain: dict[str, Arm[Probe]]) -> None:
    """Add how accept lengths go with the target's entropy, over temperatures and from prompt to prompt."""
    for name in SWEPT:
        swept = found.swept(name)
        for drafts, column in (("sampled", "length"), ("greedy", "greedy")):
            told.arm(
                f"{name}, {drafts}, slope over prompts",
                each(plain[name], lambda one, y=column: entropy.between_prompts(one, y)),  # type: ignore[misc]
            )
            told.arm(
                f"{name}, {drafts}, slope over temperatures",
                each(swept, lambda looks, y=column: entropy.over_temperatures(looks, y)),  # type: ignore[misc]
            )
            straight = each(swept, lambda looks, y=column: _straight(looks, y))  # type: ignore[misc]
            told.add(f"{name}, {drafts}, R squared over temperatures", of_arm(straight))
    ours = each(plain["e2e_tv"], lambda one: entropy.between_prompts(one, "length"))
    half = each(plain["ce"], lambda one: _halved(entropy.between_prompts(one, "length")))
    told.difference("e2e_tv - half of ce, slope over prompts", ours, half)


def _straight(looks: Sequence[Probe], column: str) -> Statistic:
    return entropy.over_points(entropy.temperature_points(looks, column), entropy.r_squared)


def _halved(one: Statistic) -> Statistic:
    return Statistic(one.sums, lambda sums: one.of(sums) / 2)


def trained_on(found: Found) -> str:
    """Return the tokens of training in words, and whether they are fewer than planned."""
    tokens, planned = tokens_of(found), int(found.progress["planned tokens"])
    words = f"heads trained on {tokens:,} of {planned:,} tokens"
    return words if tokens >= planned else f"{words}, fewer than planned"


def tokens_of(found: Found) -> int:
    """Return the tokens of all completions that were trained on."""
    return max((int(row["tokens"]) for row in found.progress["rows"] if "tokens" in row), default=0)


# ---- tables


def table_two(found: Found) -> list[Line]:
    """Return a line an objective: acceptance of three drafts, and the points over ce beside those of the paper."""
    arms = {name: each(found.arm(name), acceptance) for name in OBJECTIVES}
    lines = []
    for name, arm in arms.items():
        if not arm:
            continue
        gain = None if name == "ce" else of_difference(arm, arms["ce"])
        line: Line = {"objective": name, "seeds": len(arm), "acceptance, %": _percent(of_arm(arm))}
        line["over ce, points"] = "" if name == "ce" else _percent(gain)
        paper = PAPER_CE if name == "ce" else PAPER_GAINS[name]
        lines.append(line | {f"paper: {task}": _signed(value, name) for task, value in zip(TASKS, paper, strict=True)})
    return lines


def _percent(effect: Effect | None) -> Interval:
    found = interval(effect)
    return Interval(*(100 * value for value in (found.value, found.low, found.high)))


def _signed(value: float, name: str) -> str:
    return f"{value:.1f} %" if name == "ce" else f"{value:+.1f}"


def positions(found: Found) -> list[Line]:
    """Return a line an objective and a kind of draft: acceptance of each draft, given those before it are accepted."""
    lines = []
    for name in (SHARED, *OBJECTIVES):
        heads = [SHARED] if name == SHARED else [run.name for run in RUNS if run.objective == name]
        looks = [Look(head=head, temperature=TRAINED_AT, split=TEST).name for head in heads]
        columns = [found.archive.columns(look) for look in looks if look in found.archive]
        for drafts, reached, rate in (("sampled", "reached", "overlap"), ("greedy", "reached_greedy", "target_only")):
            if columns:
                given = np.mean([(c[reached] * c[rate]).sum(0) / c[reached].sum(0) for c in columns], 0)
                plain = np.mean([c[rate].mean(0) for c in columns], 0)
                line: Line = {"head": name, "drafts": drafts, "seeds": len(columns)}
                line |= {f"draft {k + 1}": f"{given[k]:.3f}" for k in range(DEPTH)}
                lines.append(line | {f"overlap {k + 1}": f"{plain[k]:.3f}" for k in (0, DEPTH - 1)})
    return lines


def by_entropy(found: Found) -> list[Line]:
    """Return a line a temperature: mean entropy, and accept lengths with three drafts."""
    lines = []
    for temperature in TEMPERATURES:
        base = found.arm("ce", temperature)
        if base:
            line: Line = {"temperature": f"{temperature:g}"}
            line["entropy, nats"] = interval(of_arm(each(base, lambda one: mean_of(one, one.numbers[ENTROPY]))))
            lines.append(line | _lengths(found, temperature))
    return lines


def _lengths(found: Found, temperature: float) -> Line:
    line: Line = {}
    for name in SWEPT:
        arm = found.arm(name, temperature)
        line[f"{name}, sampled"] = interval(of_arm(each(arm, lambda one: mean_of(one, one.accept))))
        if name in ADVANTAGE:
            line[f"{name}, greedy"] = interval(of_arm(each(arm, lambda one: mean_of(one, one.accept_greedy))))
    return line


def by_kind(found: Found) -> list[Line]:
    """Return a line a kind of prompt: chains, entropy, and accept lengths, means over chains and seeds."""
    arms = {name: found.arm(name) for name in ADVANTAGE}
    if not all(arms.values()):
        return []
    first = next(iter(arms["ce"].values()))
    lines = []
    for kind in np.unique(first.task):
        own = first.task == kind
        line: Line = {"kind": str(kind), "chains": int(own.sum())}
        line["entropy, nats"] = f"{first.numbers[ENTROPY][own].mean():.2f}"
        for name, arm in arms.items():
            for drafts in ("accept", "accept_greedy"):
                mean = np.mean([getattr(one, drafts)[own].mean() for one in arm.values()])
                line[f"{name}, {'sampled' if drafts == 'accept' else 'greedy'}"] = f"{mean:.3f}"
        lines.append(line)
    return lines


def progress_lines(found: Found) -> list[Line]:
    """Return a line for each part of the work: its seconds, and tokens where they count."""
    rows = found.progress["rows"]
    parts: dict[str, float] = {}
    for row in rows:
        for part, seconds in (row["seconds"] if isinstance(row.get("seconds"), dict) else {}).items():
            parts[part] = parts.get(part, 0.0) + seconds
    parts["evaluation"] = sum(row["seconds"] for row in rows if "look" in row)
    tokens = tokens_of(found)
    return [
        {"part": part, "seconds": f"{seconds:.0f}", "tokens a second": f"{tokens / seconds:.0f}" if seconds else ""}
        for part, seconds in parts.items()
    ]


TABLES: dict[str, Callable[[Found], list[Line]]] = {
    "acceptance of three drafts beside Table 2 of the paper": table_two,
    "acceptance by position": positions,
    "accept length with three drafts against entropy": by_entropy,
    "accept length by kind of prompt": by_kind,
    "seconds of the work": progress_lines,
}
