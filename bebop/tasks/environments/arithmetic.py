"""A calculator for expressions that a policy writes: exact, of bounded size, and nothing but numbers.

The text is parsed and its tree walked; nothing is ever evaluated by Python, and letters are refused before that.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 200  # letters of an expression: Python's parser takes brackets of any depth that fits in
MOST_BITS = 512  # of a numerator or denominator, in every step
LETTERS = re.compile(r"[\d\s.+\-*/%()]+", re.ASCII)
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class BadExpression(Exception):
    """What is wrong with an expression, in words for who wrote it."""


def calculate(text: str) -> Fraction:
    """The value of an expression of numbers, ``+ - * / // % **`` and brackets; ``BadExpression``."""
    if len(text) > LONGEST:
        raise BadExpression(f"longer than {LONGEST} letters")
    if not LETTERS.fullmatch(text):
        raise BadExpression("only numbers, + - * / // % ** and brackets are known")
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadExpression("not an expression") from None
    return _value(tree.body)


def written(value: Fraction) -> str:
    """A number as it is told: ``42``, or ``7/3`` where it is none of the whole ones."""
    return str(value)


def _value(node: ast.expr) -> Fraction:
    """Of a node of the tree; at most as deep as the text is long."""
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
    """A power, if it can be written down: its size is known before it is worked out."""
    if exponent.denominator != 1:
        raise BadExpression("an exponent has to be a whole number")
    if base == 0 and exponent < 0:
        raise BadExpression("division by zero")
    if abs(base) not in (0, 1) and _bits(base) * abs(exponent.numerator) > 2 * MOST_BITS:
        raise BadExpression("too large")
    return _bounded(Fraction(base**exponent.numerator))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MOST_BITS:
        raise BadExpression("too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
