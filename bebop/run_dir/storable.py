"""Plain values that a checkpoint can store: a job with other values is refused before it starts.

Rows of a parquet file and questions of an environment are stored in checkpoints whole, so that reward and environment
see the same values after a resume. This module knows the types without torch; ``state_codec`` writes them.
"""

import base64
import datetime
import json
import sys
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np

from bebop.errors import UserError

DEEPEST = 100  # levels of lists and mappings; each needs several of Python's thousand levels of recursion
# Types of arrays, by their names in numpy.
ARRAYS = (
    "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16", "uint32", "uint64",
)  # fmt: skip


def _zoned(value: datetime.datetime | datetime.time) -> list[Any]:
    """Return the time in ISO 8601, the name of its zone if it has one, and ``fold`` (which of two equal hours)."""
    if isinstance(value.tzinfo, ZoneInfo):
        return [value.replace(tzinfo=None).isoformat(), value.tzinfo.key, value.fold]
    return [value.isoformat(), None, value.fold]


def _datetime(text: str, zone: str | None, fold: int) -> datetime.datetime:
    made = datetime.datetime.fromisoformat(text).replace(fold=fold)
    return made if zone is None else made.replace(tzinfo=ZoneInfo(zone))


def _time(text: str, zone: str | None, fold: int) -> datetime.time:
    made = datetime.time.fromisoformat(text).replace(fold=fold)
    return made if zone is None else made.replace(tzinfo=ZoneInfo(zone))


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# For each type: its name in JSON, the function that splits a value into parts, and the one that rebuilds it.
Atom = tuple[str, Callable[[Any], list[Any]], Callable[..., Any]]
ATOMS: Final[dict[type, Atom]] = {
    datetime.datetime: ("datetime", _zoned, _datetime),
    datetime.time: ("time", _zoned, _time),
    datetime.date: ("date", lambda value: [value.isoformat()], datetime.date.fromisoformat),
    datetime.timedelta: ("timedelta", lambda d: [d.days, d.seconds, d.microseconds], datetime.timedelta),
    Decimal: ("decimal", lambda value: [str(value)], Decimal),
    uuid.UUID: ("uuid", lambda value: [str(value)], uuid.UUID),
    bytes: (
        "bytes",
        lambda value: [base64.b64encode(value).decode()],
        _bytes,
    ),
}
SETS: Final[dict[type, str]] = {set: "set", frozenset: "frozenset"}


def atom(value: Any) -> dict[str, list[Any]] | None:
    """Return a value of a type in ``ATOMS`` as JSON; None for any other, and for a time in a zone without a name."""
    if type(value) not in ATOMS:
        return None
    zone = getattr(value, "tzinfo", None)
    if zone is not None and (type(zone) not in (ZoneInfo, datetime.timezone) or getattr(zone, "key", "") is None):
        return None
    name, parts, _ = ATOMS[type(value)]
    return {name: parts(value)}


def in_order(parts: list[Any]) -> list[Any]:
    """Return the members of a set as JSON, in an order that does not depend on the process."""
    return sorted(parts, key=json.dumps)


def check_keepable(value: Any, where: str) -> None:
    """Raise ``UserError`` for the first value inside ``value`` that no checkpoint can store; ``where`` starts the
    message.
    """
    found = _unkept(value, "", 0)
    if found is None:
        return
    place, other, depth = found
    if depth > DEEPEST:
        raise UserError(f"{where} is nested too deeply: give one of at most {DEEPEST} levels")
    kind = f"{type(other).__module__}.{type(other).__qualname__}".removeprefix("builtins.")
    raise UserError(
        f"{where}: {place or 'it'} is {str(other)[:40]!r}, a {kind}, which no checkpoint can hold: "
        "give texts, numbers, bytes, dates, times, arrays, or lists, sets and mappings of them"
    )


def _unkept(value: Any, path: str, depth: int) -> tuple[str, Any, int] | None:
    """Return the first inner value that no checkpoint can store, with its place and depth; None if there is none."""
    if depth > DEEPEST:
        return path, value, depth
    if value is None or type(value) in (bool, int, str, float) or atom(value) is not None:
        return None
    inner: Any
    if type(value) in (list, tuple):
        inner = ((f"{path}[{i}]", one) for i, one in enumerate(value))
    elif type(value) in SETS:
        inner = ((path, one) for one in value)
    elif isinstance(value, dict):
        inner = (pair for k, v in value.items() for pair in ((path, k), (f"{path}.{k}" if path else str(k), v)))
    elif isinstance(value, np.ndarray | np.generic):
        return None if value.dtype.name in ARRAYS or isinstance(value, np.str_) else (path, value, depth)
    else:
        torch = sys.modules.get("torch")  # if it is not imported, no value is a tensor
        return None if torch is not None and type(value) is torch.Tensor else (path, value, depth)
    return next(filter(None, (_unkept(one, place, depth + 1) for place, one in inner)), None)
