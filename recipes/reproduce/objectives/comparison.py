"""Nine losses, three seeds, two amounts of data; README.md says what counts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bebop.adaptation.corpus import drafting_config
from bebop.adaptation.evaluation import Measured, measure
from bebop.adaptation.probe import Probe, probe
from bebop.metrics.intervals import Interval, across_seeds
from bebop.trainer.objectives import Sampling
from recipes.reproduce.figures import bars, color, figure
from recipes.reproduce.measured import Number, of
from recipes.reproduce.measured import over_seeds as mean_over_seeds
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import (
    HELD_OUT,
    QUICK,
    SEEDS,
    TASKS,
    Arm,
    corpus,
    everywhere,
    head,
    policy,
    prompts,
    results_folder,
    settings,
    text,
)

HERE = results_folder(Path(__file__).parent)
OBJECTIVES = ("hard_ce", "ce", "kl", "rkl", "tv", "e2e_tv", "e2e_tv_corrected", "nla", "hybrid")
LOW_DATA = ("hard_ce", "ce", "nla", "e2e_tv")
FEW = 16 if QUICK else 100  # sequences in the low-data regime: each is seen sixteen times
DECODED = ("start", "hard_ce", "ce", "e2e_tv")  # arms that are decoded with as well
OUTSIDE = 4 if QUICK else 48  # prompts of a task that neither heads nor backbone were trained on
SYSTEMS = ("bebop", "target_only")
PREPARED: dict[str, Callable[[int], object]] = {  # the longest first, so that both cores end together
    "training": corpus,
    "held out": lambda seed: text(seed, HELD_OUT),
    "outside": lambda seed: text(seed, OUTSIDE, "task=lcm"),
}

Job = tuple[str, Arm | None, int]  # label, arm (None: the head as it came), seed


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    """What one head does on the held-out text of its seed."""

    inside: Probe
    outside: Probe  # the task that nothing was trained on
    decoded: dict[str, Measured]  # decoding system -> what decoding gave; empty for most arms

    def number(self, name: str, position: int | None = None, task: str | None = None) -> float:
        """accept_length (greedy: accept_length_greedy), or the mean of a probed number at a position, or over all."""
        probe = self.outside if task == "lcm" else self.inside
        chosen = np.ones(len(probe.row), bool) if task in (None, "lcm") else probe.task == task
        if name.startswith("accept_length"):
            values = (probe.accept_greedy if name.endswith("greedy") else probe.accept)[chosen]
        else:
            table = probe.numbers[name][chosen]
            values = table.ravel() if position is None else table[:, position - 1]
        return float(np.nanmean(values))


Results = dict[tuple[str, int], HeadResult]


def jobs() -> list[Job]:
    """Every arm of every seed. ``kl`` has the gradient of ``ce``: another order of the data, so it shows chance."""
    listed: list[Job] = []
    for seed in SEEDS:
        listed.append(("start", None, seed))
        for name in OBJECTIVES:
            listed.append((name, Arm(objective=name, seed=seed, order=int(name == "kl")), seed))
        listed += [(f"{name}, few", Arm(objective=name, seed=seed, sequences=FEW), seed) for name in LOW_DATA]
    return listed


def prepare_part(part: tuple[int, str]) -> None:
    """A part of the text of a seed; those of one seed do not need one another."""
    seed, name = part
    PREPARED[name](seed)


def run(job: Job) -> HeadResult:
    """Train (or find) the head; probe it, and decode with it if it is one of ``DECODED``."""
    label, arm, seed = job
    model = policy() if arm is None else head(arm)
    decoded = {}
    if label in DECODED:
        asked, data = prompts(seed, HELD_OUT), settings(seed).data
        decoded = {s: measure(model, asked, data, drafting_config(model, s), seed + 1) for s in SYSTEMS}
    sampling = Sampling()
    return HeadResult(
        inside=probe(model, text(seed, HELD_OUT), 3, sampling),
        outside=probe(model, text(seed, OUTSIDE, "task=lcm"), 3, sampling),
        decoded=decoded,
    )


def run_all(name: str, listed: Sequence[Job]) -> tuple[Results, list[str]]:
    """What every head gave, and the labels of the arms in order."""
    everywhere(prepare_part, [(seed, part) for part in PREPARED for seed in SEEDS], "text")
    heads = everywhere(run, listed, name)
    results = {(label, seed): f for (label, _, seed), f in zip(listed, heads, strict=True)}
    return results, list(dict.fromkeys(label for label, _, _ in listed))


def over_seeds(results: Results, label: str, *what: Any) -> Interval:
    """A number of an arm: mean over seeds with its interval."""
    return across_seeds([results[label, seed].number(*what) for seed in SEEDS])


def gain(results: Results, a: str, b: str, *what: Any) -> Interval:
    """a minus b, mean over seeds with its interval; the seeds are paired."""
    return across_seeds([results[a, s].number(*what) - results[b, s].number(*what) for s in SEEDS])


def main() -> None:
    """Run all arms, judge, draw, write."""
    started = begin("objectives")
    results, labels = run_all("objectives", jobs())
    tables = {
        "Objectives": [row(results, label) for label in labels],
        "Overlap by task": by_task(results, [label for label in labels if not label.endswith("few")]),
        "Decoded": [line for label in DECODED for line in decoded(results, label)],
    }
    draw(results, labels)
    figures = {
        "objectives.svg": "Accept length at temperature 1, K = 3: sampled drafts (left), greedy drafts (right); mean "
        "of three seeds and its 95 % interval.",
        "positions.svg": "Overlap at each draft position (left) and by task (right), mean of three seeds.",
    }
    plan = {**asdict(Arm(objective="", seed=0)), "few": FEW, "prompts": HELD_OUT, "seeds": SEEDS}
    keep(HERE, started, numbers(results), tables, figures, plan)


def row(results: Results, label: str) -> dict[str, Any]:
    """A line of the table: means over seeds with intervals."""
    line: dict[str, Any] = {"objective": label}
    line |= {"accept length": over_seeds(results, label, "accept_length")}
    line |= {"greedy drafts": over_seeds(results, label, "accept_length_greedy")}
    line |= {f"overlap {k}": over_seeds(results, label, "overlap", k) for k in (1, 2, 3)}
    names = ("target_only", "draft_entropy", "target_entropy", "kl_pq")
    return line | {name.replace("_", " "): over_seeds(results, label, name) for name in names}


def by_task(results: Results, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Overlap (all positions) by task; lcm is out of distribution."""
    tasks = (*TASKS, "lcm")
    return [
        {"objective": label} | {task: over_seeds(results, label, "overlap", None, task) for task in tasks}
        for label in labels
    ]


