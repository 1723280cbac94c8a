"""A guest is files of its own and a line in each registry: nothing else in the project knows its name.

A system that needs no trained part is a folder alone: the last test adds one.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from bebop import run, systems
from bebop.config.job import DecodingConfig
from bebop.systems import PARTS, SYSTEMS
from tests.rollout.test_exactness import FEW, Case, check
from tests.tree import ROOT, files

GUESTS = ("firp", "pipo")
# What systems and parts count, the papers; and what is written for people.
REGISTRIES = ("bebop/metrics/catalogue.py", "recipes/reproduce/claims.py", "recipes/reproduce/scope.py")
REGISTRIES += ("pyproject.toml", "docs/site/mkdocs.yml")  # who may import whom; the navigation
REGISTRIES += ("recipes/reproduce/frontier/arms.py",)  # systems that are compared at several settings
WRITTEN = (".md", ".json", ".svg")
COMPARED = "recipes/reproduce/real_systems/"  # a study of all of them side by side


def naming(guest: str, texts: Mapping[str, str]) -> list[str]:
    """Files that name a guest and are neither its own nor a registry nor a document."""
    own = re.compile(rf"(^|[/_]){guest}([_./]|$)")
    return [
        name
        for name, text in texts.items()
        if re.search(guest, text, re.IGNORECASE)
        and not (
            name.startswith(("tests/", COMPARED)) or name in REGISTRIES or name.endswith(WRITTEN) or own.search(name)
        )
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
    assert "bebop/systems/base.py" in tree and "rollout/slots.py" in tree and ".gitignore" in tree


@pytest.mark.parametrize("guest", [guest for guest in GUESTS if guest in PARTS])
def test_a_guest_is_in_the_registries(guest: str) -> None:
    assert any(guest in system.needs for system in SYSTEMS.values())
    assert any(naming("elsewhere", {"a.py": "elsewhere"})), "the test can fail"
    files_of = ("bebop/systems/{}/network.py", "trainer/{}_loss.py", "recipes/{}/x.py")
    own = {name.format(guest): guest for name in files_of}
    assert naming(guest, own) == []
    other = {"rollout/slots.py": f"# as {guest.upper()} does", "trainer/x.py": guest, f"trainer/{guest}x.py": guest}
    assert naming(guest, other) == [*other]


SYSTEM = """
from dataclasses import dataclass
from bebop.systems.speculative import SpeculativeSystem

@dataclass(frozen=True, kw_only=True)
class RepeatSystem(SpeculativeSystem):
    drafter_name: str = "repeat"
    sampled: bool = False

    def drafter(self):
        from bebop.systems.repeat.decoding import RepeatDrafter
        return RepeatDrafter

SYSTEMS = (RepeatSystem(name="repeat", summary="drafts the newest tokens once more"),)
"""
DRAFTER = """
import torch
from bebop.rollout.decoding.base import Draft
from bebop.rollout.decoding.ngram import NgramDrafter

class RepeatDrafter(NgramDrafter):
    def propose(self, rows, length):
        length.start(rows)
        newest = rows.sizes[:, None] + torch.arange(-length.limit, 0, device=rows.last.device)
        return Draft(tokens=rows.context().gather(1, newest.clamp_min(0)), probs=None)
"""


def test_a_new_system_is_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repeat").mkdir()
    (tmp_path / "repeat" / "__init__.py").write_text(SYSTEM)
    (tmp_path / "repeat" / "decoding.py").write_text(DRAFTER)
    monkeypatch.setattr(systems, "__path__", [*systems.__path__, str(tmp_path)])
    assert {system.name for system in systems.find_systems()} - set(SYSTEMS) == {"repeat"}
    for system in systems.find_systems():
        monkeypatch.setitem(SYSTEMS, system.name, system)
    assert run.main(["--cfg", "decoding.system=repeat", "decoding.draft_tokens=2"]) == 0
    check(Case(decoding=DecodingConfig(system="repeat", draft_tokens=2), prompts=((0, 1, 2),)), FEW)


def test_systems_are_read_without_torch() -> None:
    code = "import sys, bebop.systems; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_system_has_a_readme_that_names_files_that_there_are() -> None:
    for folder in (file.parent for file in (ROOT / "bebop/systems").glob("*/__init__.py")):
        text = (folder / "README.md").read_text()
        assert len(text.splitlines()) <= 60 and "**Paper" in text and "**Tests.**" in text, folder
        named = [folder / name for name in re.findall(r"^\| `([\w./]+)` \|", text, re.MULTILINE)]
        named += [ROOT / name for name in re.findall(r"`((?:tests|recipes|benchmarks)/[\w/.]+\.\w+)`", text)]
        assert [path for path in named if not path.is_file()] == []
