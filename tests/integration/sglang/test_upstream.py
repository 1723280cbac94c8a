"""Defects of docs/upstream.md are there in the version that is installed: one that is gone wants its row changed."""

import pytest

from recipes.upstream.__main__ import verdict
from recipes.upstream.defect import Defect
from recipes.upstream.sglang_ import DEFECTS


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.name)
def test_a_defect_is_still_there(defect: Defect) -> None:
    assert verdict(defect) == "there"


@pytest.mark.parametrize("name", ["sglang-ngram-pads", "sglang-cpu-tensors", "sglang-abort-end"])
def test_a_patch_mends_its_defect(name: str) -> None:
    (defect,) = (one for one in DEFECTS if one.name == name)
    assert verdict(defect, patched=True) == "gone"
