"""The stock job, the same job with the plug-in and every part off, and with a head trained beside it: equal to the bit.

The stock job runs without the plug-in: a platform and a rollout of its own (``stock.py``), entry points switched off.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bebop.verl_job.example import write_example
from tests.integration.verl.builders import CONF, HERE, Job, run_job

OWN = [
    f"hydra.searchpath=[file://{CONF}]",
    "+job=stock",
    f"+reward_file={HERE / 'length_reward.py'}",
    f"+sampler_file={HERE / 'ordered.py'}",
]
STOCK = {"VERL_PLATFORM": "stock", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": "stock"}
STOCK |= {"PYTHONPATH": str(HERE)}
CLOCK = ("timing", "perf/", "mfu")  # what is measured in seconds
HEAD = ["bebop.train_head=true", "actor_rollout_ref.model.mtp.enable=true"]
HEAD += ["actor_rollout_ref.model.mtp.enable_rollout=true"]
ARMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "stock": ([], {"VERL_USE_EXTERNAL_PLUGINS": "none"}),
    "off": (["+bebop=off"], {}),
    "head": (["+bebop=off", *HEAD], {}),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Job, Path]]]:
    folder = tmp_path_factory.mktemp("off")
    write_example(folder / "example", train=64, test=4)
    done = {}
    for name, (overrides, environment) in ARMS.items():
        place = [f"trainer.default_local_dir={folder / name / 'checkpoints'}", *OWN, *overrides]
        job = run_job(folder / name, folder / "example", place, STOCK | environment, conf=HERE / "conf")
        assert job.code == 0, job.output[-4000:]
        done[name] = (job, folder / name / "checkpoints" / "global_step_5" / "actor")
    yield done


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A step's metrics without clocks and without those of the head."""
    return {k: v for k, v in row.items() if not any(c in k for c in CLOCK) and "head/" not in k}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[k] == b[k] or (math.isnan(a[k]) and math.isnan(b[k])) for k in a)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("model_world_size_1_rank_0.pt")
    state = torch.load(file, weights_only=False)
    return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("arm", ["off", "head"])
def test_losses_and_weights_are_those_of_the_stock_job(jobs: dict[str, tuple[Job, Path]], arm: str) -> None:
    (stock, stock_folder), (job, folder) = jobs["stock"], jobs[arm]
    assert len(stock.rows) == len(job.rows) == 5
    for own, others in zip(stock.rows, job.rows, strict=True):
        assert same(numbers(own), numbers(others)), {
            k: (v, others.get(k)) for k, v in numbers(own).items() if others.get(k) != v
        }
    ours, theirs = weights(folder), weights(stock_folder)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_comparison_would_notice_a_difference(jobs: dict[str, tuple[Job, Path]]) -> None:
    stock, folder = jobs["stock"]
    assert not same(numbers(stock.rows[0]), numbers(stock.rows[1]))
    before = torch.load(folder / "model_world_size_1_rank_0.pt", weights_only=False)
    assert stock.column("actor/pg_loss") != [stock.column("actor/pg_loss")[0]] * 5
    assert any(tensor.abs().max() > 0 for tensor in before.values())


def test_the_head_learned_and_was_kept(jobs: dict[str, tuple[Job, Path]]) -> None:
    job, folder = jobs["head"]
    assert "head/loss" not in jobs["off"][0].rows[0]
    assert all(0 < loss < 1 for loss in job.column("actor/head/loss"))
    kept = torch.load(folder / "bebop_head.pt", weights_only=True)
    assert kept["state"]["version"] == 5
