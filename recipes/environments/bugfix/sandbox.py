"""Runs a model's commands isolated from the machine: Linux namespaces, a separate uid, no capabilities, limits.

It protects against mistakes and against attempts at a reward, not against attackers of a kernel: the kernel is shared,
and system calls are filtered, not emulated. Each command starts with only the files that it is given. Nothing of it is
left afterwards, neither processes nor mounts nor files, even if the caller is killed (``sandbox_launch.py``).

``make_sandbox`` tests the sandbox before it is used, from inside (``sandbox_probe.py``), and refuses a machine that
cannot provide it. There is no other way to run a command here.
"""

import copy
import functools
import importlib
import json
import os
import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bebop
from bebop.errors import UserError

START_SECONDS = 30.0  # for a sandbox to be built and taken down, on a busy machine; about .1 s on a quiet one
PYTHON = f"/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"  # as a command sees it
ENVIRONMENT = {
    "PATH": "/tools:/python/bin:/usr/bin:/bin",
    "LD_LIBRARY_PATH": "/python/lib",
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same output each time
    "PYTHONDONTWRITEBYTECODE": "1",
}
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
NEEDED = "it needs Linux 5.14 or later with user namespaces, on x86_64 or aarch64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one command; memory is per process and ``file_bytes`` per file."""

    seconds: float = 20.0  # wall time: for what sleeps; a busy machine must not end what computes
    cpu_seconds: int = 5
    processes: int = 16  # threads count, and the namespace's own first process
    memory_bytes: int = 256 << 20
    file_bytes: int = 4 << 20
    disk_bytes: int = 16 << 20  # in each of its two folders, /box and /tmp
    output_bytes: int = 32 << 10  # standard output and error together
    open_files: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Result of a command: ``Ran(code=0, ended="itself", output="2 passed\\n")``."""

    code: int  # exit status; 128 + the number of the signal that ended it
    ended: str  # "itself", or the limit that ended it: "time", "output"
    output: str  # standard output and error, in the order they were written; at most ``Limits.output_bytes``


class SandboxLost(Exception):
    """Raised if the sandbox could not be made, or did not answer; it is never the command's fault."""


class Sandbox:
    """Factory of sandboxes: each ``run`` makes one and takes it down. Thread-safe."""

    def __init__(self, limits: Limits, launcher: str = "") -> None:
        """Set up without a test: use ``make_sandbox``. ``launcher``: a program to use instead of ``sandbox_launch``."""
        self.limits = limits
        self.launcher = launcher or _source("sandbox_launch")
        self.shown, self.hidden, self.links = _visible()

    def limited(self, **limits: float) -> "Sandbox":
        """Return the same sandbox with other limits."""
        other = copy.copy(self)
        other.limits = replace(self.limits, **limits)  # type: ignore[arg-type]
        return other

    def run(self, command: Sequence[str], files: Mapping[str, str]) -> Ran:
        """Run ``command`` (its first word a path inside) in a folder with ``files``; raise ``SandboxLost``."""
        request = {
            **asdict(self.limits),
            "command": list(command),
            "files": dict(files),
            "environment": ENVIRONMENT,
            "shown": self.shown,
            "hidden": self.hidden,
            "links": self.links,
            "filter": filter_program(platform.machine()).hex(),
        }
        reply = _launch(self.launcher, request, self.limits.seconds + START_SECONDS)
        if reply["problem"]:
            raise SandboxLost(reply["problem"])
        code = reply["code"] if reply["code"] >= 0 else 128 - reply["code"]
        return Ran(code=code, ended=reply["ended"], output=reply["output"])


def _launch(launcher: str, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the reply of the launcher; raise ``SandboxLost`` if there is none."""
    mine, theirs = os.pipe()
    try:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", launcher, str(mine)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[mine],
            start_new_session=True,
            env={"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
        ) as process:
            try:
                output, errors = process.communicate(json.dumps(request).encode(), timeout=seconds)
            finally:
                process.kill()  # and with it the namespace, if it is still there
    except subprocess.TimeoutExpired:
        raise SandboxLost(f"no answer within {seconds:g} s") from None
    finally:
        os.close(mine)
        os.close(theirs)
    try:
        reply: dict[str, Any] = json.loads(output)
    except ValueError:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
        raise SandboxLost(f"the launcher ended with status {process.returncode}: {last}") from None
    return reply


def _source(name: str) -> str:
    """Return the text of a module beside this one, which runs in another process."""
    module = importlib.import_module(f"{__package__}.{name}")
    assert module.__spec__ is not None and module.__spec__.loader is not None, "imported from a file"
    text: str = module.__spec__.loader.get_source(module.__name__)  # type: ignore[attr-defined]
    return text


def _visible() -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Return what a command sees of the machine, by path inside: folders and files, hidden folders, and links."""
    prefix = Path(sys.base_prefix).resolve()
    shown = {f"/python/{name}": str(prefix / name) for name in ("bin", "lib", "lib64")}
    shown |= {f"/usr/{name}": f"/usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libexec")}
    shown |= {"/etc/alternatives": "/etc/alternatives"}
    links = {"/tools/python": PYTHON, "/tools/python3": PYTHON}
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        top = Path("/", name)
        if top.is_symlink():
            links[str(top)] = str(top.readlink())
        else:
            shown[str(top)] = str(top)
    shown = {target: source for target, source in shown.items() if Path(source).is_dir()}
    hidden = [
        f"{target}/{folder.relative_to(source)}"
        for target, source in shown.items()
        for folder in sorted(Path(source).glob("python3*/*-packages"))
        if folder.is_dir()
    ]
    return shown | {device: device for device in DEVICES}, hidden, links