def decoded(results: Results, label: str) -> list[dict[str, Any]]:
    """What the engine counted: the same heads, decoding."""

    def mean(system: str, name: str, position: int | None = None) -> Interval:
        values = [results[label, s].decoded[system].interval(name, position).value for s in SEEDS]
        return across_seeds(values)

    return [
        {"objective": label, "drafts": {"bebop": "sampled", "target_only": "greedy"}[system]}
        | {"accept length": mean(system, "accept_length")}
        | {f"acceptance {k}": mean(system, "accepted", k) for k in (1, 2, 3)}
        for system in SYSTEMS
    ]


def numbers(results: Results) -> dict[str, Number]:
    """What the rules speak of."""
    arms = ("hard_ce", "ce", "kl", "tv", "e2e_tv")

    def gained(a: str, b: str, *what: Any) -> Number:
        return of(gain(results, a, b, *what), len(SEEDS))

    sampled, greedy = "accept_length", "accept_length_greedy"
    by_name = {f"length {arm}": of(over_seeds(results, arm, sampled), len(SEEDS)) for arm in arms}
    by_name |= {f"greedy {arm}": of(over_seeds(results, arm, greedy), len(SEEDS)) for arm in arms}
    by_name |= {f"lcm {arm}": of(over_seeds(results, arm, "overlap", None, "lcm"), len(SEEDS)) for arm in arms}
    by_name |= {f"e2e_tv - {base}": gained("e2e_tv", base, sampled) for base in ("hard_ce", "ce", "tv")}
    by_name["e2e_tv - hard_ce, few"] = gained("e2e_tv, few", "hard_ce, few", sampled)
    by_name["kl - ce"] = gained("kl", "ce", sampled)
    by_name["greedy: e2e_tv - ce"] = gained("e2e_tv", "ce", greedy)
    by_name["half the gain - greedy gain"] = half_less_greedy(results, "e2e_tv", "ce")
    heads = [results["e2e_tv", seed] for seed in SEEDS]
    by_name["sampled - greedy"] = mean_over_seeds([f.number(sampled) - f.number(greedy) for f in heads])
    by_name["lcm: e2e_tv - ce"] = gained("e2e_tv", "ce", "overlap", None, "lcm")
    return by_name


def half_less_greedy(results: Results, a: str, b: str) -> Number:
    """Half of what sampled drafts gain from b to a, minus what greedy drafts gain; per seed, then over seeds."""

    def rise(seed: int, name: str) -> float:
        return results[a, seed].number(name) - results[b, seed].number(name)

    return mean_over_seeds([rise(s, "accept_length") / 2 - rise(s, "accept_length_greedy") for s in SEEDS])


def draw_lengths(path: Path, results: Results, labels: Sequence[str]) -> None:
    """Accept lengths of all arms: sampled drafts on the left, greedy ones on the right."""
    with figure(path, 2, 5.6) as (left, right):
        for axes, name, title in (
            (left, "accept_length", "sampled drafts, rejection sampling"),
            (right, "accept_length_greedy", "greedy drafts, target-only"),
        ):
            means = [over_seeds(results, label, name) for label in labels]
            bars(axes, [label.removesuffix(", few") for label in labels], means, labels)
            axes.set(title=title, ylabel="accept length (accepted + 1)")
        right.sharey(left)


def draw(results: Results, labels: Sequence[str]) -> None:
    """Both figures."""
    draw_lengths(HERE / "figures" / "objectives.svg", results, labels)
    with figure(HERE / "figures" / "positions.svg", 2, 5.2) as (left, right):
        tasks = (*TASKS, "lcm")
        for label in ("start", "hard_ce", "ce", "nla", "tv", "e2e_tv"):
            style: dict[str, Any] = {"marker": "o", "color": color(label), "label": label}
            left.plot((1, 2, 3), [over_seeds(results, label, "overlap", k).value for k in (1, 2, 3)], **style)
            means = [over_seeds(results, label, "overlap", None, task).value for task in tasks]
            right.plot(range(len(tasks)), means, **style)
        left.set(xticks=(1, 2, 3), xlabel="draft position", ylabel="overlap of draft and target")
        right.set_xticks(range(len(tasks)), [*TASKS, "lcm (new)"])
        right.set(ylabel="overlap, all positions")
        right.legend()
