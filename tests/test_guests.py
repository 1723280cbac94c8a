"""A guest is files of its own and a line in each registry: nothing else in the project knows its name."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from bebop.systems import PARTS, SYSTEMS
from tests.tree import ROOT, files

GUESTS = ("firp", "pipo")
# Options of systems and parts, what they count, the papers; and what is written for people.
REGISTRIES = ("bebop/options.py", "bebop/catalogue.py", "recipes/reproduce/claims.py")
REGISTRIES += ("pyproject.toml",)  # who may import whom
REGISTRIES += ("recipes/reproduce/frontier/arms.py",)  # systems that are compared at several settings
WRITTEN = (".md", ".json", ".svg")


def naming(guest: str, texts: Mapping[str, str]) -> list[str]:
    """Files that name a guest and are neither its own nor a registry nor a document."""
    own = re.compile(rf"(^|[/_]){guest}([_./]|$)")
    return [
        name
        for name, text in texts.items()
        if re.search(guest, text, re.IGNORECASE)
        and not (name.startswith("tests/") or name in REGISTRIES or name.endswith(WRITTEN) or own.search(name))
    ]


def texts(paths: Iterable[Path]) -> dict[str, str]:
    """Files that can be read as text."""
    found = {}
    for path in paths:
        try:
            found[path.as_posix()] = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found


@pytest.mark.parametrize("guest", GUESTS)
def test_nothing_but_its_own_files_and_registries_names_a_guest(guest: str) -> None:
    tree = texts(files())
    assert naming(guest, tree) == []
    assert "bebop/systems/base.py" in tree and "rollout/target.py" in tree and ".gitignore" in tree


@pytest.mark.parametrize("guest", [guest for guest in GUESTS if guest in PARTS])
def test_a_guest_is_in_the_registries(guest: str) -> None:
    assert any(guest in system.needs for system in SYSTEMS.values())
    assert any(naming("elsewhere", {"a.py": "elsewhere"})), "the test can fail"
    files_of = ("bebop/systems/{}/network.py", "trainer/{}_loss.py", "recipes/{}/x.py")
    own = {name.format(guest): guest for name in files_of}
    assert naming(guest, own) == []
    other = {"rollout/target.py": f"# as {guest.upper()} does", "trainer/x.py": guest, f"trainer/{guest}x.py": guest}
    assert naming(guest, other) == [*other]
