"""The sandbox: what a command gets, that it holds, that its own test notices where it would not, and what is left."""

import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bebop.errors import UserError
from bebop.runtime.processes import descendants, status
from recipes.environments.bugfix import sandbox
from recipes.environments.bugfix.sandbox import PYTHON, Limits, Sandbox, SandboxLost, faults, make_sandbox
from tests.cases import slow_but
from tests.recipes.environments.namespaces import needs_namespaces
from tests.tree import ROOT

pytestmark = needs_namespaces
LAUNCHER = sandbox._source("sandbox_launch")
LIMITS = Limits(cpu_seconds=2)
PATIENCE = 20.0  # seconds, on a machine however busy
NOBODY = {"user": 54321, "group": 54321, "extra_groups": [], "capture_output": True, "text": True}
OF_ALL = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
OWNER = """
import sys
from recipes.environments.bugfix.sandbox import Limits, Sandbox, SandboxLost
try:
    Sandbox(Limits(seconds=600.0), sys.argv[1]).run(["/bin/sh", "-c", "sleep 500 & sleep 500"], {})
except SandboxLost as lost:
    print("lost:", lost)
"""


def test_a_command_gets_its_files_and_gives_its_output() -> None:
    ran = make_sandbox(LIMITS).run(["/bin/sh", "-c", "cat a/b.txt; python -V >&2; exit 3"], {"a/b.txt": "héllo\n"})
    version = f"Python {platform.python_version()}\n"
    assert (ran.code, ran.ended, ran.output) == (3, "itself", f"héllo\n{version}")


def traces(sandbox: Sandbox, mark: str) -> tuple[str, list[str], list[int]]:
    """Mounts, processes, and what it places in the machine's /tmp; what others put there, as pip does, is not its."""
    own = {Path(path).parts[1] for path in (*sandbox.shown, *sandbox.links)} | {"box", "tmp", mark}
    placed = sorted(own.intersection(os.listdir("/tmp")))
    return Path("/proc/self/mountinfo").read_text(), placed, descendants(os.getpid())


def test_it_holds_and_leaves_nothing() -> None:
    sandbox, mark = Sandbox(LIMITS), f"mark-{os.getpid()}-{time.monotonic_ns()}"
    before = traces(sandbox, mark)
    assert faults(sandbox) == []
    assert sandbox.run(["/bin/sh", "-c", f"cd /tmp && echo > {mark} && ls"], {}).output == f"{mark}\n"
    assert traces(sandbox, mark) == before


def weaker(old: str, new: str) -> Sandbox:
    """A sandbox whose launcher has a line changed."""
    assert LAUNCHER.count(old) == 1, old
    return Sandbox(LIMITS, LAUNCHER.replace(old, new))


WEAKER = {
    "network": ('"net": 0x40000000}', '"net": 0}', "reaches the network at 127.0.0.1"),
    "packages": ('for target in request["hidden"]:', "for target in []:", "sees what is in /python/lib"),
    "filter": ('    restrict(request["filter"])\n', "", "may call what reaches beyond namespaces"),
    "processes": ('request["processes"]', "4000", "starts more than 16 processes"),
    "no limit": ("        resource.RLIMIT_NPROC: request", "        99: request", ""),
    "memory": ('request["memory_bytes"]', "1 << 40", "bytes of memory"),
    "file size": ('request["file_bytes"]', "1 << 40", "writes files of more than"),
    "files": ('request["open_files"]', "1000", "opens more than 64 files"),
    "open file": ("os.set_inheritable(int(sys.argv[1]), False)", "", "holds the open file"),
    "disk": ("size={request['disk_bytes']}", "size=64m", "writes more than"),
    "processor": ('(request["cpu_seconds"], ', "(1, ", "another limit on processor time"),
    "writable": ("READ_ONLY | NO_SUID", "NO_SUID", "may write to /usr/bin"),
    "root": ("BOX = 1000", "BOX = 0", "may gain privileges"),
    "time": ('time.monotonic() + request["seconds"]', 'time.monotonic() + request["seconds"] + 5', "for longer than"),
    "output": ('> request["output_bytes"]:', "> 1 << 40:", "writes more than it may"),
}
QUICK = ("network",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in WEAKER])
def test_its_own_test_notices_a_launcher_that_does_not_hold(name: str) -> None:
    old, new, noticed = WEAKER[name]
    if not noticed:
        with pytest.raises(SandboxLost):
            faults(weaker(old, new))
    else:
        assert any(noticed in fault for fault in faults(weaker(old, new)))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the id outside is one's own")
def test_its_own_test_notices_a_command_of_root() -> None:
    found = faults(weaker("return min(OUTSIDE, last)", "return 0"))
    assert any("starts more than 16 processes" in fault for fault in found)


