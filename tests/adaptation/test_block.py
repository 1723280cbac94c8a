"""Training of a block drafter and of the choice of block sizes, from answers to a part that decodes."""

import dataclasses
import json
import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bebop.adaptation.corpus import question_streams
from bebop.adaptation.part_job import store
from bebop.adaptation.ranks import Ranks
from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config, write_down
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.model.parts import read_card
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.block.training import BlockLengthTrainer, BlockTrainer
from bebop.trainer.optim import GuardedAdamW
from tests.builders import requests

SMALL = ["data.sequences=6", "data.sampling.max_new_tokens=8", "data.slots=16", "evaluation.prompts=2",
         "train.threads=1", "progress=false", "model.check=false"]  # fmt: skip
BLOCK = ["part=block", "options.steps=4", "options.rows_per_step=4", "options.width=32", "train.save_every=2"]


def config(model: Path, folder: Path, *overrides: str) -> AdaptConfig:
    return adapt_config([f"model.path={model}", *SMALL, *overrides, f"dir={folder}"])


def trained(model: Path, folder: Path, *overrides: str) -> BlockTrainer:
    folder.mkdir(exist_ok=True)
    asked = config(model, folder, *BLOCK, *overrides)
    job = BlockTrainer(asked, folder)
    job.prepare()
    write_down(asked, [f"model.path={model}", *SMALL, *BLOCK, *overrides], folder)
    job.run()
    return job


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was not interrupted."""
    folder = tmp_path_factory.mktemp("block")
    trained(model, folder)
    return folder


def test_a_trained_part_says_what_it_is_and_decodes(model: Path, whole: Path) -> None:
    card = read_card(whole / "block.safetensors")
    assert card.part == "block" and card.settings["taps"] == [1, 2] and card.data["answers"] == 6
    assert {"accept_length/greedy/before", "accept_length/sampled/after"} <= set(card.results)
    again = adapt_config(shlex.split(card.command)[3:])
    assert again == dataclasses.replace(config(model, whole, *BLOCK), dir=None)
    policy = load_policy(
        dataclasses.replace(again.model, parts={"block": str(whole / "block.safetensors")}), needs=("block",)
    )
    answers = []
    for system in ("block", "autoregressive"):
        engine = TorchEngine(policy, DecodingConfig(system=system, draft_tokens=7), slots=2, max_length=64)
        answers.append(generate(engine, requests([[40, 41, 42]], temperature=0.0, max_new_tokens=12))[0].token_ids)
    np.testing.assert_array_equal(*answers)


@pytest.mark.slow  # two trainings more; the other parts go on from checkpoints by the same code
def test_a_resumed_training_is_an_uninterrupted_one_to_the_bit(model: Path, whole: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    shutil.rmtree(store(half).path(4))
    (half / "block.safetensors").unlink()
    job = trained(model, half, "resume=true")
    assert job.found is not None and job.found.name.endswith("000002")
    ours, wanted = load_file(half / "block.safetensors"), load_file(whole / "block.safetensors")
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    results = [read_card(folder / "block.safetensors").results for folder in (half, whole)]
    assert results[0] == results[1], "also what was measured before the first step"
    steps = [json.loads(line)["step"] for line in (half / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    other = load_file(trained(model, tmp_path / "other", "seed=1").written()["part"])
    assert not all(torch.equal(other[name], wanted[name]) for name in wanted), "another seed, another part"


@pytest.mark.slow  # a training more
def test_a_stop_keeps_the_steps_that_are_done(model: Path, whole: Path, tmp_path: Path) -> None:
    folder, step, steps = tmp_path / "stopped", GuardedAdamW.guarded_step, list[int]()

    def stopped(optimizer: GuardedAdamW, *arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(optimizer, *arguments)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(GuardedAdamW, "guarded_step", stopped)
        trained(model, folder, "train.save_every=0")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["head_000003"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["resume=true"], "no finished checkpoint"), (["options.taps=10"], r"options\.taps=10")],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    overrides: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trained(model, tmp_path, *overrides)
    assert not any(tmp_path.iterdir())


def test_several_processes_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one process"):
        BlockTrainer(config(model, tmp_path, *BLOCK), tmp_path, Ranks(0, 2))


# ---- block sizes


def swept(model: Path, whole: Path, folder: Path, *overrides: str) -> tuple[BlockLengthTrainer, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    length = ["part=block_length", "options.largest=3", "options.steps=20", *overrides]
    asked = config(model, folder, *length)
    parts = {**asked.model.parts, "block": str(whole / "block.safetensors")}
    job = BlockLengthTrainer(dataclasses.replace(asked, model=dataclasses.replace(asked.model, parts=parts)), folder)
    job.prepare()
    job.run()
    return job, read_card(job.written()["part"]).results


def test_sizes_are_compared_on_the_same_answers(
    model: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0 every size gives the same tokens; a size that is finished is not swept again on resume.

    A question that is asked again counts once: it would be trained on and tested on.
    """
    twice = lambda *given: (2 * question_streams(*given)[0], [])  # noqa: E731
    monkeypatch.setattr("bebop.systems.block.training.question_streams", twice)
    job, results = swept(model, whole, tmp_path / "greedy")
    tables = [json.loads((job.folder / f"sweep-{size}.json").read_text()) for size in (2, 3)]
    assert [tokens for tokens, _ in tables[0]] == [tokens for tokens, _ in tables[1]]
    assert sum(results["labels"]) == 6 and 0 <= results["accuracy"] <= 1
    planted = [[8, 2]] * 6
    (job.folder / "sweep-3.json").write_text(json.dumps(planted))
    _, again = swept(model, whole, job.folder, "resume=true")
    assert again["labels"] == [0, 6] and again["accuracy"] == 1.0
