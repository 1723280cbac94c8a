"""A run folder as the report sees it: its name, its configuration and one column a metric."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.errors import UserError
from bebop.reading import finite, parse_yaml
from bebop.sinks import read_jsonl

DASH = "\N{EN DASH}"  # shown where there is no data


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run; a value that is absent or null in ``metrics.jsonl`` is None.

    >>> Run(name="default", config={}, steps=[1, 2], columns={"reward/mean": [0.4, None]})  # doctest: +SKIP
    """

    name: str
    config: dict[str, Any]
    steps: list[int]  # [N]
    columns: dict[str, list[float | None]]  # each [N]

    def has(self, metric: str) -> bool:
        """Whether there is at least one number of that name."""
        return any(value is not None for value in self.columns.get(metric, []))

    def setting(self, path: str) -> str:
        """A setting such as ``model.path`` as text; a dash if config.yaml does not have it."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return DASH if value is None else str(value)


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read all runs. ``UserError`` for a missing folder, no steps or unreadable files."""
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [_load(f, name if unique else str(f)) for f, name in zip(folders, names, strict=True)]


def _load(folder: Path, name: str) -> Run:
    """Read one run."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder of a run")
    path = folder / "metrics.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    if not rows:
        raise UserError(f"{path} is missing or has no steps yet: give the folder of a run with at least one step")
    metrics = sorted({key for row in rows for key in row} - {"step"})
    columns = {metric: [finite(row.get(metric)) for row in rows] for metric in metrics}
    return Run(name=name, config=_config(folder / "config.yaml"), steps=[row["step"] for row in rows], columns=columns)


def _config(path: Path) -> dict[str, Any]:
    """The configuration; empty without the file, as the figures do not need it."""
    if not path.is_file():
        return {}
    try:
        config = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not YAML: {error}; repair it or move it away") from None
    return config if isinstance(config, dict) else {}
