"""Define settings: fields of configuration dataclasses, and the conversion of a mapping to such a dataclass.

``setting`` is the one home of a setting: its default, meaning, limits, and whether a resume may change it. Checks,
``--help GROUP``, ``docs/settings.md`` and the rules of a resume are derived from it. Every value that a user can get
wrong raises ``UserError`` in one line that names the setting, the value and what is allowed.
"""

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from bebop.errors import UserError

T = TypeVar("T")
MAX_INT = 1 << 31  # 32-bit counters and C take no larger whole number
MAX_BYTES = 1 << 50  # of settings whose names end in _bytes
MAX_PROCESSES = 4096  # or threads
MAX_SEED = 1 << 23  # a completion's 64-bit seed is this one shifted by 40 bits, plus the number of the completion
TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}


@dataclass(frozen=True, slots=True)
class Limit:
    """Allowed values of a setting within its type; None is always allowed."""

    holds: Callable[[Any], bool]
    words: str  # ends a line of refusal: "give 1 or more"


def at_least(low: float, means: str = "", finite: bool = True) -> Limit:
    """Allow ``low`` or more; ``means`` explains the value ``low`` itself."""
    words = f"give {low} ({means}) or more" if means else f"give {low} or more"
    return Limit(lambda value: low <= value and (not finite or value < math.inf), words)


def above(low: float, finite: bool = True, unit: str = "") -> Limit:
    """Allow numbers above ``low``; ``unit`` names their unit."""
    words = f"give a number{f' of {unit}' * bool(unit)} above {low}"
    return Limit(lambda value: low < value and (not finite or value < math.inf), words)


def within(low: float, high: float, words: str = "") -> Limit:
    """Allow ``low`` to ``high``, both included."""
    return Limit(lambda value: low <= value <= high, words or f"give a number from {low} to {high}")


def choice(names: Iterable[Any]) -> Limit:
    """Allow one of ``names``."""
    known = tuple(names)
    return Limit(lambda value: value in known, f"choose one of {', '.join(map(str, known))}")


NOT_NEGATIVE, POSITIVE = at_least(0), at_least(1)
SHARE = within(0, 1)
FROM_0_BELOW_1 = Limit(lambda value: 0 <= value < 1, "give a number from 0 to below 1")
ABOVE_0_TO_1 = Limit(lambda value: 0 < value <= 1, "give a number above 0 and at most 1")
BETWEEN_0_AND_1 = Limit(lambda value: 0 < value < 1, "give a number between 0 and 1")
NOT_EMPTY = Limit(lambda text: bool(text.strip()), "give a text, or leave it out")


def setting(default: Any, meaning: str, limit: Limit | None = None, *, only: str = "", fixed: str | None = None) -> Any:
    """Return a field of a configuration dataclass.

    Args:
        default: default value; for a mutable value, the function that makes it.
        meaning: one line.
        limit: allowed values; a ``Literal`` type needs none.
        only: the choice in ``conf/`` without which the setting cannot be given.
        fixed: why a resume must not change it; empty: it may; None: the section decides, which allows it by default.
    """
    known = {"meaning": meaning, "limit": limit, "only": only, "fixed": fixed}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=known)
    return dataclasses.field(default=default, metadata=known)


def section(default: Callable[[], Any], *, only: str = "", fixed: str | None = None) -> Any:
    """Return a field that holds a configuration dataclass.

    ``only`` and ``fixed`` apply to those of its settings that do not define them.
    """
    return dataclasses.field(default_factory=default, metadata={"only": only, "fixed": fixed})


class Settings:
    """Base of configuration dataclasses: every instance has valid values, or its construction raises ``UserError``."""

    __slots__ = ()
    SECTION: ClassVar[str] = ""  # begins the full names of its settings, and ends in a dot

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, limit in _limits(cls).items():
            value = getattr(self, name)
            shown = list(value) if isinstance(value, tuple) else value
            check(value is None or limit.holds(value), self.SECTION + name, shown, limit.words)
        self._validate()

    def _validate(self) -> None:
        """Check settings against one another; each already satisfies its own limit."""

    def require(self, condition: bool, name: str, allowed: str) -> None:
        """Refuse the value of the setting ``name`` unless ``condition`` holds; a dot leads into a section."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        check(condition, self.SECTION + name, list(value) if isinstance(value, tuple) else value, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Description of one setting."""

    name: str  # in full: rollout.sampling.top_p
    kind: Any  # its annotated type
    default: Any
    meaning: str
    limit: Limit | None
    only: str
    fixed: str


def settings(cls: Any, where: str = "", only: str = "", fixed: str = "", values: Any = None) -> Iterator[Setting]:
    """Yield every setting of a configuration dataclass and of its sections, with the effective defaults."""
    hints, values = typing.get_type_hints(cls), cls() if values is None else values
    for field in dataclasses.fields(cls):
        kind, known, value = hints[field.name], field.metadata, getattr(values, field.name)
        own = known.get("fixed")
        of_field = {"only": known.get("only") or only, "fixed": fixed if own is None else own}
        if dataclasses.is_dataclass(kind):
            yield from settings(kind, f"{where}{field.name}.", values=value, **of_field)
            continue
        if field.default == "auto":  # some dataclasses resolve it on construction
            value = field.default
        limit = known["limit"] or _choices(kind)
        name, meaning = f"{where}{field.name}", known["meaning"]
        yield Setting(name=name, kind=kind, default=value, meaning=meaning, limit=limit, **of_field)


