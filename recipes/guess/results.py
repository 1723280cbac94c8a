"""Results of the jobs, read from their run folders, judged by ``rule``, and stored as JSON and as a table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bebop.bench import record
from bebop.command import writing
from bebop.metrics.sinks import read_jsonl
from bebop.trajectory_db.reader import NAME, Trajectories
from recipes.guess import rule
from recipes.guess.stages import Plan
from recipes.stages import read

REWARDS = "SELECT step, prompt, AVG(reward) AS reward FROM answers GROUP BY step, prompt ORDER BY step, prompt"
METRICS = "metrics.jsonl"


def rewards(run: Path) -> list[list[float]]:
    """Return the mean reward of each group of a job: steps x prompts."""
    with Trajectories(run / NAME) as stored:
        rows = stored.query(REWARDS)
    steps: dict[int, list[float]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row["reward"])
    return [steps[step] for step in sorted(steps)]


def job_row(job: Path) -> dict[str, Any]:
    """Return the table row of a job."""
    metrics, groups = read_jsonl(job / "run" / METRICS), rewards(job / "run")
    before, after = rule.first(groups), rule.last(groups)
    lengths = [row["rollout/accept_length"] for row in metrics]
    turns = [row["turn/count"] for row in metrics]
    return {
        "job": job.name,
        "reward, first steps": _mean(before),
        "reward, last steps": _mean(after),
        "gain": _mean(after) - _mean(before),
        "turns, first": _mean(turns[: rule.STEPS]),
        "turns, last": _mean(turns[-rule.STEPS :]),
        "accept length, first": _mean(lengths[: rule.STEPS]),
        "accept length, last": _mean(lengths[-rule.STEPS :]),
        "log-prob difference": max(_known(metrics, "rollout/logprob_diff_current")),
        "ratio error": max(_known(metrics, "train/ratio_error_max")),
        "minutes": read(job)["seconds"] / 60,
    }


def result(plan: Plan, out: Path, jobs: Sequence[Path], origin: Mapping[str, object]) -> dict[str, Any]:
    """Return the content to store."""
    rows, groups = [job_row(job) for job in jobs], [rewards(job / "run") for job in jobs]
    start, head = read(out / "supervised"), read(out / "head")
    findings = rule.judge(groups, [row["ratio error"] for row in rows], [row["minutes"] for row in rows])
    return {
        "settings": asdict(plan),
        "place": record.place(origin),
        "rule": {"hash": rule.hash_of_rule(), "file": "recipes/guess/rule.py", "findings": dict(findings)},
        "summary": {
            "gain, over seeds": asdict(rule.over_seeds(groups)),
            "gain, over prompts": asdict(rule.over_prompts(groups)),
            "won, supervised": start["won"],
            "supervised, processor seconds": start["training_processor_seconds"],
            "accept length by turn, before": start["accept_length_by_turn"],
            "accept length by turn, adapted": head["accept_length_by_turn"],
            "accept length of held-out turns": head["accept_length"],
            "minutes of supervised part and head": (start["seconds"] + head["seconds"]) / 60,
        },
        "rows": rows,
        "rewards": groups,
    }


def keep(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``guess.json`` and ``guess.md``."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "guess.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / "guess.md").write_text(page(content))


def page(content: Mapping[str, Any]) -> str:
    """Return the table, the summary, and the findings of the rule."""
    findings = content["rule"]["findings"]
    lines = [f"- {name}: {told(value)}" for name, value in content["summary"].items()]
    lines += [f"- {name}: {'yes' if met else 'no'}" for name, met in findings.items()]
    return record.table(content["rows"]) + "\n" + "\n".join(lines) + f"\n- rule: {content['rule']['hash']}\n"


def told(value: Any) -> str:
    """Format a number, an interval, or several of them."""
    if isinstance(value, Mapping) and {"value", "low", "high"} <= value.keys():
        return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {told(one)}" for name, one in value.items())
    if isinstance(value, Sequence):
        return ", ".join(map(told, value))
    return f"{value:.3g}"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _known(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in metrics if row.get(name) is not None]
