"""``calc``: work out an expression that is too long for the head, with a calculator.

A turn is ``calc EXPRESSION``, answered by a message of role ``tool``, or ``answer NUMBER``, which ends the trajectory.
The calculator takes less at a time than a question has, so that results of calls go into later ones.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

from bebop.errors import UserError
from bebop.tasks.environment import EnvStep, Message, last_line
from bebop.tasks.environments.arithmetic import BadExpression, calculate, written

NUMBER = re.compile(r"-?\d{1,80}", re.ASCII)
TERM = re.compile(r"\d+(?:\.\d*)?|\.\d+", re.ASCII)
AT_A_TIME = 3  # numbers in a call


def item(index: int, seed: int, *, terms: int = 6, digits: int = 3) -> dict[str, Any]:
    """An expression and its value: ``{"expression": "(417 - 52) * 96 + 8", "answer": "35048"}``; ``UserError``."""
    for name, value, low, high in (("terms", terms, 4, 12), ("digits", digits, 1, 6)):
        if not low <= value <= high:
            raise UserError(f"{name}={value} is not possible for calc: it is from {low} to {high}")
    rng = random.Random(f"calc {seed} {index}")
    low, high = 10 ** (digits - 1), 10**digits - 1
    products = 0
    text = str(rng.randint(low, high))
    for _ in range(terms - 1):
        sign = rng.choice("+-*" if products < 3 else "+-")  # so that the result stays below 30 digits
        products += sign == "*"
        number = rng.randint(low, high)
        text = f"({text}) * {number}" if sign == "*" and not text.isdigit() else f"{text} {sign} {number}"
    return {"expression": text, "answer": written(calculate(text))}


class Calc:
    """One question; calls are counted in ``tool_calls``, those that make no sense in ``tool_errors``."""

    def __init__(self, *, turns: int = 12) -> None:
        """``turns`` at most, the answer among them; ``UserError``."""
        if not 1 <= turns <= 1000:
            raise UserError(f"turns={turns} is not possible for calc: 1 to 1000")
        self.turns, self.left, self.answer = turns, 0, ""

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """The question; nothing depends on ``seed``."""
        self.left, self.answer = self.turns, item["answer"]
        text = (
            f"What is {item['expression']}? Each of your turns is 'calc EXPRESSION', which a calculator works out if "
            f"it has at most {AT_A_TIME} numbers, or 'answer NUMBER', which is the last. The last line of a "
            f"turn counts. There are {self.left} turns."
        )
        return ({"role": "user", "content": text},)

    async def step(self, text: str) -> EnvStep:
        """Reward 1 for the right answer; a wrong one, or the last turn, ends it with 0."""
        self.left -= 1
        verb, _, rest = last_line(text).partition(" ")
        if verb == "answer" and NUMBER.fullmatch(rest):
            return EnvStep(reward=float(int(rest) == int(self.answer)), done=True)
        try:
            if verb != "calc":
                raise BadExpression("say 'calc EXPRESSION', or 'answer NUMBER' with a whole number")
            if len(TERM.findall(rest)) > AT_A_TIME:
                raise BadExpression(f"more than {AT_A_TIME} numbers")
            said, wrong = written(calculate(rest)), 0.0
        except BadExpression as error:
            said, wrong = f"error: {error}", 1.0
        counts = {"tool_calls": 1.0, "tool_errors": wrong}
        if self.left <= 0:
            return EnvStep(done=True, counts=counts)
        return EnvStep(messages=({"role": "tool", "content": said},), counts=counts)

    async def close(self) -> None:
        """Nothing is held."""