@pytest.mark.slow
def test_its_own_test_notices_folders_that_should_not_be_there() -> None:
    wide = Sandbox(LIMITS)
    wide.shown["/etc"] = "/etc"
    wide.shown["/project"] = str(ROOT)
    found = faults(wide)
    assert "it sees /etc/passwd" in found and f"it sees {Path('/project', 'bebop')}" in found


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        # a process that may make no namespaces, by the filter that commands run under
        ("    enter()\n", "    drop()\n        restrict(request['filter'])\n        enter()\n",
         "the sandbox cannot be used on this machine (user namespace: Operation not permitted): it needs Linux 5.14"),
        (WEAKER["network"][0], WEAKER["network"][1],
         "the sandbox does not hold a command on this machine: it reaches the network at 127.0.0.1"),
        ("    main()\n", "    raise SystemExit(4)\n",
         "the sandbox cannot be used on this machine (the launcher ended with status 4: no word)"),
    ],
    ids=["no namespaces", "holes", "no launcher"],
)  # fmt: skip
def test_a_machine_that_cannot_is_refused_in_one_line(old: str, new: str, says: str, monkeypatch) -> None:
    launcher = weaker(old, new).launcher
    source = sandbox._source
    monkeypatch.setattr(sandbox, "_source", lambda name: launcher if name == "sandbox_launch" else source(name))
    with pytest.raises(UserError) as refused:
        make_sandbox(Limits(seconds=19.0))  # no other test has tried these
    assert says in str(refused.value) and "\n" not in str(refused.value)


def python_of_all() -> str:
    """A Python that any user of this machine may start; "" if there is none."""
    for path in (sys.executable, "/usr/bin/python3"):
        code = "import ctypes, sys, bebop.errors; sys.exit(sys.version_info < (3, 11))"
        try:
            if subprocess.run([path, "-c", code], cwd=ROOT, env=OF_ALL, **NOBODY).returncode == 0:
                return path
        except OSError:
            continue
    return ""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are what this one is about")
def test_it_holds_for_a_user_who_is_not_root() -> None:
    python = python_of_all()
    if not python:
        pytest.skip("no Python here that another user may start")
    code = (
        "from recipes.environments.bugfix.sandbox import Limits, PYTHON, make_sandbox\n"
        "made = [PYTHON, '-c', 'import os; print(os.getuid(), open(\"a\").read())']\n"
        "print(make_sandbox(Limits()).run(made, {'a': 'b'}).output)"
    )
    done = subprocess.run([python, "-c", code], cwd=ROOT, env=OF_ALL, **NOBODY)
    assert done.stdout.strip() == "1000 b", done


@contextmanager
def asleep() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that owns a sandbox in which a command sleeps, and all that belongs to it."""
    command = [sys.executable, "-c", OWNER, LAUNCHER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        begun = time.monotonic()
        while sum(name_of(pid) == "sleep" for pid in descendants(owner.pid)) < 2:
            assert owner.poll() is None and time.monotonic() - begun < PATIENCE
            time.sleep(0.02)
        found = descendants(owner.pid)
        handles = [os.pidfd_open(pid) for pid in found]
        try:
            yield owner, found
        finally:
            owner.kill()
            for handle in handles:  # where the sandbox does not do it
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.close(handle)


def name_of(pid: int) -> str:
    known = status(pid)
    return "" if known is None else known.name


def ended(handles: list[int]) -> bool:
    """Whether all these processes came to an end, in good time."""
    return all(select.select([handle], [], [], PATIENCE)[0] for handle in handles)


@pytest.mark.parametrize("killed", slow_but(["owner", "launcher"], ["owner", "launcher", "init"]))
def test_nothing_is_left_when_it_is_killed(killed: str) -> None:
    with asleep() as (owner, found):
        handles = [os.pidfd_open(pid) for pid in found]
        launcher = min(found)
        init = next(pid for pid in found if (of := status(pid)) is not None and of.parent == launcher)
        os.kill({"owner": owner.pid, "launcher": launcher, "init": init}[killed], signal.SIGKILL)
        assert ended(handles)
        if killed == "launcher":
            assert owner.communicate(timeout=PATIENCE)[0].startswith("lost: the launcher ended with status -9")
    for handle in handles:
        os.close(handle)


def test_commands_do_not_share_a_count_of_processes() -> None:
    """Ten each, of sixteen, at the same time."""
    code = "for n in 1 2 3 4 5 6 7 8 9 10; do sleep 600 & done; echo ten; wait"
    with asleep():
        ran = make_sandbox(LIMITS).limited(seconds=1.5).run(["/bin/sh", "-c", code], {})
        assert ran.output == "ten\n" and ran.ended == "time"


def test_a_command_cannot_reach_the_process_that_waits_for_it() -> None:
    code = (
        "import os, signal\nfor n in (signal.SIGKILL, signal.SIGINT, signal.SIGSTOP): os.kill(1, n)\nprint(os.getpid())"
    )
    ran = make_sandbox(LIMITS).run([PYTHON, "-I", "-S", "-c", code], {})
    assert (ran.code, ran.output) == (0, "2\n")
