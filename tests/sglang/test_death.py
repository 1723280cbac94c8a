"""SGLang's scheduler is killed in the middle of a rollout; the loop replaces the worker and loses nothing."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bebop.config import JobConfig
from bebop.rollout.engine import EngineDied
from bebop.rollout.sglang_backend import LocalBackend
from bebop.rollout.sglang_builder import make_engine
from bebop.rollout.worker import RolloutWorker
from bebop.trajectory import Group, Prompt
from tests.sglang.builders import PROMPT, checkpoint, job, with_sglang


def start(config: JobConfig) -> RolloutWorker:
    engine, eos = make_engine(config)
    worker = RolloutWorker(engine, lambda text, prompt: float(len(text)), config, eos)
    worker.start()
    return worker


def kill(worker: RolloutWorker) -> None:
    """The scheduler's process, as the kernel would when memory is short."""
    backend: Any = worker.engine.backend  # type: ignore[attr-defined]
    assert isinstance(backend, LocalBackend)
    for pid in backend.engine.get_all_child_pids():
        os.kill(pid, signal.SIGKILL)


def test_nothing_is_lost(tmp_path: Path) -> None:
    config = with_sglang(job(checkpoint(tmp_path)))
    prompts = {i: Prompt(index=i, task="t", text="", token_ids=PROMPT, item={}) for i in range(6)}
    worker, done, deaths = start(config), dict[int, Group](), 0
    worker.submit(list(prompts.values()))
    while len(done) < len(prompts):
        try:
            groups: Sequence[Group] = worker.collect(1.0).groups
        except EngineDied as death:
            deaths += 1
            worker.engine.close()  # type: ignore[attr-defined]
            worker = start(config)
            worker.submit([prompt for i, prompt in prompts.items() if i not in done])
            assert "ended" in str(death)
            continue
        for group in groups:
            assert group.prompt.index not in done
            done[group.prompt.index] = group
        if groups and not deaths:
            kill(worker)
    worker.stop()
    worker.engine.close()  # type: ignore[attr-defined]
    assert deaths == 1 and sorted(done) == sorted(prompts)
    lengths = [len(t.completion.token_ids) for group in done.values() for t in group.trajectories]
    assert len(lengths) == 6 * config.trainer.group_size and min(lengths) >= 1
    assert np.isfinite([t.completion.logprobs.sum() for g in done.values() for t in g.trajectories]).all()
