"""Ray for the length of a job, and a look after its own servers.

Ray ends a driver that has lost its GCS, from inside and without a word to Python, and waits for a raylet that does not
answer: so their death, and their being stopped, are noticed here, before.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from uuid import uuid4

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

from bebop.config import JobConfig
from bebop.dashboards.provision import provision
from bebop.errors import UserError
from bebop.events import EventLog
from bebop.hangs import TICK, AwakeClock
from bebop.preflight import LONGEST_FOLDER
from bebop.processes import descendants, end, main_stack, marked, place, status, stopped
from bebop.remote.part import free_port

log = logging.getLogger(__name__)
PRIVATE, DRIVER, FILES = "bebop-", "driver", "files"  # temporary folders of jobs; in them: who drives, and TMPDIR
STARTS = 3  # times that Ray is started before it is given up
SERVERS = ("gcs_server", "raylet")  # without which no job goes on


class SessionDied(Exception):
    """Ray's servers are gone; the job goes back to its last checkpoint, on new ones."""

    def __init__(self, why: str, silent: float = 0.0) -> None:
        super().__init__(why)
        self.silent = silent  # seconds until it was noticed


class Session:
    """Ray, as a job sees it."""

    def __init__(
        self, folder: Path | None, floor: float, events: EventLog, servers: Mapping[int, str] | None = None
    ) -> None:
        """``folder``: of a private one; ``servers``: name of each process; ``floor``: seconds that one may be stopped.

        What was joined is looked after by others.
        """
        self.folder, self.floor, self.events, self.servers = folder, floor, events, dict(servers or {})
        self._turns = self._seen = 0  # of the driver's event loop; as of the last look
        self._idle = 0.0  # seconds without one
        self._silent = dict.fromkeys(self.servers, 0.0)
        self._hung: SessionDied | None = None
        self._closed = threading.Event()

    def guard(self) -> None:
        """Notice a server that was stopped for too long, and name what holds up the driver, until ``close``.

        In a thread: calls of Ray that wait for a server hold up whoever makes them, such as an event loop.
        """
        clock = AwakeClock()
        while not self._closed.wait(TICK):
            self.look(clock.tick())

    def look(self, passed: float) -> None:
        """``passed`` seconds later: is a server stopped, or the driver held up?"""
        self._look_at_driver(passed)
        for pid, name in self.servers.items():
            self._silent[pid] = silent = self._silent[pid] + passed if stopped(pid) else 0.0
            if silent > self.floor:
                self._hung = SessionDied(f"Ray's {name} (process {pid}) is stopped for {silent:.0f} s", silent)
                # A call of Ray whose raylet dies ends this process, without a word. So let it answer first; it ends
                # with the session, which is over.
                _go_on(pid)

    def _look_at_driver(self, passed: float) -> None:
        """A sink or a disk that does not come back holds up everything; nobody is there to replace the driver."""
        before, self._idle = self._idle, self._idle + passed
        if self._turns != self._seen or not self._turns:
            self._seen, self._idle = self._turns, 0.0
        elif before <= self.floor < self._idle:
            dump = main_stack()
            where = place(dump, "File")
            why = f"the driver (process {os.getpid()}) is silent for {self._idle:.0f} s, at {where}"
            log.warning("%s; if that lasts, end it and go on with runtime.resume=true", why)
            self.events.keep_stacks("driver", dump)
            self.events.write("hang", "driver", why, silent_s=self._idle, notice_s=self._idle)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def close_to_others(self) -> None:
        """Shut Ray's folder, once more after its processes have come up: they make parts of it."""
        if self.folder is not None:
            shut(self.folder)

    def death(self) -> SessionDied | None:
        """Which server has ended."""
        gone = [f"{name} (process {pid})" for pid, name in self.servers.items() if not _lives(pid)]
        return self._hung or (SessionDied(f"Ray's {' and '.join(gone)} ended") if gone else None)

    async def watch(self) -> SessionDied:
        """Wait until a server has ended."""
        while (death := self.death()) is None:
            self._turns += 1
            await asyncio.sleep(TICK)
        return death


@contextlib.contextmanager
def _guarded(session: Session) -> Iterator[Session]:
    threading.Thread(target=session.guard, name="guard", daemon=True).start()
    try:
        yield session
    finally:
        session.close()


def _servers() -> dict[int, str]:
    """Ray's servers that this process has started, by process."""
    found = {pid: status(pid) for pid in descendants(os.getpid())}
    return {pid: of.name for pid, of in found.items() if of is not None and of.name in SERVERS}


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _lives(pid: int) -> bool:
    found = status(pid)
    return found is not None and found.state != "Z"


def _runs(pid: int) -> bool:
    return _lives(pid) and not stopped(pid)


