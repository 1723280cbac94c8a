"""A scheduler of SGLang's that is stopped: alive, and it never answers."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from bebop.config.job import RuntimeConfig
from bebop.rollout.engine import EngineDied
from bebop.rollout.sglang.backend import LocalBackend
from tests.integration.sglang.builders import engine
from tests.served_models import answers, ask, checkpoint, collect, job

HANG_AFTER = 4.0


def test_a_stopped_scheduler_is_noticed(tmp_path: Path) -> None:
    config = dataclasses.replace(job(checkpoint(tmp_path)), runtime=RuntimeConfig(hang_after=HANG_AFTER))
    with engine(config) as served:
        backend = served.server.backend
        assert isinstance(backend, LocalBackend)
        children = psutil.Process().children(recursive=True)
        scheduler = next(child for child in children if child.name().startswith("sglang::schedul"))
        assert len(answers(served, ask(2, 4))) == 2
        time.sleep(2 * HANG_AFTER)
        assert backend.dead() is None, "an idle engine owes nothing"
        for request in ask(2, 60):
            served.add(request)
        os.kill(scheduler.pid, signal.SIGSTOP)
        try:
            known, backend.children = backend.children, set()  # as if its processes were elsewhere
            with pytest.raises(EngineDied, match=r"scheduler is silent for .* with 2 requests open"):
                collect(served, 2)
            backend.children, backend.heart.why = known, None
            begun = time.monotonic()
            while (why := backend.dead()) is None and time.monotonic() < begun + 60:
                time.sleep(0.2)
            assert why is not None and f"process {scheduler.pid} is stopped for" in why
            assert time.monotonic() - begun < 5 * HANG_AFTER
        finally:
            scheduler.kill()
