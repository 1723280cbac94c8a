"""Where a run's numbers are written: JSONL, TensorBoard, Weights & Biases, a progress line.

A sink is given plain floats, reduced already. The Ray sink is in ``runtime.py``; heavy libraries are imported late.
"""

import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

from tqdm import tqdm

from bebop.command import writing
from bebop.config.fields import MAX_INT
from bebop.errors import UserError
from bebop.metrics.catalogue import METRICS
from bebop.run_dir.safe_parse import parse_json


class Sink(Protocol):
    """Where the values of each step go. ``step`` counts finished updates, from 1."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""
        ...

    def close(self) -> None:
        """Flush and let go of what is open."""
        ...


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the steps in ``metrics.jsonl``. A torn last line (the process was killed while it wrote) is left out."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 (byte {error.start}): give the log of a run") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError:
            if number == len(lines):
                break
            raise UserError(f"{path} line {number} is not JSON: repair or delete that line") from None
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or not 0 <= step <= MAX_INT:
            raise UserError(f"{path} line {number} has no whole-numbered step: repair or delete that line")
        rows.append(row)
    return rows


class StepLog:
    """One JSON object a step, each line flushed; NaN and infinities become null.

    Each step is in the file at most once: going on from step n drops what came after it, whether the run starts anew
    (``resume_from=n``) or goes back in flight (a ``write`` of a step that is already there). With ``None`` it starts
    with an empty file.
    """

    def __init__(self, path: Path, resume_from: int | None = None) -> None:
        """Start ``path``, or keep its steps up to and including ``resume_from``."""
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._last = _keep(path, resume_from or 0)
            self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line; ``row`` has a whole-numbered ``step``."""
        with writing(self.path):
            if row["step"] <= self._last:
                self._file.close()
                _keep(self.path, row["step"] - 1)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(_line(row))
            self._file.flush()
        self._last = row["step"]

    def close(self) -> None:
        """Close the file."""
        with writing(self.path):
            self._file.close()


class JsonlSink:
    """The values of a step in a ``StepLog``, ``step`` first."""

    def __init__(self, path: Path, resume_from: int | None = None) -> None:
        """Start ``path``, or keep its steps up to and including ``resume_from``."""
        self._log = StepLog(path, resume_from)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        self._log.write({"step": step, **{k: v if isinstance(v, int) else float(v) for k, v in values.items()}})

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def _keep(path: Path, step: int) -> int:
    """Keep the lines up to and including ``step``, in one go, as a kill must not cost them; return the last step."""
    rows = read_jsonl(path) if path.exists() and step > 0 else []
    kept = [row for row in rows if row["step"] <= step]
    scratch = path.with_name(path.name + ".new")
    scratch.write_text("".join(map(_line, kept)), encoding="utf-8")
    scratch.replace(path)
    return kept[-1]["step"] if kept else 0


def _line(row: Mapping[str, Any]) -> str:
    """Return one step as a line of JSON, which knows no NaN and no infinity."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean, allow_nan=False) + "\n"


class TensorBoardSink:
    """TensorBoard events. After a resume at step n, ``purge_step=n + 1`` hides what the interrupted run wrote later."""

    def __init__(self, dir: Path, purge_step: int | None = None) -> None:
        """Write events to ``dir`` and hide those of steps from ``purge_step`` on."""
        # Imported here: it takes a second and most importers of this file want only Mean.
        from torch.utils.tensorboard import SummaryWriter

        self.dir = dir
        threading.excepthook = _not_tensorboards(threading.excepthook)
        with writing(dir):
            self._writer = SummaryWriter(str(dir), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar a name."""
        with writing(self.dir):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        with writing(self.dir):
            self._writer.close()


