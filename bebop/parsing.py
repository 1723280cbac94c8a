"""A mapping becomes a configuration dataclass, and the checks that dataclasses make of their values.

Every value that a user can get wrong raises ``UserError`` in one line with what is allowed.
"""

import dataclasses
import math
import os
import types
import typing
from typing import Any, Literal, TypeVar, get_args, get_origin

from bebop.errors import UserError

T = TypeVar("T")
LARGEST = 1 << 31  # of any whole number: what 32-bit counters and C take
MOST = 4096  # processes, threads
MAX_SEED = 1 << 23  # a rollout's 64-bit seed is this one shifted by 40 bits, plus the answer's number
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}


def check(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise ``UserError`` naming the setting, its value and what is allowed, unless ``condition`` holds."""
    if not condition:
        raise UserError(f"{name}={value!r} is not possible: {allowed}")


def one_of(name: str, value: object, literal: object) -> None:
    """Check a value against the choices of a ``Literal`` type."""
    check(value in get_args(literal), name, value, "choose one of " + ", ".join(map(str, get_args(literal))))


def within(name: str, value: float, low: float, high: float, words: str = "") -> None:
    """Check that a number lies between two others, both included."""
    check(low <= value <= high, name, value, words or f"give a number from {low} to {high}")


def not_empty(name: str, value: str | None) -> None:
    """Check a text that may be left out and may not be empty."""
    check(value is None or bool(value.strip()), name, value, "give a text, or leave it out")


def readable_rows(name: str, path: str | None, needed: bool) -> None:
    """Check the path of a file of rows, whether it is ``needed`` or not."""
    check(not needed or bool(path), name, path, "source=file needs a .jsonl or .parquet file")
    if path is not None:
        check(os.path.isfile(path), name, path, "there is no such file")  # False, too, for names too long for a disk
        check(path.endswith((".jsonl", ".parquet")), name, path, "the file must end in .jsonl or .parquet")
        check(os.access(path, os.R_OK), name, path, "give a file that this user may read")


def from_dict(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """Build a configuration dataclass from a mapping; unknown names and wrong types raise ``UserError``."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments = {}
    for name, value in values.items():
        check(name in names, f"{where}{name}", value, "no such setting; there are " + ", ".join(names))
        arguments[name] = _convert(hints[name], value, f"{where}{name}")
    try:
        return cls(**arguments)
    except UserError as error:
        # A section says its own name (sampling.top_p); which one it is, is known here (data.sampling.top_p).
        own = where.split(".")[-2] + "." if where else ""
        full = where + str(error).removeprefix(own) if own and str(error).startswith(own) else str(error)
        raise UserError(full) from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the annotated type: numbers widen, lists become tuples, mappings become dataclasses."""
    if dataclasses.is_dataclass(hint):
        check(isinstance(value, dict), where, value, "a mapping is wanted here")
        return from_dict(hint, value, where + ".")  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in get_args(hint):
            return None
        return _convert(next(t for t in get_args(hint) if t is not type(None)), value, where)
    if origin is Literal:
        # YAML reads on/off as booleans.
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
    if origin is tuple:
        check(isinstance(value, list | tuple), where, value, "a list is wanted here")
        kinds = get_args(hint)
        item = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
        check(len(item) == len(value), where, value, f"{len(item)} values are wanted here")
        return tuple(_convert(kind, v, where) for kind, v in zip(item, value, strict=True))
    if isinstance(value, int) and not isinstance(value, bool) and hint in (int, float):
        check(abs(value) <= LARGEST, where, value, f"give a number of at most {LARGEST}")
        return hint(value)
    wanted = origin or hint
    right = isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool)
    right = right and not (isinstance(value, float) and math.isnan(value))  # it would pass every comparison as False
    check(right, where, value, f"{WANTED[wanted]} is wanted here")
    return value
