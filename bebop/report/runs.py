"""Run folders as the report reads them, and the summary at the top of the page with one row per run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bebop.command import shown_path
from bebop.errors import UserError
from bebop.metrics.sinks import read_jsonl
from bebop.run_dir.folder import CONFIG, OVERRIDES
from bebop.run_dir.machine import MACHINE
from bebop.run_dir.safe_parse import finite, parse_json, parse_yaml
from bebop.systems import SYSTEMS

DASH = "\N{EN DASH}"  # shown where there is no data
HEADS = ("Run", "Model", "Task", "System", "Steps", "Reward", "Accept length", "Tokens/s", "Minutes")
NOTE = (
    "Reward and accept length: mean of the first five steps → mean of the last ten; of fewer than fifteen, the first "
    "five or the first half → the rest. Tokens/s: mean over the run, weighted by the duration of each step."
)
FIRST, LAST = 5, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run folder as read by the report; a value that is absent or null in ``metrics.jsonl`` is None.

    >>> Run(name="default", config={}, steps=[1, 2], columns={"reward/mean": [0.4, None]})  # doctest: +SKIP
    """

    name: str
    config: dict[str, Any]
    steps: list[int]  # [N]
    columns: dict[str, list[float | None]]  # each [N]
    folder: Path | None = None
    given: list[str] | None = None  # settings that it was started with; None: not kept
    machine: dict[str, Any] = field(default_factory=dict)  # see ``machine.machine``; empty: not kept

    def has(self, metric: str) -> bool:
        """Return whether the metric has at least one value."""
        return any(value is not None for value in self.columns.get(metric, []))

    @property
    def updates(self) -> int:
        """Return the number of steps that updated the weights; step 0 evaluates the initial weights."""
        return sum(step > 0 for step in self.steps)

    @property
    def place(self) -> str | None:
        """Return the folder as a user would type it here: a shared page should show no longer path."""
        return None if self.folder is None else str(shown_path(self.folder))

    def setting(self, path: str) -> str:
        """Return a setting such as ``model.path`` as text; a dash if config.yaml does not have it."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return DASH if value is None else str(value)


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read all runs; raise ``UserError`` for a missing folder, no steps or unreadable files."""
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [_load(f, name if unique else str(f)) for f, name in zip(folders, names, strict=True)]


def _load(folder: Path, name: str) -> Run:
    """Read the run in ``folder``."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder of a run")
    path = folder / "metrics.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    if not rows:
        raise UserError(f"{path} is missing or has no steps yet: give the folder of a run with at least one step")
    metrics = sorted({key for row in rows for key in row} - {"step"})
    columns = {metric: [finite(row.get(metric)) for row in rows] for metric in metrics}
    return Run(name=name, steps=[row["step"] for row in rows], columns=columns, folder=folder, **origin(folder))


def origin(folder: Path) -> dict[str, Any]:
    """Return the fields ``config``, ``given`` and ``machine`` of the run in a folder."""
    given, machine = _json(folder / OVERRIDES), _json(folder / MACHINE)
    return {
        "config": _config(folder / CONFIG),
        "given": [str(one) for one in given] if isinstance(given, list) else None,
        "machine": machine if isinstance(machine, dict) else {},
    }


def _json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or unreadable, as no figure needs it."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _config(path: Path) -> dict[str, Any]:
    """Return the configuration of a run; empty without the file, as the figures do not need it."""
    if not path.is_file():
        return {}
    try:
        config = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not YAML: {error}; repair it or move it away") from None
    return config if isinstance(config, dict) else {}


# ---- the summary


def summary(run: Run) -> tuple[str, ...]:
    """Return the cells of one run, in the order of ``HEADS``; a dash where there is no data."""
    drafts = run.setting("decoding.draft_tokens")
    system = run.setting("decoding.system")
    drafting = DASH not in (system, drafts) and (system not in SYSTEMS or SYSTEMS[system].drafts)
    return (
        run.name,
        run.setting("model.path").rstrip("/").rsplit("/", 1)[-1],
        run.setting("task.name"),
        f"{system}, K = {drafts}" if drafting else system,
        str(run.updates),
        _first_last(run, "reward/mean", 3),
        _first_last(run, "rollout/accept_length", 2),
        _shown(_over_time(run, "rollout/tokens_per_s"), 0),
        _shown(_minutes(run), 1),
    )


def windows(column: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Return the first values and the last ones of a column, without overlap; a single value is among the last."""
    known = [value for value in column if value is not None]
    first = min(FIRST, len(known) // 2)
    return known[:first], known[first:][-LAST:]


def _first_last(run: Run, metric: str, digits: int) -> str:
    """Return the mean of the first steps, the mean of the last ones, and the difference, as text."""
    first, last = map(_mean, windows(run.columns.get(metric, [])))
    if first is None or last is None:
        return DASH if last is None else f"{last:.{digits}f}"
    return f"{first:.{digits}f} → {last:.{digits}f} ({last - first:+.{digits}f})"


def _over_time(run: Run, metric: str) -> float | None:
    """Return the mean of a rate weighted by the duration of steps; unweighted if durations are unknown."""
    rates = run.columns.get(metric, [])
    times = run.columns.get("time/step", [None] * len(rates))
    pairs = [(rate, time) for rate, time in zip(rates, times, strict=True) if rate is not None and time is not None]
    if not pairs or not sum(time for _, time in pairs):
        return _mean(rates)
    return sum(rate * time for rate, time in pairs) / sum(time for _, time in pairs)


def _minutes(run: Run) -> float | None:
    """Return the minutes spent in steps; None if they were not recorded."""
    times = [time for time in run.columns.get("time/step", []) if time is not None]
    return sum(times) / 60 if times else None


def _mean(column: Sequence[float | None]) -> float | None:
    """Return the mean of the numbers in a column; None without any."""
    numbers = [value for value in column if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _shown(value: float | None, digits: int) -> str:
    """Return a number with thousands separators, or a dash for None."""
    return DASH if value is None else f"{value:,.{digits}f}"
