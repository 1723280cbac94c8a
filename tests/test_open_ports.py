"""What a job listens on: loopback, or Ray's servers, which answer to nobody without Ray's key."""

import http.client
import ipaddress
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from bebop.runtime.processes import descendants, status
from tests.test_job import finish, rows, start, wait_for_step

pytestmark = pytest.mark.slow

# gRPC servers of Ray's by process: of the control store, of the raylet and its object manager, one of each other.
SERVERS = {"gcs_server": 1, "raylet": 2}
REFUSED = "InvalidAuthToken"  # what Ray's client says that it was told


class Listener(NamedTuple):
    """A TCP socket that waits for connections."""

    pid: int
    process: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Of these processes, as the kernel has them."""
    owners: dict[str, int] = {}
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        owners |= {link[8:-1]: pid for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, place, _, state, *rest = line.split()
            inode = rest[5]
            if state == "0A" and inode in owners:
                address, port = place.split(":")
                words = b"".join(struct.pack("<I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
                of = status(owners[inode])
                text = socket.inet_ntop(socket.AF_INET if table == "tcp" else socket.AF_INET6, words)
                found.append(Listener(owners[inode], of.name if of else "", text, int(port, 16)))
    return found


def answers(one: Listener) -> str:
    """What a web browser without a key gets: ``nothing``, ``refused``, ``numbers`` for Prometheus, or ``a page``."""
    host = "127.0.0.1" if ipaddress.ip_address(one.address).is_unspecified else one.address
    connection = http.client.HTTPConnection(host, one.port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        text = reply.read(200)
    except (OSError, http.client.HTTPException):
        return "nothing"
    finally:
        connection.close()
    if reply.status in (401, 403):
        return "refused"
    return "numbers" if text.startswith(b"# HELP") or not text.strip() else "a page"


def exposed(pids: Iterable[int]) -> list[str]:
    """Listeners that others can reach and that are none of Ray's servers: those ask for a key.

    Prometheus is given numbers without one (``docs/security.md``).
    """
    wrong, others = [], Counter[tuple[int, str]]()
    open_to_others = [one for one in listeners(pids) if not one.on_loopback]
    with ThreadPoolExecutor(len(open_to_others) or 1) as side_by_side:  # whoever is silent costs ten seconds
        for one, got in zip(open_to_others, side_by_side.map(answers, open_to_others), strict=True):
            if got == "a page":
                wrong.append(f"{one} shows a page")
            elif got == "nothing":
                others[one.pid, one.process] += 1
    return wrong + [
        f"{process} ({pid}) has {count} listeners" for (pid, process), count in others.items()
        if count > SERVERS.get(process, int(process.startswith(("ray::", "python", "pytest"))))
    ]  # fmt: skip


def let_in(port: int, environment: Mapping[str, str]) -> bool:
    """Whether Ray's control store lets a driver in.

    The first refusal decides: Ray's client tries 20 times, and once the job has ended, each try waits 40 seconds.
    """
    code = f"import ray; ray.init(address='127.0.0.1:{port}', log_to_driver=False); print('IN', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        assert driver.stdout is not None
        told = []
        for line in driver.stdout:
            told.append(line)
            if line == "IN\n" or REFUSED in line:
                break
        driver.kill()
    assert told and (told[-1] == "IN\n" or REFUSED in told[-1]), "".join(told)
    return told[-1] == "IN\n"


def test_a_job_listens_on_loopback_or_asks_for_a_key(tmp_path: Path) -> None:
    run = start(tmp_path, "trainer.steps=1000", "trainer.ranks=2", "rollout.workers=2", "monitor.ray_metrics=true")
    wait_for_step(tmp_path, 1, run)
    family = [run.pid, *descendants(run.pid)]
    found = listeners(family)
    assert {one.process for one in found} >= {"gcs_server", "raylet"}, "it is really looked at"
    assert exposed(family) == []
    (gcs,) = [one for one in found if one.process == "gcs_server" and not one.on_loopback]
    stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    assert let_in(gcs.port, stranger | {"RAY_AUTH_MODE": "token"}), "who has the key comes in"
    assert not let_in(gcs.port, stranger | {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"})
    key = Path.home() / ".ray" / "auth_token"
    assert not key.parent.stat().st_mode & 0o077, "the key is nobody else's"
    wait_for_step(tmp_path, len(rows(tmp_path)) + 1, run)  # the job minds none of it
    run.send_signal(signal.SIGINT)
    code, errors = finish(run)
    assert code == 130, errors


def test_an_open_door_is_seen() -> None:
    """A second port of a process, as a store of torch.distributed is one, and a page without a key."""
    serve = "import http.server as h; h.test(HandlerClass=h.SimpleHTTPRequestHandler, port=0, bind='{}')"
    store = "import socket; a = [socket.create_server(('0.0.0.0', 0)) for _ in range(2)]; print(flush=True); input()"
    for code, door in ((serve.format("0.0.0.0"), "shows a page"), (serve.format("127.0.0.1"), ""), (store, "has 2")):
        with subprocess.Popen(
            [sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            found = exposed([process.pid])
            process.kill()
        assert (door in found[0]) if door else found == []
