"""``calc``: evaluate a long expression with a calculator.

A turn is ``calc EXPRESSION``, answered by a message of role ``tool``, or ``answer NUMBER``, which ends the trajectory.
The calculator takes fewer numbers at a time than a question has, so later calls use the results of earlier ones.
"""

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from bebop.errors import UserError
from bebop.tasks.environment import EnvStep, Message, last_line

NUMBER = re.compile(r"-?\d{1,80}", re.ASCII)
TERM = re.compile(r"\d+(?:\.\d*)?|\.\d+", re.ASCII)
MAX_NUMBERS = 3  # in a call
MAX_LENGTH = 200  # characters of an expression: Python's parser handles every nesting that fits
MAX_BITS = 512  # limit of a numerator or denominator, in every step
LETTERS = re.compile(r"[\d\s.+\-*/%()]+", re.ASCII)
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def item(index: int, seed: int, *, terms: int = 6, digits: int = 3) -> dict[str, Any]:
    """Draw an expression and its value: ``{"expression": "(417 - 52) * 96 + 8", "answer": "35048"}``.

    Raises ``UserError`` for impossible arguments.
    """
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
    return {"expression": text, "answer": str(calculate(text))}


class Calc:
    """One question. ``tool_calls`` counts calls, ``tool_errors`` the invalid ones."""

    def __init__(self, *, turns: int = 12) -> None:
        """Allow ``turns`` turns, the answer included; raise ``UserError`` if that is out of range."""
        if not 1 <= turns <= 1000:
            raise UserError(f"turns={turns} is not possible for calc: 1 to 1000")
        self.turns, self.left, self.answer = turns, 0, ""

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Return the question; it does not depend on ``seed``."""
        self.left, self.answer = self.turns, item["answer"]
        text = (
            f"What is {item['expression']}? Each of your turns is 'calc EXPRESSION', which a calculator works out if "
            f"it has at most {MAX_NUMBERS} numbers, or 'answer NUMBER', which is the last. The last line of a "
            f"turn counts. There are {self.left} turns."
        )
        return ({"role": "user", "content": text},)

    async def step(self, text: str) -> EnvStep:
        """Return reward 1 for the right answer; a wrong one, or the last turn, ends the episode with 0."""
        self.left -= 1
        verb, _, rest = last_line(text).partition(" ")
        if verb == "answer" and NUMBER.fullmatch(rest):
            return EnvStep(reward=float(int(rest) == int(self.answer)), done=True)
        try:
            if verb != "calc":
                raise BadExpression("say 'calc EXPRESSION', or 'answer NUMBER' with a whole number")
            if len(TERM.findall(rest)) > MAX_NUMBERS:
                raise BadExpression(f"more than {MAX_NUMBERS} numbers")
            said, wrong = str(calculate(rest)), 0.0
        except BadExpression as error:
            said, wrong = f"error: {error}", 1.0
        counts = {"tool_calls": 1.0, "tool_errors": wrong}
        if self.left <= 0:
            return EnvStep(done=True, counts=counts)
        return EnvStep(messages=({"role": "tool", "content": said},), counts=counts)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


# ---- the calculator


class BadExpression(Exception):
    """Expression that cannot be calculated; the policy reads the message."""


def calculate(text: str) -> Fraction:
    """Return the value of an expression of numbers, ``+ - * / // % **`` and brackets; raise ``BadExpression`` if
    invalid.

    The calculation is exact, of bounded size, and limited to numbers: the text is parsed and its tree walked. Python
    evaluates nothing, and letters are refused before that.
    """
    if len(text) > MAX_LENGTH:
        raise BadExpression(f"longer than {MAX_LENGTH} letters")
    if not LETTERS.fullmatch(text):
        raise BadExpression("only numbers, + - * / // % ** and brackets are known")
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadExpression("not an expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> Fraction:
    """Return the value of a node of the tree, whose depth is bounded by the length of the text."""
    match node:
        case ast.Constant(value=bool() | complex()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(repr(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            try:
                return _bounded(Fraction(OPERATORS[type(op)](_value(left), _value(right))))
            except ZeroDivisionError:
                raise BadExpression("division by zero") from None
    raise BadExpression("only numbers, + - * / // % ** and brackets are known")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power; raise ``BadExpression`` if it is too large, which is known before it is calculated."""
    if exponent.denominator != 1:
        raise BadExpression("an exponent has to be a whole number")
    if base == 0 and exponent < 0:
        raise BadExpression("division by zero")
    if abs(base) not in (0, 1) and _bits(base) * abs(exponent.numerator) > 2 * MAX_BITS:
        raise BadExpression("too large")
    return _bounded(Fraction(base**exponent.numerator))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise BadExpression("too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
