"""Rewards: a number for the text of a completion and its prompt, and the reward's parts.

``auto`` is the reasoning-gym data set's own verifier, or math-verify for files; ``math_verify`` compares with the gold
answer. ``package.module.function`` and ``path/to/file.py:function`` are functions of the user, in their own process
(``functions``), with one of several signatures (``signatures``). Several rewards are combined by their weighted sum.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from bebop.config.job import TaskConfig
from bebop.errors import UserError
from bebop.metrics.catalogue import METRICS
from bebop.tasks.files import FileItems
from bebop.tasks.functions import RewardTimeout, UserFunction, isolated
from bebop.tasks.math_answers import gold_text, score_math
from bebop.tasks.procedural import check_name, is_quick, score_entry
from bebop.tasks.signatures import Call, Value
from bebop.tasks.source import Items
from bebop.trajectory import Prompt

RewardFunction = Callable[[str, Prompt], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReward:
    """Verifier of a reasoning-gym data set, applied to the last ``<answer>...</answer>``; 0 without one."""

    name: str
    args: str  # arguments of the data set, as JSON

    def __call__(self, text: str, prompt: Prompt) -> float:
        """Return the data set's score, mostly 0 or 1; ``procedural`` lists the exceptions."""
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

    A gold answer that shows its working before ``####`` counts from there, as in GSM8K. ``math_answers`` defines
    equality.
    """

    name: str = "math_verify"

    def __call__(self, text: str, prompt: Prompt) -> float:
        """Return 1.0 or 0.0; raise ``UserError`` if the item's answer is neither text nor number."""
        from reasoning_gym.utils import extract_answer

        gold = prompt.item["answer"]
        self.check(gold, f"prompt {prompt.index}")
        expected, answer = gold_text(gold), extract_answer(text)
        if answer is not None and answer == expected:
            return 1.0
        number = not isinstance(gold, str)
        return isolated().score(score_math, text if answer is None else answer, expected, answer is not None, number)

    def check(self, gold: Any, where: str) -> None:
        """Raise ``UserError`` unless ``gold`` is comparable; ``where``: its place, for the message."""
        right = isinstance(gold, str | int) or (isinstance(gold, float | Decimal) and math.isfinite(gold))
        if not right or not gold_text(gold):
            wanted = "a text that is not empty, or a finite number, is wanted"
            raise UserError(f"task.reward={self.name!r}: {where} has answer {str(gold)[:80]!r}: {wanted}")


# ---- rewards of several completions at once, with their parts

OWN = "score"  # the entry of a mapping that is the reward, as in verl; without it, the reward is the sum of entries
RESERVED = {row.name.split("/")[1] for row in METRICS if row.name.startswith("reward/")}  # forbidden names of parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Reward of a completion, and its parts by name.

    >>> Score(value=1.1, parts={"correct": 1.0, "format": 0.5, "code": None})  # doctest: +SKIP
    """

    value: float
    parts: Mapping[str, float | None] = field(default_factory=dict)  # None: the part does not apply to the completion


class Answer(NamedTuple):
    """Completion to reward."""

    text: str
    prompt: Prompt
    token_ids: tuple[int, ...] | None = None  # [T]; None: only its text is known


Outcome = Score | RewardTimeout | None  # None: the reward does not apply to the completion


class Scorer:
    """Base of rewards for several completions at once, with parts; each is also a RewardFunction."""

    name: str
    batched = False  # whether it benefits from several completions at once

    def outcomes(self, answers: Sequence[Answer]) -> list[Outcome]:
        """Return the outcome of each completion; ``RewardTimeout`` for one whose function hung."""
        raise NotImplementedError

    def scores(self, answers: Sequence[Answer]) -> list[Score | RewardTimeout]:
        """Return the score of each completion; raise ``UserError`` if no reward applies to one, and for any fault."""
        found: list[Score | RewardTimeout] = []
        for answer, one in zip(answers, self.outcomes(answers), strict=True):
            if one is None:
                where = f"reward {self.name} on prompt {answer.prompt.index}"
                raise UserError(
                    f"{where} returned None, which says that it does not apply: every completion needs one that does"
                )
            found.append(one)
        return found

    def __call__(self, text: str, prompt: Prompt) -> float:
        """Return the reward of one completion; raises ``RewardTimeout``, ``UserError``."""
        [score] = self.scores([Answer(text, prompt)])
        if isinstance(score, RewardTimeout):
            raise score
        return score.value

    def close(self) -> None:
        """End the reward's processes."""


