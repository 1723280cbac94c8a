"""An engine in a process of its own: the completions of one in this process, its errors, its end."""

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from bebop.errors import UserError
from bebop.rollout.engine import EngineDied
from bebop.rollout.engine_process import EngineProcess
from tests.served_models import answers, ask, checkpoint, embedded, job

pytestmark = pytest.mark.slow  # the process imports torch and transformers


def test_completions_errors_and_the_end(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    wanted = answers(embedded(folder), ask(6, 12))
    with closing(EngineProcess(job(folder))) as engine:
        process = engine._process
        assert [c.token_ids.tolist() for c in answers(engine, ask(6, 12))] == [c.token_ids.tolist() for c in wanted]
        assert engine.unfinished == 0
        with pytest.raises(UserError, match="exceeds max_length=120"):
            engine.add(ask(1, 400)[0])
        for request in ask(3, 60):
            engine.add(request)
        engine.step()
        assert len(engine.abort()) == 3 and engine.unfinished == 0
        os.kill(process.pid or 0, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"torch (is gone|ended with code -9)"):
            answers(engine, ask(1, 4))
    assert not process.is_alive()


def test_what_the_engine_refuses_is_raised_here(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # of no model
    with pytest.raises(UserError, match="cannot be loaded"):
        EngineProcess(job(tmp_path))
