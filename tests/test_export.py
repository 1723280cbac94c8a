"""``python -m bebop.export``: the shipped drafter in SGLang's layout, and mistakes in one line each."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bebop import export
from bebop.model.checkpoint import resolve
from bebop.model.parts import SHIPPED
from tests.commands import ended

SHIPPED_BLOCK = SHIPPED["tiny"] / "block.safetensors"


def test_the_shipped_drafter_is_written_and_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with ended(export.main, ["--out", str(tmp_path)], capsys) as (code, out, _lines):
            assert code == 0 and "layers [1, 9] of the target, MASK is token 491" in out
    shipped, written = load_file(SHIPPED_BLOCK), load_file(tmp_path / "model.safetensors")
    assert set(shipped) - set(written) == {"mask"}
    assert all(torch.equal(tensor, shipped[name]) for name, tensor in written.items())
    assert json.loads((tmp_path / "config.json").read_text())["block_size"] == 8


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--out"),
        (["--out", "x", "--part", "pivot"], "invalid choice"),
        (["--out", "x", "--model", "no/such"], "no/such"),
        (["--out", "x", "--file", "no.safetensors"], r"model.parts.block='no.safetensors' is not possible"),
        (["--out", "x", "--mask-token", "512"], "tokens 0..511"),
        (["--out", str(resolve("tiny"))], "holds something else"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with ended(export.main, arguments, capsys) as (code, out, lines):
        assert (code, out, len(lines)) == (2, "", 1) and word in lines[0]
    assert not (tmp_path / "x").exists()
