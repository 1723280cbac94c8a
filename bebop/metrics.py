"""Metrics that carry their own reduction, and the places they are written to.

A metric keeps what it takes to merge it with its like from another worker: a mean its total and count, never its value
alone. ``a + b`` over disjoint data equals the metric of the union, so a mean of means cannot be formed by merging.
Values (plain floats) appear once, at the sinks. The Ray sink is elsewhere; no heavy library is imported here.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

import numpy as np
from numpy.typing import ArrayLike
from tqdm import tqdm

from bebop.errors import UserError


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean as total and count. NaN while the count is 0.

    >>> (Mean.of([1.0, 2.0]) + Mean.of([6.0])).value
    3.0
    """

    total: float
    count: float  # sum of weights

    @classmethod
    def of(cls, values: ArrayLike, weights: ArrayLike | None = None) -> "Mean":
        """The mean of numbers of any shape; ``weights`` broadcasts to it. Metrics are refused: ``+`` merges them."""
        array = _numbers(values)
        if weights is None:
            return cls(float(array.sum()), float(array.size))
        weight = np.broadcast_to(_numbers(weights), array.shape)
        return cls(float((array * weight).sum()), float(weight.sum()))

    def __add__(self, other: "Mean") -> "Mean":
        """The mean of both, as if computed on the union."""
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """Total over count."""
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum, for instance of samples or tokens."""

    total: float

    def __add__(self, other: "Sum") -> "Sum":
        """The sum of both, as if computed on the union."""
        return Sum(self.total + other.total) if isinstance(other, Sum) else NotImplemented

    @property
    def value(self) -> float:
        """The total."""
        return float(self.total)


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum. NaN wins on either side, which Python's ``max`` does not do."""

    value: float

    def __add__(self, other: "Max") -> "Max":
        """The maximum of both, as if computed on the union."""
        return Max(float(np.maximum(self.value, other.value))) if isinstance(other, Max) else NotImplemented


@dataclass(frozen=True, slots=True)
class Min:
    """A minimum. NaN wins on either side."""

    value: float

    def __add__(self, other: "Min") -> "Min":
        """The minimum of both, as if computed on the union."""
        return Min(float(np.minimum(self.value, other.value))) if isinstance(other, Min) else NotImplemented


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often each integer, or each bin, occurred; the total makes the mean exact in either form.

    >>> (Histogram.of([1, 1, 4]) + Histogram.of([4])).counts
    {1: 2, 4: 2}
    """

    counts: Mapping[int, int]  # integer, or bin (-1: below the first edge, len(edges) - 1: from the last on), -> count
    total: float  # sum of the values themselves
    edges: tuple[float, ...] | None = None  # ascending; bin i is [edges[i], edges[i + 1]); None: integers, exactly

    @classmethod
    def of(cls, values: ArrayLike, edges: tuple[float, ...] | None = None) -> "Histogram":
        """Count ``values``: exactly when they are integers and ``edges`` is None, else by bin."""
        array = _numbers(values).ravel()
        if edges is None and bool((array != np.rint(array)).any()):
            raise ValueError("exact counts are for integers; give edges for other values")
        keys = array.astype(np.int64) if edges is None else np.searchsorted(edges, array, side="right") - 1
        unique, counts = np.unique(keys, return_counts=True)
        return cls({int(k): int(n) for k, n in zip(unique, counts, strict=True)}, float(array.sum()), edges)

    def __add__(self, other: "Histogram") -> "Histogram":
        """The histogram of both, as if computed on the union."""
        if not isinstance(other, Histogram) or self.edges != other.edges:
            return NotImplemented
        keys = sorted({*self.counts, *other.counts})
        counts = {k: self.counts.get(k, 0) + other.counts.get(k, 0) for k in keys}
        return Histogram(counts, self.total + other.total, self.edges)

    @property
    def value(self) -> float:
        """The mean of what was counted; NaN while empty."""
        count = sum(self.counts.values())
        return self.total / count if count else math.nan


Metric = Mean | Sum | Max | Min | Histogram
Metrics = dict[str, Metric]


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """Merge metrics of disjoint data name by name. ``TypeError`` where one name has two kinds (or is a bare number)."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if not isinstance(metric, Metric):
                raise TypeError(f"{name} is a {type(metric).__name__}, which does not know how to merge; give a metric")
            try:
                merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
            except TypeError as error:
                kinds = f"{type(merged[name]).__name__} with {type(metric).__name__}"
                raise TypeError(f"{name} cannot merge {kinds}: one name has one kind (and one set of edges)") from error
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The value of each metric: the last thing done before a sink, as it cannot be merged any more."""
    return {name: metric.value for name, metric in metrics.items()}


def _numbers(source: ArrayLike) -> np.ndarray[Any, np.dtype[np.float64]]:
    """``source`` as float64; a metric among it raises ``TypeError``."""
    array = np.asarray(source)
    if array.dtype == object:
        raise TypeError("numbers are wanted here; metrics are merged with +, never averaged")
    return array.astype(np.float64)


class Sink(Protocol):
    """Where the values of each step go. ``step`` counts finished updates, from 1."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""
        ...

    def close(self) -> None:
        """Flush and let go of what is open."""
        ...


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The steps in ``metrics.jsonl``. A torn last line (the process was killed in the middle of it) is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise UserError(f"{path} line {number} is not JSON: repair or delete that line") from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path} line {number} has no whole-numbered step: repair or delete that line")
        rows.append(row)
    return rows


