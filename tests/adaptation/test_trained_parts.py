"""What the training of every part does alike: its card, a resume, a stop, and what is refused."""

import dataclasses
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from bebop.adaptation.corpus import backbone_states
from bebop.adaptation.part_job import StepJob, store
from bebop.adaptation.ranks import Ranks
from bebop.config.compose import adapt_config
from bebop.errors import UserError
from bebop.model.parts import read_card
from bebop.systems import PARTS
from bebop.systems.block.losses import read_texts
from bebop.trainer.chains import TokenRow
from bebop.trainer.optim import GuardedAdamW
from tests.adaptation.trainings import TRAININGS, config, overrides, train
from tests.cases import slow_but

Finished = Callable[[str], Path]

FIRST_STAGES = [name for name in TRAININGS if name in PARTS]
CARDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "block": ({"taps": [1, 2]}, {"accept_length/greedy/before", "accept_length/sampled/after"}),
    "eagle3": (
        {"taps": [0, 2, 3], "draft_vocab_size": 9},
        {"accept_length/greedy/before", "accept_length/sampled/after", "coverage"},
    ),
    "firp": ({"layers": [1, 2, 3]}, {"overlap/1", "kl/2", "agreement/3", "accept_length/3", "accept_length/63"}),
    "pipo": ({"pad": 0}, {"reward", "tokens_per_pair", "pairs"}),
}


def test_every_part_that_is_trained_step_by_step_is_tested() -> None:
    assert {name for name, part in PARTS.items() if issubclass(part.job(), StepJob)} == {*FIRST_STAGES}


@pytest.mark.parametrize("name", slow_but(["block"], FIRST_STAGES))
def test_a_card_says_what_the_part_is_and_the_command_that_makes_it(name: str, model: Path, finished: Finished) -> None:
    card, (settings, results) = read_card(finished(name) / f"{name}.safetensors"), CARDS[name]
    assert card.part == name and settings.items() <= card.settings.items() and results <= set(card.results)
    again = adapt_config(shlex.split(card.command)[3:])
    assert again == dataclasses.replace(adapt_config(overrides(name, model)), dir=None)


@pytest.mark.parametrize("name", slow_but(["firp"], TRAININGS))
def test_a_resumed_training_is_an_uninterrupted_one_to_the_bit(name: str, finished: Finished, tmp_path: Path) -> None:
    """Also in the middle of rollouts, half of which had been trained on; block keeps its first measurement."""
    whole, half = finished(name), tmp_path / "half"
    part = name.removesuffix("-opd") + ".safetensors"
    shutil.copytree(whole, half)
    middle, last = sorted((half / "checkpoints").iterdir())
    shutil.rmtree(last)
    (half / part).unlink()
    job = train([*json.loads((whole / "overrides.json").read_text()), "resume=true"], half)
    assert job.found == middle == store(half).path(job.version // 2)
    ours, wanted = load_file(half / part), load_file(whole / part)
    assert ours.keys() == wanted.keys() and all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert read_card(half / part).results == read_card(whole / part).results
    steps = [json.loads(line)["step"] for line in (half / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, job.version + 1)]


@pytest.mark.slow  # a training more
def test_another_seed_makes_another_part(model: Path, finished: Finished, tmp_path: Path) -> None:
    other = load_file(train([*overrides("block", model), "seed=1"], tmp_path).written()["part"])
    first = load_file(finished("block") / "block.safetensors")
    assert not all(torch.equal(other[name], first[name]) for name in first)


@pytest.mark.slow  # four trainings more
@pytest.mark.parametrize("name", FIRST_STAGES)
def test_a_part_beside_a_model_in_bfloat16_is_trained_in_float32(name: str, model: Path, tmp_path: Path) -> None:
    """Engines convert their networks to the model's type. The network in training is none of these."""
    job = train([*overrides(name, model), "model.dtype=bfloat16"], tmp_path)
    assert job.policy.backbone.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in job.network.parameters()} == {torch.float32}
    rotary = getattr(getattr(job.network, "decoder", None), "rotary_emb", None)
    assert rotary is None or rotary.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(("name", "reader"), [("block", read_texts), ("eagle3", backbone_states)])
def test_states_that_do_not_fit_into_memory_are_read_for_each_update(
    name: str, reader: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, read = PARTS[name].job()(config(name, model, tmp_path, "train.cache_mb=0"), tmp_path), Mock(wraps=reader)
    monkeypatch.setattr(f"bebop.systems.{name}.training.{reader.__name__}", read)
    job._train([TokenRow(prompt=(i, 2, 3), answer=(4, 5, 6, 7)) for i in range(6)])
    assert [len(call.args[1]) for call in read.call_args_list] == [4] * 4


@pytest.mark.slow  # a training more
def test_a_stop_keeps_the_steps_that_are_done(model: Path, tmp_path: Path) -> None:
    step, steps = GuardedAdamW.guarded_step, list[int]()

    def stopped(optimizer: GuardedAdamW, *arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(optimizer, *arguments)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(GuardedAdamW, "guarded_step", stopped)
        train([*overrides("block", model), "train.save_every=0"], tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["head_000003"]


WRONG = [
    ("block", ["options.taps=10"], r"options\.taps=10"),
    ("firp", ["options.layers=[5,6]"], r"layers 1\.\.5"),
    ("pipo", ["options.stage=opd", "model.parts.pipo=nowhere.safetensors"], r"model\.parts\.pipo='nowhere"),
    ("block", ["resume=true"], "no finished checkpoint"),
    ("firp", ["resume=true"], "no finished checkpoint"),
    ("pipo", ["resume=true"], "no finished checkpoint"),
    ("firp", ["options.layers=[3,2]"], "do not fall"),
    ("pipo", ["options.rho=2"], r"options\.rho=2"),
    ("pipo", ["options.stage=rl"], r"options\.stage"),
]


@pytest.mark.parametrize(("name", "more", "message"), slow_but(WRONG[:4], WRONG, several=True))
def test_what_is_wrong_is_said_before_anything_is_written(
    name: str, more: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train([*overrides(name, model), *more], tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", FIRST_STAGES)
def test_several_processes_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one process"):
        PARTS[name].job()(config(name, model, tmp_path), tmp_path, Ranks(0, 2))