def _choices(kind: Any) -> Limit | None:
    """Return the choices of a ``Literal``, also in a union with None."""
    kinds = [k for k in (kind, *get_args(kind)) if get_origin(k) is Literal]
    return choice(get_args(kinds[0])) if kinds else None


@cache
def _limits(cls: Any) -> dict[str, Limit]:
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
    limits = {field.name: field.metadata.get("limit") or _choices(hints[field.name]) for field in fields}
    return {name: limit for name, limit in limits.items() if limit is not None}


def lookup(tree: Any, name: str, default: Any = None) -> Any:
    """Return the value of a setting by its full name from nested mappings; ``default`` if it is missing."""
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return default
        tree = tree[part]
    return tree


def plain(config: Any) -> dict[str, Any]:
    """Return a configuration dataclass as nested mappings and lists that survive YAML and JSON."""
    tree: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return tree


def resume_refusals(before: Mapping[str, Any], config: Any) -> list[str]:
    """Return one sentence for each setting that a resume must not change.

    Some settings *name* something, such as the weights of a model or a file of questions. ``identity.json`` checks
    these by content, so the folders and files may move.

    Args:
        before: the stored configuration of the run; settings that it lacks are not compared.
        config: the dataclass to resume with.
    """
    now, refused = plain(config), []
    for one in settings(type(config)):
        value = lookup(now, one.name)
        was = lookup(before, one.name, value)
        if one.fixed and was != value:
            refused.append(f"{one.name} cannot change from {was!r} to {value!r} in a run ({one.fixed})")
    return refused


def check(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise ``UserError`` naming the setting, its value and what is allowed, unless ``condition`` holds."""
    if not condition:
        raise UserError(f"{name}={value!r} is not possible: {allowed}")


def similar(wrong: str, known: Iterable[str]) -> str:
    """Return ``did you mean a.b or c.b? `` for a name that does not exist; empty without a similar known name."""
    names: dict[str, list[str]] = {}  # last part -> full names
    for name in known:
        if not wrong.startswith(f"{name}."):
            names.setdefault(name.rpartition(".")[2], []).append(name)
    group, _, last = wrong.rpartition(".")
    close = [name for word in difflib.get_close_matches(last, names, n=1, cutoff=0.7) for name in names[word]]
    near = [n for n in close if difflib.SequenceMatcher(None, n.rpartition(".")[0], group).ratio() > 0.6]
    found = near or close  # the group may be wrong as well, or missing
    return f"did you mean {' or '.join(found[:3])}? " if found else ""


def readable_rows(name: str, path: str | None, needed: bool) -> None:
    """Check the path of a file of rows, which may be None unless it is ``needed``."""
    check(not needed or bool(path), name, path, "source=file needs a .jsonl or .parquet file")
    if path is not None:
        check(os.path.isfile(path), name, path, "there is no such file")  # False, too, for names too long for a disk
        check(path.endswith((".jsonl", ".parquet")), name, path, "the file must end in .jsonl or .parquet")
        check(os.access(path, os.R_OK), name, path, "give a file that this user may read")


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build a configuration dataclass from a mapping; unknown names and wrong types raise ``UserError``."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments = {}
    for name, value in values.items():
        word = f"no such setting; {similar(where + name, [where + n for n in names])}there are {', '.join(names)}"
        check(name in names, f"{where}{name}", value, word)
        arguments[name] = _convert(hints[name], value, f"{where}{name}")
    try:
        return cls(**arguments)
    except UserError as error:
        # A section knows its own name (sampling.top_p); only this call knows the full one (data.sampling.top_p).
        own, text = getattr(cls, "SECTION", ""), str(error)
        raise UserError(where + text.removeprefix(own) if own and text.startswith(own) else text) from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the annotated type: integers become floats, lists tuples, and mappings dataclasses."""
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
        most = MAX_BYTES if where.endswith("_bytes") else MAX_INT
        check(abs(value) <= most, where, value, f"give a number of at most {most}")
        return hint(value)
    wanted = origin or hint
    right = isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool)
    right = right and not (isinstance(value, float) and math.isnan(value))  # it would pass every comparison as False
    check(right, where, value, f"{TYPE_WORDS[wanted]} is wanted here")
    return value


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return ``value`` as one of several types: None, a word of a ``Literal``, or else the first other type."""
    literal = [kind for kind in kinds if get_origin(kind) is Literal]
    words = [word for kind in literal for word in get_args(kind)]
    if (value is None and type(None) in kinds) or value in words:
        return value
    kind = next((k for k in kinds if k not in (*literal, type(None))), *literal)
    if isinstance(value, list | tuple):
        kind = next((k for k in kinds if get_origin(k) is tuple), kind)
    known = not words or kind in (*literal, str) or not isinstance(value, str)
    check(known, where, value, f"{' or '.join([TYPE_WORDS.get(kind, 'a list'), *words])} is wanted here")
    return _convert(kind, value, where)


# ---- options of a single decoding system or trained part


class SystemOptions(Settings):
    """Base of the options of a decoding system."""

    __slots__ = ()
    SECTION = "decoding.options."


class TrainingOptions(Settings):
    """Base of the options for the training of a part."""

    __slots__ = ()
    SECTION = "options."


def parse_options(cls: type | None, values: Mapping[str, Any], section: str, owner: str) -> Any:
    """Return the options ``cls`` of a system or part from the given values; None if it has no options.

    ``section``: prefix of the option names; ``owner``: name of the system or part in a refusal.
    """
    if cls is None:
        check(not values, section.removesuffix("."), dict(values), f"{owner} has no options")
        return None
    return from_dict(cls, values, section)
