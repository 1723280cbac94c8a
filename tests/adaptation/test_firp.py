"""Training of pseudo hidden states: the part, a resume, and what is refused."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bebop.adaptation.part_job import store
from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config, write_down
from bebop.errors import UserError
from bebop.model.parts import load_part, read_card
from bebop.systems.firp.network import PseudoStates
from bebop.systems.firp.training import FirpTrainer
from bebop.trainer.chains import TokenRow
from tests.cases import slow_but

SMALL = ["part=firp", "task=gcd", "data.sequences=6", "data.sampling.max_new_tokens=8", "data.slots=8",
         "evaluation.prompts=2", "options.steps=2", "options.rows_per_step=4", "options.anchors=4", "options.warm=0.5",
         "options.objective=e2e_tv", "options.calibration=4", "train.save_every=3", "train.threads=1", "progress=false",
         "model.check=false"]  # fmt: skip


ROWS = [TokenRow(prompt=(2, 3, 4), answer=(5, 6, 1))]


def config(model: Path, folder: Path, *overrides: str) -> AdaptConfig:
    return adapt_config([f"model.path={model}", *SMALL, *overrides, f"dir={folder}"])


def trained(model: Path, folder: Path, *overrides: str) -> FirpTrainer:
    folder.mkdir(exist_ok=True)
    asked = config(model, folder, *overrides)
    job = FirpTrainer(asked, folder)
    job.prepare()
    write_down(asked, [f"model.path={model}", *SMALL, *overrides], folder)
    job.run()
    return job


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was not interrupted."""
    folder = tmp_path_factory.mktemp("firp")
    trained(model, folder)
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "firp.safetensors")


def test_a_trained_part_says_what_it_is(model: Path, whole: Path) -> None:
    card = read_card(whole / "firp.safetensors")
    assert card.part == "firp" and card.settings["layers"] == [1, 2, 3]
    assert {"overlap/1", "kl/2", "agreement/3", "accept_length/3", "accept_length/63"} <= set(card.results)
    assert all(1 <= card.results[f"accept_length/{nodes}"]["value"] <= 4 for nodes in (3, 16, 32, 63))
    assert adapt_config(shlex.split(card.command)[3:]) == dataclasses.replace(config(model, whole), dir=None)
    policy = FirpTrainer(config(model, whole), whole).policy
    loaded = load_part("firp", whole / "firp.safetensors", policy)
    assert isinstance(loaded, PseudoStates) and len(loaded.chances) == 3
    assert all(0 < sum(row) <= 1 and list(row) == sorted(row, reverse=True) for row in loaded.chances)
    assert all(not torch.equal(matrix, torch.eye(32)) for matrix in weights(whole).values())


def test_steps_are_trained_one_after_another(model: Path, whole: Path, tmp_path: Path) -> None:
    """After the third of six updates step 1 is as it will be, step 2 has begun and step 3 is the identity."""
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    shutil.rmtree(store(half).path(6))
    (half / "firp.safetensors").unlink()
    begun = FirpTrainer(config(model, half, "resume=true"), half)
    begun.prepare()
    assert begun.version == 3
    first, second, third = (one.weight.detach().clone() for one in begun.network.maps)  # type: ignore[union-attr, operator]
    final = [*weights(whole).values()]
    assert torch.equal(first, final[0]) and torch.equal(third, torch.eye(32))
    assert not torch.equal(second, torch.eye(32)) and not torch.equal(second, final[1])
    trained(model, half, "resume=true")
    assert all(torch.equal(a, b) for a, b in zip(weights(half).values(), final, strict=True)), "to the bit"
    steps = [json.loads(line)["step"] for line in (half / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow  # a second training
def test_texts_that_do_not_fit_are_read_for_each_update(model: Path, whole: Path, tmp_path: Path) -> None:
    """Rounding differs with what is read together."""
    other = tmp_path / "other"
    trained(model, other, "train.cache_mb=0")
    losses = [
        [json.loads(line)["firp/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, other)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 6
    kept, fresh = (FirpTrainer(config(model, whole, f"train.cache_mb={room}"), whole)._read(ROWS) for room in (1, 0))
    assert kept and not fresh


WRONG = [
    (["resume=true"], "no finished checkpoint"),
    (["options.layers=[3,2]"], "do not fall"),
    (["options.layers=[5,6]"], r"layers 1\.\.5"),
]


@pytest.mark.parametrize(("overrides", "message"), slow_but(WRONG[2:], WRONG, several=True))
def test_what_is_wrong_is_said_before_anything_is_written(
    overrides: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trained(model, tmp_path, *overrides)
    assert not any(tmp_path.iterdir())
