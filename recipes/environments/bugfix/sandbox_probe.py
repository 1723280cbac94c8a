"""Tests what a command can do inside the sandbox; a program for ``python -I -S -c`` that imports nothing of ours.

Its argument is JSON with facts of the machine outside (files, an open port) and the limits. It prints, as JSON, a line
for everything that it could do although it must not.
"""

import ctypes
import errno
import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

NEW_USER, VSOCK = 0x10000000, 40
PR_GET_SECCOMP, PR_GET_NO_NEW_PRIVS = 21, 39


def files(outside: dict[str, Any]) -> Iterator[str]:
    """Yield paths that are visible but should not be, or that are writable."""
    for path in outside["absent"]:
        if os.path.exists(path):
            yield f"it sees {path}"
    if extra := sorted(set(os.listdir("/")) - set(outside["root"])):
        yield f"it sees {extra} in /"
    for folder in [*outside["hidden"], "/tmp"]:
        if os.listdir(folder):
            yield f"it sees what is in {folder}"
    for folder in outside["shown"]:
        if not os.statvfs(folder).f_flag & os.ST_RDONLY:
            yield f"it may write to {folder}"


def descriptors(outside: dict[str, Any]) -> Iterator[str]:
    """Yield open files that it did not open itself."""
    for number in range(3, 1024):
        try:
            os.fstat(number)
        except OSError:
            continue
        yield f"it holds the open file {number} of whoever started it"


def network(outside: dict[str, Any]) -> Iterator[str]:
    """Yield the ways in which it reaches a network."""
    for address in (("127.0.0.1", outside["port"]), ("192.0.2.1", 80)):
        with socket.socket() as one:
            one.settimeout(1.0)
            if one.connect_ex(address) not in (errno.ENETUNREACH, errno.ECONNREFUSED):
                yield f"it reaches the network at {address[0]}"
    try:
        socket.socket(VSOCK).close()
        yield "it opens sockets that reach the machine's host"
    except OSError:
        pass


def privileges(outside: dict[str, Any]) -> Iterator[str]:
    """Yield the privileges that it has or may gain."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = ctypes.create_string_buffer(24)
    libc.capget(ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0)), held)
    if any(held.raw):
        yield "it has capabilities"
    if os.getuid() == 0 or libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        yield "it may gain privileges"
    if libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) != 2 or libc.unshare(NEW_USER) == 0:
        yield "it may call what reaches beyond namespaces"
    if os.getppid() != 1:
        yield "it sees processes of others"


def bounds(outside: dict[str, Any]) -> Iterator[str]:
    """Yield the limits that do not hold."""
    limits = outside["limits"]
    if resource.getrlimit(resource.RLIMIT_CPU)[0] != limits["cpu_seconds"]:
        yield "it has another limit on processor time"
    try:
        bytearray(limits["memory_bytes"])
        yield f"it has more than {limits['memory_bytes']} bytes of memory"
    except MemoryError:
        pass
    try:
        with open("/box/large", "wb", buffering=0) as file:
            while file.tell() <= limits["file_bytes"]:
                file.write(bytes(limits["file_bytes"] // 4 + 1))
        yield f"it writes files of more than {limits['file_bytes']} bytes"
    except OSError:
        pass
    try:
        for number in range(limits["disk_bytes"] // limits["file_bytes"] + 2):
            with open(f"/box/{number}", "wb", buffering=0) as file:
                file.write(bytes(limits["file_bytes"] - 1))
        yield f"it writes more than {limits['disk_bytes']} bytes"
    except OSError:
        pass
    kept: list[int] = []
    try:
        while len(kept) <= limits["open_files"]:
            kept.append(os.dup(0))
        yield f"it opens more than {limits['open_files']} files"
    except OSError:
        pass
    for one in kept:
        os.close(one)


def processes(outside: dict[str, Any]) -> Iterator[str]:
    """Yield a line if the number of processes is not limited: start processes that wait until all are counted."""
    most = outside["limits"]["processes"]
    reading, writing = os.pipe()
    children: list[int] = []
    try:
        while len(children) <= most:
            if (pid := os.fork()) == 0:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
            children.append(pid)
        yield f"it starts more than {most} processes"
    except BlockingIOError:
        pass
    os.close(writing)
    for pid in children:
        os.waitpid(pid, 0)


def main() -> None:
    """Make all attempts and print the findings."""
    outside = json.loads(sys.argv[1])
    tried = (files, descriptors, network, privileges, bounds, processes)
    print(json.dumps([line for attempt in tried for line in attempt(outside)]))


if __name__ == "__main__":
    main()
