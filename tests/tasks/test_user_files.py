"""A file of the user's: run anew each time, with nothing left beside it."""

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from bebop.tasks import functions
from bebop.tasks.functions import load_file

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass, fields

@dataclass
class Row:
    text: str

WHERE, NAMES = __file__, [field.name for field in fields(Row)]
"""


@pytest.fixture(autouse=True)
def _bytecode_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def test_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.py"
    file.write_text(SOURCE)
    module = load_file(file, "reward")
    assert (module.__name__, module.WHERE, module.NAMES) == ("bebop_reward_rows", str(file), ["text"])
    assert [*tmp_path.iterdir()] == [file]


def test_importlib_alone_would_leave_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.py"
    file.write_text("")
    monkeypatch.setattr(functions, "_NoBytecode", SourceFileLoader)
    load_file(file, "reward")
    assert (tmp_path / "__pycache__").exists()


def test_a_file_that_changes_within_a_second_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "rows.py"
    seen = []
    for number in (1, 2):
        file.write_text(f"N = {number}\n")
        seen.append(load_file(file, "reward").N)
    assert seen == [1, 2]


def test_one_that_raises_is_no_module(tmp_path: Path) -> None:
    file = tmp_path / "raises.py"
    file.write_text("raise RuntimeError('no')\n")
    with pytest.raises(RuntimeError, match="no"):
        load_file(file, "reward")
    assert "bebop_reward_raises" not in sys.modules
