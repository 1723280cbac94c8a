"""Run folders as the viewer sees them: what may be opened, whether a job still writes there, its curves and alarms."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bebop.catalogue import METRICS as CATALOGUE
from bebop.errors import UserError
from bebop.reading import finite, parse_yaml
from bebop.run_folder import CONFIG, LOCK
from bebop.sinks import read_jsonl
from bebop.trajectories import NAME, Trajectories

State = Literal["running", "waiting", "ended"]
METRICS, ALARMS = "metrics.jsonl", "controller.jsonl"
CURVES = tuple(row for row in CATALOGUE if row.curve)  # of the first page
LOCKS = Path("/proc/locks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """One run.

    >>> Folder(path=Path("runs/gcd"), name="gcd")  # doctest: +SKIP
    """

    path: Path
    name: str

    @property
    def store(self) -> Path:
        """Its ``trajectories.sqlite``."""
        return self.path / NAME

    @property
    def state(self) -> State:
        """Ended unless a job holds the folder; waiting until that job has written answers."""
        if not _locked(self.path / LOCK):
            return "ended"
        return "running" if self.store.is_file() else "waiting"

    @contextlib.contextmanager
    def open(self) -> Iterator[Trajectories | None]:
        """Its answers, for one request: a job may put another file there meanwhile. None: there are none yet."""
        if not self.store.is_file():
            yield None
            return
        with Trajectories(self.store) as answers:
            yield answers

    def check(self) -> None:
        """``UserError`` if there is nothing to show, and will not be."""
        if not self.path.is_dir():
            raise UserError(f"{self.path} is not a folder: give the folder of a run")
        if not any((self.path / name).exists() for name in (METRICS, CONFIG, NAME, LOCK)):
            raise UserError(f"{self.path} is no run: give a folder that python -m bebop.run has made")
        if not self.store.is_file():
            self._explain_absence()
        with self.open():
            pass  # which refuses what is no file of ours, or has another format

    def _explain_absence(self) -> None:
        if self.setting("monitor", "trace") in ("off", False):  # YAML reads a bare off as False
            raise UserError(f"{self.path} ran with monitor.trace=off, which keeps no answers: set sample or all")
        if self.state == "ended":
            raise UserError(f"{self.store} is missing and no job runs there: this run kept no answers to show")

    def setting(self, group: str, name: str) -> Any:
        """A setting out of its ``config.yaml``; None if that does not say."""
        try:
            return parse_yaml((self.path / CONFIG).read_text(encoding="utf-8"))[group][name]
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            return None

    def curves(self) -> dict[str, Any]:
        """Return the steps and the metrics of CURVES that the run has; null where a step has none."""
        rows = _rows(self.path / METRICS)
        columns = {curve.name: [finite(row.get(curve.name)) for row in rows] for curve in CURVES}
        kept = {name: column for name, column in columns.items() if any(value is not None for value in column)}
        labels = {curve.name: {"label": curve.curve, "unit": curve.unit} for curve in CURVES if curve.name in kept}
        return {"steps": [row["step"] for row in rows], "columns": kept, "labels": labels}

    def alarms(self) -> list[dict[str, Any]]:
        """Where the drift monitor's state changed or something was to be done: step, state, evidence, action."""
        return alarms(self.path)

    def counts(self) -> dict[str, Any]:
        """What tells cheaply whether something is new: state, answers, the newest step, sizes of the logs."""
        with self.open() as answers:
            rows = [] if answers is None else answers.query("SELECT count(*), max(step) FROM answers")
        sizes = [_size(self.path / name) for name in (METRICS, ALARMS)]
        count, newest = rows[0] if rows else (0, None)
        return {"state": self.state, "answers": count, "step": newest, "metrics": sizes[0], "alarms": sizes[1]}


def alarms(run: Path) -> list[dict[str, Any]]:
    """Lines of ``controller.jsonl``: step, state, evidence and action of every change of state and every proposal."""
    return _rows(run / ALARMS)


def folders(paths: Sequence[Path]) -> list[Folder]:
    """The runs, named by their folders, or by whole paths where two folders have one name; checked."""
    names = [path.resolve().name for path in paths]
    unique = len(set(names)) == len(names)
    found = [Folder(path=path, name=name if unique else str(path)) for path, name in zip(paths, names, strict=True)]
    for folder in found:
        folder.check()
    return found


def _locked(lock: Path) -> bool:
    """Whether a process holds the lock, without touching it: a job that takes it just then must not be refused."""
    try:
        inode, holder = lock.stat().st_ino, lock.read_text(encoding="utf-8").split()[1:2]
        held = LOCKS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    for line in held:
        fields = line.replace("->", "").split()  # 1: FLOCK ADVISORY WRITE pid major:minor:inode 0 EOF
        # The device is left out, as overlays show another than stat; the process tells two inodes of a number apart.
        if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode) and holder in ([], [fields[4]]):
            return True
    return False


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def dumps(value: object) -> str:
    """JSON that every browser reads: ``ValueError`` for NaN, which has no place in it."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _rows(path: Path) -> list[dict[str, Any]]:
    """Lines of a log; none while it is not there."""
    return read_jsonl(path) if path.is_file() else []
