"""A real server of another program in a process of its own, for tests that meet it over HTTP."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def healthy(
    command: Callable[[int], Sequence[str]], environment: Mapping[str, str], place: Path, seconds: int
) -> Iterator[str]:
    """Start what ``command`` returns for a free port, yield its address once it is healthy, and end it.

    ``place`` gets its log; it has ``seconds`` to become healthy.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = place / "server.txt"
    with log.open("w") as output:
        whole = {**os.environ, **environment}
        server = subprocess.Popen(command(port), env=whole, stdout=output, stderr=output, start_new_session=True)
    try:
        for _ in range(2 * seconds):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
