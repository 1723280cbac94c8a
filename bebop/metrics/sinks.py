"""Sinks of a run's metrics and sample completions: JSONL, TensorBoard, Weights & Biases, Trackio, a progress line.

A sink receives plain floats, already reduced. The Ray sink is in ``runtime/gauges.py``; heavy libraries are
imported late.
"""

import contextlib
import json
import math
import os
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO, runtime_checkable

from tqdm import tqdm

from bebop.command import writing
from bebop.config.fields import MAX_INT
from bebop.errors import UserError
from bebop.metrics.catalogue import METRICS, Layout, tracker_values
from bebop.run_dir.safe_parse import json_lines


class Sink(Protocol):
    """Receiver of the values of each step. ``step`` counts finished updates, from 1."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""
        ...

    def close(self) -> None:
        """Flush and close what is open."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sample completion to display, with its prompt and reward.

    >>> Sample(prompt="<user>4 + 5 = ?", completion="9", number=16, reward=1.0)  # doctest: +SKIP
    """

    prompt: str  # after the chat template
    completion: str  # what the policy wrote; of several turns all of it
    number: int  # of the prompt in the stream of prompts
    reward: float


@runtime_checkable
class SampleSink(Protocol):
    """Sink that also displays completions."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Display samples of the completions of update ``step``; there is at least one."""
        ...


MAX_SAMPLE = 2000  # characters of a text in a tracker


def printable(text: str, most: int = MAX_SAMPLE) -> str:
    """Return a text in one line of at most ``most`` characters; a longer one loses its middle.

    Characters with an effect in a terminal or page are escaped: line ends, escape sequences, direction marks.
    """
    spelled = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in _cut(text, most))
    return _cut(spelled, most)  # escaping made it longer


def _cut(text: str, most: int) -> str:
    left = (most - 3) // 2
    return text if len(text) <= most else f"{text[:left]} … {text[len(text) - (most - 3 - left) :]}"


def sample_rows(step: int, samples: Sequence[Sample]) -> list[list[Any]]:
    """Return samples as rows of a table, with the columns of ``SAMPLE_COLUMNS``."""
    return [[step, one.number, printable(one.prompt), printable(one.completion), one.reward] for one in samples]


SAMPLE_COLUMNS = ["step", "prompt number", "prompt", "completion", "reward"]


