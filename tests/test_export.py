"""``python -m bebop.export``: the shipped drafter, a run's merged model, and mistakes in one line each."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bebop import export
from bebop.config.compose import as_yaml
from bebop.config.job import ModelConfig
from bebop.model.checkpoint import load_policy, resolve
from bebop.model.parts import SHIPPED
from bebop.run_dir.identity import identity
from bebop.trainer.checkpoint import store
from bebop.trainer.rank import TrainerRank
from tests.commands import ended
from tests.tiny_families import write_family
from tests.trainer.builders import batch, job

SHIPPED_BLOCK = SHIPPED["tiny"] / "block.safetensors"


def test_the_shipped_drafter_is_written_and_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with ended(export.main, ["--out", str(tmp_path)], capsys) as (code, out, _lines):
            assert code == 0 and "layers [1, 9] of the target, MASK is token 491" in out
    shipped, written = load_file(SHIPPED_BLOCK), load_file(tmp_path / "model.safetensors")
    assert set(shipped) - set(written) == {"mask"}
    assert all(torch.equal(tensor, shipped[name]) for name, tensor in written.items())
    assert json.loads((tmp_path / "config.json").read_text())["block_size"] == 8


HEAD = {"mode": "always", "head": {"depth": 2, "lr": 1e-3, "max_tokens": 64}}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainerRank]:
    """A run of the built-in model with an adapter and a head that is trained beside it: two steps, two checkpoints."""
    run: Path = tmp_path_factory.mktemp("adapted")
    config = job(trainer={"lora": {"rank": 4, "target_modules": ["q_proj", "up_proj"]}}, cotrain=HEAD)
    (run / "config.yaml").write_text(as_yaml(config))
    (run / "identity.json").write_text(json.dumps(identity(config.model, {})))
    rank = TrainerRank(config)
    for step in (1, 2):
        rank.update(batch(seed=step), cotrain=True)
        staged = store(run).staging(step)
        rank.save(staged, {})
        store(run).publish(staged, step)
    return run, rank


def test_the_model_of_a_run_with_an_adapter_is_what_engines_were_sent(
    adapted: tuple[Path, TrainerRank], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rank = adapted
    with ended(export.main, ["--run", str(run), "--out", str(tmp_path / "model")], capsys) as (code, out, _):
        assert code == 0 and out.endswith("the model of step_000002, with its adapter of rank 4 merged\n")
    wanted = rank.weights(mtp=True).weights
    again = load_policy(ModelConfig(path=str(tmp_path / "model"), device="cpu", check=False)).weights(mtp=True)
    assert list(again) == list(wanted) and all(torch.equal(again[name], wanted[name]) for name in wanted)
    base = load_policy(ModelConfig(device="cpu", check=False)).weights(mtp=True)
    moved = {name.split(".")[-2] for name in wanted if not torch.equal(base[name], wanted[name])}
    assert {"q_proj", "up_proj"} < moved and "embed_tokens" not in moved
    with ended(export.main, ["--run", str(run), "--step", "1", "--out", str(tmp_path / "first")], capsys) as (
        code,
        _,
        _,
    ):
        assert code == 0
    first = load_file(tmp_path / "first/model.safetensors")
    assert not torch.equal(
        first["model.layers.0.mlp.up_proj.weight"], again["backbone.model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.slow  # models of two families, an update of each
@pytest.mark.parametrize(("family", "engine"), [("glm4_moe", "torch"), ("qwen3_5", "vllm")])
def test_models_of_other_families_are_exported_with_the_head_that_was_trained(
    family: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A router's bias is no weight that is trained, and transformers' attention is what a server's job trains with."""
    model = {"path": str(write_family(tmp_path / "family", family)), "check": False}
    lora = {"rank": 4, "target_modules": ["q_proj"]}
    config = job(model=model, rollout={"engine": engine}, trainer={"lora": lora}, cotrain=HEAD)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(as_yaml(config))
    (run / "identity.json").write_text(json.dumps(identity(config.model, {})))
    rank = TrainerRank(config)
    rank.update(batch(seed=1), cotrain=True)
    staged = store(run).staging(1)
    rank.save(staged, {})
    store(run).publish(staged, 1)
    with ended(export.main, ["--run", str(run), "--out", str(tmp_path / "model")], capsys) as (code, _, lines):
        assert code == 0, lines
    wanted = rank.weights(mtp=True).weights
    found = load_policy(ModelConfig(path=str(tmp_path / "model"), device="cpu", check=False), any_backbone=True)
    again = found.weights(mtp=True)
    assert all(torch.equal(again[name].to(tensor.dtype), tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("arguments", "change", "word"),
    [
        (["--step", "3"], {}, "--step 3 is not possible: there are checkpoints of steps 1, 2"),
        (["--out", str(resolve("tiny"))], {}, "it holds a model: choose another folder"),
        (["--file", "x"], {}, "--file=x is not possible: --run writes the model of a run"),
        ([], {"config.yaml": "model: {path: tiny}"}, "config.yaml is no configuration of a run"),
        (
            [],
            {"config.yaml": "trainer: {}\nruntime: {seed: 0}\nmodel: {}"},
            "it trained all weights, without trainer.lora",
        ),
        ([], {"identity.json": '{"the weights in model.path": "others"}'}, "the weights in model.path is not the one"),
        ([], {"identity.json": "{"}, "identity.json cannot be read"),
    ],
)
def test_a_run_that_cannot_be_exported_is_one_line(
    arguments: list[str], change: dict[str, str], word: str, adapted: tuple[Path, TrainerRank], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    run.mkdir()
    for path in adapted[0].iterdir():
        (run / path.name).symlink_to(path)
    for name, text in change.items():
        (run / name).unlink()
        (run / name).write_text(text)
    given = ["--run", str(run), "--out", str(tmp_path / "x"), *arguments]
    with ended(export.main, given, capsys) as (code, out, lines):
        assert (code, out, len(lines)) == (2, "", 1) and word in lines[0]
    assert not (tmp_path / "x").exists()


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
