"""Rewards: the text of a completion and its prompt in, a number out.

``auto`` is the reasoning-gym data set's own verifier, or math-verify for files; ``math_verify`` compares with the gold
answer; ``package.module.function`` and ``path/to/file.py:function`` are called as ``f(text, item) -> float`` with the
answer's text and ``prompt.item`` (question, answer, metadata), in a process of their own, see ``functions``.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from bebop.config import TaskConfig
from bebop.errors import UserError
from bebop.tasks.functions import RewardTimeout, UserFunction
from bebop.tasks.isolated import isolated
from bebop.tasks.procedural import check_name
from bebop.tasks.scoring import as_math, is_quick, score_entry, score_math
from bebop.trajectory import Prompt

RewardFunction = Callable[[str, Prompt], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReward:
    """The verifier of a reasoning-gym data set, given the last ``<answer>...</answer>``; 0 if there is none."""

    name: str
    args: str  # arguments of the data set, as JSON

    def __call__(self, text: str, prompt: Prompt) -> float:
        """The score that the data set gives, mostly 0 or 1; see ``verifiers`` for the exceptions."""
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

    A gold answer that shows its working before ``####`` counts from there, as in GSM8K.
    """

    name: str = "math_verify"

    def __call__(self, text: str, prompt: Prompt) -> float:
        """1.0 or 0.0; ``UserError`` if the item's answer is no text or number."""
        from reasoning_gym.utils import extract_answer

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
    function: UserFunction

    def __call__(self, text: str, prompt: Prompt) -> float:
        """What the function returns; ``RewardTimeout``, ``UserError``."""
        return self.function(text, prompt.item, f"reward {self.name} on prompt {prompt.index}")


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
    return UserReward(name=kind, function=UserFunction(kind, config.reward_timeout))


def checked(reward: RewardFunction, text: str, prompt: Prompt) -> float:
    """``reward(text, prompt)``; ``UserError`` in one line if it raises or returns anything but a finite number.

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
