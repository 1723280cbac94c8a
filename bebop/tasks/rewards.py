"""Rewards: a number for the text of a completion and its prompt.

``auto`` is the reasoning-gym data set's own verifier, or math-verify for files; ``math_verify`` compares with the gold
answer; ``package.module.function`` and ``path/to/file.py:function`` are called as ``f(text, item) -> float`` with the
completion's text and ``prompt.item`` (question, answer, metadata), in a process of their own (``functions``).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

from bebop.config.job import TaskConfig
from bebop.errors import UserError
from bebop.tasks.files import FileItems
from bebop.tasks.functions import RewardTimeout, UserFunction, isolated
from bebop.tasks.math_answers import gold_text, score_math
from bebop.tasks.procedural import check_name, is_quick, score_entry
from bebop.tasks.source import Items
from bebop.trajectory import Prompt

RewardFunction = Callable[[str, Prompt], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReward:
    """The verifier of a reasoning-gym data set, given the last ``<answer>...</answer>``; 0 if there is none."""

    name: str
    args: str  # arguments of the data set, as JSON

    def __call__(self, text: str, prompt: Prompt) -> float:
        """Return the score that the data set gives, mostly 0 or 1; ``procedural`` names the exceptions."""
        from reasoning_gym.utils import extract_answer  # 1.9 s of processor time: not for rewards of the user's

        answer = extract_answer(text)
        if answer is None:
            return 0.0
        if is_quick(self.name):
            return score_entry(self.name, self.args, answer, prompt.item)
        return isolated().score(score_entry, self.name, self.args, answer, prompt.item)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward:
    """1 if the last ``<answer>``, else the last ``\\boxed{}``, else the last expression equals the gold answer, else 0.

    A gold answer that shows its working before ``####`` counts from there, as in GSM8K. ``math_answers`` says what is
    equal.
    """

    name: str = "math_verify"

    def __call__(self, text: str, prompt: Prompt) -> float:
        """Return 1.0 or 0.0; ``UserError`` if the item's answer is no text or number."""
        from reasoning_gym.utils import extract_answer

        gold = prompt.item["answer"]
        self.check(gold, f"prompt {prompt.index}")
        expected, answer = gold_text(gold), extract_answer(text)
        if answer is not None and answer == expected:
            return 1.0
        number = not isinstance(gold, str)
        return isolated().score(score_math, text if answer is None else answer, expected, answer is not None, number)

    def check(self, gold: Any, where: str) -> None:
        """Raise ``UserError`` unless ``gold`` can be compared with; ``where``: its place, for the message."""
        right = isinstance(gold, str | int) or (isinstance(gold, float | Decimal) and math.isfinite(gold))
        if not right or not gold_text(gold):
            wanted = "a text that is not empty, or a finite number, is wanted"
            raise UserError(f"task.reward={self.name!r}: {where} has answer {str(gold)[:80]!r}: {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserReward:
    """A function of the user, with the name in ``task.reward``."""

    name: str
    function: UserFunction

    def __call__(self, text: str, prompt: Prompt) -> float:
        """Return the function's number; ``RewardTimeout``, ``UserError``."""
        return self.function(text, prompt.item, f"reward {self.name} on prompt {prompt.index}")


def make_reward(config: TaskConfig, output: Path | None = None) -> RewardFunction:
    """Return the reward of a task; ``UserError`` if its function cannot be imported or its data set does not exist.

    ``output``: the file for what a function of the user prints; None: the standard error.
    """
    kind = config.reward
    if kind == "auto":
        kind = "math_verify" if config.source == "file" else "dataset"
    if kind == "math_verify":
        return MathReward()
    if kind == "dataset":
        check_name(config.name, "task.name")
        return DatasetReward(name=config.name, args=json.dumps(config.args))
    return UserReward(name=kind, function=UserFunction(kind, config.reward_timeout, output))


def check_reward(config: TaskConfig, items: Items) -> None:
    """Try the reward on the questions of a task: every gold answer of a file, or one call of a user's function.

    The call is for the first question, with its own answer as the text. ``UserError`` names the row or the failure.
    """
    reward, first = make_reward(config), items.item(0)
    if isinstance(reward, MathReward):
        for where, gold in items.golds() if isinstance(items, FileItems) else [("the first question", first["answer"])]:
            reward.check(gold, where)
    if isinstance(reward, UserReward):
        try:
            checked(reward, str(first["answer"]), Prompt(index=0, task=config.name, text="", token_ids=(), item=first))
        except RewardTimeout as error:
            raise UserError(f"{error}: raise it, or give a quicker function") from None
        finally:
            reward.function.close()


def checked(reward: RewardFunction, text: str, prompt: Prompt) -> float:
    """Return ``reward(text, prompt)``; ``UserError`` in one line if it raises or returns no finite number.

    ``RewardTimeout`` if it hung.
    """
    name = getattr(reward, "name", None) or getattr(reward, "__qualname__", repr(reward))
    where = f"reward {name} on prompt {prompt.index}"
    try:
        value = reward(text, prompt)
    except (UserError, RewardTimeout):
        raise
    except Exception as error:  # code from outside may raise anything; it rises on, with the place named
        message = " ".join(str(error).split())
        raise UserError(f"{where} raised {type(error).__name__}: {message}") from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"{where} returned {str(value)[:80]!r}: a finite number is wanted")
    return float(value)
