"""Starts one command in its own namespaces; a program for ``python -I -S -c`` that imports nothing of ours.

It reads a request as JSON from its standard input and writes the result as JSON. Its argument is a pipe's end that
hangs up when the caller is gone. There are three processes: the launcher, outside; the init of the namespace, which
builds the file system and ends with the command; and the command. A namespace ends with its init, mounts included, and
the init with the launcher: nothing is left, whatever ends any of them.
"""

import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

NEW_NAMESPACES = {"mount": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000, "pid": 0x20000000,
                  "net": 0x40000000}  # fmt: skip
BOX = 1000  # the command's uid and gid, as it sees them
# As the machine sees them, where root starts it: above what systemd gives to containers, so nobody else's. The limit
# on processes holds for no process of uid 0.
OUTSIDE = 0x70000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 0x40000, 2
MOUNT_FLAGS = 0x2 | 0x4  # nosuid, nodev
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442  # the same on every machine
OPEN_TREE_FLAGS = 0x1 | 0x8000 | 0x80000  # a clone, with what is mounted below, closed on exec
EMPTY_PATH, RECURSIVE, READ_ONLY, NO_SUID, NO_DEVICES = 0x1000, 0x8000, 0x1, 0x2, 0x4
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NO_RANDOM_ADDRESSES = 0x0040000
WRITTEN = 1_000_000_000  # time stamp of the files, in seconds since 1970, as listings show it

libc = ctypes.CDLL(None, use_errno=True)


def call(what: str, function: Any, *arguments: Any) -> int:
    """Call a function of the C library; raise ``OSError`` that names the attempt."""
    result: int = function(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def set_attributes(folder: int, path: bytes, attributes: int, flags: int) -> None:
    """Add attributes to a mount."""
    wanted = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0))
    call("mount_setattr", libc.syscall, MOUNT_SETATTR, folder, path, flags, wanted, 32)


def enter() -> None:
    """Put this process and its children into new namespaces; root lends it an unused id."""
    root = os.geteuid() == 0
    ids = {"gid": os.getegid(), "uid": os.geteuid()}
    if root:
        ids = {name: outside(f"/proc/self/{name}_map") for name in ids}
    own, (go, gone), (done, finish) = os.getpid(), os.pipe(), os.pipe()
    writer = os.fork() if root else -1
    if writer == 0:  # only a process of the old namespace may map an id that is not one's own
        os.close(gone)
        os.close(done)
        if os.read(go, 1):
            write_maps(own, ids)
            os.write(finish, b"+")
        os._exit(0)
    call("user namespace", libc.unshare, NEW_NAMESPACES["user"])
    if root:
        os.close(finish)
        os.write(gone, b"+")
        if not os.read(done, 1):
            raise OSError(0, "uid_map: not written")
        os.waitpid(writer, 0)
        os.setgroups([])
    else:
        with open(f"/proc/{own}/setgroups", "w") as file:
            file.write("deny")
        write_maps(own, ids)
    rest = sum(flag for name, flag in NEW_NAMESPACES.items() if name != "user")
    call("namespaces", libc.unshare, rest)


def outside(table: str) -> int:
    """Return an outside id for the command: ``OUTSIDE`` or, in a container with fewer ids, the last one."""
    with open(table) as file:
        rows = [tuple(map(int, line.split())) for line in file]
    last = max(start + count - 1 for start, _, count in rows)
    return min(OUTSIDE, last)


def write_maps(pid: int, ids: dict[str, int]) -> None:
    """Map the command's ids to ids outside."""
    for name, own in ids.items():
        with open(f"/proc/{pid}/{name}_map", "w") as file:
            file.write(f"{BOX} {own} 1")


def build(request: dict[str, Any]) -> None:
    """Build the command's file system: the visible parts of the machine, read-only, and two folders of its own."""
    trees = []
    for target, source in request["shown"].items():
        tree = call(f"open_tree {source}", libc.syscall, OPEN_TREE, -100, source.encode(), OPEN_TREE_FLAGS)
        device = source.startswith("/dev/")
        set_attributes(tree, b"", READ_ONLY | NO_SUID | (0 if device else NO_DEVICES), EMPTY_PATH | RECURSIVE)
        trees.append((target, tree, os.path.isdir(source)))
    os.setresgid(BOX, BOX, BOX)
    os.setresuid(BOX, BOX, BOX)  # capabilities of the namespace stay: no root is mapped into it
    call("private mounts", libc.mount, b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    room = f"mode=755,size={request['disk_bytes']},nr_inodes=4096".encode()
    base = "/tmp"  # hidden below a mount that nobody else sees
    call("tmpfs", libc.mount, b"none", base.encode(), b"tmpfs", MOUNT_FLAGS, room)
    for target, tree, folder in trees:
        place(base + target, folder)
        call(f"move_mount {target}", libc.syscall, MOVE_MOUNT, tree, b"", -100, (base + target).encode(), 4)
        os.close(tree)
    for target in request["hidden"]:
        call(f"hide {target}", libc.mount, b"none", (base + target).encode(), b"tmpfs", MOUNT_FLAGS | 1, b"size=4k")
    for link, target in request["links"].items():
        place(os.path.dirname(base + link), True)
        os.symlink(target, base + link)
    for target in ("/box", "/tmp"):
        place(base + target, True)
        call(f"tmpfs {target}", libc.mount, b"none", (base + target).encode(), b"tmpfs", MOUNT_FLAGS, room)
    os.chdir(base)
    call("pivot_root", libc.syscall, PIVOT_ROOT[platform.machine()], b".", b".")
    call("detach", libc.umount2, b".", MNT_DETACH)
    os.chdir("/box")
    for name, text in request["files"].items():
        place(os.path.dirname(f"/box/{name}"), True)
        with open(f"/box/{name}", "w", encoding="utf-8", newline="") as file:
            file.write(text)
    for inner, _, names in os.walk("/box"):
        for path in (inner, *(f"{inner}/{name}" for name in names)):
            os.utime(path, (WRITTEN, WRITTEN))
    set_attributes(-100, b"/", READ_ONLY, 0)


def place(path: str, folder: bool) -> None:
    """Create a folder or a file to mount upon."""
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def drop() -> None:
    """Give up every capability permanently."""
    call("no new privileges", libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # above the last one that this kernel knows
    header = ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0))
    call("capset", libc.capset, header, ctypes.create_string_buffer(24))


