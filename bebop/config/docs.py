"""Describe the settings to readers: ``--help GROUP``, and ``python -m bebop.config.docs`` for docs/settings.md."""

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, get_args, get_origin

from bebop.command import run_main
from bebop.config.adapt import AdaptConfig
from bebop.config.compose import ROOTS, composed, groups, of_model
from bebop.config.fields import TYPE_WORDS, Setting, lookup, settings, similar
from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.systems import SYSTEMS

RESUMED = (JobConfig, AdaptConfig)  # configurations of commands that can be resumed
TITLE = """# Settings

Written by `python -m bebop.config.docs > docs/settings.md` from the dataclasses in `bebop/config/`. A resume may change
a setting unless the last column says `fixed`; `--help NAME` says why. See also [resuming.md](resuming.md).
"""


def asked(arguments: list[str]) -> str | None:
    """Return the group in ``--help GROUP``, empty for ``--help`` alone; None without a help option."""
    at = next((i for i, argument in enumerate(arguments) if argument in ("--help", "-h")), None)
    if at is None:
        return None
    following = arguments[at + 1 : at + 2]
    return "".join(name for name in following if "=" not in name and not name.startswith("-"))


def overview(cls: type) -> str:
    """Return the groups of a command, one per line, each followed by one line for each of its choices."""
    lines = []
    for name, section in _sections(cls).items():
        lines.append(f"  {name:11} {_summary(section)}\n")
        lines += [f"    {name + '=' + choice:28} {words}\n" for choice, words in _choices(name)]
    return "".join(lines)


def about(cls: type, group: str) -> str:
    """Return the settings of a group, or those that begin with a name; raise ``UserError`` if there are none."""
    members = [one for one in _settings(cls) if one.name == group or one.name.startswith(f"{group}.")]
    if not members:
        alone = [one.name for one in _settings(cls) if "." not in one.name]
        names = [*_sections(cls), *alone]
        close = similar(group, [*names, *(one.name for one in _settings(cls))])
        raise UserError(f"--help {group}: there is no such group; {close}there are {', '.join(names)}")
    section = _sections(cls).get(group)
    lines = [f"{group}: {_summary(section)}\n"] if section else []
    lines += [f"  {group + '=' + choice:28} {words}\n" for choice, words in _choices(group)] if section else []
    for one in members:
        lines.append(f"\n{one.name}={_shown(one.default)}\n    {_meaning(one)}\n    give {_allowed(one)}\n")
        if one.fixed and cls in RESUMED:
            lines.append(f"    fixed in a run: {one.fixed}\n")
    return "".join(lines)


def document() -> str:
    """Return the text of ``docs/settings.md``."""
    parts = [TITLE]
    for root, cls in ROOTS.items():
        parts.append(f"\n## `python -m bebop.{'run' if cls is JobConfig else root}`\n")
        known = {} if cls is JobConfig else _sections(JobConfig)
        described = {name for name, kind in _sections(cls).items() if known.get(name) is kind}
        rows = [one for one in _settings(cls) if one.name.split(".")[0] not in described]
        for group in dict.fromkeys(one.name.split(".")[0] if "." in one.name else "" for one in rows):
            section = _sections(cls).get(group)
            parts.append(f"\n### `{group}`\n\n{_summary(section)}\n" if section else "\n### Without a group\n")
            parts += ["\n" * bool(_choices(group)), *(f"- `{group}={c}`: {words}\n" for c, words in _choices(group))]
            mine = [one for one in rows if one.name.split(".")[0] == group or (not group and "." not in one.name)]
            table = [("setting", "default", "allowed", "meaning", "resume"), ("---",) * 5, *map(_row, mine)]
            parts += ["\n", *(f"| {' | '.join(row[: 4 + (cls in RESUMED)])} |\n" for row in table)]
    return "".join(parts)


def _row(one: Setting) -> tuple[str, ...]:
    return f"`{one.name}`", f"`{_shown(one.default)}`", _allowed(one), _meaning(one), "fixed" if one.fixed else ""


def _sections(cls: type) -> dict[str, type]:
    """Return the dataclass of each group."""
    hints = typing.get_type_hints(cls)
    return {name: kind for name, kind in hints.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


def _settings(cls: type) -> Iterator[Setting]:
    """Yield all settings, with the defaults of the command."""
    tree = composed([], next(root for root, described in ROOTS.items() if described is cls))
    for one in settings(cls):
        yield dataclasses.replace(one, default=lookup(tree, one.name, one.default))


def _summary(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0].replace("``", "")


def _choices(group: str) -> list[tuple[str, str]]:
    """Return the choices of a group with more than one, each with the first comment of its file."""
    there = groups().get(group, [])
    if group == "decoding":
        return [(name, SYSTEMS[name].summary) for name in there]
    files = resources.files("bebop.conf")
    first = {name: (files / group / f"{name}.yaml").read_text().partition("\n")[0] for name in there if len(there) > 1}
    return [(name, line.removeprefix("# ")) for name, line in first.items()]


def _meaning(one: Setting) -> str:
    """Return a setting's meaning, the choice that it requires, and its defaults that depend on the model."""
    others = [f"; {_shown(theirs[one.name])} with model={choice}" for choice, theirs in _models() if one.name in theirs]
    return one.meaning + (f"; for {one.name.split('.')[0]}={one.only}" if one.only else "") + "".join(others)


@cache
def _models() -> list[tuple[str, dict[str, Any]]]:
    """Return each choice of model with the settings that go with it in all commands."""
    return [(choice, of_model(choice) | of_model(choice, "adapt")) for choice in groups()["model"]]


def _shown(value: Any) -> str:
    """Return a value in command-line syntax."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _allowed(one: Setting) -> str:
    """Return the type and the limit in words."""
    union = get_origin(one.kind) in (types.UnionType, typing.Union)
    kind = next(k for k in get_args(one.kind) if k is not type(None)) if union else one.kind
    word = TYPE_WORDS.get(get_origin(kind) or kind, "a list")
    words = one.limit.words.removeprefix("give ").removeprefix("choose ") if one.limit else word
    words = words.removesuffix(", or leave it out")
    if words.startswith("a number"):
        words = word + words.removeprefix("a number")
    elif not words.startswith((word, "one of ")):
        words = f"{word}: {words}"
    return words + (", or null" if type(None) in get_args(one.kind) and "null" not in words else "")


def main(arguments: list[str]) -> int:
    """Print ``docs/settings.md``."""
    if arguments:
        raise UserError(f"{arguments[0]!r} is not wanted: python -m bebop.config.docs takes nothing")
    sys.stdout.write(document())
    return 0


if __name__ == "__main__":
    run_main(main)