def flat_settings(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested settings by their full names, as ``trainer.lr``."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        nested = isinstance(value, Mapping) and value
        flat |= flat_settings(value, f"{before}{name}.") if nested else {f"{before}{name}": value}
    return flat


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the steps in ``metrics.jsonl``, without an incomplete last line (the process was killed while writing)."""
    return [row for _, row in _step_lines(path)]


def _step_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines of a log of steps with the object of each, without an incomplete last line."""
    try:
        for number, line, row in json_lines(path):
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is not int or not 0 <= step <= MAX_INT:
                raise UserError(f"{path} line {number} has no whole-numbered step: repair or delete that line")
            yield line, row
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 (byte {error.start}): give the log of a run") from None


class StepLog:
    """Log with one JSON object a step, each line flushed; NaN and infinities become null.

    Each step is in the file at most once: continuing from step n drops the later steps. That holds if the run restarts
    (``resume_from=n``) and if it goes back while running (a ``write`` of a step that is already there). With ``None``
    the log starts empty.
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
    """Sink that writes the values of a step to a ``StepLog``, ``step`` first."""

    def __init__(self, path: Path, resume_from: int | None = None) -> None:
        """Start ``path``, or keep its steps up to and including ``resume_from``."""
        self._log = StepLog(path, resume_from)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line with the values of a step."""
        self._log.write({"step": step, **{k: v if isinstance(v, int) else float(v) for k, v in values.items()}})

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def _keep(path: Path, step: int) -> int:
    """Keep the lines up to and including ``step``, atomically in case of a kill; return the last step.

    Lines are copied one by one: ``drift.jsonl`` has 1.4 GB after 10,000 steps of 128 completions.
    """
    scratch, newest = path.with_name(path.name + ".new"), 0
    try:
        with scratch.open("w", encoding="utf-8") as file:
            for line, row in _step_lines(path) if path.exists() and step > 0 else ():
                if row["step"] <= step:
                    file.write(line.rstrip() + "\n")
                    newest = row["step"]
    except UserError:
        scratch.unlink()
        raise
    scratch.replace(path)
    return newest


def _line(row: Mapping[str, Any]) -> str:
    """Return one step as a line of JSON, with null for NaN and infinities."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean, allow_nan=False) + "\n"


class TensorBoardSink:
    """TensorBoard events: scalars, sample completions, the settings as text and as hyperparameters, and a page of
    charts (Custom Scalars) in the order of the catalogue.

    After a resume at step n, ``purge_step=n + 1`` hides the later steps of the interrupted run.
    """

    def __init__(
        self,
        dir: Path,
        purge_step: int | None = None,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Write events to ``dir`` and hide those of steps from ``purge_step`` on.

        ``config``: nested settings. ``layout``: the page of charts; its main charts are listed with the
        hyperparameters.
        """
        # Imported here: it takes a second, and most importers of this file do not need it.
        from torch.utils.tensorboard import SummaryWriter

        self.dir = dir
        threading.excepthook = _not_tensorboards(threading.excepthook)
        with writing(dir):
            self._writer = SummaryWriter(str(dir), purge_step=purge_step)
            if layout is not None:
                self._writer.add_custom_scalars(layout)
            if config is not None:
                main = [tag for _, tags in (layout or {}).get("main", {}).values() for tag in tags]
                self._write_settings(flat_settings(config), main, (purge_step or 1) - 1)

    def _write_settings(self, settings: Mapping[str, Any], main: Sequence[str], step: int) -> None:
        from torch.utils.tensorboard.summary import hparams

        rows = "".join(
            f"| {name} | `{printable(str(value)).replace('|', '/')}` |\n" for name, value in settings.items()
        )
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", step)
        # add_hparams would write into a separate folder, which TensorBoard shows as another run.
        plain = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
        for summary in hparams(plain, dict.fromkeys(main, 0.0)):
            self._writer._get_file_writer().add_summary(summary)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar per name."""
        with writing(self.dir):
            for name, value in tracker_values(values).items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Add a text with all samples, indented so that TensorBoard shows them literally, without Markdown."""
        parts = [
            f"**Prompt {one.number}, reward {one.reward:.3f}**\n\n{_indented(one.prompt)}\n\n"
            f"Completion:\n\n{_indented(one.completion)}\n"
            for one in samples
        ]
        with writing(self.dir):
            self._writer.add_text("samples", "\n".join(parts), step)
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        with writing(self.dir):
            self._writer.close()


def _indented(text: str) -> str:
    """Return a text as a Markdown code block, line by line, with control characters escaped."""
    return "\n".join(f"    {printable(line)}" for line in _cut(text, MAX_SAMPLE).split("\n"))


def _not_tensorboards(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return ``hook`` for all threads except TensorBoard's: its write errors are raised again by the next call."""

    def show(arguments: threading.ExceptHookArgs) -> None:
        if not (type(arguments.thread).__name__ == "_AsyncWriterThread" and isinstance(arguments.exc_value, OSError)):
            hook(arguments)

    return show


class WandbSink:
    """Sink to Weights & Biases, offline unless WANDB_MODE says otherwise; raises ``UserError`` if not installed."""

    def __init__(self, dir: Path, config: Mapping[str, Any] | None = None, project: str = "bebop") -> None:
        """Start a run named after ``dir``, which holds its files."""
        try:
            import wandb
        except ImportError:
            raise UserError("monitor.wandb=True is not possible: pip install -e '.[wandb]' first") from None
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # W&B refuses unknown modes
        dir.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._run: Any = wandb.init(
            project=project, name=dir.name, dir=str(dir), config=dict(config or {}), mode=mode, settings={"quiet": True}
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log(tracker_values(values), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log the samples as a table."""
        self._run.log({"samples": self._wandb.Table(SAMPLE_COLUMNS, sample_rows(step, samples))}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioSink:
    """Sink to Trackio, Hugging Face's local tracker, in its own folder ($TRACKIO_DIR).

    Show it by ``trackio show --project bebop``. Raises ``UserError`` if it is not installed.
    """

    def __init__(self, dir: Path, config: Mapping[str, Any] | None = None, project: str = "bebop") -> None:
        """Start a run named after ``dir``, or continue the one with that name."""
        try:
            import trackio
        except ImportError:
            raise UserError("monitor.trackio=True is not possible: pip install -e '.[trackio]' first") from None
        self._trackio = trackio
        plain = json.loads(json.dumps(dict(config or {}), default=str))
        with contextlib.redirect_stdout(StringIO()):  # it prints a greeting to stdout, which belongs to the command
            self._run: Any = trackio.init(
                project=project, name=dir.name, config=plain, resume="allow", embed=False,
                auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log(tracker_values(values), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log the samples as a table."""
        table = self._trackio.Table(columns=SAMPLE_COLUMNS, data=sample_rows(step, samples))
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        """Finish the run."""
        with contextlib.redirect_stdout(StringIO()):
            self._trackio.finish()  # the run's own finish would be repeated at exit


SPEED = "rollout/tokens_per_s"
EVALUATED = {  # metric of an evaluation -> its text in a terminal
    "eval/greedy_pass_at_1": "greedy pass@1 {:.3f}",
    "eval/pass_at_1": "pass@1 {:.3f}",
    "eval/pass_at_k": "pass@k {:.3f}",
    "eval/greedy_reward": "greedy reward {:.3f}",
    "eval/reward": "reward {:.3f}",
}


def evaluation_line(step: int, values: Mapping[str, float]) -> str:
    """Return one line about the evaluation among a step's values, empty without one."""
    known = [text.format(values[name]) for name, text in EVALUATED.items() if name in values]
    if not known:
        return ""
    best = values.get("eval/best_step")
    ending = "" if best is None else "; the best so far" if best == step else f"; best so far: step {best:.0f}"
    return f"evaluation after step {step}: {', '.join(known)}{ending}"


class ProgressLine:
    """Progress line on stderr with the step, the remaining time and five numbers; one line per step without a terminal.

    A sample completion is written above it.
    """

    SHOWN: ClassVar[dict[str, str]] = {row.name: row.progress for row in METRICS if row.progress}
    EVERY = 30.0  # seconds between lines about a step in progress, if stderr is no terminal
    INDENT = 16  # columns before the texts of a sample
    LAST = 10  # steps over which the speed is averaged: in some steps no group, and so no token, arrives

    def __init__(self, total: int, start: int = 0, stream: TextIO | None = None) -> None:
        """Count to ``total`` steps from ``start``, on ``stream`` (stderr)."""
        self._stream = stream or sys.stderr
        self._speeds = deque[tuple[float, float]](maxlen=self.LAST)  # tokens and seconds of each step
        self._terminal = self._stream.isatty()
        self._shown, self._said = "", time.monotonic()  # numbers of the last step; time of the last line
        self._bar = tqdm(
            total=total,
            initial=start,
            file=self._stream if self._terminal else StringIO(),
            dynamic_ncols=True,
            mininterval=0,
            bar_format="step {n_fmt}/{total_fmt} {elapsed}<{remaining}  {desc}",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of one step."""
        if SPEED in values:
            seconds = values.get("time/step", 1.0)
            self._speeds.append((values[SPEED] * seconds, seconds))
            tokens, whole = (sum(column) for column in zip(*self._speeds, strict=True))
            values = {**values, SPEED: tokens / whole}
        if line := evaluation_line(step, values):
            self._above([line])
        known = {name: values[name] for name in self.SHOWN if name in values and (name != SPEED or values[name])}
        shown = [self.SHOWN[name].format(value) for name, value in known.items()]
        self._shown, self._said = "  ".join(shown), time.monotonic()
        self._bar.set_description_str(self._shown, refresh=False)
        self._bar.update(step - self._bar.n)
        if not self._terminal:
            self._stream.write(f"{self._bar}\n")
            self._stream.flush()

    def _above(self, lines: Sequence[str]) -> None:
        """Write permanent lines above the progress line."""
        if self._terminal:
            self._bar.clear()
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()
        if self._terminal:
            self._bar.refresh()

    def under_way(self, what: str) -> None:
        """Show the progress of the next step: at once on a terminal, else now and then in a separate line."""
        if self._terminal:
            bare = self._bar.format_meter(**{**self._bar.format_dict, "prefix": "", "ncols": None})
            room = self._columns() - len(bare) - 2 - len(what)  # keeps the changing end of the line visible
            numbers = self._shown
            while numbers and len(numbers) > room:
                numbers = numbers.rpartition("  ")[0]
            self._bar.set_description_str("  ".join(filter(None, (numbers, what))))
        elif (now := time.monotonic()) - self._said > self.EVERY:
            self._said = now
            self._stream.write(f"step {self._bar.n + 1}/{self._bar.total}: {what}\n")
            self._stream.flush()

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show the first sample in a few lines above the progress line."""
        one, width = samples[0], self._columns()
        lines = [f"  sample of step {step}: prompt {one.number}, reward {one.reward:.3f}"]
        for name, text, rows in (("prompt", one.prompt, 2), ("completion", one.completion, 4)):
            room = rows * (width - self.INDENT) * 3 // 4  # lines are not full: words stay whole
            lines += textwrap.wrap(
                printable(text, room), width, initial_indent=f"    {name:{self.INDENT - 4}}",
                subsequent_indent=" " * self.INDENT,
            )  # fmt: skip
        self._above(lines)

    def _columns(self) -> int:
        """Return the width of the terminal minus a margin; for a file, a readable width."""
        if not self._terminal:
            return 100
        try:  # shutil would ask stdout, which may be a file
            return max(40, os.get_terminal_size(self._stream.fileno()).columns - 1)
        except OSError:
            return 79

    def close(self) -> None:
        """Leave the last line on the screen."""
        self._bar.close()
