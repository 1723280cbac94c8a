"""Bugs as changes of a function's syntax tree, of the kinds that people make."""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}

Place = tuple[str, int | None]  # a field of a node; its index where the field is a list


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of a kind: ``Mutation("comparison", 17, ("ops", 0), new)`` replaces a part of the 17th node."""

    kind: str
    node: int  # in the order of ``ast.walk``
    place: Place
    new: Callable[[ast.AST], ast.AST | None]  # of the part that is there now; None: nothing

    def applied(self, function: ast.FunctionDef) -> ast.FunctionDef:
        """Return the function with the bug; the argument is not changed."""
        changed = copy.deepcopy(function)
        node = list(ast.walk(changed))[self.node]
        field, index = self.place
        if index is None:
            setattr(node, field, self.new(getattr(node, field)))
        else:
            parts = getattr(node, field)
            new = self.new(parts[index])
            parts[index : index + 1] = [] if new is None else [new]
        return ast.fix_missing_locations(changed)


def mutations(function: ast.FunctionDef) -> list[Mutation]:
    """Return all known changes of a function in a fixed order; some may have no visible effect."""
    skipped = _unread(function)
    names = sorted({n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                   | {a.arg for a in function.args.args})  # fmt: skip
    found = []
    for number, node in enumerate(ast.walk(function)):
        if id(node) not in skipped:
            found += [Mutation(kind, number, place, new) for kind, place, new in _of(node, names, skipped)]
    return found


def _unread(function: ast.FunctionDef) -> set[int]:
    """Return the ids of nodes without effect in Python: docstring and annotations."""
    annotations = [a.annotation for a in function.args.args] + [function.returns]
    annotations += [n.annotation for n in ast.walk(function) if isinstance(n, ast.AnnAssign)]
    roots = [function.body[0], *(a for a in annotations if a is not None)]
    return {id(node) for root in roots for node in ast.walk(root)}


Change = tuple[str, Place, Callable[[ast.AST], ast.AST | None]]


def _of(node: ast.AST, names: list[str], skipped: set[int]) -> Iterator[Change]:
    """Yield the changes within one node."""
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                yield "comparison", ("ops", index), _always(COMPARISONS[type(op)]())
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield "operator", ("op", None), _always(OPERATORS[type(op)]())
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield "operator", ("op", None), _always(OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield "logic", ("op", None), _always(ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.If() | ast.While() | ast.IfExp():
            yield "negation", ("test", None), _negated
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield "call", ("func", None), _always(ast.Name(CALLS[name], ast.Load()))
        case _:
            pass
    yield from _operands(node, names)
    yield from _statements(node, skipped)


def _operands(node: ast.AST, names: list[str]) -> Iterator[Change]:
    """Yield changes of the numbers, names and arguments in a node."""
    for field, value in ast.iter_fields(node):
        for index, part in enumerate(value) if isinstance(value, list) else [(None, value)]:
            match part:
                case ast.Constant(value=int() as number) if not isinstance(number, bool):
                    for other in (number + 1, number - 1):
                        yield "off by one", (field, index), _always(ast.Constant(other))
                case ast.Name(id=name, ctx=ast.Load()) if name in names and field != "func":
                    for another in (known for known in names if known != name):
                        yield "name", (field, index), _always(ast.Name(another, ast.Load()))
                case ast.Call(args=[first, second]) if ast.dump(first) != ast.dump(second):
                    yield "swapped arguments", (field, index), _swapped
                case _:
                    pass


def _statements(node: ast.AST, skipped: set[int]) -> Iterator[Change]:
    """Yield changes of the statements in a block."""
    for field in ("body", "orelse"):
        held = getattr(node, field, None)
        block = held if isinstance(held, list) else []
        for index, statement in enumerate(block):
            if id(statement) in skipped:
                continue
            match statement:
                case ast.Return(value=value) if value is not None:
                    yield "missing return", (field, index), _always(ast.Expr(value))
                case ast.AugAssign() | ast.Expr() if len(block) > 1:
                    yield "missing statement", (field, index), lambda _: None
                case ast.If(orelse=[], body=[only]):
                    yield "missing condition", (field, index), _always(only)
                case _:
                    pass


def _always(new: ast.AST) -> Callable[[ast.AST], ast.AST]:
    """Return a function that ignores its argument and returns a copy of ``new``."""
    return lambda _: copy.deepcopy(new)


def _negated(test: ast.AST) -> ast.AST:
    assert isinstance(test, ast.expr), "a condition"
    return ast.UnaryOp(ast.Not(), test)


def _swapped(call: ast.AST) -> ast.AST:
    assert isinstance(call, ast.Call), "with two arguments"
    return ast.Call(call.func, call.args[::-1], call.keywords)