def limit(request: dict[str, Any]) -> None:
    """Set the limits of one process; its children inherit them."""
    bounds = {
        resource.RLIMIT_CPU: request["cpu_seconds"] + 1,
        resource.RLIMIT_AS: request["memory_bytes"],
        resource.RLIMIT_FSIZE: request["file_bytes"],
        resource.RLIMIT_NPROC: request["processes"],
        resource.RLIMIT_NOFILE: request["open_files"],
        resource.RLIMIT_CORE: 1,  # of 0, a program that the machine has for dumps would take no notice
        resource.RLIMIT_MEMLOCK: 0,
    }
    for which, bound in bounds.items():
        resource.setrlimit(which, (bound, bound))
    # SIGXCPU first, which says why; what ignores it is killed a second later
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"], request["cpu_seconds"] + 1))


def restrict(filter_text: str) -> None:
    """Install the filter of system calls, given as 8 bytes per instruction in hexadecimal."""
    program = bytes.fromhex(filter_text)
    code = ctypes.create_string_buffer(program)
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    call("seccomp", libc.prctl, PR_SET_SECCOMP, 2, head, 0, 0)


def command(request: dict[str, Any], output: int) -> NoReturn:
    """Turn this process into the command."""
    os.setsid()
    libc.personality(NO_RANDOM_ADDRESSES)  # the same output each time, "<object at 0x...>" included
    reading, writing = os.pipe()
    os.close(writing)
    os.dup2(reading, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    limit(request)
    restrict(request["filter"])
    os.execve(request["command"][0], request["command"], request["environment"])


def init(request: dict[str, Any], output: int, trouble: int, life: int) -> NoReturn:
    """Run the first process of the namespace: build it, start the command, end with it."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the kernel keeps from an init
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs short, the command is killed first
        build(request)
        drop()
        call("dumpable", libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)
        call("death signal", libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if select.select([life], [], [], 0)[0]:
            os._exit(1)  # the launcher was gone already
        pid = os.fork()
        if pid == 0:
            command(request, output)
    except BaseException as error:
        os.write(trouble, (getattr(error, "strerror", "") or repr(error)).encode()[:1000])
        os._exit(1)
    for number in (output, trouble):
        os.close(number)
    while (ended := os.wait())[0] != pid:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


def watch(request: dict[str, Any], pid: int, output: int, trouble: int, owner: int) -> dict[str, Any]:
    """Wait for the end of the command, or end it at a limit; return its result with the output."""
    held, ended, problem = bytearray(), "", b""
    deadline = time.monotonic() + request["seconds"]
    handle = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (handle, output, trouble, owner):
        poll.register(descriptor, select.POLLIN)
    while not ended:
        events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if owner in events:
            os._exit(1)  # nobody is left to read the reply; the init ends with this process
        if trouble in events:
            if not (part := os.read(trouble, 4096)):
                poll.unregister(trouble)
            problem += part
        if output in events:
            if not (part := os.read(output, 1 << 16)):
                poll.unregister(output)
            held += part
        if len(held) > request["output_bytes"]:
            ended = "output"
        elif handle in events and output not in events:
            ended = "itself"
        elif time.monotonic() >= deadline:
            ended = "time"
    os.kill(pid, signal.SIGKILL) if ended != "itself" else None
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = bytes(held[: request["output_bytes"]])
    return {"problem": problem.decode(), "ended": ended, "code": code, "output": text.decode("utf-8", "replace")}


def main() -> None:
    """Read a request, carry it out, write the reply."""
    request = json.load(sys.stdin)
    os.set_inheritable(int(sys.argv[1]), False)
    (output, theirs), (trouble, told), (alive, ours) = os.pipe(), os.pipe(), os.pipe()
    try:
        enter()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            init(request, theirs, told, alive)
        os.close(theirs)
        os.close(told)
        result = watch(request, pid, output, trouble, int(sys.argv[1]))
    except OSError as error:
        result = {"problem": error.strerror or str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
