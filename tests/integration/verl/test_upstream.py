"""Defects of docs/upstream.md are there in the version that is installed: one that is gone wants its row changed."""

import ast
from pathlib import Path
from typing import Any

import pytest

from recipes.upstream.__main__ import verdict
from recipes.upstream.defect import Defect
from recipes.upstream.patched import PATCHES, copy_with_patch
from recipes.upstream.verl_ import DEFECTS, SGLANG, VLLM

PATCHED = [one for one in DEFECTS if (PATCHES / f"{one.name}.patch").exists()]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.name)
def test_a_defect_is_still_there(defect: Defect) -> None:
    assert verdict(defect) == "there"


@pytest.mark.parametrize("defect", PATCHED, ids=lambda one: one.name)
def test_a_patch_mends_it(defect: Defect) -> None:
    assert verdict(defect, patched=True) == "gone"


def counts(name: str, path: str, folder: Path) -> Any:
    """Return the function that a patch adds to read a request's counts."""
    copy_with_patch("verl", PATCHES / f"{name}.patch", folder)
    tree = ast.parse((folder / "verl" / path).read_text())
    (added,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "_spec_decode_counts")
    space: dict[str, Any] = {"Any": Any}
    exec(compile(ast.Module([added], []), path, "exec"), space)
    return space["_spec_decode_counts"]


def test_counts_of_vllm(tmp_path: Path) -> None:
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    read = counts("verl-vllm-counts", VLLM, tmp_path)
    metrics = RequestSpecDecodeMetrics.new(3)
    for accepted in (3, 0, 1):
        metrics.observe(3, accepted)
    found = read(metrics)
    assert (found["spec_num_draft_tokens"], found["spec_num_accepted_tokens"], found["spec_num_verify_steps"]) == (
        9,
        4,
        3,
    )
    assert set(read(None).values()) == {0}


@pytest.mark.parametrize(
    "names",
    [("spec_num_proposed_drafts", "spec_num_correct_drafts"), ("spec_draft_token_num", "spec_accept_token_num")],
)
def test_counts_of_sglang_by_every_name(names: tuple[str, str], tmp_path: Path) -> None:
    read = counts("verl-sglang-counts", SGLANG, tmp_path)
    meta = {names[0]: 9, names[1]: 4, "spec_verify_ct": 3}
    assert list(read(meta).values()) == [9, 4, 3]
    assert set(read({}).values()) == {0}
