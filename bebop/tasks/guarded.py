"""Verifiers that read an answer without evaluating it.

Nine of reasoning-gym's verifiers pass the answer to Python's ``eval``, in a scope that holds their own variables
(``oracle_answer`` is one) and the builtins, or to sympy's ``parse_expr``, which is ``eval`` with all of sympy. Readers
replace both here: ``literal`` knows Python's literals. ``algebra`` walks the syntax tree of a formula and builds it
from the functions listed below. Neither looks up a name anywhere else, whatever the answer says.
"""

import ast
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from sympy.parsing.sympy_parser import standard_transformations, stringify_expr

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(sympy, name)
    for name in (
        "sqrt cbrt root exp log ln Abs sign floor ceiling re im conjugate sin cos tan cot sec csc asin acos atan acot "
        "asec acsc atan2 sinh cosh tanh coth sech csch asinh acosh atanh acoth asech acsch sinc erf erfc Ei li Si Ci "
        "Min Max Rational Integral"
    ).split()
}
CONSTANTS: dict[str, Any] = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}
# Calls into which sympy rewrites a formula's numbers and names before evaluation; "5!" is factorial(5).
MADE: dict[str, Callable[..., Any]] = {"Integer": sympy.Integer, "Float": sympy.Float, "Symbol": sympy.Symbol}
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Mod: lambda a, b: a % b,
    ast.FloorDiv: lambda a, b: a // b,
}
# Names needed to build a sum of numbers, for math-verify, which reads 1/2 as an unevaluated sum.
CONSTRUCTORS = {name: getattr(sympy, name) for name in "Integer Float Rational Symbol Function Add Mul Pow".split()}
SCOPE = {**FUNCTIONS, **CONSTANTS, **MADE, "factorial": sympy.factorial}
MAX_BITS = 1 << 15  # maximum size of a power's result
MAX_FACTORIAL = 1000


class Refused(BaseException):
    """Answer that needs more than reading. Not an ``Exception``: verifiers catch those, some with a score above 0."""


def literal(text: str) -> Any:
    """Return the Python literal in ``text``; raise ``Refused`` for anything else, ``SyntaxError`` for bad syntax."""
    tree = ast.parse(text.strip(), mode="eval")
    try:
        return ast.literal_eval(tree)
    except ValueError as error:
        raise Refused(str(error)) from None


def algebra(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """Return the formula in ``text``, as sympy's ``parse_expr`` reads it; unknown names are symbols.

    Raises ``Refused`` if it uses anything but ``FUNCTIONS``, or if a power or factorial is too large.
    """
    known = dict(local_dict or {})
    code = stringify_expr(text, dict(known), SCOPE, standard_transformations)
    return _built(ast.parse(code.strip(), mode="eval").body, CONSTANTS | known)


def _built(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a node of a formula's syntax tree."""
    match node:
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_built(left, names), _built(right, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_built(left, names), _built(right, names))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_built(operand, names)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _built(operand, names)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() | int() as value)], keywords=[]) if (
            name in MADE
        ):
            return MADE[name](value)
        case ast.Call(func=ast.Name(id="factorial"), args=[operand], keywords=[]):
            return _factorial(_built(operand, names))
        case ast.Call(func=ast.Name(id=name), args=operands, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*[_built(operand, names) for operand in operands])
    raise Refused(f"{type(node).__name__} in a formula")


def _power(base: Any, exponent: Any) -> Any:
    """Return a power; raise ``Refused`` if the result is too large, as sympy evaluates powers of numbers at once."""
    if exponent.is_Rational:
        bits = sum(int(n.p).bit_length() + int(n.q).bit_length() for n in base.atoms(sympy.Rational))
        if bits * abs(exponent) > MAX_BITS:
            raise Refused("a power too big to be an answer")
    return base**exponent


def _factorial(number: Any) -> Any:
    if not (number.is_Integer and abs(number) <= MAX_FACTORIAL):
        raise Refused("a factorial too big to be an answer")
    return sympy.factorial(number)


def _refuse(*_: Any, **__: Any) -> Any:
    raise Refused("evaluation")


SAFE_SYMPY = types.SimpleNamespace(**{**vars(sympy), "parse_expr": algebra, "sympify": _refuse, "S": _refuse})
REPLACED: list[tuple[Any, Any]] = [(sympy.parse_expr, algebra), (sympy, SAFE_SYMPY), (sympy.sympify, _refuse)]
BUILTINS = {"eval": literal, "exec": _refuse, "compile": _refuse}


def guard_math_verify() -> None:
    """Limit the scope in which math-verify lets sympy evaluate sums of numbers to constructors."""
    import math_verify.parser

    scope = {**CONSTRUCTORS, "__builtins__": {}}
    math_verify.parser.parse_expr = functools.partial(sympy.parse_expr, global_dict=scope)


def _safe(value: Any) -> Any:
    return next((safe for unsafe, safe in REPLACED if value is unsafe), value)


def guard(dataset: Any) -> Any:
    """Return the data set with guarded verifiers, including those of a mixture's parts: they read instead of
    evaluating.
    """
    from reasoning_gym.composite import CompositeDataset  # math-verify's child process can do without: 1.9 s

    if isinstance(dataset, CompositeDataset):
        for part in dataset.datasets.values():
            guard(part)
    own = type(dataset).score_answer
    safe = {name: _safe(value) for name, value in own.__globals__.items()}
    made = types.FunctionType(own.__code__, {**safe, **BUILTINS}, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    dataset.score_answer = types.MethodType(made, dataset)
    return dataset
