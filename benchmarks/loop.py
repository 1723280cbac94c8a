"""The whole job, asynchronous against synchronous: the same work, samples trained per second, and idle time.

Synchronous work is also measured with every core given to the running phase, so that asynchrony gets no credit for a
core that the synchronous job merely left idle.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bebop.bench.record import best_of
from bebop.errors import UserError

ARMS: dict[str, tuple[str, ...]] = {
    "synchronous": ("rollout.staleness=0",),
    "synchronous, 2 threads": ("rollout.staleness=0", "rollout.threads=2", "trainer.threads=2"),
    "staleness 1": ("rollout.staleness=1",),
    "staleness 2": ("rollout.staleness=2",),
}
WARM_UP = 3  # steps that are left out: first allocations, and a pipeline that fills


def run(steps: int, rounds: int, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per arm; the arms take turns and the best round of each counts."""
    with tqdm(total=rounds * len(ARMS), desc="loop") as progress:
        best = best_of(rounds, ARMS, lambda arm: _measure(steps, [*ARMS[arm], *overrides]), "samples/s", progress)
    base = best["synchronous"]["samples/s"]
    return [{"arm": arm, "x synchronous": row["samples/s"] / base, **row} for arm, row in best.items()]


def _measure(steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            f"runtime.dir={folder}/run",
            f"trainer.steps={steps}",
            "trainer.save_every=0",
            "monitor.plots=false",
        )
        command = [sys.executable, "-m", "bebop.run", *settings, *overrides]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            stderr = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            raise UserError(f"bebop.run {' '.join(overrides)} failed: {stderr[-1].removeprefix('error: ')}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][WARM_UP:]

    def total(name: str) -> float:
        return float(sum(row[name] for row in rows))

    seconds = total("time/step")
    samples = rows[-1]["samples/trained"] - rows[0]["samples/trained"] * (1 - 1 / (WARM_UP + 1))
    return {
        "samples/s": samples / seconds,
        "seconds/step": seconds / len(rows),
        "trainer idle %": 100 * total("time/idle") / seconds,
        "rollout idle %": 100 * total("time/rollout_idle") / seconds,
        "staleness": total("staleness/mean") / len(rows),
        "reward": total("reward/mean") / len(rows),
    }