class SingleReward(Scorer):
    """Reward that is a function of one completion: Bebop's own, or that of a test."""

    def __init__(self, function: RewardFunction, name: str = "") -> None:
        self.name, self.function = name or _name(function), function

    def outcomes(self, answers: Sequence[Answer]) -> list[Outcome]:
        """Return the score of each completion."""
        found: list[Outcome] = []
        for answer in answers:
            try:
                found.append(Score(value=checked(self.function, answer.text, answer.prompt)))
            except RewardTimeout as late:
                found.append(late)
        return found


class UserReward(Scorer):
    """Function of the user, named in ``task.reward``. It returns a number, or a mapping of parts."""

    def __init__(self, name: str, function: UserFunction) -> None:
        self.name, self.function, self.batched = name, function, function.batched
        self._names: tuple[str, ...] | None = None  # names of its parts, empty for a number; None: not called yet

    def outcomes(self, answers: Sequence[Answer]) -> list[Outcome]:
        """Return the outcome of each completion; raise ``UserError`` if its parts differ from those of other calls."""
        places = [f"reward {self.name} on prompt {prompt.index}" for _, prompt, _ in answers]
        calls = [Call(text=text, item=own.item, task=own.task, token_ids=ids) for text, own, ids in answers]
        found = self.function.values(calls, places)
        return [self._score(value, place) for value, place in zip(found, places, strict=True)]

    def _score(self, value: Value | RewardTimeout, place: str) -> Outcome:
        if value is None or isinstance(value, RewardTimeout):
            return value
        names = tuple(sorted(value)) if isinstance(value, dict) else ()
        if self._names is None:
            self._names = names
            if wrong := next((name for name in names if name in RESERVED), None):
                raise UserError(f"{place} returned a part {wrong!r}: reward/{wrong} is a metric already, rename it")
        if names != self._names:
            was, now = (", ".join(one) or "a number" for one in (self._names, names))
            raise UserError(
                f"{place} returned {now}, and before that {was}: return the same parts every time, None where one "
                "does not apply"
            )
        if not isinstance(value, dict):
            return Score(value=value)
        known = [part for part in value.values() if part is not None]
        if OWN in value:
            known = [own] if (own := value[OWN]) is not None else []
        return Score(value=sum(known), parts=value) if known else None

    def close(self) -> None:
        """End the reward's process."""
        self.function.close()


class WeightedReward(Scorer):
    """Weighted sum of several rewards; a reward that does not apply to a completion is left out of its sum."""

    def __init__(self, rewards: Sequence[Scorer], weights: Sequence[float]) -> None:
        self.rewards, self.weights = rewards, weights
        self.name = f"[{', '.join(reward.name for reward in rewards)}]"
        self.batched = any(reward.batched for reward in rewards)
        self.labels = part_names([reward.name for reward in rewards])
        if wrong := next((name for name in self.labels if name in RESERVED), None):
            raise UserError(f"task.reward: {wrong!r} names a part, and reward/{wrong} is a metric already: rename it")

    def outcomes(self, answers: Sequence[Answer]) -> list[Outcome]:
        """Return the outcome of each completion. The rewards run in parallel, each in its process."""
        with ThreadPoolExecutor(len(self.rewards)) as pool:
            found = list(pool.map(lambda reward: reward.outcomes(answers), self.rewards))
        return [self._sum(list(of_one)) for of_one in zip(*found, strict=True)]

    def _sum(self, found: Sequence[Outcome]) -> Outcome:
        """Return the sum for one completion, with the parts of all rewards."""
        parts: dict[str, float | None] = {}
        total = 0.0
        for label, weight, one in zip(self.labels, self.weights, found, strict=True):
            if isinstance(one, RewardTimeout):
                return one
            own = dict(one.parts) if one is not None else {}
            if OWN in own or not own:
                own = {label: own.pop(OWN, None if one is None else one.value), **own}
            if twice := next((name for name in own if name in parts), None):
                raise UserError(f"task.reward: two of {self.name} have a part {twice!r}: rename one of them")
            parts |= own
            total += 0.0 if one is None else weight * one.value
        return Score(value=total, parts=parts) if any(one is not None for one in found) else None

    def close(self) -> None:
        """End the processes of all rewards."""
        for reward in self.rewards:
            reward.close()


