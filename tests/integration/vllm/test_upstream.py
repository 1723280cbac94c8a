"""Defects of docs/upstream.md are there in the version that is installed: one that is gone wants its row changed."""

import subprocess
import sys

import pytest

from recipes.upstream.__main__ import verdict
from recipes.upstream.defect import Defect
from recipes.upstream.patched import PATCHES
from recipes.upstream.vllm_ import DEFECTS
from tests.tree import ROOT


def test_defects_are_still_there() -> None:
    """In a process of its own, where nothing has been mended yet."""
    command = [sys.executable, "-m", "recipes.upstream", *(one.name for one in DEFECTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("vllm-"))
    assert found == dict.fromkeys((one.name for one in DEFECTS), "there")


PATCHED = [one for one in DEFECTS if (PATCHES / f"{one.name}.patch").exists()]


@pytest.mark.parametrize("defect", PATCHED, ids=lambda one: one.name)
def test_a_patch_mends_it(defect: Defect) -> None:
    assert verdict(defect, patched=True) == "gone"
