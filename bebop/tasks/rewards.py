"""Rewards: the text of a completion and its prompt in, a number out.

``auto`` is the reasoning-gym data set's own verifier, or math-verify for files; ``math_verify`` compares with the gold
answer; ``package.module.function`` and ``path/to/file.py:function`` are called as ``f(text, item) -> float`` with the
whole completion and ``prompt.item`` (question, answer, metadata).
"""

import difflib
import importlib
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from reasoning_gym.utils import extract_answer

from bebop.config import TaskConfig
from bebop.errors import UserError
from bebop.tasks.isolated import isolated
from bebop.tasks.procedural import check_name
from bebop.tasks.verifiers import as_math, is_quick, score_entry, score_math
from bebop.trajectory import Prompt

RewardFunction = Callable[[str, Prompt], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReward:
    """The verifier of a reasoning-gym data set, given the last ``<answer>...</answer>``; 0 if there is none."""

    name: str
    args: str  # arguments of the data set, as JSON

    def __call__(self, text: str, prompt: Prompt) -> float:
        """The score that the data set gives, mostly 0 or 1; see ``verifiers`` for the exceptions."""
        answer = extract_answer(text)
        if answer is None:
            return 0.0
        if is_quick(self.name):
            return score_entry(self.name, self.args, answer, prompt.item)
        return isolated().score(score_entry, self.name, self.args, answer, prompt.item)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward:
    """1 if the last ``<answer>``, else the last ``\\boxed{}``, else the last expression equals the gold answer, else 0.

    A gold answer that shows its working before ``####`` counts from there, as in GSM8K.
    """

    name: str = "math_verify"

    def __call__(self, text: str, prompt: Prompt) -> float:
        """1.0 or 0.0; ``UserError`` if the item's answer is no text or number."""
        gold = prompt.item["answer"]
        if not isinstance(gold, str | int | float):
            raise UserError(f"task.reward={self.name!r}: prompt {prompt.index} has answer {gold!r}, a text is wanted")
        expected = str(gold).rsplit("####", 1)[-1].strip()
        answer = extract_answer(text)
        if answer is not None and answer == expected:
            return 1.0
        candidate = as_math(answer) if answer is not None else text[max(0, text.rfind("\\boxed")) :]
        return isolated().score(score_math, candidate, as_math(expected))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserReward:
    """A function of the user's, with the name that it was given by."""

    name: str
    function: Callable[[str, dict[str, Any]], float]

    def __call__(self, text: str, prompt: Prompt) -> float:
        """What the function returns."""
        return self.function(text, prompt.item)


def make_reward(config: TaskConfig) -> RewardFunction:
    """The reward of a task; ``UserError`` if its function cannot be imported or its data set does not exist."""
    kind = config.reward
    if kind == "auto":
        kind = "math_verify" if config.source == "file" else "dataset"
    if kind == "math_verify":
        return MathReward()
    if kind == "dataset":
        check_name(config.name, "task.name")
        return DatasetReward(name=config.name, args=json.dumps(config.args))
    return UserReward(name=kind, function=_load(kind))


def checked(reward: RewardFunction, text: str, prompt: Prompt) -> float:
    """``reward(text, prompt)``; ``UserError`` in one line if it raises or returns anything but a finite number."""
    name = getattr(reward, "name", None) or getattr(reward, "__qualname__", repr(reward))
    where = f"reward {name} on prompt {prompt.index}"
    try:
        value = reward(text, prompt)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything; it rises on, with the place named
        message = " ".join(str(error).split())
        raise UserError(f"{where} raised {type(error).__name__}: {message}") from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"{where} returned {str(value)[:80]!r}: a finite number is wanted")
    return float(value)


def _load(spec: str) -> Callable[[str, dict[str, Any]], float]:
    """The function behind ``package.module.function`` or ``path/to/file.py:function``."""
    where, _, name = spec.rpartition(":" if ":" in spec else ".")
    if not where or not name:
        allowed = "auto, math_verify, package.module.function or path/to/file.py:function"
        raise UserError(f"task.reward={spec!r} is not possible: give {allowed}")
    try:
        module = _load_file(Path(where), spec) if ":" in spec else importlib.import_module(where)
    except UserError:
        raise
    except Exception as error:  # importing runs the user's code, which may raise anything
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"task.reward={spec!r} cannot be imported: {message}") from error
    function = getattr(module, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [k for k, v in vars(module).items() if callable(v)])
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UserError(f"task.reward={spec!r}: {where} has no function {name!r}{hint}")
    return function


def _load_file(path: Path, spec: str) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"task.reward={spec!r}: there is no Python file {str(path)!r}")
    found = importlib.util.spec_from_file_location(f"bebop_reward_{path.stem}", path)
    assert found is not None and found.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
