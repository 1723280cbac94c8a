"""Runs a job of verl as a user does, from the command line, and reads what it logged."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONF = HERE.parents[2] / "recipes" / "verl" / "conf"
# Ray kills a job's process group itself; what is inherited from the caller must not reach it.
DROPPED = ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "VERL_USE_EXTERNAL_MODULES", "BEBOP_VERL")
QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HYDRA_FULL_ERROR": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "VERL_PLATFORM": "cpu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How a job ended."""

    code: int
    output: str
    rows: list[dict[str, Any]]  # what verl's logger was given, step after step

    def column(self, name: str) -> list[float]:
        """One metric over the steps."""
        return [float(row[name]) for row in self.rows]


def run_job(
    folder: Path,
    example: Path,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None = None,
    conf: Path = CONF,
    seconds: int = 300,
    main: str = "verl.trainer.main_ppo",
    watch: Callable[["subprocess.Popen[str]"], None] | None = None,
) -> Job:
    """One of verl's entry points with the example's files; its log goes to ``folder``.

    ``watch`` is called with the process while it runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, output = folder / "metrics.jsonl", folder / "output.txt"
    log.unlink(missing_ok=True)
    own = {name: value for name, value in os.environ.items() if name not in DROPPED}
    own |= QUIET | {"VERL_FILE_LOGGER_PATH": str(log)} | dict(environment or {})
    command = [sys.executable, "-W", "ignore", "-m", main, "--config-dir", str(conf)]
    sockets = tempfile.mkdtemp(prefix="ray-")  # their paths must be short, and pytest's folders are deep
    command += [f"hydra.run.dir={folder / 'hydra'}", f"++example={example}", "trainer.logger=[console,file]"]
    command += [f"+ray_kwargs.ray_init._temp_dir={sockets}", *overrides]
    with output.open("w") as told:
        job = subprocess.Popen(command, cwd=folder, env=own, stdout=told, stderr=subprocess.STDOUT, text=True)
    try:
        if watch is not None:
            watch(job)
        job.wait(seconds)
    finally:
        if job.poll() is None:
            job.kill()
        shutil.rmtree(sockets, ignore_errors=True)
    rows = [json.loads(line)["data"] for line in log.read_text().splitlines()] if log.exists() else []
    return Job(code=job.returncode, output=output.read_text(), rows=rows)


def free_port() -> int:
    """A TCP port that is free on the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def scraped(port: int) -> Iterator[set[str]]:
    """The names of the gauges that Ray exports for Prometheus at ``port`` while the block runs."""
    found: set[str] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(2):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    lines = answer.read().decode().splitlines()
            except OSError:  # not there yet, or not any more
                continue
            found.update(line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(timeout=30)
