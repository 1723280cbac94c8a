"""Reproductions of defects upstream: each is told of in docs/upstream.md; they run in the suites of their programs."""

from collections.abc import Callable

import pytest

from bebop.errors import UserError
from recipes.upstream.__main__ import DEFECTS, main, verdict
from recipes.upstream.defect import Defect
from recipes.upstream.patched import PATCHES, patch_of
from tests.tree import ROOT


def named(text: str) -> list[str]:
    """The rows of the page's table."""
    return [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]


def test_the_page_has_each_of_them_with_a_mend() -> None:
    found, mends = (ROOT / "docs" / "upstream.md").read_text().split("## Changes that would mend them")
    assert named(found) == list(DEFECTS)
    assert [name for name in DEFECTS if f"`{name}`" not in mends] == []
    assert sorted(named(mends)) == sorted(path.stem for path in PATCHES.glob("*.patch"))


@pytest.mark.parametrize(
    ("program", "there", "said"),
    [
        ("torch", lambda: True, "there"),
        ("torch", lambda: False, "gone"),
        ("nobody.has.it", lambda: 1 / 0, "not installed"),
    ],
)
def test_verdicts(program: str, there: Callable[[], bool], said: str) -> None:
    assert verdict(Defect(name="a", program=program, version="1", there=there)) == said


def test_a_name_that_nobody_knows_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no defect is called 'vllm-none': choose of vllm-expand, "):
        main(["vllm-none"])
    main(["megatron-mtp-gradient"])
    assert capsys.readouterr().out.split() in (
        ["megatron-mtp-gradient", "not", "installed"],
        ["megatron-mtp-gradient", "there"],
    )


def test_a_defect_without_a_patch_is_one_line() -> None:
    with pytest.raises(UserError, match=r"'vllm-seeds' has no patch in recipes/upstream/patches: choose of sglang"):
        patch_of("vllm-seeds")
