"""A rank that is killed ends the whole command, and what was saved before is where another split goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.commands import HANGING
from tests.tree import ROOT


def text(path: Path) -> Path:
    lines = [{"prompt_ids": [5, 9, 30 + i], "answer_ids": [10 + i, 40, 41, 42, 43, 44, 1]} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(folder: Path, ranks: int, *settings: str) -> list[str]:
    """The command line of README.md, on text of its own."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*start, "-m", "bebop.megatron_job.adapt", f"dir={folder / 'run'}", "progress=false", *settings]


def started(arguments: Sequence[str], errors: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    with errors.open("wb") as output:
        return subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("head_*"))


def kill_a_rank(children: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The last of the processes that train, of those that torchrun started itself; all of them.

    A rank forks a writer while it saves, with the command line of the rank: it is no child of torchrun.
    """
    ranks = [child for child in children if "bebop.megatron_job.adapt" in " ".join(child.cmdline())]
    os.kill(ranks[-1].pid, signal.SIGKILL)
    return ranks


@pytest.mark.smoke("engine", "drafts", "update", "killed")
def test_a_killed_rank_ends_the_job_and_a_resume_goes_on(tmp_path: Path) -> None:
    own = ["data.source=file", f"data.path={text(tmp_path / 'text.jsonl')}", "parallel.evaluate=false"]
    own += ["model.device=cpu", "head.depth=2", "train.rows_per_step=4", "train.save_every=2", "train.warm_steps=0"]
    own += ["train.eval_every=0", "train.threads=1", "tensorboard=false"]
    errors = tmp_path / "output.txt"
    job, family = started(command(tmp_path, 2, "parallel.tensor=2", "train.steps=100000", *own), errors), []
    try:
        ends = time.monotonic() + HANGING
        while not checkpoints(tmp_path):
            assert job.poll() is None and time.monotonic() < ends, errors.read_text()[-3000:]
            time.sleep(0.1)
        family = psutil.Process(job.pid).children(recursive=True)
        ranks = kill_a_rank(psutil.Process(job.pid).children())
        assert len(ranks) == 2 and job.wait(HANGING) != 0
        left = psutil.wait_procs(ranks, timeout=20)[1]
        assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    finally:  # what megatron-core starts to write checkpoints outlives the process that it writes for
        for process in [*family, *([job] if job.poll() is None else [])]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    last = int(checkpoints(tmp_path)[-1].split("_")[1])
    again = started(command(tmp_path, 1, "resume=true", "parallel.tensor=1", f"train.steps={last + 2}"), errors)
    assert again.wait(HANGING) == 0, errors.read_text()[-3000:]
    assert checkpoints(tmp_path)[-1] == f"head_{last + 2:06d}"
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert found["after/eval/overlap/1"] > found["before/eval/overlap/1"] > 0
