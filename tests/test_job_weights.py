"""The real job on Ray with weights that are cut short on their way to a worker: refused, sent again, or replaced; and
with a broadcast that loses a receiver."""

import os
import signal
from pathlib import Path

import pytest

from tests.test_job import counted, finish, pids, rows, start, wait_for_step

pytestmark = pytest.mark.slow

# On the path of every process of a job. What arrives at a worker is cut short so many times: BUDGET has a line for each
# that is left. The object itself is changed before it is looked at, as a transfer that ended early would leave it.
CUT_SHORT = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "bebop.rollout.worker":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def changed(module):
            run(module)
            take_in = module.RolloutWorker.set_weights

            def cut(self, weights, version):
                left = open(BUDGET).read().split()
                if left:
                    open(BUDGET, "w").write(" ".join(left[1:]))
                    first = next(iter(weights.weights))
                    weights.weights[first] = weights.weights[first][:-1]
                take_in(self, weights, version)

            module.RolloutWorker.set_weights = cut

        spec.loader.exec_module = changed
        return spec

if any("default_worker" in argument for argument in sys.orig_argv):
    sys.meta_path.insert(0, Finder())
"""


@pytest.mark.exhaustive("a whole job; chaos/test_short.py changes weights on their way")
def test_weights_cut_short_are_refused_sent_again_and_at_last_the_worker_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five arrivals that are damaged three end a process, the next two are made up for by the third sending."""
    budget, folder = tmp_path / "budget", tmp_path / "run"
    budget.write_text("x " * 5)
    (tmp_path / "sitecustomize.py").write_text(CUT_SHORT.replace("BUDGET", repr(str(budget))))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    code, errors = finish(start(folder, "trainer.steps=3", "trainer.publish=store"))
    assert code == 0, errors
    assert not budget.read_text() and "Traceback" not in errors
    refusals = [line for line in errors.splitlines() if "refuses weights of version 0, " in line]
    assert len(refusals) == 4 and all(line.rstrip().endswith(": sent again") for line in refusals), errors
    assert all("instead of torch.float32" in line for line in refusals), "what is wrong is told in the same line"
    assert errors.count("arrived 3 times damaged") == 1 and "prompts start again" in errors
    assert rows(folder)[-1]["rollout/restarts"] == 1
    assert counted(folder) == dict.fromkeys(range(1, 4), (16, 4)), "every prompt was trained on once"


def test_a_job_that_broadcasts_goes_on_without_a_worker_that_is_killed(tmp_path: Path) -> None:
    """Each of two workers receives for itself; the replacement of one gets what it missed, and then receives too."""
    process = start(tmp_path, "trainer.steps=4", "trainer.publish=broadcast", "rollout.workers=2")
    wait_for_step(tmp_path, 1, process)
    os.kill(pids(tmp_path, "rollout")[1], signal.SIGKILL)
    code, errors = finish(process)
    assert code == 0 and "Traceback" not in errors, errors
    assert rows(tmp_path)[-1]["rollout/restarts"] == 1 and "broadcast any more" not in errors
    assert counted(tmp_path) == dict.fromkeys(range(1, 5), (16, 4)), "every prompt was trained on once"
