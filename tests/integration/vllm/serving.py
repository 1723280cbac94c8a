"""A real vLLM server in a process of its own, for tests that meet it over HTTP."""

import json
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
from bebop.rollout.vllm.arguments import ENVIRONMENT, engine_arguments
from bebop.rollout.vllm.plugin import CPU
from tests.integration.vllm.builders import with_vllm

OURS = ("weight_transfer_config", "use_tqdm_on_load", "disable_log_stats")  # not for a server that others start


@contextmanager
def serving(
    config: JobConfig, folder: Path, place: Path, environment: Mapping[str, str] | None = None, *, mended: bool = True
) -> Iterator[str]:
    """Its address, once it is healthy; ``place`` gets its log. ``mended``: the plugin acts on what a CPU lacks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = engine_arguments(with_vllm(config), folder, "cpu") | {"skip_tokenizer_init": False}
    given = flags({name: value for name, value in arguments.items() if name not in OURS})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    log = place / "server.txt"
    with log.open("w") as output:
        whole = {**os.environ, **ENVIRONMENT, CPU: str(int(mended)), **(environment or {})}
        server = subprocess.Popen([*command, *given], env=whole, stdout=output, stderr=output, start_new_session=True)
    try:
        for _ in range(600):
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
    """Arguments of ``vllm.EngineArgs`` as the command line has them."""
    found = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found
