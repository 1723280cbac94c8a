"""A head with experts, over two processes: the head of one process, whoever holds which expert."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.megatron_job.checkpoint import load_head
from bebop.megatron_job.convert import convert
from bebop.megatron_job.parallel import ParallelConfig, Place, joined
from bebop.megatron_job.source import Checkpoint
from bebop.model.backbone import Policy
from bebop.model.checkpoint import save_policy
from bebop.model.layouts import join_experts
from bebop.model.mtp import MTPHead
from tests.builders import letters
from tests.commands import HANGING
from tests.integration.megatron.builders import VOCAB, distance, trainer, two_processes
from tests.integration.megatron.policy import cotrainer, wrapped
from tests.integration.megatron.test_families import fill, make
from tests.integration.megatron.test_killed import command, started
from tests.integration.megatron.worker import EXPERT_SPLITS, EXPERT_STEPS, steps_of

ONE = ParallelConfig()
OF = {"qwen3_moe": ("qwen3 with experts", "qwen3_next"), "glm4_moe": ("glm4 with experts", "deepseek")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Path:
    """A folder with a checkpoint of each family, in its layout."""
    for family, (row, layout) in OF.items():
        backbone = make(row)
        head = fill(MTPHead(backbone, zero_first=False))
        policy = Policy(backbone=backbone, tokenizer=letters(VOCAB), mtp=head, layout=layout)
        save_policy(policy, folder / "checkpoints" / family)
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def two(folder: Path, saved: Path) -> list[dict[str, Any]]:
    return two_processes(saved, folder, "experts")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with joined(ONE, "cpu") as found:
        yield found


@pytest.fixture(scope="module")
def one(saved: Path, place: Place) -> dict[str, Any]:
    return {family: steps_of(trainer(saved / family, ONE, place, objective="e2e_tv")) for family in OF}


def still(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """But for the bias of keys, which softmax takes no notice of: AdamW makes steps of the rounding of its gradient."""
    return {name: x for name, x in weights.items() if not name.endswith("k_proj.bias")}


@pytest.mark.slow
@pytest.mark.parametrize("family", OF)
@pytest.mark.parametrize("name", EXPERT_SPLITS)
def test_two_processes_train_as_one(two: list[dict[str, Any]], one: dict[str, Any], name: str, family: str) -> None:
    wanted = one[family]
    for rank in two:
        found = rank[family, name]
        assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], abs=1e-5)
        assert distance(still(found["weights"]), still(wanted["weights"])) < 1e-4


@pytest.mark.slow
def test_experts_of_another_rank_and_a_lost_bias_are_caught(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    assert len(two[0]["broken"]) == 2
    for fault, found in two[0]["broken"].items():
        assert abs(found["loss"][0] - one["glm4_moe"]["loss"][0]) > 2e-5, fault  # sound ranks: within 1e-6


@pytest.mark.slow
def test_one_process_reads_what_two_by_two_wrote(
    two: list[dict[str, Any]], folder: Path, saved: Path, place: Place
) -> None:
    """Tensor and expert parallel ranks write; one process, and expert parallel ranks alone, read equal tensors."""
    for family in OF:
        training = trainer(saved / family, ONE, place, objective="e2e_tv")
        before = training.weights()
        load_head(folder / family, training)
        found, wanted = training.weights(), two[0][family, "tp2 ep2"]["weights"]
        assert distance(found, wanted) == 0 < distance(before, wanted)
        assert training.version == EXPERT_STEPS
    assert distance(two[1]["read by ep2"], two[0]["glm4_moe", "tp2 ep2"]["weights"]) == 0


@pytest.mark.slow
def test_a_resume_is_exact_to_the_bit(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["stopped"]["loss"] == rank["not stopped"]["loss"]
        assert distance(rank["stopped"]["weights"], rank["not stopped"]["weights"]) == 0


@pytest.mark.slow
def test_conversion_there_and_back_is_exact(two: list[dict[str, Any]], folder: Path, saved: Path, place: Place) -> None:
    """Two by two to megatron-core's format; one process back, experts one by one and with their biases."""
    model = saved / "glm4_moe"
    back = {"model": str(model), "source": str(folder / "megatron"), "out": str(folder / "back")}
    convert("to-huggingface", back, ONE, place)
    before, after = (load_file(path / "model.safetensors") for path in (model, folder / "back"))
    assert before.keys() == after.keys() and "model.layers.2.mlp.experts.3.up_proj.weight" in after
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_stacked_experts_are_read_one_by_one(saved: Path, tmp_path: Path) -> None:
    apart = saved / "qwen3_moe"
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text((apart / file).read_text())
    save_file(join_experts(load_file(apart / "model.safetensors")), tmp_path / "model.safetensors")
    wanted, found = (Checkpoint(ModelConfig(path=str(path))) for path in (apart, tmp_path))
    assert set(wanted) == set(found) and "mtp.layer.mlp.experts.3.gate_proj.weight" in set(found)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_head_with_experts_is_refused_beside_a_policy(saved: Path, place: Place) -> None:
    with pytest.raises(UserError, match="the MTP head has experts, which are not trained beside a policy"):
        cotrainer(wrapped(saved / "qwen3_moe", place))


@pytest.mark.slow
def test_the_command_adapts_stops_and_goes_on(saved: Path, tmp_path: Path) -> None:
    """Expert parallel ranks under torchrun: half a job and its resume are the whole job, to the bit."""
    text = tmp_path / "text.jsonl"
    lines = [{"prompt_ids": [5, 9, 1 + i % 20], "answer_ids": [2 + i % 20, 4, 7, 8, 3, 9, 1]} for i in range(40)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ["data.source=file", f"data.path={text}", "parallel.evaluate=false", "model.device=cpu", "train.threads=1"]
    own += [
        f"model.path={saved / 'glm4_moe'}",
        "head.depth=2",
        "head.lr=0.002",
        "train.rows_per_step=4",
        "train.save_every=2",
    ]
    own += ["train.eval_every=0", "train.warm_steps=0", "tensorboard=false", "parallel.expert=2"]
    for name, settings in (("whole", [*own, "train.steps=4"]), ("half", [*own, "train.steps=2"]), ("half", [])):
        (tmp_path / name).mkdir(exist_ok=True)
        errors = tmp_path / f"{name}.txt"
        given = settings or ["resume=true", "train.steps=4"]
        assert started(command(tmp_path / name, 2, *given), errors).wait(HANGING) == 0, errors.read_text()[-3000:]
    whole, half = (load_file(tmp_path / name / "run/model/model.safetensors") for name in ("whole", "half"))
    before = load_file(saved / "glm4_moe" / "model.safetensors")
    assert whole.keys() == half.keys() == before.keys()
    assert all(torch.equal(whole[name], half[name]) for name in whole)
    changed = {name for name in whole if not torch.equal(whole[name], before[name])}
    assert "model.layers.2.mlp.gate.weight" in changed and all(name.startswith("model.layers.2.") for name in changed)
    numbers = {int(found[1]) for name in changed if (found := re.search(r"\.experts\.(\d)\.", name))}
    assert numbers == {0, 1, 2, 3}  # of both ranks