def _not_tensorboards(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return ``hook`` for all threads but TensorBoard's: what that one cannot write, the next call raises as well."""

    def show(arguments: threading.ExceptHookArgs) -> None:
        if not (type(arguments.thread).__name__ == "_AsyncWriterThread" and isinstance(arguments.exc_value, OSError)):
            hook(arguments)

    return show


class WandbSink:
    """Weights & Biases, offline unless the environment's WANDB_MODE says otherwise. ``UserError`` if not installed."""

    def __init__(self, dir: Path, config: Mapping[str, Any] | None = None, project: str = "bebop") -> None:
        """Start a run named after ``dir``, whose files lie there."""
        try:
            import wandb
        except ImportError:
            raise UserError("monitor.wandb=True is not possible: pip install -e '.[wandb]' first") from None
        mode = os.environ.get("WANDB_MODE", "offline")
        dir.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(project=project, name=dir.name, dir=str(dir), config=dict(config or {}), mode=mode)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


SPEED = "rollout/tokens_per_s"
EVALUATED = {  # metric of an evaluation -> how a terminal says it
    "eval/greedy_pass_at_1": "greedy pass@1 {:.3f}",
    "eval/pass_at_1": "pass@1 {:.3f}",
    "eval/pass_at_k": "pass@k {:.3f}",
    "eval/greedy_reward": "greedy reward {:.3f}",
    "eval/reward": "reward {:.3f}",
}


def evaluation_line(step: int, values: Mapping[str, float]) -> str:
    """Return one line about the evaluation in a step's values, empty without one."""
    known = [text.format(values[name]) for name, text in EVALUATED.items() if name in values]
    if not known:
        return ""
    best = values.get("eval/best_step")
    ending = "" if best is None else "; the best so far" if best == step else f"; best so far: step {best:.0f}"
    return f"evaluation after step {step}: {', '.join(known)}{ending}"


class ProgressLine:
    """A line on stderr with the step, the time to go and five numbers; one line a step where stderr is no terminal."""

    SHOWN: ClassVar[dict[str, str]] = {row.name: row.progress for row in METRICS if row.progress}
    EVERY = 30.0  # seconds between lines about a step that is under way, where stderr is no terminal
    LAST = 10  # steps whose speed is shown: tokens count when their group comes in, which in some steps none does

    def __init__(self, total: int, start: int = 0, stream: TextIO | None = None) -> None:
        """Count to ``total`` steps from ``start``, on ``stream`` (stderr)."""
        self._stream = stream or sys.stderr
        self._speeds = deque[tuple[float, float]](maxlen=self.LAST)  # tokens and seconds of each step
        self._terminal = self._stream.isatty()
        self._shown, self._said = "", time.monotonic()  # of the last step; when a line was written
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
        if SPEED in values:
            seconds = values.get("time/step", 1.0)
            self._speeds.append((values[SPEED] * seconds, seconds))
            tokens, whole = (sum(column) for column in zip(*self._speeds, strict=True))
            values = {**values, SPEED: tokens / whole}
        if line := evaluation_line(step, values):
            self._above(line)
        known = {name: values[name] for name in self.SHOWN if name in values and (name != SPEED or values[name])}
        shown = [self.SHOWN[name].format(value) for name, value in known.items()]
        self._shown, self._said = "  ".join(shown), time.monotonic()
        self._bar.set_description_str(self._shown, refresh=False)
        self._bar.update(step - self._bar.n)
        if not self._terminal:
            self._stream.write(f"{self._bar}\n")
            self._stream.flush()

    def _above(self, line: str) -> None:
        """Write a line that stays, above the progress line."""
        self._bar.clear()
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def under_way(self, what: str) -> None:
        """Say how far the next step has come: at once on a terminal, else now and then in a line of its own."""
        if self._terminal:
            self._bar.set_description_str("  ".join(filter(None, (self._shown, what))))
        elif (now := time.monotonic()) - self._said > self.EVERY:
            self._said = now
            self._stream.write(f"step {self._bar.n + 1}/{self._bar.total}: {what}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the last line standing."""
        self._bar.close()
