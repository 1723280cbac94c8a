"""Overrides that a run was started with, and those that it is resumed with, as one list.

The rule is Hydra's own: all in one line, the old ones first, later ones win. Three things are put right: a name that is
given twice where Hydra takes it once; a saved deletion before a new value; and values in a group that is chosen anew,
which belong to the former choice.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Parsed(Protocol):
    """What is needed of Hydra's ``Override``."""

    input_line: str | None
    key_or_group: str

    def is_add(self) -> bool:
        """``+name=``."""
        ...

    def is_force_add(self) -> bool:
        """``++name=``."""
        ...

    def is_delete(self) -> bool:
        """``~name``."""
        ...

    def value(self) -> object:
        """After the =."""
        ...


def merged(saved: Sequence[Parsed], new: Sequence[Parsed], choices: Mapping[str, object]) -> list[str]:
    """The texts of what stays of ``saved``, then ``new``; ``choices``: each group's choice where none is given."""
    before = dict(choices) | {o.key_or_group: o.value() for o in saved if o.key_or_group in choices}
    after = {o.key_or_group: o.value() for o in new if o.key_or_group in choices and not o.is_delete()}
    changed = tuple(f"{group}." for group, choice in after.items() if str(choice) != str(before[group]))
    kept = [
        old
        for old in saved
        if old.key_or_group not in after
        and not old.key_or_group.startswith(changed)
        and not any(_replaces(o, old) for o in new if o.key_or_group == old.key_or_group)
    ]
    return [o.input_line or "" for o in (*kept, *new)]


def _replaces(new: Parsed, old: Parsed) -> bool:
    """Whether the same name, given anew, makes an old override void, or impossible beside it."""
    if new.input_line == old.input_line:
        return True
    if isinstance(new.value(), dict) and isinstance(old.value(), dict):
        return False  # mappings are merged
    adds = new.is_add() or new.is_force_add()
    if old.is_delete():
        return not adds  # a plain value needs the name, which the deletion takes away
    if old.is_add() or old.is_force_add():
        return adds  # a plain value, and a deletion, need the name that the old one adds
    return not new.is_delete()
