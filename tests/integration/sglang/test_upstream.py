"""Defects of docs/upstream.md are there in the version that is installed: one that is gone wants its row changed."""

import pytest

from recipes.upstream.__main__ import verdict
from recipes.upstream.defect import Defect
from recipes.upstream.sglang_ import DEFECTS


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.name)
def test_a_defect_is_still_there(defect: Defect) -> None:
    assert verdict(defect) == "there"


def test_the_patch_of_padding_mends_it() -> None:
    (defect,) = (one for one in DEFECTS if one.name == "sglang-ngram-pads")
    assert verdict(defect, patched=True) == "gone"
