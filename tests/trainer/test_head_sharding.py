"""Two ranks over gloo (FSDP2) train a head as one rank does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.one_head_rank import train
from tests.trainer.test_heads import distance, rows, trainer

pytestmark = pytest.mark.slow  # two processes, and one beside them
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two rank processes has to show."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [sys.executable, "-m", "tests.trainer.one_head_rank"]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), "2", str(folder)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=240)
        assert rank.returncode == 0, errors[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return train(0, 1)


def test_weights_and_numbers_are_those_of_one_rank(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    start = trainer().weights()
    assert distance(one["state"]["weights"], start) > 5e-3, "updates move the weights by far more than the tolerance"
    for rank in two:
        assert distance(rank["state"]["weights"], one["state"]["weights"]) < 1e-5
        for ours, wanted in zip(rank["numbers"], one["numbers"], strict=True):
            assert ours == pytest.approx(wanted, abs=2e-5)


def test_a_resume_goes_on_as_if_nothing_had_been(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for rank in two:
        assert distance(rank["resumed"], rank["last"]) == 0
        assert distance(rank["last"], one["last"]) < 1e-5


def test_a_checkpoint_of_two_ranks_is_one_for_one_rank(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    training = trainer(lr_warmup_steps=0, max_tokens=100)
    training.load_state_dict(two[0]["state"])
    training.update(rows(3))
    assert distance(training.weights(), one["last"]) < 1e-5
