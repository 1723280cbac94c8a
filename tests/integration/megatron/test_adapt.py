"""The command: adaptation of the built-in model on megatron-core does as well as bebop.adapt, and can be resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bebop import adapt as plain
from bebop.config.compose import adapt_config, write_down
from bebop.errors import UserError
from bebop.megatron_job import adapt
from bebop.model.checkpoint import resolve
from bebop.run_dir.checkpoints import seal

SETTINGS = [
    "data.sequences=256", "data.sampling.max_new_tokens=128", "evaluation.prompts=64", "head.depth=3",
    "train.rows_per_step=16", "train.eval_every=0", "train.threads=1", "train.warm_steps=20", "tensorboard=false",
    "progress=false", "model.device=cpu",
]  # fmt: skip


def accept_length(folder: Path, when: str) -> dict[str, float]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    found: dict[str, float] = results["systems"]["bebop"][when]["accept_length"]
    return found


def test_it_reaches_what_bebop_adapt_reaches(tmp_path: Path) -> None:
    settings = [*SETTINGS, "train.steps=80", "train.save_every=40"]
    assert plain.main([*settings, f"dir={tmp_path / 'plain'}"]) == 0
    assert adapt.main([*settings, f"dir={tmp_path / 'megatron'}"]) == 0
    before, wanted, found = (
        accept_length(tmp_path / name, when)
        for name, when in (("megatron", "before"), ("plain", "after"), ("megatron", "after"))
    )
    assert found["low"] <= wanted["high"] and wanted["low"] <= found["high"]
    assert found["low"] > before["high"]
    same, trained = load_file(resolve("tiny") / "model.safetensors"), tmp_path / "megatron" / "model"
    after = load_file(trained / "model.safetensors")
    assert same.keys() == after.keys()
    assert all((same[name].float() == after[name]).all() for name in same if "mtp" not in name)
    assert [p.name for p in sorted((tmp_path / "megatron" / "checkpoints").iterdir())] == ["head_000040", "head_000080"]
    assert (tmp_path / "megatron" / "report.html").is_file()


def test_a_file_of_text_without_a_whole_model_and_a_resume(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    lines = [{"prompt_ids": [5, 9, 30 + i], "answer_ids": [10 + i, 40, 41, 42, 43, 44, 1]} for i in range(40)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ["data.source=file", f"data.path={text}", "parallel.evaluate=false", "train.save_every=2", "train.keep=9"]
    settings = [*SETTINGS, *own, "train.warm_steps=0", "train.rows_per_step=8"]
    assert adapt.main([*settings, "train.steps=4", f"dir={tmp_path / 'whole'}"]) == 0
    assert adapt.main([*settings, "train.steps=2", f"dir={tmp_path / 'parts'}"]) == 0
    with pytest.raises(UserError, match="holds an adaptation"):
        adapt.main([*settings, "train.steps=4", f"dir={tmp_path / 'parts'}"])
    assert adapt.main([f"dir={tmp_path / 'parts'}", "resume=true", "train.steps=4"]) == 0
    whole, parts = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all((whole[name] == parts[name]).all() for name in whole)
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert results["after/eval/overlap/1"] != results["before/eval/overlap/1"]
    with pytest.raises(UserError, match="holds no finished checkpoint"):
        adapt.main([*settings, "resume=true", f"dir={tmp_path / 'empty'}"])


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    broken = tmp_path / "checkpoints" / "head_000002"
    broken.mkdir(parents=True)
    (broken / "metadata.json").write_text("{")
    seal(broken)  # as it was written, and wrong all the same
    write_down(adapt_config(SETTINGS), SETTINGS, tmp_path)
    with pytest.raises(UserError, match="is no checkpoint of this model, or is damaged"):
        adapt.main([*SETTINGS, f"dir={tmp_path}", "resume=true"])
