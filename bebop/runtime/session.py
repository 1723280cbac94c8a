"""Ray session of a job, with checks of Ray's own servers.

Ray ends a driver that has lost its GCS without any Python exception. It waits for ever for a raylet that does not
answer. So this module has to notice first that a server died or was stopped.

Invariants of a private session, which this process starts:

- Its temporary files lie in a folder that nobody else may enter, and that is removed afterwards.
- Every process of the session carries a mark in its environment, by which it is found and ended.
- A driver that was killed leaves its folder and its processes to the next driver, which removes them. Folders from
  other machines or other containers stay, since nobody here can tell whether their drivers run.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.report.dashboards.provision import provision
from bebop.runtime.events import EventLog
from bebop.runtime.preflight import MAX_FOLDER_LENGTH
from bebop.runtime.processes import (
    descendants,
    end,
    lives,
    main_stack,
    marked,
    namespace,
    place,
    start_ticks,
    status,
    stopped,
)
from bebop.runtime.watchdog import TICK, SuspendAwareClock

log = logging.getLogger(__name__)
PRIVATE, DRIVER, FILES = "bebop-", "driver", "files"  # temporary folders of jobs; in them: the driver, and TMPDIR
STARTS = 3  # attempts to start Ray
SERVERS = ("gcs_server", "raylet")  # no job can run without them


class SessionDied(Exception):
    """Ray's servers are gone; the job returns to its last checkpoint, on new servers."""

    def __init__(self, why: str, silent: float = 0.0) -> None:
        super().__init__(why)
        self.silent = silent  # seconds until it was noticed


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Address of Ray's dashboard, and whether it requires the token that ``ray get-auth-token`` prints."""

    url: str
    token: bool


class Session:
    """Ray session with checks of its servers and of the driver's event loop."""

    def __init__(
        self, folder: Path | None, floor: float, events: EventLog, servers: Mapping[int, str] | None = None
    ) -> None:
        """Describe a session.

        Args:
            folder: folder of a private session; None for a session that this process joined.
            floor: seconds that a server may be stopped and the driver silent.
            events: log of hangs.
            servers: process id -> name.
        """
        self.folder, self.floor, self.events, self.servers = folder, floor, events, dict(servers or {})
        self._turns = self._last_turns = 0  # of the driver's event loop: now, and at the last check
        self._idle = 0.0  # seconds without a turn
        self._silent = dict.fromkeys(self.servers, 0.0)
        self._hung: SessionDied | None = None
        self._closed = threading.Event()

    @property
    def dashboard(self) -> Dashboard | None:
        """Return Ray's dashboard; None if it was not started."""
        address = ray._private.worker.get_dashboard_url()
        if not address:
            return None
        url = address if "://" in address else f"http://{address}"
        return Dashboard(url, os.environ.get("RAY_AUTH_MODE") == "token")

    def guard(self) -> None:
        """Check until ``close``; run it in a thread, since calls of Ray that wait for a server block their caller."""
        clock = SuspendAwareClock()
        while not self._closed.wait(TICK):
            self.check(clock.tick())

    def check(self, passed: float) -> None:
        """Check for a stopped server and a blocked driver, ``passed`` seconds after the last check."""
        self._check_driver(passed)
        for pid, name in self.servers.items():
            self._silent[pid] = silent = self._silent[pid] + passed if stopped(pid) else 0.0
            if silent > self.floor:
                self._hung = SessionDied(f"Ray's {name} (process {pid}) is stopped for {silent:.0f} s", silent)
                # A call of Ray whose raylet dies ends this process without a message. So let the raylet answer first;
                # it ends with the session, which is over.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _check_driver(self, passed: float) -> None:
        """Report a driver with a blocked event loop; no other process can replace it."""
        before, self._idle = self._idle, self._idle + passed
        if self._turns != self._last_turns or not self._turns:
            self._last_turns, self._idle = self._turns, 0.0
        elif before <= self.floor < self._idle:
            dump = main_stack()
            where = place(dump, "File")
            why = f"the driver (process {os.getpid()}) is silent for {self._idle:.0f} s, at {where}"
            log.warning("%s; if that lasts, end it and go on with runtime.resume=true", why)
            self.events.keep_stacks("driver", dump)
            self.events.write("hang", "driver", why, silent_s=self._idle, notice_s=self._idle)

    def close(self) -> None:
        """Stop the checks."""
        self._closed.set()

    def close_to_others(self) -> None:
        """Make Ray's folder private again after Ray's processes have started, since they create parts of it."""
        if self.folder is not None:
            make_private(self.folder)

    def death(self) -> SessionDied | None:
        """Return the death of a server that has ended or hangs, or None."""
        gone = [f"{name} (process {pid})" for pid, name in self.servers.items() if not lives(pid)]
        return self._hung or (SessionDied(f"Ray's {' and '.join(gone)} ended") if gone else None)

    async def watch(self) -> SessionDied:
        """Wait until a server has ended or hangs, and return its death."""
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
    """Return the ids and names of Ray's servers that this process has started."""
    found = {pid: status(pid) for pid in descendants(os.getpid())}
    return {pid: of.name for pid, of in found.items() if of is not None and of.name in SERVERS}


