"""What /proc says of real processes, and what is written about them."""

import asyncio
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.runtime import session
from bebop.runtime.events import EventLog
from bebop.runtime.processes import descendants, end, marked, namespace, place, stacks, status, stopped
from bebop.runtime.session import Session, private_folder

# A process with a child, which waits in a function of its own. It says that both are there from the very line that it
# waits on: whoever has read it finds it in that function.
PARENT = """
import faulthandler, signal, subprocess, sys, tempfile
stacks = tempfile.TemporaryFile()
faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
def linger():
    print(child.pid, stacks.fileno(), flush=True); sys.stdin.readline()
linger()
"""


@pytest.fixture
def parent() -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A process, its child's id, and the descriptor of its stacks."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "BEBOP_PART": f"a-mark-{os.getpid()}"},
    )  # fmt: skip
    assert process.stdout is not None
    child, descriptor = map(int, process.stdout.readline().split())
    yield process, child, descriptor
    end([child, process.pid])
    process.communicate()


def test_children_are_found_by_parent_and_by_mark(parent: tuple[subprocess.Popen[str], int, int]) -> None:
    process, child, _ = parent
    assert descendants(process.pid) == [child] and process.pid in descendants(os.getpid())
    assert set(marked(f"BEBOP_PART=a-mark-{os.getpid()}")) == {process.pid, child}
    assert marked("BEBOP_PART=a-mark-") == []


def test_what_is_stopped_can_be_told_and_ended(parent: tuple[subprocess.Popen[str], int, int]) -> None:
    process, child, _ = parent
    assert not stopped(process.pid)
    for pid in (child, process.pid):
        os.kill(pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert stopped(process.pid)
    end([process.pid, child])
    assert process.wait() == -signal.SIGKILL
    end([process.pid])  # it is gone: no matter
    assert status(process.pid) is None and not stopped(process.pid)


def test_the_stacks_of_another_process(parent: tuple[subprocess.Popen[str], int, int]) -> None:
    process, _, descriptor = parent
    dump = stacks(process.pid, descriptor)
    assert "in linger" in dump and "most recent call first" in dump
    assert place(dump, "linger") == "<string>:7 in linger"
    assert place(dump, "no such thread") == ""
    end([process.pid])
    process.wait()
    assert stacks(process.pid, descriptor) == ""


def test_the_innermost_line_of_ours_is_named() -> None:
    ours = Path(place.__code__.co_filename).parent
    dump = (
        'Thread 0x1 (most recent call first):\n  File "/lib/select.py", line 3 in poll\n\n'
        f'Thread 0x2 (most recent call first):\n  File "/lib/threading.py", line 359 in wait\n'
        f'  File "{ours}/engine.py", line 12 in step\n  File "{ours}/rollout/engine_thread.py", line 99 in turn\n'
    )
    assert place(dump, "engine_thread.py") == "engine.py:12 in step"
    assert place(dump, "select.py") == "select.py:3 in poll"


def test_what_holds_up_the_driver_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Session(None, 30.0, EventLog(tmp_path))
    own.check(100.0)
    assert not caplog.records, "its event loop has not begun"

    def look(seconds: float) -> None:
        """From another thread, as the guard does, while this one waits in ``hold_up``."""
        guard = threading.Thread(target=own.check, args=(seconds,))
        guard.start()
        guard.join()

    async def hold_up() -> None:
        watch = asyncio.create_task(own.watch())
        for _ in range(3):  # a turn of the loop, and no more
            await asyncio.sleep(0)
        for _ in range(100):
            look(1.0)
        watch.cancel()

    asyncio.run(hold_up())
    assert len(caplog.records) == 1 and "is silent for 31 s, at threading.py" in caplog.text
    (event,) = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["kind"], event["who"], event["silent_s"]) == ("hang", "driver", 31.0)
    assert "in hold_up" in next((tmp_path / "hangs").iterdir()).read_text()


