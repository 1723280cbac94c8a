"""A real SGLang server in a process of its own, for tests that meet it over HTTP."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bebop.config import JobConfig
from bebop.config_engines import SglangConfig
from bebop.rollout.sglang.arguments import server_arguments
from bebop.rollout.sglang.backend import INTERPRETER, WHOLE_ANSWERS


@contextmanager
def serving(
    config: JobConfig, folder: Path, place: Path, environment: Mapping[str, str] | None = None, **extra: Any
) -> Iterator[str]:
    """Its address, once it is healthy; ``place`` gets its log, ``extra`` are arguments of ``sglang.ServerArgs``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = SglangConfig(cache_tokens=8192, extra={"port": port, **extra})
    command = [sys.executable, "-m", "sglang.launch_server", *flags(server_arguments(config, own, folder, "cpu"))]
    log = place / "server.txt"
    with log.open("w") as output:
        whole = {**os.environ, **INTERPRETER, **WHOLE_ANSWERS, **(environment or {})}
        server = subprocess.Popen(command, env=whole, stdout=output, stderr=output, start_new_session=True)
    try:
        for _ in range(1200):
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


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of ``sglang.Engine`` as the command line has them."""
    found = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        found += [flag] if value is True else [] if value in (False, None) else [flag, str(value)]
    return found