class HeldOutReward(Scorer):
    """Pair of rewards: one for completions of training prompts, the other for held-out questions."""

    def __init__(self, training: Scorer, held_out: Scorer) -> None:
        self.training, self.held_out = training, held_out
        self.name, self.batched = training.name, training.batched or held_out.batched

    def outcomes(self, answers: Sequence[Answer]) -> list[Outcome]:
        """Return the outcome of each completion, in the order of ``answers``."""
        found: dict[int, Outcome] = {}
        for reward, held_out in ((self.training, False), (self.held_out, True)):
            places = [i for i, answer in enumerate(answers) if answer.prompt.held_out is held_out]
            found |= zip(places, reward.outcomes([answers[i] for i in places]) if places else [], strict=True)
        return [found[i] for i in range(len(answers))]

    def close(self) -> None:
        """End the processes of both rewards."""
        self.training.close()
        self.held_out.close()


def part_names(names: Sequence[str]) -> list[str]:
    """Return the names of parts for reward functions: the last word of each, with its file if two agree.

    >>> part_names(["a.py:score", "b.py:score", "math_verify"])
    ['a_score', 'b_score', 'math_verify']
    """
    last = [re.split(r"[.:]", name)[-1] for name in names]
    files = [PurePath(n.rpartition(":")[0]).stem if ":" in n else n.rpartition(".")[0].split(".")[-1] for n in names]
    paths = [f"{file}_{own}" if file and last.count(own) > 1 else own for file, own in zip(files, last, strict=True)]
    return [re.sub(r"\W", "_", path) for path in paths]


def _name(reward: RewardFunction) -> str:
    return str(getattr(reward, "name", "") or getattr(reward, "__qualname__", repr(reward)))


def scorer(reward: RewardFunction) -> Scorer:
    """Return a reward as a ``Scorer``."""
    return reward if isinstance(reward, Scorer) else SingleReward(reward)


def make_reward(config: TaskConfig, output: Path | None = None) -> RewardFunction:
    """Return the reward of a task; raise ``UserError`` if a function cannot be imported or its data set does not exist.

    ``output``: the file for output of the user's functions; None: the standard error.
    """
    if isinstance(config.reward, str) and config.reward_weights is None:
        return _make(config.reward, config, output)
    rewards: list[Scorer] = []
    for name in config.rewards:
        made = _make(name, config, output)
        rewards.append(made if isinstance(made, Scorer) else SingleReward(made, name))
    return WeightedReward(rewards, config.reward_weights or [1.0] * len(rewards))


def _make(kind: str, config: TaskConfig, output: Path | None) -> RewardFunction:
    if kind == "auto":
        kind = "math_verify" if config.source == "file" else "dataset"
    if kind == "math_verify":
        return MathReward()
    if kind == "dataset":
        check_name(config.name, "task.name")
        return DatasetReward(name=config.name, args=json.dumps(config.args))
    return UserReward(kind, UserFunction(kind, config.reward_timeout, output, config.reward_signature))


def check_reward(config: TaskConfig, items: Items) -> None:
    """Try the reward on the questions of a task: every gold answer of a file, and one call of each function of the
    user.

    The call is for the first question, with its own answer as the text. ``UserError`` names the row or the failure.
    """
    reward, first = make_reward(config), items.item(0)
    for one in reward.rewards if isinstance(reward, WeightedReward) else [reward]:
        own = one.function if isinstance(one, SingleReward) else one
        if isinstance(own, MathReward):
            for where, gold in (
                items.golds() if isinstance(items, FileItems) else [("the first question", first["answer"])]
            ):
                own.check(gold, where)
    if isinstance(reward, Scorer):
        try:
            prompt = Prompt(index=0, task=config.name, text="", token_ids=(), item=first)
            [score] = reward.scores([Answer(str(first["answer"]), prompt, token_ids=())])
            if isinstance(score, RewardTimeout):
                raise UserError(f"{score}: raise it, or give a quicker function")
        finally:
            reward.close()


def checked(reward: RewardFunction, text: str, prompt: Prompt) -> float:
    """Return ``reward(text, prompt)``; raise a one-line ``UserError`` if it raises or returns no finite number.

    Raises ``RewardTimeout`` if it hung.
    """
    where = f"reward {_name(reward)} on prompt {prompt.index}"
    try:
        value = reward(text, prompt)
    except (UserError, RewardTimeout):
        raise
    except Exception as error:  # user code may raise anything; it is raised again with the place named
        message = " ".join(str(error).split())
        raise UserError(f"{where} raised {type(error).__name__}: {message}") from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"{where} returned {str(value)[:80]!r}: a finite number is wanted")
    return float(value)
