"""Report card on how runs were made: settings, commit, machine, versions, and all settings in a foldable section.

A page may be shared, so it shows only the last part of absolute paths.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import yaml

from bebop.report.document import Card, table
from bebop.report.runs import DASH, Run
from bebop.run_dir.machine import PACKAGES, without_folders


def cards(runs: Sequence[Run]) -> list[Card]:
    """Return the card in a list; empty if nothing about the runs' origin was recorded."""
    rows = {"Settings": _settings, "Bebop": _commit, "Machine": _processor, "Versions": _versions}
    cells = [(name, *(cell(run) or DASH for run in runs)) for name, cell in rows.items()]
    folds = [_fold(run) for run in runs if run.config]
    if not folds and all(cell == DASH for row in cells for cell in row[1:]):
        return []
    body = table(("", *(run.name for run in runs)), cells) + "".join(folds)
    return [Card(title="How it was made", text="", table=body, wide=True)]


def _settings(run: Run) -> str:
    """Return the overrides that the run was started with; empty if they were not recorded."""
    if run.given is None:
        return ""
    return " ".join(map(without_folders, run.given)) or "none given: the defaults"


def _commit(run: Run) -> str:
    """Return Bebop's version and commit."""
    commit, version = run.machine.get("commit"), run.machine.get(PACKAGES[0])
    changed = ", with changes that are in no commit" if run.machine.get("dirty") else ""
    known = [str(version)] * bool(version) + [f"commit {str(commit)[:12]}{changed}"] * (commit not in (None, "unknown"))
    return ", ".join(known)


def _processor(run: Run) -> str:
    return ", ".join(str(run.machine[name]) for name in ("processor", "gpu") if run.machine.get(name))


def _versions(run: Run) -> str:
    names = ("python", *PACKAGES[1:])
    return ", ".join(f"{name} {run.machine[name]}" for name in names if run.machine.get(name))


def _fold(run: Run) -> str:
    """Return all settings of a run as YAML in a foldable HTML element."""
    text = yaml.safe_dump(_bare(run.config), sort_keys=False, allow_unicode=True)
    return f"<details><summary>All settings of {escape(run.name)}</summary><pre>{escape(text)}</pre></details>"


def _bare(value: Any) -> Any:
    """Return the settings with every path cut to its last part."""
    if isinstance(value, dict):
        return {key: _bare(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_bare(one) for one in value]
    return without_folders(value) if isinstance(value, str) else value