@functools.cache
def make_sandbox(limits: Limits) -> Sandbox:
    """Return a sandbox that passed its own test; ``UserError`` names the limits that do not hold.

    Each process tests each set of limits once, in about half a second.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in MACHINES:
        raise UserError(f"the sandbox cannot be used on {sys.platform} {platform.machine()}: {NEEDED}")
    sandbox = Sandbox(limits)
    try:
        found = faults(sandbox)
    except SandboxLost as lost:
        why = " ".join(str(lost).split())
        raise UserError(f"the sandbox cannot be used on this machine ({why}): {NEEDED}") from None
    if found:
        raise UserError(f"the sandbox does not hold a command on this machine: {'; '.join(found)}")
    return sandbox


def faults(sandbox: Sandbox) -> list[str]:
    """Return forbidden things that a command in this sandbox can do, one line each; raise ``SandboxLost``."""
    return [*_inside(sandbox.limited(disk_bytes=2 << 20, file_bytes=1 << 20)), *_ended(sandbox)]


def _inside(sandbox: Sandbox) -> list[str]:
    """Return the faults that a command finds from inside."""
    project = Path(bebop.__file__).resolve().parent
    absent = ["/etc/passwd", "/proc/self", "/home", str(project)]
    absent += [f"{target}/{project.relative_to(source)}"
               for target, source in sandbox.shown.items() if project.is_relative_to(source)]  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        outside = {
            "absent": absent,
            "root": [*{Path(path).parts[1] for path in [*sandbox.shown, *sandbox.links]}, "box", "tmp"],
            "hidden": sandbox.hidden,
            "shown": [target for target, source in sandbox.shown.items() if source not in DEVICES],
            "port": server.getsockname()[1],
            "limits": asdict(sandbox.limits),
        }
        ran = sandbox.run([PYTHON, "-I", "-S", "-c", _source("sandbox_probe"), json.dumps(outside)], {})
    try:
        found: list[str] = json.loads(ran.output)
    except ValueError:
        raise SandboxLost(f"its test ended with status {ran.code}: {ran.output.strip()[-200:]}") from None
    return found


def _ended(sandbox: Sandbox) -> Iterator[str]:
    """Yield the limits that should end a command and do not."""
    slow = sandbox.limited(seconds=0.3).run(["/bin/sh", "-c", "sleep 3 & sleep 3"], {})
    if slow.ended != "time":
        yield "it runs for longer than it may"
    much = sandbox.limited(output_bytes=1000).run(["/bin/sh", "-c", "exec head -c 100000 /dev/zero"], {})
    if much.ended != "output" or len(much.output) != 1000:
        yield "it writes more than it may"


# ---- the filter of system calls: a program for the kernel (seccomp, classic BPF)

# Calls that a command does not need, or that reach beyond namespaces: x86_64's number, aarch64's.
DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
# (architecture as the kernel's audit has it, clone, clone3, socket)
MACHINES = {"x86_64": (0xC000003E, 56, 435, 41), "aarch64": (0xC00000B7, 220, 435, 198)}
OTHER_TABLE = 0x40000000  # numbers from here on are of another table of calls
NAMESPACES = 0x7E020000  # flags of clone: mount, cgroup, uts, ipc, user, pid, net
FAMILIES = (1, 2, 10)  # local and internet sockets: a machine's vsock, say, is shared by all network namespaces
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # where they are in what the filter reads


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Return an instruction; ``yes`` and ``no`` are the instructions to skip after a comparison."""
    return struct.pack("HBBI", code, yes, no, value)


def _refuse(error: int) -> bytes:
    """Return the instruction that makes a call fail with this error."""
    return _step(RETURN, 0x00050000 | error)


def filter_program(machine: str) -> bytes:
    """Return a filter that refuses ``DENIED``, new namespaces and sockets outside ``FAMILIES``, and allows the rest."""
    audit, clone, clone3, socket = MACHINES[machine]
    which = list(MACHINES).index(machine)
    allow = _step(RETURN, 0x7FFF0000)
    steps = [_step(LOAD, ARCHITECTURE), _step(EQUAL, audit, 1), _refuse(EPERM)]
    steps += [_step(LOAD, NUMBER), _step(AT_LEAST, OTHER_TABLE, 0, 1), _refuse(EPERM)]
    for numbers in DENIED.values():
        steps += [_step(EQUAL, numbers[which], 0, 1), _refuse(EPERM)]
    steps += [_step(EQUAL, clone3, 0, 1), _refuse(ENOSYS)]  # its flags cannot be read here: clone takes its place
    steps += [_step(EQUAL, clone, 0, 4), _step(LOAD, FIRST_ARGUMENT), _step(ANY_BIT, NAMESPACES, 0, 1),
              _refuse(EPERM), allow]  # fmt: skip
    steps += [_step(EQUAL, socket, 0, len(FAMILIES) + 3), _step(LOAD, FIRST_ARGUMENT)]
    steps += [_step(EQUAL, family, len(FAMILIES) - at) for at, family in enumerate(FAMILIES)]
    return b"".join([*steps, _refuse(EAFNOSUPPORT), allow, allow])