class JsonlSink:
    """One JSON object a step, ``step`` first, each line flushed; NaN and infinities become null.

    Each step is in the file exactly once: going on from step n drops what came after it, whether the run starts anew
    (``resume_from=n``) or goes back in flight (a ``write`` of a step that is already there). With ``None`` it starts
    with an empty file.
    """

    def __init__(self, path: Path, resume_from: int | None = None) -> None:
        """Start ``path``, or keep its steps up to and including ``resume_from``."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._last = _keep(path, resume_from or 0)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        if step <= self._last:
            self._file.close()
            _keep(self._path, step - 1)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(_line({"step": step, **{k: v if isinstance(v, int) else float(v) for k, v in values.items()}}))
        self._file.flush()
        self._last = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _keep(path: Path, step: int) -> int:
    """Keep the lines up to and including ``step``, in one go, as a kill must not cost them; returns the last step."""
    rows = read_jsonl(path) if path.exists() and step > 0 else []
    kept = [row for row in rows if row["step"] <= step]
    scratch = path.with_name(path.name + ".new")
    scratch.write_text("".join(map(_line, kept)), encoding="utf-8")
    scratch.replace(path)
    return kept[-1]["step"] if kept else 0


def _line(row: Mapping[str, Any]) -> str:
    """One step as a line of JSON, which knows no NaN and no infinity."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean, allow_nan=False) + "\n"


class TensorBoardSink:
    """TensorBoard events. After a resume at step n, ``purge_step=n + 1`` hides what the interrupted run wrote later."""

    def __init__(self, dir: Path, purge_step: int | None = None) -> None:
        """Events go to ``dir``; those of steps from ``purge_step`` on are hidden."""
        # Imported here: it takes a second and most importers of this file want only Mean.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(dir), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar a name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbSink:
    """Weights & Biases, offline unless the environment's WANDB_MODE says otherwise. ``UserError`` if not installed."""

    def __init__(self, dir: Path, config: Mapping[str, Any] | None = None, project: str = "bebop") -> None:
        """Start a run named after ``dir``, whose files lie there."""
        try:
            import wandb
        except ImportError:
            raise UserError("monitor.wandb=True is not possible: pip install bebop-rl[wandb] first") from None
        mode = os.environ.get("WANDB_MODE", "offline")
        dir.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(project=project, name=dir.name, dir=str(dir), config=dict(config or {}), mode=mode)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class ProgressLine:
    """A line on stderr with the step, the time to go and five numbers; one line a step where stderr is no terminal."""

    # Short labels, so that the line fits into 80 columns.
    SHOWN: ClassVar[dict[str, str]] = {
        "reward/mean": "reward {:.3f}",
        "response/length": "len {:.0f}",
        "rollout/accept_length": "accept {:.2f}",
        "rollout/tokens_per_s": "{:.0f} tok/s",
        "staleness/max": "stale {:.0f}",
    }

    def __init__(self, total: int, start: int = 0, stream: TextIO | None = None) -> None:
        """Count to ``total`` steps from ``start``, on ``stream`` (stderr)."""
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._bar = tqdm(
            total=total,
            initial=start,
            file=self._stream if self._terminal else StringIO(),
            dynamic_ncols=True,
            mininterval=0,
            bar_format="step {n_fmt}/{total_fmt} {elapsed}<{remaining}  {desc}",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show one step."""
        shown = [form.format(values[name]) for name, form in self.SHOWN.items() if name in values]
        self._bar.set_description_str("  ".join(shown), refresh=False)
        self._bar.update(step - self._bar.n)
        if not self._terminal:
            self._stream.write(f"{self._bar}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the last line standing."""
        self._bar.close()
