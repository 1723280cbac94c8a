"""One real job from its start to its end, whatever befalls it: what is done to it, and what comes of it."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bebop.bench import record
from bebop.runtime.processes import end, lives, marked, status, stopped
from tests.chaos import served
from tests.chaos.control import BUG, ENVIRONMENT, Control
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.plan import SMALL, Plan, Planned
from tests.test_open_ports import listeners

PATIENCE = 240.0  # seconds for a job to go on after a fault
LEAVE = 30.0  # ... for processes to be gone after the end
POLL = 0.05
STOPPING = threading.Event()  # set: runs in progress end, and count as not begun
PROCESS = re.compile(r"\d+")


class Stuck(Exception):
    """A job does not go on, or ended as it should not."""


class Run:
    """A folder, and in it a job."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        """``folder`` is made anew by ``run``."""
        self.folder, self.plan = folder, plan
        self.job, self.output = folder / "job", folder / "out.txt"
        self.control = Control(folder / "control")
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-"))  # short, for Ray's sockets
        self.mark = f"{ENVIRONMENT}={self.control.folder}"
        self.process: subprocess.Popen[bytes]
        self.sessions: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []

    @property
    def driver(self) -> int:
        """Its process."""
        return self.process.pid

    def steps(self) -> int:
        """Lines of metrics so far; what is resumed has fewer."""
        with contextlib.suppress(FileNotFoundError):
            return (self.job / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def updates(self) -> int:
        """Updates so far, those done again too."""
        with contextlib.suppress(FileNotFoundError):
            return (self.control.journal).read_bytes().count(b'"trained"')
        return 0

    def events(self) -> list[dict[str, Any]]:
        """What the job says befell it."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.job / "events.jsonl").read_text().splitlines()]
        return []

    def checkpoints(self) -> list[Path]:
        """That have appeared."""
        return sorted((self.job / "checkpoints").glob("step_*"))

    def pids(self, kind: str) -> list[int]:
        """Of the processes that are there now: those of the start, and those that took the place of others since."""
        lines = [line.split() for line in (self.job / "pids.txt").read_text().splitlines()]
        found = [int(pid) for name, pid in lines if name == kind]
        since = (self.job / "pids.txt").stat().st_mtime_ns
        who = {"rollout": "rollout worker", "trainer": "trainer"}[kind]
        with contextlib.suppress(FileNotFoundError):
            if (self.job / "events.jsonl").stat().st_mtime_ns >= since:
                again = [e for e in self.events() if e["kind"] == "replaced" and e["who"].startswith(who)]
                found += [int(pid) for event in again for pid in PROCESS.findall(event["why"])]
        return [pid for pid in found if lives(pid) and not stopped(pid)]

    def start(self, resume: bool = False) -> None:
        """The command that a user gives."""
        own = [override.replace("{folder}", str(self.folder)) for override in self.plan.overrides]
        arguments = [f"runtime.dir={self.job}", *SMALL, *own]
        arguments += [f"trainer.steps={self.plan.steps}"] if self.plan.steps else []
        arguments = [f"runtime.dir={self.job}", "runtime.resume=true"] if resume else arguments
        command = [sys.executable, "-m", "tests.chaos.job", *arguments]
        environment = {**os.environ, ENVIRONMENT: str(self.control.folder), "TMPDIR": str(self.temporary)}
        environment |= {BUG: self.plan.bug} if self.plan.bug else {}
        self.sessions.append({"arguments": arguments[1:], "began": time.monotonic(), "from": self.size()})
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def size(self) -> int:
        """Of what all sessions said."""
        return self.output.stat().st_size if self.output.exists() else 0

    def said(self, session: int = -1) -> list[str]:
        """Lines of a session."""
        with self.output.open("rb") as output:
            output.seek(self.sessions[session]["from"])
            return output.read().decode(errors="replace").splitlines()

    def wait(self, until: Callable[[], bool], ends: bool = False, patience: float = PATIENCE) -> None:
        """For something; ``Stuck`` if it does not come, or if the job ends first (unless it may)."""
        limit = time.monotonic() + patience
        while not until():
            if STOPPING.is_set():
                raise KeyboardInterrupt
            if self.process.poll() is not None and not ends:
                raise Stuck(f"ended with {self.process.returncode}: {self.said()[-1:]}")
            if self.process.poll() is not None:
                return
            if time.monotonic() > limit:
                raise Stuck(f"nothing for {patience:.0f} s")
            time.sleep(POLL)

    def run(self) -> None:
        """From start to end; everything that is known of it afterwards is in the folder."""
        if STOPPING.is_set():
            raise KeyboardInterrupt
        shutil.rmtree(self.folder, ignore_errors=True)
        self.control.folder.mkdir(parents=True)
        (self.folder / "plan.json").write_text(json.dumps(self.plan.as_dict() | record.begin(), indent=1))
        stuck = ""
        with self._place(), contextlib.ExitStack() as leaving:
            leaving.callback(lambda: end(marked(self.mark)))
            self.start()
            try:
                if self.plan.steps:
                    self.wait(lambda: self.process.poll() is not None, ends=True, patience=10 * PATIENCE)
                    self._ended(0)
                else:
                    # Without a checkpoint there would be nothing to go on from.
                    self.wait(lambda: self.steps() >= 1 and bool(self.checkpoints()))
                    for group in groups(self.plan.faults):
                        self._faults(group)
                    self._goes_on(2)
                    self.process.send_signal(signal.SIGINT)
                    self.wait(lambda: False, ends=True)
                    self._ended(130)
            except Stuck as why:
                stuck = str(why)
            self._finish(stuck)

    def _faults(self, group: Sequence[tuple[int, Planned]]) -> None:
        """Faults that come right upon each other, and what follows until the job goes on."""
        if (steps := group[0][1].steps) > 0:
            before = self.updates()
            self.wait(lambda: self.updates() >= before + steps)
        events, updates = len(self.events()), self.updates()
        rows = []
        for number, planned in group:
            time.sleep(planned.seconds)
            row = {"number": number, "kind": planned.kind, "alone": len(group) == 1}
            rows.append(row)
            self.rows.append(row)  # before: what is not survived counts, too
            self._do(FAULTS[planned.kind], planned, row)
        if len(group) == 1:
            self._follow(FAULTS[group[0][1].kind], rows[0], events, updates)
        else:
            hit = [pid for row in rows for pid in row["ended"]]
            self.wait(lambda: not any(map(lives, hit)))
            self._goes_on(2)
        for row in rows:
            row["recovered"] = round(time.monotonic() - row.pop("begun"), 2)

    def _do(self, kind: Fault, planned: Planned, row: dict[str, Any]) -> None:
        """It happens; an order counts from when it is carried out."""
        row["begun"] = time.monotonic()
        row["to"] = kind.do(self, random.Random(planned.seed))
        row["ended"] = [int(pid) for pid in PROCESS.findall(row["to"])] if kind.who and not kind.order else []
        if kind.order:
            self.wait(lambda: self.control.taken(kind.order), ends=kind.ends)
            row["begun"] = time.monotonic()

    def _follow(self, kind: Fault, row: dict[str, Any], events: int, updates: int) -> None:
        """One fault alone: when it is noticed, and that the job goes on."""
        if kind.ends:
            self.wait(lambda: kind.refused and self.updates() >= updates + 3, ends=True)
            if self.process.poll() is None:  # what was removed as too old made room enough
                self._make_room()
                return
            if kind.refused:
                row["noticed"] = round(time.monotonic() - row["begun"], 2)
                self._ended(2)
                row["why"] = self.said()[-1]
            self._make_room()
            self.start(resume=True)
            self.wait(self._runs)
        elif kind.who:
            self.wait(lambda: any(e["kind"] != "replaced" for e in self.events()[events:]))
            row["noticed"] = round(time.monotonic() - row["begun"], 2)
            row["why"] = next(e["why"] for e in self.events()[events:] if e["kind"] != "replaced")
            self.wait(lambda: any(e["kind"] == "replaced" for e in self.events()[events:]))
        self._goes_on(1)

    def _make_room(self) -> None:
        (self.job / "checkpoints" / "ballast").unlink(missing_ok=True)

    def _runs(self) -> bool:
        """Whether the processes that are named are those of the session in progress."""
        return f"driver {self.driver}\n" in (self.job / "pids.txt").read_text()

    def _goes_on(self, steps: int) -> None:
        """So many updates from now."""
        before = self.updates()
        self.wait(lambda: self.updates() >= before + steps)

    def _ended(self, code: int) -> None:
        """The session that ended did so as it should: with this code, and without a traceback."""
        found = self.process.wait()
        self.sessions[-1] |= {"exit": found}
        lines = self.said()
        if found != code or any("Traceback" in line for line in lines):
            raise Stuck(f"a session ended with {found} instead of {code}: {lines[-1:]}")

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """What a job needs before it begins: where a disk is to run full, a small one for the checkpoints."""
        if self.plan.job == "sglang":
            served.prepare(self.folder)
        if self.plan.job != "disk":
            yield
            return
        checkpoints = self.job / "checkpoints"
        checkpoints.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "chaos", checkpoints], check=True)
        try:
            yield
        finally:
            kept = self.folder / "checkpoints"
            shutil.copytree(checkpoints, kept)
            subprocess.run(["umount", "-l", checkpoints], check=True)
            checkpoints.rmdir()
            kept.rename(checkpoints)

    def _finish(self, stuck: str) -> None:
        """What is left, once all had time to go; then it is ended."""
        limit = time.monotonic() + LEAVE
        while (left := self._left())["processes"] and time.monotonic() < limit:
            time.sleep(10 * POLL)
        shutil.rmtree(self.temporary)
        for name, value in (("faults", self.rows), ("sessions", self.sessions), ("left", left)):
            (self.folder / f"{name}.json").write_text(json.dumps(value, indent=1))
        (self.folder / "done.json").write_text(json.dumps({"stuck": stuck}))

    def _left(self) -> dict[str, list[str]]:
        processes = list(filter(lives, marked(self.mark)))
        return {
            "ports": [str(one) for one in listeners(processes)],
            "processes": [f"{pid} {status(pid)}" for pid in processes],
            "folders": sorted(os.listdir(self.temporary)),
        }


def groups(faults: Sequence[Planned]) -> list[list[tuple[int, Planned]]]:
    """Faults with their numbers; those together that come right upon each other."""
    found: list[list[tuple[int, Planned]]] = []
    for number, planned in enumerate(faults):
        if planned.steps < 0 and found:
            found[-1].append((number, planned))
        else:
            found.append([(number, planned)])
    return found
