"""Results of all jobs by epoch and by age of the history, judged by ``rule``; stored as JSON, table and plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bebop.bench import record
from bebop.command import writing
from bebop.metrics.intervals import Interval, across_seeds
from recipes.history import rule
from recipes.history.jobs import Plan
from recipes.history.replay import ARMS, BATCH_OF_AGES, MAX_LENGTH, PROMPTS, ROUNDS

NAME = "history_epochs"
AGE = "epochs ago"


def by_epoch(rows: rule.Rows) -> list[dict[str, Any]]:
    """Return one row per batch size, epoch and arm, with intervals over seeds."""
    lines = []
    for batch in sorted({row["batch"] for row in rows}):
        for epoch in sorted({row["epoch"] for row in rows}):
            here = rule.of(rows, batch=batch, epoch=epoch)
            for arm in ARMS:
                lines.append({"batch": batch, "epoch": epoch, "arm": arm, **_line(here, arm)})
    return lines


def sums(rows: rule.Rows) -> list[dict[str, Any]]:
    """Add up the points of each epoch; the rule gives the same findings on these sums."""
    keys = ("seed", "epoch", "batch", "arm")
    made = []
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        own = dict(zip(keys, key, strict=True))
        here = rule.of(rows, **own)
        tokens, cycles = ([int(rule.total(here, what))] for what in ("tokens", "cycles"))
        line = {**own, "tokens": tokens, "cycles": cycles, "seconds": rule.total(here, "seconds")}
        looked = [row["lookup"] for row in here if "lookup" in row]
        made.append({**line, "lookup": sum(looked) / len(looked)} if looked else line)
    return made


def _line(here: rule.Rows, arm: str) -> dict[str, Any]:
    """Return the numbers of one arm at one batch size and epoch; a seed's ratios compare rows that took turns."""
    seeds = sorted({row["seed"] for row in here})
    own = [rule.of(here, seed=seed, arm=arm) for seed in seeds]
    others = {name: [rule.of(here, seed=seed, arm=name) for seed in seeds] for name in ("plain", "bebop")}
    line: dict[str, Any] = {
        "accept length": _over(map(rule.accept_length, own)),
        "tokens/s": sum(map(rule.speed, own)) / len(own),
    }
    for name, rows in others.items():
        pairs = zip(own, rows, strict=True)
        line[f"tokens/s, x {name}"] = _over(rule.speed(mine) / rule.speed(its) for mine, its in pairs)
    looked = [row["lookup"] for rows in own for row in rows if "lookup" in row]
    if looked:
        line["lookups %"] = 100 * sum(looked) / len(looked)
    return line


def by_age(rows: rule.Rows) -> list[dict[str, Any]]:
    """Return one row per epoch and age of the only completions in the history."""
    lines = []
    for epoch, ago in sorted({(row["epoch"], row[AGE]) for row in rows}):
        here = [row for row in rows if (row["epoch"], row[AGE]) == (epoch, ago)]
        seeds = sorted({row["seed"] for row in here})
        lengths = _over(rule.accept_length(rule.of(here, seed=seed)) for seed in seeds)
        lines.append({"epoch": epoch, AGE: ago, "accept length": lengths})
    return lines


def _over(values: Any) -> dict[str, float]:
    return asdict(across_seeds(list(values)))


def result(
    plan: Plan, found: Sequence[Mapping[str, Any]], origin: Mapping[str, object], looks: int | None = None
) -> dict[str, Any]:
    """Return the content to store; ``found`` holds the output of ``replay.measured`` for each seed."""
    arms = [row for one in found for row in one["arms"]]
    epochs = range(plan.epochs)
    return {
        "settings": {
            **asdict(plan), "looks": looks or plan.points, "arms": ARMS, "prompts of a point by batch": PROMPTS,
            "rounds": ROUNDS, "batch by age": BATCH_OF_AGES, "max_length": MAX_LENGTH,
        },
        "place": record.place(origin),
        "rule": {"hash": rule.hash_of_rule(), "file": "recipes/history/rule.py", "findings": dict(rule.judge(arms))},
        "auto": {"hash": rule.hash_of_rule("judge_auto"), "findings": dict(rule.judge_auto(arms))},
        "times": {
            f"batch {batch}": {
                "accept length, x bebop": asdict(rule.against(arms, rule.accept_length, batch, "bebop")),
                **{f"tokens/s, x {other}": asdict(rule.against(arms, rule.speed, batch, other)) for other in ARMS
                   if other != rule.ARM},
            }
            for batch in PROMPTS
        },
        "reward by epoch": [_over(one["rewards"][epoch]["reward"] for one in found) for epoch in epochs],
        "rows": by_epoch(arms),
        "sums": sums(arms),
        "by age": by_age([row for one in found for row in one["ages"]]),
    }  # fmt: skip


def keep(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``history_epochs.json``, ``.md`` and ``.svg``."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{NAME}.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / f"{NAME}.md").write_text(page(content))
        picture(content, folder / f"{NAME}.svg")


def page(content: Mapping[str, Any]) -> str:
    """Return the page: the tables, then the findings of the rule and their numbers."""
    findings = content["rule"]["findings"]
    lines = [f"- {name}: {'yes' if met else 'no'}" for name, met in findings.items()]
    lines += [f"- auto: {name}: {'yes' if met else 'no'}" for name, met in content["auto"]["findings"].items()]
    lines += [f"- {batch}: {name} {told(one)}" for batch, all in content["times"].items() for name, one in all.items()]
    rewards = ", ".join(map(told, content["reward by epoch"]))
    lines += [f"- reward by epoch: {rewards}", f"- rule: {content['rule']['hash']}"]
    tables = [record.table([_cells(row) for row in content[name]]) for name in ("rows", "by age")]
    return "\n\n".join([tables[0].rstrip(), tables[1].rstrip(), "\n".join(lines)]) + "\n"


def told(value: Mapping[str, float]) -> str:
    """Format a number with its interval."""
    return str(Interval(**value))


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: told(value) if isinstance(value, Mapping) else value for name, value in row.items()}


def picture(content: Mapping[str, Any], path: Path) -> None:
    """Draw accept length and speed over plain decoding by epoch, with one column of plots per batch size."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    rows = content["rows"]
    batches = sorted({row["batch"] for row in rows})
    figure, axes = plt.subplots(2, len(batches), figsize=(3.4 * len(batches), 5.6), sharex=True, sharey="row")
    for column, batch in enumerate(batches):
        for line, what in enumerate(("accept length", "tokens/s, x plain")):
            axis = axes[line][column]
            for arm in ARMS:
                values = [row[what] for row in rows if row["batch"] == batch and row["arm"] == arm]
                low, mid, high = ([value[end] for value in values] for end in ("low", "value", "high"))
                axis.plot([1 + i for i in range(len(mid))], mid, marker="o", markersize=3, label=arm)
                axis.fill_between([1 + i for i in range(len(mid))], low, high, alpha=0.15)
            axis.grid(alpha=0.3)
            axis.set_xlabel("epoch" if line else "")
            axis.set_ylabel(what if column == 0 else "")
            axis.set_title(f"batch {batch}" if line == 0 else "")
            axis.set_xticks([1 + i for i in range(len(mid))])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
