"""Where a measurement was made, and how it is kept: JSON, a table, a bar chart."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from bebop.command import writing


def place() -> dict[str, object]:
    """Device, versions and commit: what a number means nothing without."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ray": version("ray"),
        "commit": _commit(),
    }


def keep(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, object]) -> None:
    """Write ``name``.json with settings, place and rows."""
    content = {"settings": dict(settings), "place": place(), "rows": [dict(row) for row in rows]}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table; numbers with three significant digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def bars(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], *, group: str, bar: str, height: str) -> None:
    """A bar chart as a self-contained page: a group per value of ``group``, a bar per value of ``bar``."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for label in dict.fromkeys(row[bar] for row in rows):
        chosen = [row for row in rows if row[bar] == label]
        x, y = [f"{group} {row[group]}" for row in chosen], [row[height] for row in chosen]
        figure.add_bar(name=str(label), x=x, y=y, text=[_cell(value) for value in y])
    figure.update_layout(barmode="group", template="plotly_white", title=name, yaxis_title=height, font_size=13)
    figure.write_html(folder / f"{name}.html", include_plotlyjs=True)


def show(text: str) -> None:
    """Print to the terminal: a benchmark's result is its output."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parents[2]), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
