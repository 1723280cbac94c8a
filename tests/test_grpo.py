"""Training from Python: settings become overrides that read back the same, functions become names, mistakes one line.

A real job, slow, shows that both meet in ``bebop.run``.
"""

import asyncio
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bebop.config.compose import composed, job_config
from bebop.errors import UserError
from bebop.grpo import _result, override, reward_name, settings_as_overrides, train
from tests.chaos import rewards as of_a_package
from tests.tree import ROOT


def good(text: str, item: dict[str, Any]) -> float:
    return 1.0


class Judge:
    def method(self, text: str, item: dict[str, Any]) -> float:
        return 1.0

    __call__ = method


VALUES = [
    1, -3, 1e-6, 1e22, True, None, "", "true", "1", "null", "a b", "it's", 'say "x"', "a,b=[c]:{d}", "C:\\new\\", "\\'",
    "'", "${x}", "\\${x}", "\\\\${", "a\nb\\\n", "#~+%", "ü", ["a", 1, None, [1.5, "x,y'"]], {"a": 1, "b c": ["2"]}, [],
]  # fmt: skip


def test_every_value_reads_back_the_same() -> None:
    found = composed([override(f"++task.args.x{n}", value) for n, value in enumerate(VALUES)])["task"]["args"]
    assert [found[f"x{n}"] for n in range(len(VALUES))] == VALUES


def test_keywords_are_choices_and_settings() -> None:
    given = settings_as_overrides(
        {
            "task": {"args": {"max_terms": 9, "new": [1, 2]}, "seed": 5},
            "decoding": "bebop_tree",
            "trainer": {"lr": 1e-5, "betas": (0.9, 0.95)},
            "rollout": {"sampling": {"stop": ["it's", "\n"]}},
            "runtime": {"dir": Path("runs/a b")},
        }
    )
    config = job_config(["task=chain_sum", *given])
    assert config.task.args["max_terms"] == 9 and config.task.args["new"] == [1, 2] and config.task.args["min_terms"]
    assert (config.decoding.system, config.trainer.lr, config.trainer.betas) == ("bebop_tree", 1e-5, (0.9, 0.95))
    assert config.rollout.sampling.stop == ("it's", "\n") and config.runtime.dir == "runs/a b"


def test_functions_are_named_by_file_or_package() -> None:
    assert reward_name(good) == "tests.test_grpo.good"
    assert reward_name(of_a_package.score) == "tests.chaos.rewards.score"
    assert reward_name("reward.py:correct") == "reward.py:correct"


def made_by_text() -> Callable[..., float]:
    scope: dict[str, Any] = {}
    exec("def typed(text, item): return 1.0", scope)
    made: Callable[..., float] = scope["typed"]
    return made


def inner() -> Callable[..., float]:
    def nested(text: str, item: dict[str, Any]) -> float:
        return 1.0

    return nested


@functools.wraps(good)
def impostor(text: str, item: dict[str, Any]) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda text, item: 1.0, r"reward=<lambda> is not possible, as it is a lambda: give a function at the top of"),
        (inner(), "nested is not possible, as it is defined inside of a function or class"),
        (Judge().method, "reward=Judge.method is not possible: give a function at the top"),
        (Judge(), "is not possible: give a function at the top"),
        (functools.partial(good), "is not possible: give a function at the top"),
        (made_by_text(), "reward=typed is not possible, as it stands in no file"),
        (impostor, "good is not possible, as .* has another good"),
        (len, "reward=len is not possible: give a function at the top of a .py file"),
    ],
)
def test_a_function_that_no_process_can_import_is_refused(reward: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        reward_name(reward)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"overrides": "task=gcd"}, r"'task=gcd' is not possible: give a list of texts such as \['task=gcd'\]"),
        ({"overrides": ["task=nothing"]}, "task=nothing is not possible: choose one of chain_sum"),
        ({"task": "nothing"}, "task='nothing' is not possible: choose one of chain_sum"),
        ({"trainer": {"stepz": 3}}, "trainer.stepz: no such setting; did you mean trainer.steps"),
        ({"trainer": {"steps": object()}}, "trainer.steps='<object .* is not possible: give a number, a text"),
        ({"trainer": {"steps": "many"}}, "trainer.steps='many'"),
        ({"trainr": {"steps": 3}}, "trainr.steps: no such setting"),
        ({"runtime": "verl"}, "runtime=verl is not possible: train.. runs Bebop's own jobs"),
        ({"overrides": ["runtime=verl"]}, "runtime=verl is not possible: train.. runs Bebop's own jobs"),
        ({"reward": lambda text, item: 1.0}, "as it is a lambda"),
        ({"reward": {len: 1.0, "auto": 2.0}}, "reward=len is not possible"),
        ({"reward": []}, r"task.reward=\[\] is not possible: give a function"),
        ({"reward": {"auto": 1.0, "math_verify": float("inf")}}, "task.reward_weights="),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    given: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words) as error:
        train(**given)
    assert "\n" not in str(error.value) and not [*tmp_path.iterdir()]


def test_an_event_loop_that_runs_is_refused() -> None:
    async def notebook() -> None:
        train()

    with pytest.raises(UserError, match="cannot run inside of an event loop, as in a notebook: call it in a script"):
        asyncio.run(notebook())


def test_a_job_that_was_stopped_before_its_first_step_has_no_verdict(tmp_path: Path) -> None:
    """Also after the evaluation of the initial model, which has a row of its own."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/pass_at_1": 0.25}\n')
    result = _result(tmp_path, finished=False)
    assert (result.verdict, result.advice, result.model) == ("", "", None)
    assert result.metrics == [{"step": 0, "eval/pass_at_1": 0.25}]


SCRIPT = """
import bebop

def short(text, item):
    return -len(text) / 100

def tags(completions, **columns):
    return [None if "<answer>" not in text else 1.0 for text in completions]

{guard}
    result = bebop.train(
        ["task=gcd"],
        reward={{"auto": 1.0, short: 0.5, tags: 0}},
        trainer={{"steps": 1, "groups_per_step": 2, "group_size": 2}},
        rollout={{"sampling": {{"max_new_tokens": 16}}}},
        runtime={{"dir": "run", "progress": False}},
    )
    row = result.metrics[0]
    assert result.finished and len(result.metrics) == 1 and result.verdict.startswith("After 1 step"), result
    assert abs(row["reward/mean"] - row["reward/auto"] - row["reward/short"] / 2) < 1e-6, row
    assert (result.model / "config.json").is_file() and result.folder.name == "run"
    print("trained")
"""


def run_script(folder: Path, guard: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(SCRIPT.format(guard=guard))
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "mine.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )  # fmt: skip


@pytest.mark.slow
def test_a_real_job_with_functions_of_the_script_itself(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'if __name__ == "__main__":')
    ours = [line for line in done.stdout.splitlines() if "(raylet)" not in line]  # Ray prints of its workers there
    assert done.returncode == 0 and ours == ["trained"], done.stderr


@pytest.mark.slow
def test_a_script_that_trains_when_it_is_imported_is_told_so(tmp_path: Path) -> None:
    """Its reward is imported in another process, which would train again."""
    done = run_script(tmp_path, "if True:")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "train() was called while this file was imported for its reward: put the" in last
    assert not (tmp_path / "run").exists()
