"""A job on a served engine whose process is killed while the engine holds answers, and what must be true afterwards."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.served_models import checkpoint, windows

STEPS, PROMPTS, GROUP = 4, 4, 4
# Of the third batch, which is not asked for before the first was trained on, no answer gets its reward until the engine
# was killed: its worker then holds answers for certain, however fast the rest of the job is.
REWARD = f"""
import pathlib, time
here, calls = pathlib.Path(__file__).parent, 0

def reward(text, item):
    global calls
    calls += 1
    if calls > {2 * PROMPTS * GROUP}:
        (here / "held").touch()
        while not (here / "killed").exists():
            time.sleep(0.02)
    return text.count("a") / max(1, len(text))
"""


def command(folder: Path, *overrides: str) -> list[str]:
    """``bebop.run`` on a task whose reward is the share of one letter; ``overrides`` name the engine."""
    (folder / "task.jsonl").write_text("".join(json.dumps({"question": q, "answer": "a"}) + "\n" for q in ("ab", "ba")))
    (folder / "reward.py").write_text(REWARD)
    return [
        sys.executable, "-m", "bebop.run", "model=folder", f"model.path={checkpoint(folder / 'model')}",
        "model.device=cpu", "model.dtype=float32", "task=file", f"task.path={folder}/task.jsonl",
        f"task.reward={folder}/reward.py:reward", "task.reward_timeout=300", "task.system=null", "cotrain=always",
        f"runtime.dir={folder}/run", "runtime.progress=false", f"trainer.steps={STEPS}",
        f"trainer.groups_per_step={PROMPTS}", f"trainer.group_size={GROUP}", "trainer.lr=5e-3",
        "trainer.lr_warmup_steps=0", "rollout.max_length=64", "rollout.sampling.max_new_tokens=8",
        "decoding.draft_tokens=2", "monitor.tensorboard=false", "monitor.plots=false", "monitor.ray_metrics=false",
        "monitor.probe_every=0", *overrides,
    ]  # fmt: skip


def rows(folder: Path) -> list[dict[str, Any]]:
    """What the job logged of its steps."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def worker(folder: Path) -> int:
    """The process id of the rollout worker."""
    lines = (folder / "run" / "pids.txt").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rollout"))


def below(process: int) -> dict[int, str]:
    """The names and command lines of the processes below one, by id: a process that sets both may lose one of them."""
    found = {}
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.pid] = " ".join([child.name(), *child.cmdline()[:3]])
    return found


def _found(victim: Callable[[int], int], folder: Path) -> int:
    """Return the victim's process id; on a busy machine it may have no name of its own for a moment."""
    until = time.monotonic() + 30
    while True:
        try:
            return victim(worker(folder))
        except (StopIteration, psutil.NoSuchProcess):
            assert time.monotonic() < until, f"no engine below the worker: {below(worker(folder))}"
            time.sleep(0.1)


def run(arguments: list[str], folder: Path, victim: Callable[[int], int]) -> str:
    """The stderr of a job that went well although ``victim(worker)``, a process id, was killed; none of it is left."""
    job = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not (folder / "held").exists():
            assert job.poll() is None, job.stderr and job.stderr.read()
            time.sleep(0.05)
        children = psutil.Process(job.pid).children(recursive=True)
        os.kill(_found(victim, folder), signal.SIGKILL)
        (folder / "killed").touch()
        _, errors = job.communicate(timeout=400)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, errors
    gone = psutil.wait_procs(children, timeout=20)[1]
    assert not [process for process in gone if process.status() != psutil.STATUS_ZOMBIE]
    return errors


def check(folder: Path) -> None:
    """Nothing is lost, the weights are those that they should be, and the job learns."""
    found = rows(folder)
    assert [row["step"] for row in found] == [row["version"] for row in found] == list(range(1, STEPS + 1))
    assert found[-1]["rollout/restarts"] == 1
    assert found[-1]["samples/prompts"] == STEPS * PROMPTS and found[-1]["samples/trained"] == STEPS * PROMPTS * GROUP
    assert max(row["staleness/max"] for row in found) <= 1
    # The trainer computes the same distribution, and corrects for what it does not.
    assert all(row["rollout/logprob_diff"] >= 0 and row["train/tis_mean"] > 0 for row in found)
    assert found[0]["rollout/logprob_diff_current"] < 1e-4 and found[0]["train/ratio_error_max"] < 1e-3
    assert found[-1]["reward/mean"] > found[0]["reward/mean"] + 0.2
    assert all(1 < row["rollout/accept_length"] <= 3 for row in found)
    # The head was trained and sent; no fingerprint or version was another than it should be, whatever else was noticed.
    seen: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "run" / "drift.jsonl").read_text().splitlines()
    ]
    assert not [line for line in seen if line.get("health")], seen
    told = (folder / "run" / "controller.jsonl").read_text()
    assert "checksum of the head" not in told and "weight version" not in told


def adapter_test(folder: Path, *overrides: str) -> None:
    """A LoRA job on a served engine: the engine gets merged weights of every version, and decodes with them."""
    (folder / "killed").touch()  # no reward waits
    extra = ("trainer.lora.rank=4", "trainer.steps=3", "rollout.staleness=0", "trainer.lr=5e-2")
    done = subprocess.run(command(folder, *overrides, *extra), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = rows(folder)
    assert [row["version"] for row in found] == [1, 2, 3]
    # Without staleness each batch has the newest weights: were they not merged, or not sent, log-probs would differ.
    assert all(row["rollout/logprob_diff"] < 1e-4 and row["train/ratio_error_max"] < 1e-3 for row in found)
    assert all(1 < row["rollout/accept_length"] <= 3 for row in found)
    assert (folder / "run" / "model" / "adapter_model.safetensors").is_file()


def windows_test(folder: Path, *overrides: str) -> None:
    """A job on a model with sliding windows, which transformers' own forward trains: log-probs agree."""
    (folder / "killed").touch()  # no reward waits
    extra = (
        f"model.path={windows(folder / 'windows')}", "cotrain=off", "decoding=autoregressive",
        "decoding.draft_tokens=0", "rollout.staleness=0", "rollout.sampling.max_new_tokens=24", "trainer.lr=2e-2",
    )  # fmt: skip
    done = subprocess.run(command(folder, *overrides, *extra), capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = rows(folder)
    assert [row["version"] for row in found] == list(range(1, STEPS + 1))
    # Completions are three times as long as the window: a trainer or an engine without it would differ.
    assert all(row["rollout/logprob_diff"] < 1e-4 and row["train/ratio_error_max"] < 1e-3 for row in found)
