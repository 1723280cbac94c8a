"""Where a run's numbers and sample completions go: JSONL, TensorBoard, Weights & Biases, Trackio, a progress line.

A sink is given plain floats, reduced already. The Ray sink is in ``runtime/job.py``; heavy libraries are imported late.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO, runtime_checkable

from tqdm import tqdm

from bebop.command import writing
from bebop.config.fields import MAX_INT
from bebop.errors import UserError
from bebop.metrics.catalogue import METRICS, Layout, tracker_values
from bebop.run_dir.safe_parse import parse_json


class Sink(Protocol):
    """Where the values of each step go. ``step`` counts finished updates, from 1."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""
        ...

    def close(self) -> None:
        """Flush and let go of what is open."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion to be looked at, with its prompt and reward.

    >>> Sample(prompt="<user>4 + 5 = ?", completion="9", number=16, reward=1.0)  # doctest: +SKIP
    """

    prompt: str  # after the chat template
    completion: str  # what the policy wrote; of several turns all of it
    number: int  # of the prompt in the stream of prompts
    reward: float


@runtime_checkable
class SampleSink(Protocol):
    """A sink that shows completions as well."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show samples of the completions that update ``step`` has learned from; there is at least one."""
        ...


MAX_SAMPLE = 2000  # characters of a text in a tracker


def printable(text: str, most: int = MAX_SAMPLE) -> str:
    """Return a text in one line of at most ``most`` characters; of a longer one the middle is left out.

    What a terminal or a page would obey is spelled out: line ends, escape sequences, marks of direction.
    """
    spelled = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in _cut(text, most))
    return _cut(spelled, most)  # what is spelled out is longer


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
    """TensorBoard events: scalars, sample completions, the settings as a text and as hyperparameters, and a page of
    charts (Custom Scalars) in the order of the catalogue.

    After a resume at step n, ``purge_step=n + 1`` hides what the interrupted run wrote later.
    """

    def __init__(
        self,
        dir: Path,
        purge_step: int | None = None,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Write events to ``dir`` and hide those of steps from ``purge_step`` on.

        ``config``: nested settings. ``layout``: the page of charts, whose main ones go with the hyperparameters.
        """
        # Imported here: it takes a second and most importers of this file want only Mean.
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
        # add_hparams would write into a folder of its own, which TensorBoard shows as another run.
        plain = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
        for summary in hparams(plain, dict.fromkeys(main, 0.0)):
            self._writer._get_file_writer().add_summary(summary)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar a name."""
        with writing(self.dir):
            for name, value in tracker_values(values).items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Add a text with all samples; indented, so that TensorBoard shows them as they are, without Markdown."""
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
    """Return a text as a block of code in Markdown, line by line, control characters spelled out."""
    return "\n".join(f"    {printable(line)}" for line in _cut(text, MAX_SAMPLE).split("\n"))


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
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # W&B refuses what it does not know
        dir.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._run: Any = wandb.init(
            project=project, name=dir.name, dir=str(dir), config=dict(config or {}), mode=mode, settings={"quiet": True}
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(tracker_values(values), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log a table."""
        self._run.log({"samples": self._wandb.Table(SAMPLE_COLUMNS, sample_rows(step, samples))}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioSink:
    """Trackio, Hugging Face's local tracker, in its own folder ($TRACKIO_DIR): ``trackio show --project bebop``.

    ``UserError`` if not installed.
    """

    def __init__(self, dir: Path, config: Mapping[str, Any] | None = None, project: str = "bebop") -> None:
        """Start a run named after ``dir``, or go on with the one of that name."""
        try:
            import trackio
        except ImportError:
            raise UserError("monitor.trackio=True is not possible: pip install -e '.[trackio]' first") from None
        self._trackio = trackio
        plain = json.loads(json.dumps(dict(config or {}), default=str))
        with contextlib.redirect_stdout(StringIO()):  # it greets on stdout, which is the command's
            self._run: Any = trackio.init(
                project=project, name=dir.name, config=plain, resume="allow", embed=False,
                auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(tracker_values(values), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log a table."""
        table = self._trackio.Table(columns=SAMPLE_COLUMNS, data=sample_rows(step, samples))
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        """Finish the run."""
        with contextlib.redirect_stdout(StringIO()):
            self._trackio.finish()  # that of the run alone would be done once more at exit


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
    """A line on stderr with the step, the time to go and five numbers; one line a step where stderr is no terminal.

    A sample completion is written above it.
    """

    SHOWN: ClassVar[dict[str, str]] = {row.name: row.progress for row in METRICS if row.progress}
    EVERY = 30.0  # seconds between lines about a step that is under way, where stderr is no terminal
    INDENT = 16  # columns before the texts of a sample
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
        """Write lines that stay, above the progress line."""
        if self._terminal:
            self._bar.clear()
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()
        if self._terminal:
            self._bar.refresh()

    def under_way(self, what: str) -> None:
        """Say how far the next step has come: at once on a terminal, else now and then in a line of its own."""
        if self._terminal:
            bare = self._bar.format_meter(**{**self._bar.format_dict, "prefix": "", "ncols": None})
            room = self._columns() - len(bare) - 2 - len(what)  # else the end is cut off, which is all that moves
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
            room = rows * (width - self.INDENT) * 3 // 4  # lines are not filled to the end: words stay whole
            lines += textwrap.wrap(
                printable(text, room), width, initial_indent=f"    {name:{self.INDENT - 4}}",
                subsequent_indent=" " * self.INDENT,
            )  # fmt: skip
        self._above(lines)

    def _columns(self) -> int:
        """Return the width of the terminal, with a margin; of a file, a width that is easy to read."""
        if not self._terminal:
            return 100
        try:  # stdout, of which shutil asks, may be a file
            return max(40, os.get_terminal_size(self._stream.fileno()).columns - 1)
        except OSError:
            return 79

    def close(self) -> None:
        """Leave the last line standing."""
        self._bar.close()
