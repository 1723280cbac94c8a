"""Records of measurements: where they were made, and their files: JSON, a table, a bar chart."""

import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from bebop.command import writing
from bebop.run_dir import machine
from bebop.run_dir.machine import commit, processor, version_of, without_folders

ROOT = machine.ROOT


def begin(root: Path = ROOT) -> dict[str, object]:
    """Return the facts to record before a measurement: the commit, whether the tree differed from it, the command.

    A commit made while a measurement runs is not the one measured. See ``machine.commit``.
    """
    given = [without_folders(word) for word in sys.orig_argv[1:]]
    began = datetime.now(UTC).isoformat(timespec="seconds")
    return {**commit(root), "command": shlex.join(["python", *given]), "began": began}


def place(origin: Mapping[str, object]) -> dict[str, object]:
    """Return the device, the versions, and the ``origin`` from ``begin``, without which a number means nothing."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ray": version_of("ray"),
        **({"cuda": torch.version.cuda, "triton": version_of("triton")} if cuda else {}),
        **origin,
    }


def keep(
    folder: Path,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, object],
    origin: Mapping[str, object],
) -> None:
    """Write ``name``.json with settings, place and rows; ``origin`` comes from ``begin``, before the measurement."""
    content = {"settings": dict(settings), "place": place(origin), "rows": [dict(row) for row in rows]}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


_noted: list[dict[str, Any]] = []  # by the benchmark that is running


def noted(row: dict[str, Any]) -> dict[str, Any]:
    """Record a row, or one turn of it, and return it; it is kept even if the benchmark ends early."""
    _noted.append(row)
    return row


@contextmanager
def kept_if_ended(
    folder: Path, name: str, settings: Mapping[str, object], origin: Mapping[str, object]
) -> Iterator[None]:
    """Keep the rows ``noted`` in the block as ``name``-unfinished if an error or an interrupt ends it."""
    _noted.clear()
    try:
        yield
    except BaseException:
        if _noted:
            keep(folder, f"{name}-unfinished", _noted, settings, origin)
            (folder / f"{name}-unfinished.md").write_text(table(_noted))
            sys.stderr.write(
                f"\nnot finished: what was measured until now is kept in {folder}/{name}-unfinished.json\n"
            )
        raise


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table; numbers with three significant digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def bars(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], *, group: str, bar: str, height: str) -> None:
    """Draw a bar chart as a self-contained page: one group per value of ``group``, one bar per value of ``bar``."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for label in dict.fromkeys(row[bar] for row in rows):
        chosen = [row for row in rows if row[bar] == label]
        x, y = [f"{group} {row[group]}" for row in chosen], [row[height] for row in chosen]
        figure.add_bar(name=str(label), x=x, y=y, text=[_cell(value) for value in y])
    figure.update_layout(barmode="group", template="plotly_white", title=name, yaxis_title=height, font_size=13)
    figure.write_html(folder / f"{name}.html", include_plotlyjs=True)


def best_of(
    rounds: int,
    arms: Iterable[str],
    measure: Callable[[str], dict[str, Any]],
    by: str,
    progress: "tqdm[Any]",
    **about: object,
) -> dict[str, dict[str, Any]]:
    """Return the best row of each arm by ``by``; arms take turns, as other work on the machine can only slow a run.

    ``about``: further columns of each ``noted`` turn.
    """
    best: dict[str, dict[str, Any]] = {}
    for arm in [*arms] * rounds:
        row = measure(arm)
        noted({**about, "arm": arm, **row})
        best[arm] = max(best.get(arm, row), row, key=lambda row: float(row[by]))
        progress.update()
    return best


@contextmanager
def timed(owner: Any, *names: str, clock: Callable[[], float] = time.process_time) -> Iterator[list[float]]:
    """Yield the seconds of each call of an owner's functions (of a module, or an object) while the block runs."""
    originals = {name: getattr(owner, name) for name in names}
    seconds: list[float] = []
    own = {name for name in names if name in vars(owner)}
    for name, original in originals.items():
        setattr(owner, name, clocked(original, seconds, clock))
    try:
        yield seconds
    finally:
        for name, original in originals.items():
            if name in own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


def clocked(function: Callable[..., Any], seconds: list[float], clock: Callable[[], float]) -> Callable[..., Any]:
    """Return the function with the time of each call added to ``seconds``."""

    def call(*args: Any) -> Any:
        started = clock()
        result = function(*args)
        seconds.append(clock() - started)
        return result

    return call


def show(text: str) -> None:
    """Print to the terminal: a benchmark's result is its output."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _cell(value: object) -> str:
    if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
        return f"{_cell(value['value'])} [{_cell(value['low'])}, {_cell(value['high'])}]"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)