def test_events_are_lines_of_json_in_a_folder_that_exists(tmp_path: Path) -> None:
    EventLog(None).write("death", "trainer", "why")
    EventLog(tmp_path / "none").write("death", "trainer", "why")
    assert not (tmp_path / "none").exists() and EventLog(tmp_path / "none").keep_stacks("trainer", "dump") == ""
    log = EventLog(tmp_path)
    log.write("hang", "rollout worker 1", "in decoding", silent_s=31.0004, notice_s=31.0)
    log.write("replaced", "rollout worker 1", "process 7", recover_s=8.0)
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["silent_s"], row["recover_s"]) for row in rows] == [
        ("hang", 31.0, None),
        ("replaced", None, 8.0),
    ]
    name = log.keep_stacks("rollout worker 1", "dump")
    assert name.startswith("hangs/") and (tmp_path / name).read_text() == "dump"


def test_this_process_can_tell_its_own_stacks() -> None:
    file: IO[bytes]
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        try:
            assert "test_this_process_can_tell" in stacks(os.getpid(), file.fileno())
        finally:
            faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.slow
def test_a_private_folder_of_a_driver_that_was_killed_is_cleared_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # a long name would not do for Ray's sockets
        monkeypatch.setattr(tempfile, "tempdir", place)
        _leave_and_clear(Path(place))


def test_a_private_folder_of_a_driver_elsewhere_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine or container that shares the folder may have a driver by a process id that nobody has here."""
    monkeypatch.setattr(session, "_short", lambda _: str(tmp_path))
    nobody, boot = 1 << 30, namespace().partition("/")[0]
    drivers = {
        "machine": f"{nobody} 1 another-start/{os.readlink('/proc/self/ns/pid')}",
        "container": f"{nobody} 1 {boot}/pid:[1]",
        "unknown": f"{nobody} 1",
        "here": f"{nobody} 1 {namespace()}",
    }
    for name, driver in drivers.items():
        (tmp_path / f"bebop-{name}").mkdir()
        (tmp_path / f"bebop-{name}" / "driver").write_text(driver)
    with private_folder():
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"bebop-machine", "bebop-container", "bebop-unknown"}


def test_a_session_is_that_of_its_own_job_where_jobs_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's link to the latest session may lead to that of the other job by then."""
    temp = tmp_path / "ray"
    own, foreign = temp / "session_1", temp / "session_2"
    for folder in (own, foreign):
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    provided: list[Path] = []

    def start(*_: Any) -> None:
        (temp / "session_latest").symlink_to(foreign)
        node = SimpleNamespace(get_session_dir_path=lambda: str(own))
        monkeypatch.setattr(session.ray._private.worker, "_global_node", node)

    monkeypatch.setattr(session, "_start_ray", start)
    monkeypatch.setattr(session, "provision", lambda folder, **_: provided.append(folder))
    monkeypatch.setattr(session.ray, "shutdown", lambda: None)
    config = from_dict(JobConfig, {"runtime": {"temp_dir": str(temp)}})
    with session._started(config, tmp_path, EventLog(None)) as begun:
        assert begun.folder == own and provided == [own]
    assert own.stat().st_mode & 0o777 == 0o700 and foreign.stat().st_mode & 0o777 == 0o755


def _leave_and_clear(place: Path) -> None:
    code = "import os, signal, subprocess\nfrom bebop.runtime.session import private_folder\n"
    code += (
        "with private_folder():\n    print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid, flush=True)\n"
    )
    code += "    os.kill(os.getpid(), signal.SIGKILL)\n"
    environment = {**os.environ, "TMPDIR": str(place)}
    driver = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True)
    assert driver.returncode == -signal.SIGKILL
    os.kill(child := int(driver.stdout), signal.SIGSTOP)
    gone = os.pidfd_open(child)  # readable once it is dead, which SIGKILL alone does not yet make it
    (left,) = place.iterdir()
    (place / "bebop-of-no-job").mkdir()
    with private_folder() as mine, private_folder() as beside:
        assert not left.exists() and mine.exists() and beside.exists(), "one that runs keeps its own"
        assert select.select([gone], [], [], 30)[0] == [gone], "who is left of its job is ended"
    os.close(gone)
    assert [path.name for path in place.iterdir()] == ["bebop-of-no-job"]