@contextlib.contextmanager
def ray_session(config: JobConfig, events: EventLog) -> Iterator[Session]:
    """Run Ray within the block: a private session, or an existing one at ``runtime.address``."""
    if config.runtime.address is not None:
        with _joined(config.runtime.address, config.runtime.hang_after, events) as session:
            yield session
    else:
        with private_folder() as private, _started(config, private, events) as session:
            yield session


@contextlib.contextmanager
def _joined(address: str, floor: float, events: EventLog) -> Iterator[Session]:
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        # With an address, Ray reads its token too late unless RAY_AUTH_MODE says that there is one.
        advice = "" if "RAY_AUTH_MODE" in os.environ else " (a cluster that wants a token: set RAY_AUTH_MODE=token)"
        raise UserError(f"runtime.address={address!r} cannot be joined{advice}: {error}") from error
    try:
        with _guarded(Session(None, floor, events)) as session:
            yield session
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _started(config: JobConfig, private: Path, events: EventLog) -> Iterator[Session]:
    """Start a private Ray, and end everything that belongs to it afterwards."""
    runtime = config.runtime
    temp = Path(runtime.temp_dir).absolute() if runtime.temp_dir else private / "ray"
    temp.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = temp.stat().st_mode
    mark, servers = f"BEBOP_SESSION={uuid4().hex}", dict[int, str]()
    os.environ["BEBOP_SESSION"] = mark.partition("=")[2]  # Ray's processes inherit it
    try:
        _start_ray(config, temp, mark)
        # Not the link ``session_latest``, which leads to the newest session of all jobs with this folder.
        folder = Path(ray._private.worker._global_node.get_session_dir_path()).resolve()
        os.environ.pop("BEBOP_SESSION")
        temp.chmod(mode)
        make_private(folder)
        if config.monitor.ray_metrics:  # Ray has written its own files by now, and ours lie beside them
            provision(folder, staleness=config.rollout.staleness)
        servers = _servers()
        with _guarded(Session(folder, runtime.hang_after, events, servers)) as session:
            yield session
    finally:
        os.environ.pop("BEBOP_SESSION", None)
        with ignore_signals():
            if not all(
                lives(pid) and not stopped(pid) for pid in servers
            ):  # ``shutdown`` would wait for ever for a server that does not run
                end(marked(mark))
            ray.shutdown()
            end(marked(mark))


def _start_ray(config: JobConfig, temp: Path, mark: str) -> None:
    """Start Ray's servers; try again if they do not come up, for instance because another program took a port first."""
    runtime = config.runtime
    cpus = config.trainer.ranks * config.trainer.threads + config.rollout.workers * config.rollout.threads
    tried: set[int] = set()
    for left in reversed(range(STARTS)):
        tried.add(port := runtime.port or free_port(tried))
        tried.add(metrics_port := runtime.metrics_port or free_port(tried))
        os.environ["RAY_GCS_SERVER_PORT"] = str(port)
        try:
            ray.init(
                address="local",
                num_cpus=max(cpus, os.cpu_count() or 1),
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
    with contextlib.suppress(OSError, RuntimeError):  # another user's home, or none
        make_private(Path.home() / ".ray")  # Ray leaves its key there for all to read


def free_port(tried: Collection[int] = ()) -> int:
    """Return a free TCP port of the loopback address that is not in ``tried``."""
    while (port := _some_port()) in tried:  # the system may give the same one again
        pass
    return port


def _some_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder that nobody else may enter, for the temporary files of all processes of a job within the block.

    A killed driver leaves its folder behind; the next driver here that creates one beside it removes it.
    """
    before, parent = os.environ.get("TMPDIR"), Path(_short(tempfile.gettempdir()))
    _clear(parent)
    folder = Path(tempfile.mkdtemp(prefix=PRIVATE, dir=parent))
    (folder / DRIVER).write_text(f"{os.getpid()} {start_ticks(os.getpid())} {namespace()}")
    (folder / FILES).mkdir(mode=0o700)
    os.environ["TMPDIR"] = str(folder / FILES)  # Ray's processes inherit it
    try:
        yield folder
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
        with ignore_signals():
            for _ in range(50):  # processes that are ending may still write
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
                time.sleep(0.1)


def _clear(parent: Path) -> None:
    """Remove the private folders of this user's ended drivers, and end the remaining processes of their jobs.

    Machines and containers may share ``parent``; only drivers with process ids of our own namespace can be looked up.
    Ray ends its processes once it misses the driver, but a stopped process does not notice.
    """
    for driver in parent.glob(f"{PRIVATE}*/{DRIVER}"):
        with contextlib.suppress(OSError, ValueError):
            pid, started, where = driver.read_text().split()
            if where != namespace() or driver.stat().st_uid != os.getuid():
                continue
            if int(started) and start_ticks(int(pid)) != int(started):
                end(marked(f"TMPDIR={driver.parent / FILES}"))
                shutil.rmtree(driver.parent, ignore_errors=True)


def _short(folder: str) -> str:
    """Return ``folder``, or /tmp (as Ray does) if the paths of sockets below it would be too long."""
    return folder if len(folder) + len("/bebop-12345678/ray") <= MAX_FOLDER_LENGTH else "/tmp"


def make_private(folder: Path) -> None:
    """Remove the rights of others below ``folder``: Ray creates folders that everybody may write to."""
    for inner, _, _ in os.walk(folder):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(inner, os.stat(inner).st_mode & ~0o077)


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM within the block, which cleans up."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
