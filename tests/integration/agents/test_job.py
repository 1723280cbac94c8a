"""Whole jobs: the engine decodes, the trainer trains, and a library's environment answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.agents.openenv_server import serving
from tests.tree import ROOT

PACKAGES = Path(__file__).with_name("packages")


def run(folder: Path, name: str, args: str) -> dict[str, float]:
    """The metrics of one step of 4 groups of 4."""
    settings = ["trainer.steps=1", "trainer.group_size=4", "trainer.groups_per_step=4", f"runtime.dir={folder}"]
    settings += ["rollout.sampling.max_new_tokens=64", "task.environment.max_turns=4", f"+task.args={args}"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PACKAGES)])}
    done = subprocess.run(
        [sys.executable, "-m", "bebop.run", "task=environment", f"task.name={name}", *settings],
        env=environ, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [step] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return step


@pytest.mark.parametrize("name", ["openenv", "verifiers"])
def test_a_job(name: str, tmp_path: Path) -> None:
    if name == "openenv":
        with serving() as address:
            step = run(tmp_path / "run", name, f"{{address: '{address}', system: count}}")
        # Every turn that reached the server earned something there.
        assert step["reward/mean"] > 0
    else:
        tokenizer = ROOT / "bebop" / "model" / "tiny"
        step = run(tmp_path / "run", name, f"{{taskset: counting_tasks, tokenizer: {tokenizer}, max_turns: 4}}")
    assert step["samples/trained"] == 16 and step["turn/count_p99"] > 1
    # What the trainer computes over a whole trajectory is what the engine sampled turn by turn.
    assert step["train/ratio_tokens"] > 16 and step["train/ratio_error_max"] < 1e-4
