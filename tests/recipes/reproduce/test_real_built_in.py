"""The head that Bebop brings for a real model: the best that has ended, in half the bytes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bebop.errors import UserError
from recipes.reproduce.real import built_in
from recipes.reproduce.real.heads import BEST, DONE


def test_the_best_head_that_has_ended_is_brought_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(built_in, "HERE", tmp_path)
    monkeypatch.setattr(built_in, "HEAD", tmp_path / "head.safetensors")
    with pytest.raises(UserError, match=r"no head of e2e_tv in .* has ended: run first python -m"):
        built_in.main([])
    heads = {"e2e_tv-0": 1.4, "e2e_tv-1": 1.6, "e2e_tv-2": 1.5, "tv-0": 1.9, "fresh-e2e_tv-0": 1.8}
    for place, (name, length) in enumerate(heads.items()):
        folder = tmp_path / "heads" / name
        folder.mkdir(parents=True)
        save_file({"project.weight": torch.full((2, 3), place + 1 / 3)}, folder / BEST)
        (folder / DONE).write_text(json.dumps({"best length": length}))
    built_in.main([])
    assert "e2e_tv-1, accept length 1.600" in capsys.readouterr().out
    (weight,) = load_file(tmp_path / "head.safetensors").values()
    assert torch.equal(weight, torch.full((2, 3), 1 + 1 / 3).half())
    with safe_open(tmp_path / "head.safetensors", framework="pt") as opened:
        assert opened.metadata()["head"] == "e2e_tv-1"