@contextlib.contextmanager
def ray_session(config: JobConfig, events: EventLog) -> Iterator[Session]:
    """Ray for the length of a job: a private one with its own folder and ports, or one that is joined by address."""
    runtime = config.runtime
    if runtime.address is not None:
        try:
            ray.init(address=runtime.address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            # Ray reads its token too late for an address, unless it is told that there is one.
            advice = "" if "RAY_AUTH_MODE" in os.environ else " (a cluster that wants a token: set RAY_AUTH_MODE=token)"
            raise UserError(f"runtime.address={runtime.address!r} cannot be joined{advice}: {error}") from error
        try:
            with _guarded(Session(None, config.runtime.hang_after, events)) as guarded:
                yield guarded
        finally:
            ray.shutdown()
        return
    with private_folder() as private:
        temp = Path(runtime.temp_dir).absolute() if runtime.temp_dir else private / "ray"
        temp.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = temp.stat().st_mode
        mark, servers = f"BEBOP_SESSION={uuid4().hex}", dict[int, str]()
        os.environ["BEBOP_SESSION"] = mark.partition("=")[2]  # whatever belongs to it can be told by it
        try:
            _start_ray(config, temp, mark)
            session = (temp / "session_latest").resolve()
            os.environ.pop("BEBOP_SESSION")
            temp.chmod(mode)
            shut(session)
            if config.monitor.ray_metrics:  # Ray has written its own files by now; ours go beside them
                provision(session, staleness=config.rollout.staleness)
            servers = _servers()
            with _guarded(Session(session, config.runtime.hang_after, events, servers)) as guarded:
                yield guarded
        finally:
            os.environ.pop("BEBOP_SESSION", None)
            with unhurried():
                if not all(map(_runs, servers)):  # whoever waits for a server of Ray's would wait for ever
                    end(marked(mark))
                ray.shutdown()
                end(marked(mark))


def _start_ray(config: JobConfig, temp: Path, mark: str) -> None:
    """A Ray of our own; again if its servers do not come up, as where another program was quicker to take a port."""
    runtime = config.runtime
    wanted = config.trainer.ranks * config.trainer.threads + config.rollout.workers * config.rollout.threads
    tried: set[int] = set()
    for left in reversed(range(STARTS)):
        tried.add(port := runtime.port or free_port(tried))
        tried.add(metrics_port := runtime.metrics_port or free_port(tried))
        os.environ["RAY_GCS_SERVER_PORT"] = str(port)
        try:
            ray.init(
                address="local",
                num_cpus=max(wanted, os.cpu_count() or 1),
                include_dashboard=runtime.dashboard,
                dashboard_port=runtime.dashboard_port,
                _temp_dir=str(temp),
                _metrics_export_port=metrics_port,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
            break
        except Exception as error:  # Ray raises whatever it has
            ray.shutdown()
            end(marked(mark))  # what it has started; this process itself began without the mark
            why = f"Ray did not start: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}"
            if not left:
                raise UserError(f"{why} ({STARTS} times)") from error
            log.warning("%s; trying again", why)
    with contextlib.suppress(OSError, RuntimeError):  # a home that is somebody else's, or none
        shut(Path.home() / ".ray")  # Ray's key is there, for all to read


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that nobody else may enter, for the temporary files of every process of a job; gone afterwards.

    A driver that is killed leaves its folder to the next that looks for a place beside it.
    """
    before, place = os.environ.get("TMPDIR"), Path(_short(tempfile.gettempdir()))
    _clear(place)
    folder = Path(tempfile.mkdtemp(prefix=PRIVATE, dir=place))
    (folder / DRIVER).write_text(_self())
    (folder / FILES).mkdir(mode=0o700)
    os.environ["TMPDIR"] = str(folder / FILES)  # Ray's processes inherit it
    try:
        yield folder
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
        with unhurried():
            for _ in range(50):  # processes that are ending may still write
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
                time.sleep(0.1)


def _self() -> str:
    """This process, told from a later one of the same number."""
    found = status(os.getpid())
    return f"{os.getpid()} {found.started if found else 0}"


def _clear(place: Path) -> None:
    """Remove private folders of drivers of this user that are there no more, and end who is left of their jobs.

    Ray ends them once it misses the driver, but a process that was stopped does not hear it.
    """
    for left in place.glob(f"{PRIVATE}*/{DRIVER}"):
        with contextlib.suppress(OSError, ValueError):
            pid, started = map(int, left.read_text().split())
            found = status(pid)
            if left.stat().st_uid == os.getuid() and (found is None or found.started != started) and started:
                end(marked(f"TMPDIR={left.parent / FILES}"))
                shutil.rmtree(left.parent, ignore_errors=True)


def _short(folder: str) -> str:
    """``folder``, or, as Ray does, the system's own where sockets below it would have too long a name."""
    return folder if len(folder) + len("/bebop-12345678/ray") <= LONGEST_FOLDER else "/tmp"


def shut(folder: Path) -> None:
    """Take from others what Ray gives to everybody: folders for the whole machine to write to."""
    for inner, _, _ in os.walk(folder):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(inner, os.stat(inner).st_mode & ~0o077)


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Ctrl-C and a polite kill are not heard while the block puts things away."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
