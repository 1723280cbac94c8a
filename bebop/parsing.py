"""A setting with its meaning and limits, and a mapping that becomes a dataclass of settings.

``setting`` is the one source of what ``--help GROUP``, ``docs/settings.md`` and the checks say. Every value that a user
can get wrong raises ``UserError`` in one line with what is allowed.
"""

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

from bebop.errors import UserError

T = TypeVar("T")
LARGEST = 1 << 31  # of any whole number: what 32-bit counters and C take
MOST = 4096  # processes, threads
MAX_SEED = 1 << 23  # a rollout's 64-bit seed is this one shifted by 40 bits, plus the answer's number
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}


@dataclass(frozen=True, slots=True)
class Limit:
    """Which values of its type a setting may have; None is not asked."""

    holds: Callable[[Any], bool]
    words: str  # ends a line of refusal: "give 1 or more"


def at_least(low: float, means: str = "", finite: bool = True) -> Limit:
    """``low`` or more; ``means``: what ``low`` itself stands for."""
    words = f"give {low} ({means}) or more" if means else f"give {low} or more"
    return Limit(lambda value: low <= value and (not finite or value < math.inf), words)


def above(low: float, finite: bool = True, unit: str = "") -> Limit:
    """More than ``low``; ``unit``: of what."""
    words = f"give a number{f' of {unit}' * bool(unit)} above {low}"
    return Limit(lambda value: low < value and (not finite or value < math.inf), words)


def within(low: float, high: float, words: str = "") -> Limit:
    """From ``low`` to ``high``, both included."""
    return Limit(lambda value: low <= value <= high, words or f"give a number from {low} to {high}")


def choice(literal: object) -> Limit:
    """One of the values of a ``Literal`` type."""
    return Limit(lambda value: value in get_args(literal), f"choose one of {', '.join(map(str, get_args(literal)))}")


FROM_0_BELOW_1 = Limit(lambda value: 0 <= value < 1, "give a number from 0 to below 1")
ABOVE_0_TO_1 = Limit(lambda value: 0 < value <= 1, "give a number above 0 and at most 1")
BETAS = Limit(lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1")
NOT_EMPTY = Limit(lambda text: bool(text.strip()), "give a text, or leave it out")


def setting(default: Any, meaning: str, limit: Limit | None = None, *, only: str = "", formerly: str = "") -> Any:
    """A field of a configuration dataclass; a mutable ``default`` is a function that makes it.

    Args:
        default: where nothing is given.
        meaning: one line.
        limit: choices of a ``Literal`` type need none.
        only: the choice in ``conf/`` without which the setting cannot be given.
        formerly: the name it had; it is taken with a warning.
    """
    metadata = {"meaning": meaning, "limit": limit, "only": only, "formerly": formerly}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known of one setting."""

    name: str  # in full: rollout.sampling.top_p
    kind: Any  # its annotated type
    default: Any
    meaning: str
    limit: Limit | None
    only: str
    formerly: str


def settings(cls: Any, where: str = "", only: str = "", values: Any = None) -> Iterator[Setting]:
    """Every setting of a configuration dataclass and of those inside, with the defaults that it gives to them."""
    hints, values = typing.get_type_hints(cls), cls() if values is None else values
    for field in dataclasses.fields(cls):
        kind, known, value = hints[field.name], field.metadata, getattr(values, field.name)
        if field.default == "auto":  # which some dataclasses settle as they are made
            value = field.default
        only_here = known.get("only", "") or only
        if dataclasses.is_dataclass(kind):
            yield from settings(kind, f"{where}{field.name}.", only_here, value)
            continue
        rest = {"meaning": known["meaning"], "limit": known["limit"] or _choices(kind), "only": only_here}
        name, formerly = f"{where}{field.name}", known["formerly"] and where + known["formerly"]
        yield Setting(name=name, kind=kind, default=value, formerly=formerly, **rest)


def _choices(kind: Any) -> Limit | None:
    """Those of a ``Literal``, or of one that may be None."""
    kinds = [k for k in (kind, *get_args(kind)) if get_origin(k) is Literal]
    return choice(kinds[0]) if kinds else None


@cache
def _limits(cls: Any) -> dict[str, Limit]:
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
    limits = {field.name: field.metadata.get("limit") or _choices(hints[field.name]) for field in fields}
    return {name: limit for name, limit in limits.items() if limit is not None}


def check_settings(config: Any, section: str = "") -> None:
    """Hold every value of a configuration dataclass against its limit; ``section`` ends in a dot."""
    kind: Any = type(config)
    for name, limit in _limits(kind).items():
        value = getattr(config, name)
        shown = list(value) if isinstance(value, tuple) else value
        check(value is None or limit.holds(value), section + name, shown, limit.words)


def check(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise ``UserError`` naming the setting, its value and what is allowed, unless ``condition`` holds."""
    if not condition:
        raise UserError(f"{name}={value!r} is not possible: {allowed}")


def similar(wrong: str, known: Iterable[str]) -> str:
    """``did you mean a.b or c.b? `` for a name that does not exist: those of the same or a like last part, if any."""
    names: dict[str, list[str]] = {}  # last part -> full names
    for name in known:
        if not wrong.startswith(f"{name}."):
            names.setdefault(name.rpartition(".")[2], []).append(name)
    group, _, last = wrong.rpartition(".")
    close = [name for word in difflib.get_close_matches(last, names, n=1, cutoff=0.7) for name in names[word]]
    near = [n for n in close if difflib.SequenceMatcher(None, n.rpartition(".")[0], group).ratio() > 0.6]
    found = near or close  # the group may be wrong as well, or not be there
    return f"did you mean {' or '.join(found[:3])}? " if found else ""


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
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    now = {field.metadata.get("formerly"): field.name for field in fields}  # folders of older runs have the old names
    arguments = {}
    for given, value in values.items():
        name = now.get(given, given)
        word = f"no such setting; {similar(where + name, [where + n for n in names])}there are {', '.join(names)}"
        check(name in names, f"{where}{name}", value, word)
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
        return _one_of(get_args(hint), value, where)
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


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """``value`` as one of several types: None, a word of a ``Literal``, or else the first other one."""
    literal = [kind for kind in kinds if get_origin(kind) is Literal]
    words = [word for kind in literal for word in get_args(kind)]
    if (value is None and type(None) in kinds) or value in words:
        return value
    kind = next((k for k in kinds if k not in (*literal, type(None))), *literal)
    known = not words or kind in (*literal, str) or not isinstance(value, str)
    check(known, where, value, f"{' or '.join([WANTED.get(kind, 'a list'), *words])} is wanted here")
    return _convert(kind, value, where)
