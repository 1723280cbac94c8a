"""Training of pseudo hidden states: what becomes of the matrices, the order of the steps, and what is read at once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bebop.adaptation.part_job import store
from bebop.model.parts import load_part, read_card
from bebop.systems.firp.network import PseudoStates
from bebop.systems.firp.training import FirpTrainer
from bebop.trainer.chains import TokenRow
from tests.adaptation.trainings import config, overrides, train

ROWS = [TokenRow(prompt=(2, 3, 4), answer=(5, 6, 1))]


@pytest.fixture(scope="module")
def whole(finished: Callable[[str], Path]) -> Path:
    return finished("firp")


def test_every_step_was_trained_and_calibrated(model: Path, whole: Path) -> None:
    card = read_card(whole / "firp.safetensors")
    assert all(1 <= card.results[f"accept_length/{nodes}"]["value"] <= 4 for nodes in (3, 16, 32, 63))
    policy = FirpTrainer(config("firp", model, whole), whole).policy
    loaded = load_part("firp", whole / "firp.safetensors", policy)
    assert isinstance(loaded, PseudoStates) and len(loaded.chances) == 3
    assert all(0 < sum(row) <= 1 and list(row) == sorted(row, reverse=True) for row in loaded.chances)
    assert all(not torch.equal(one, torch.eye(32)) for one in load_file(whole / "firp.safetensors").values())


def test_steps_are_trained_one_after_another(model: Path, whole: Path, tmp_path: Path) -> None:
    """After the third of six updates step 1 is as it will be, step 2 has begun and step 3 is the identity."""
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    shutil.rmtree(store(half).path(6))
    begun = FirpTrainer(config("firp", model, half, "resume=true"), half)
    begun.prepare()
    assert begun.version == 3
    first, second, third = (one.weight for one in begun.network.maps)
    final = [*load_file(whole / "firp.safetensors").values()]
    assert torch.equal(first, final[0]) and torch.equal(third, torch.eye(32))
    assert not torch.equal(second, torch.eye(32)) and not torch.equal(second, final[1])


@pytest.mark.slow  # a second training
def test_texts_that_do_not_fit_are_read_for_each_update(model: Path, whole: Path, tmp_path: Path) -> None:
    """Rounding differs with what is read together."""
    other = tmp_path / "other"
    train([*overrides("firp", model), "train.cache_mb=0"], other)
    losses = [
        [json.loads(line)["firp/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, other)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 6
    kept, fresh = (
        FirpTrainer(config("firp", model, whole, f"train.cache_mb={room}"), whole)._read(ROWS) for room in (1, 0)
    )
    assert kept and not fresh
