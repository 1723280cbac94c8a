"""A head trained over two processes, however they split the work, is the head that one process trains."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bebop.config.job import HeadConfig, ModelConfig
from bebop.megatron_job.checkpoint import _moments
from bebop.megatron_job.parallel import ParallelConfig, Place, joined
from bebop.model.checkpoint import load_policy
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import OBJECTIVES, Sampling
from tests.integration.megatron.builders import STEPS, checkpoint, distance, rows, run, trainer, two_processes
from tests.integration.megatron.policy import context_step

ONE = ParallelConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Path:
    return checkpoint(folder / "checkpoint")


@pytest.fixture(scope="module")
def two(folder: Path, saved: Path) -> list[dict[str, Any]]:
    """What each of two processes has to show."""
    return two_processes(saved, folder)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with joined(ONE, "cpu") as found:
        yield found


@pytest.fixture(scope="module")
def one(saved: Path, place: Place) -> dict[str, Any]:
    """One process, both objectives."""
    found = {}
    for objective in ("tv", "e2e_tv"):
        training = trainer(saved, ONE, place, objective=objective)
        found[objective] = {**run(training), "weights": training.weights()}
        found[objective]["overlaps"] = training.backend.overlaps(rows(99), 3)
    return found


def test_a_resumed_optimizer_counts_steps_where_its_kernel_looks_for_them() -> None:
    """A fused AdamW on a GPU takes no count on the CPU; the device "meta" stands for the GPU."""
    master = torch.zeros(2, device="meta")
    optimizer = SimpleNamespace(state=defaultdict(dict), defaults={"fused": True})
    trainer: Any = SimpleNamespace(optimizer=optimizer, backend=SimpleNamespace(named={"a": master}))
    assert _moments(trainer)["a"]["step"].device.type == "meta"


@pytest.mark.parametrize("objective", ["tv", "e2e_tv"])
def test_one_process_trains_as_bebop_adapt_does(saved: Path, one: dict[str, Any], objective: str) -> None:
    policy = load_policy(ModelConfig(path=str(saved), device="cpu"))
    head = HeadConfig(objective=objective, depth=3, lr=2e-3, lr_warmup_steps=3, max_tokens=60)
    reference = HeadTrainer(FSDPBackend(policy, Sampling(temperature=0.9)), head)
    losses = [reference.update(rows(step))["head/loss"] for step in range(STEPS)]
    assert one[objective]["loss"] == pytest.approx(losses, abs=1e-5)
    assert max(losses) - min(losses) > 0.05
    assert distance(one[objective]["weights"], reference.weights()) < 1e-4


@pytest.mark.parametrize("objective", ["tv", "e2e_tv"])
@pytest.mark.parametrize("name", ["tp2", "pp2", "dp2", "cp2"])
def test_two_processes_train_as_one(two: list[dict[str, Any]], one: dict[str, Any], name: str, objective: str) -> None:
    wanted = one[objective]
    for rank in two:
        found = rank[name][objective]
        assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], abs=1e-4)
        assert distance(found["weights"], wanted["weights"]) < 1e-4
        assert found["overlaps"] == pytest.approx(wanted["overlaps"], abs=1e-5)


def test_a_sum_left_out_is_caught(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for fault, found in two[0]["broken"].items():
        errors = [
            abs(a - b) for kind in ("loss", "grad_norm") for a, b in zip(found[kind], one["tv"][kind], strict=False)
        ]
        assert max(errors) > 1e-3, fault


def test_every_objective_is_that_of_the_whole_vocabulary(two: list[dict[str, Any]], saved: Path, place: Place) -> None:
    wanted = {name: trainer(saved, ONE, place, objective=name).update(rows(0))["head/loss"] for name in OBJECTIVES}
    assert two[0]["first"] == pytest.approx(wanted, abs=1e-5)
    assert len(set(round(x, 4) for x in wanted.values())) >= len(wanted) - 1  # kl and ce differ by an entropy


def test_another_split_goes_on_from_a_checkpoint(
    two: list[dict[str, Any]], one: dict[str, Any], saved: Path, place: Place
) -> None:
    training = trainer(saved, ONE, place, objective="tv")
    run(training, 6)
    for name in ("pp2", "dp2"):
        found = two[0]["resumed"][name]
        assert found["version"] == 6
        assert found["loss"] == pytest.approx(one["tv"]["loss"][3:6], abs=1e-5)
        assert distance(found["weights"], training.weights()) < 1e-4
    assert two[0]["resumed"]["steps"] == {6}, "AdamW's count of steps, which a pipeline's first stage does not know"


def test_a_head_beside_a_policy_under_megatrons_schedules(two: list[dict[str, Any]], saved: Path, place: Place) -> None:
    """Pipeline, data, tensor and sequence parallel: policy gradients to the bit, and the head of one process."""
    alone = trainer(saved, ONE, place, objective="e2e_tv")
    wanted = [alone.update(rows(step, 8)) for step in range(3)]
    for rank in two:
        assert len(rank["beside"]) == 4
        for name, found in rank["beside"].items():
            assert found["same"] and found["largest"] > 1e-3, name
            assert found["idle"] == {}, name
            for kind in ("loss", "grad_norm"):
                numbers = [x[f"head/{kind}"] for x in found["numbers"]]
                assert numbers == pytest.approx([x[f"head/{kind}"] for x in wanted], rel=1e-4), name


@pytest.mark.parametrize("name", ["side by side", "packed"])
def test_context_parallel_ranks_learn_from_whole_rows(
    two: list[dict[str, Any]], saved: Path, place: Place, name: str
) -> None:
    wanted = context_step(saved, place, packed=name == "packed")
    assert wanted["head/grad_norm"] > 1e-2
    for rank in two:
        assert rank["contexts"][name] == pytest.approx(wanted, rel=1e-4)


def test_conversion_there_and_back_is_exact(two: list[dict[str, Any]], saved: Path, folder: Path) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (saved, folder / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((path / "config.json").read_text()) for path in (saved, folder / "back")]
    assert configs[0] == configs[1]
