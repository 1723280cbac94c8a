"""The real job on Ray: resume, deaths, interruption. Each run is a process of its own, as a user starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bebop.driver.evaluation import EVALUATIONS
from bebop.run_dir.checkpoints import verify
from bebop.runtime.processes import lives
from bebop.trainer import checkpoint
from bebop.trajectory_db.reader import NAME, Trajectories
from tests.commands import HANGING

pytestmark = pytest.mark.slow

SMALL = [
    "trainer.groups_per_step=4", "trainer.group_size=4", "rollout.slots=16", "rollout.sampling.max_new_tokens=96",
    "monitor.tensorboard=false", "monitor.plots=false", "monitor.ray_metrics=false",
]  # fmt: skip


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bebop.run", f"runtime.dir={folder}", *SMALL, *overrides]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str], timeout: float = HANGING) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        raise
    return process.returncode, errors


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.time() + HANGING
    while len(rows(folder)) < step:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.time() < deadline, "no progress"
        time.sleep(0.1)


def pids(folder: Path, kind: str) -> list[int]:
    lines = (line.split() for line in (folder / "pids.txt").read_text().splitlines())
    return [int(pid) for name, pid in lines if name == kind]


def learned(folder: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.store(folder).newest_sound()
    assert newest is not None
    state = checkpoint.load(newest).trainer
    return {**state["weights"], **state["optimizer"]}


def same(a: Path, b: Path) -> bool:
    """Whether weights, optimizer and every metric but the times are equal bit for bit."""
    left, right = learned(a), learned(b)
    timed = ("time/", "rollout/tokens_per_s", "rollout/restarts")
    measured = [
        [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows(folder)] for folder in (a, b)
    ]
    equal = left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    return equal and measured[0] == measured[1]


def answers(folder: Path) -> list[tuple[Any, ...]]:
    """All that is kept of each answer, in the order in which they were trained on."""
    with Trajectories(folder / NAME) as stored:
        return [tuple(row) for row in stored.query("SELECT * FROM answers JOIN tokens ON answer = id ORDER BY id")]


def counted(folder: Path) -> dict[int, tuple[int, int]]:
    """Answers of each step, and how many of them the trainer gave its log-probs of."""
    with Trajectories(folder / NAME) as stored:
        sql = "SELECT step, count(*), count(trainer_logprobs) FROM answers JOIN tokens ON answer = id GROUP BY step"
        return {step: (every, scored) for step, every, scored in stored.query(sql)}


@pytest.mark.exhaustive("chaos/test_short.py compares a synchronous job with deaths and resumes to the bit")
@pytest.mark.parametrize("adapted", [(), ("trainer.lora.rank=8", "trainer.lr=2e-3")], ids=["all", "lora"])
def test_synchronous_run_equals_half_and_resume_bit_for_bit(adapted: tuple[str, ...], tmp_path: Path) -> None:
    sync = ("rollout.staleness=0", "trainer.save_every=5", *adapted)
    assert finish(start(tmp_path / "whole", *sync, "trainer.steps=10"))[0] == 0
    assert finish(start(tmp_path / "halves", *sync, "trainer.steps=5"))[0] == 0
    code, errors = finish(start(tmp_path / "halves", *sync, "trainer.steps=10", "runtime.resume=true"))
    assert code == 0, errors
    assert [row["step"] for row in rows(tmp_path / "halves")] == list(range(1, 11))
    assert same(tmp_path / "whole", tmp_path / "halves")
    assert answers(tmp_path / "whole") == answers(tmp_path / "halves")
    assert counted(tmp_path / "halves") == dict.fromkeys(range(1, 11), (16, 4)), "of four prompts one is traced"
    with Trajectories(tmp_path / "whole" / NAME) as stored:
        for one in stored.traced_tokens(range(1, 11)):  # engine and trainer had the same weights
            assert one.trainer_logprobs is not None and abs(one.logprobs - one.trainer_logprobs).max() < 1e-3
    # The comparison can fail: another seed gives other weights.
    assert finish(start(tmp_path / "other", *sync, "trainer.steps=5", "runtime.seed=1"))[0] == 0
    assert not same(tmp_path / "whole", tmp_path / "other")
    assert answers(tmp_path / "whole")[:80] != answers(tmp_path / "other")


def test_a_job_that_trains_an_adapter_ends_with_a_model_to_export(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "model"
    code, errors = finish(start(run, "trainer.lora.rank=8", "trainer.lr=2e-3", "trainer.steps=3", "cotrain=always"))
    assert code == 0 and f"the model with its adapter: python -m bebop.export --run {run} --out DIR" in errors, errors
    assert all(row["train/ratio_error_max"] < 1e-3 for row in rows(run) if row["train/ratio_tokens"])
    assert (run / "model/adapter_model.safetensors").is_file()
    code, errors = finish(start(run, "trainer.lora.rank=4", "trainer.steps=4", "runtime.resume=true"))
    assert code == 2 and "trainer.lora.rank cannot change from 8 to 4 in a run" in errors, errors
    export = [sys.executable, "-m", "bebop.export", "--run", str(run), "--out", str(out)]
    done = subprocess.run(export, capture_output=True, text=True, timeout=HANGING)
    assert done.returncode == 0 and "with its adapter of rank 8 merged" in done.stdout, done.stderr
    code, errors = finish(
        start(tmp_path / "next", f"model.path={out}", "trainer.steps=1", "algorithm.kl_coefficient=0")
    )
    assert code == 0 and rows(tmp_path / "next")[0]["train/ratio_error_max"] < 1e-3, errors


def test_the_best_evaluated_checkpoint_outlives_the_newer_ones_a_death_and_a_resume(tmp_path: Path) -> None:
    held_out = (
        "evaluation.every=2", "evaluation.size=6", "evaluation.samples=2", "evaluation.best_by=reward",
        "trainer.save_every=1", "trainer.keep=1", "rollout.workers=2",
    )  # fmt: skip
    run = start(tmp_path, *held_out, "trainer.steps=4")
    wait_for_step(tmp_path, 2, run)
    os.kill(pids(tmp_path, "rollout")[0], signal.SIGKILL)
    code, errors = finish(run)
    assert code == 0 and "prompts start again" in errors, errors
    code, errors = finish(start(tmp_path, "trainer.steps=6", "runtime.resume=true"))
    assert code == 0, errors
    assert [row["step"] for row in rows(tmp_path)] == [*range(7)]
    lines = [json.loads(line) for line in (tmp_path / EVALUATIONS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    scores = {line["step"]: line["eval/reward"] for line in lines}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert lines[-1]["best"]["step"] == best and f"best evaluation: step {best}, eval/reward" in errors
    kept = {checkpoint.store(tmp_path).step(path) for path in checkpoint.store(tmp_path).all()}
    assert kept == {6, best} - {0}
    assert all(len(line["questions"]) == 6 and line["eval/seen"] == 0 for line in lines)
    for row in rows(tmp_path):
        assert ("eval/reward" in row) == (row["step"] % 2 == 0)


@dataclass(frozen=True, slots=True)
class Disturbed:
    """What a job left that lost a rollout worker, then its trainer, and was interrupted."""

    folder: Path
    code: int
    errors: str
    scraped: str  # by Prometheus's way, while it ran
    parts: set[int]  # processes that its trainer and its workers ever were
    steps: int


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """One job for several tests: starting one takes longer than what is done to it."""
    folder = tmp_path_factory.mktemp("disturbed")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    run = start(
        folder, "trainer.steps=1000", "trainer.save_every=2", "rollout.workers=2", "monitor.ray_metrics=true",
        f"runtime.metrics_port={port}",
    )  # fmt: skip
    wait_for_step(folder, 2, run)
    scraped, parts = scrape(port), set[int]()
    for killed in ("rollout", "trainer"):
        parts.update(pids(folder, "trainer") + pids(folder, "rollout"))
        os.kill(pids(folder, killed)[0], signal.SIGKILL)
        wait_for_step(folder, len(rows(folder)) + 3, run)
    last = pids(folder, "trainer") + pids(folder, "rollout")
    assert len(last) == 3 and all(map(lives, last))
    os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C does: the whole foreground group gets it
    code, errors = finish(run)
    return Disturbed(folder, code, errors, scraped, parts.union(last), len(rows(folder)))


def scrape(port: int) -> str:
    found, deadline = "", time.time() + 60
    while "ray_bebop_reward_mean" not in found and time.time() < deadline:
        for host in ("127.0.0.1", socket.gethostbyname(socket.gethostname())):
            try:
                found += urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=2).read().decode()
            except OSError:
                time.sleep(0.5)
    return found


def test_a_killed_rollout_worker_is_replaced(disturbed: Disturbed) -> None:
    assert "prompts start again" in disturbed.errors
    found = rows(disturbed.folder)
    assert [row["step"] for row in found] == list(range(1, disturbed.steps + 1))
    assert found[-1]["rollout/restarts"] == 1
    assert found[-1]["samples/prompts"] == disturbed.steps * 4
    assert max(row["staleness/max"] for row in found) <= 1


def test_a_killed_trainer_goes_back_to_the_last_checkpoint(disturbed: Disturbed) -> None:
    assert "going back to step_00000" in disturbed.errors
    assert counted(disturbed.folder) == dict.fromkeys(range(1, disturbed.steps + 1), (16, 4))


def test_an_interrupt_leaves_a_checkpoint_and_no_process(disturbed: Disturbed) -> None:
    assert disturbed.code == 130 and "go on with" in disturbed.errors
    newest = checkpoint.store(disturbed.folder).newest_sound()
    assert newest is not None and newest.name == f"step_{disturbed.steps:06d}"
    verify(newest)
    assert (disturbed.folder / "model").resolve() == newest / "policy", "also after a step back"
    said = [line.partition(": ")[0] for line in disturbed.errors.splitlines()[-4:]]
    assert said == ["verdict", "model", "viewer", "interrupted; go on with"]
    deadline = time.time() + 10
    while any(map(lives, disturbed.parts)) and time.time() < deadline:
        time.sleep(0.1)
    assert len(disturbed.parts) >= 5 and not any(map(lives, disturbed.parts))


def test_prometheus_can_scrape_the_metrics_of_a_run(disturbed: Disturbed) -> None:
    assert "ray_bebop_reward_mean" in disturbed.scraped and "ray_bebop_rollout_accept_length" in disturbed.scraped


def test_checkpoints_that_are_all_corrupt_are_named_and_kept(disturbed: Disturbed) -> None:
    """The last of them: it spoils what the others read."""
    files = sorted(disturbed.folder.glob("checkpoints/step_*/trainer.safetensors"))
    for file in files:
        file.write_bytes(file.read_bytes()[:-7])
    code, errors = finish(start(disturbed.folder, "runtime.resume=true"))
    assert code == 2 and "trainer.safetensors" in errors and files == [file for file in files if file.exists()] != []
    assert len(rows(disturbed.folder)) == disturbed.steps


def test_a_reward_that_raises_ends_the_run_in_one_line_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "calls = 0\n"
        "def reward(text, item):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls > 40:\n"
        "        raise KeyError('gold')\n"
        "    return float(len(text) % 2)\n"
    )
    run = start(tmp_path / "run", "trainer.steps=20", f"task.reward={tmp_path}/reward.py:reward")
    code, errors = finish(run)
    assert code == 2
    told = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and "KeyError" in told[0] and "Traceback" not in errors
    newest = checkpoint.store(tmp_path / "run").newest_sound()
    assert newest is not None and len(rows(tmp_path / "run")) >= 1
