"""A pivot classifier from the command line: labels, a part that decodes, a resume to the bit; mistakes are one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bebop import adapt
from bebop.config.job import DecodingConfig, ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.pad.training import read_rollouts
from tests.builders import requests
from tests.cases import slow_but

SMALL = [
    "part=pivot", "model.device=cpu", "model.check=false", "task=gcd", "data.sequences=14", "data.slots=64",
    "data.sampling.max_new_tokens=12", "data.max_length=128", "train.rows_per_step=8", "train.save_every=2",
    "train.eval_every=2", "train.threads=1", "tensorboard=false", "progress=false", "options.rollouts=2",
    "options.places=2", "options.twice=0.3", "options.tol=0.0",
]  # fmt: skip
REWARD = "def by_length(text, item):\n    return float(len(text) % 2)\n"  # answers this short solve nothing


def trained(folder: Path, steps: int, *more: str) -> Path:
    folder.parent.mkdir(exist_ok=True)
    (folder.parent / "reward.py").write_text(REWARD)
    reward = f"task.reward={folder.parent / 'reward.py'}:by_length"
    assert adapt.main([*SMALL, f"dir={folder}", f"train.steps={steps}", reward, *more]) == 0
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "whole", 6)


@pytest.mark.slow
def test_it_writes_a_part_that_decodes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = json.loads((run / "pivot.json").read_text())
    assert card["part"] == "pivot" and card["settings"]["layer"] == 8 and "options.rollouts=2" in card["command"]
    results = json.loads((run / "results.json").read_text())
    assert results["reliability"]["candidates"] == len((run / "labels_again.jsonl").read_text().splitlines()) > 0
    assert sum(one["candidates"] for one in results["splits"].values()) == len(read_rollouts(run / "labels.jsonl"))
    config = ModelConfig(path="tiny", device="cpu", check=False, parts={"pivot": str(run / "pivot.safetensors")})
    policy = load_policy(config, need_head=True, needs=("pivot",))
    decoding = DecodingConfig(system="pad", options={"tau": 1.0})
    (answer,) = generate(
        TorchEngine(policy, decoding, slots=2, max_length=64), requests([[5, 6, 7]], max_new_tokens=48)
    )
    assert answer.stats.counts["overridden"].sum() > 0 and answer.weighable and not answer.exact


@pytest.mark.slow
def test_a_resumed_training_repeats_an_uninterrupted_one_to_the_bit(run: Path, tmp_path: Path) -> None:
    """Interrupted in the labels, whose last line was not finished, and again in the training."""
    half = trained(tmp_path / "half", 2)
    labels = half / "labels.jsonl"
    kept = labels.read_text().splitlines(keepends=True)
    labels.write_text("".join(kept[: len(kept) // 2]) + kept[len(kept) // 2][:20])
    trained(half, 6, "resume=true")
    for name in ("labels.jsonl", "labels_again.jsonl"):
        assert (half / name).read_text() == (run / name).read_text()
    ours, wanted = (load_file(folder / "pivot.safetensors") for folder in (half, run))
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (half, run)]
    assert [json.loads(line)["step"] for line in lines[0]] == [json.loads(line)["step"] for line in lines[1]]


WRONG = [
    (["options.layer=12"], "options.layer=12 is not possible: give a number from 0 to 11"),
    (["options.rollouts=0"], "options.rollouts=0 is not possible: give a number from 1"),
    (["options.feat_pos=next"], "options.feat_pos='next' is not possible"),
    (["options.no=1"], "options.no=1 is not possible: no such setting"),
    (["data.source=file", "data.path=pyproject.toml"], "data."),
]


@pytest.mark.parametrize(("overrides", "words"), slow_but(WRONG[:1], WRONG, several=True))
def test_mistakes_are_one_line(overrides: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        adapt.main([*SMALL, f"dir={tmp_path / 'run'}", *overrides])
    assert words in str(error.value) and "\n" not in str(error.value)
