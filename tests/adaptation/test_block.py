"""A block drafter after its training decodes; the training of the choice of block sizes."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from bebop.adaptation.corpus import begun, question_streams
from bebop.config.compose import adapt_config
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.parts import read_card
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.run_dir.checkpoints import HEADS, Store
from bebop.run_dir.folder import RunFolder
from bebop.systems.block.losses import read_texts
from bebop.systems.block.training import BlockLengthTrainer
from tests.adaptation.builders import random_policy
from tests.adaptation.trainings import SMALL, overrides, train
from tests.builders import requests

FEW = range(5, 9)  # tokens


@pytest.fixture(scope="module")
def drafter(finished: Callable[[str], Path]) -> Path:
    return finished("block") / "block.safetensors"


def test_a_trained_part_decodes(model: Path, drafter: Path) -> None:
    assert read_card(drafter).data["answers"] == 6
    config = adapt_config([f"model.path={model}", *SMALL, f"model.parts.block={drafter}"])
    policy = load_policy(config.model, needs=("block",))
    answers = []
    for system in ("block", "autoregressive"):
        engine = TorchEngine(policy, DecodingConfig(system=system, draft_tokens=7), slots=2, max_length=64)
        answers.append(generate(engine, requests([[40, 41, 42]], temperature=0.0, max_new_tokens=12))[0].token_ids)
    np.testing.assert_array_equal(*answers)


# ---- block sizes


def swept(model: Path, drafter: Path, folder: Path, *overrides: str) -> tuple[BlockLengthTrainer, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    asked = adapt_config([f"model.path={model}", *SMALL, "part=block_length", "options.largest=3", "options.steps=20",
                          *overrides, f"dir={folder}"])  # fmt: skip
    parts = {**asked.model.parts, "block": str(drafter)}
    job = BlockLengthTrainer(dataclasses.replace(asked, model=dataclasses.replace(asked.model, parts=parts)), folder)
    job.prepare()
    job.run()
    return job, read_card(job.written()["part"]).results


@pytest.mark.slow
def test_cycles_of_greedy_completions_are_counted_without_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size, one token a cycle among them, gives the tokens and cycles that decoding with it gives.

    The model knows few tokens, so that a drafter that learned next to nothing is right now and then. States of all
    texts do not fit into memory: texts are read one by one.
    """
    policy = random_policy(layers=5)
    with torch.no_grad():
        policy.backbone.get_output_embeddings().weight[: FEW.start] = 0
        policy.backbone.get_output_embeddings().weight[FEW.stop :] = 0
    save_policy(policy, tmp_path / "model")
    given = overrides("block", tmp_path / "model")
    drafter = train(given, tmp_path / "block").folder / "block.safetensors"
    monkeypatch.setattr("bebop.systems.block.losses.CHUNK_ROWS", {"cpu": 8})  # places of a completion in several parts
    read = Mock(wraps=read_texts)
    monkeypatch.setattr("bebop.systems.block.training.read_texts", read)
    sizes = ["options.smallest=1", "options.largest=4"]
    job, _ = swept(tmp_path / "model", drafter, tmp_path / "read", *sizes, "train.cache_mb=0")
    assert {len(call.args[1]) for call in read.call_args_list} == {1}
    prompts, accepted = job.prompts(), set()
    for size in job.sizes:
        answers = job._answers(prompts, size, 0, None)
        decoded = [[answer.stats.emitted, answer.stats.cycles] for answer in answers]
        assert json.loads((job.folder / f"sweep-{size}.json").read_text()) == decoded, size
        accepted |= {tokens - cycles for tokens, cycles in decoded}
    assert len(accepted) > 2  # the numbers of accepted drafts differ


def test_sizes_are_compared_on_the_same_answers(
    model: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0 every size gives the same tokens; a size that is finished is not swept again on resume.

    A question that is asked again counts once: it would be trained on and tested on.
    """
    twice = lambda *given: (2 * question_streams(*given)[0], [])  # noqa: E731
    monkeypatch.setattr("bebop.systems.block.training.question_streams", twice)
    job, results = swept(model, drafter, tmp_path / "greedy")
    tables = [json.loads((job.folder / f"sweep-{size}.json").read_text()) for size in (2, 3)]
    assert [tokens for tokens, _ in tables[0]] == [tokens for tokens, _ in tables[1]]
    assert sum(results["labels"]) == 6 and 0 <= results["accuracy"] <= 1
    planted = [[8, 2]] * 6
    (job.folder / "sweep-3.json").write_text(json.dumps(planted))
    _, again = swept(model, drafter, job.folder, "resume=true")
    assert again["labels"] == [0, 6] and again["accuracy"] == 1.0


def test_a_folder_with_a_size_that_is_finished_can_resume_and_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "sweep-2.json").write_text("[]")
    again, anew = (RunFolder(tmp_path, "dir", r, Store(tmp_path, HEADS), "an adaptation", begun) for r in (True, False))
    again._check_contents()
    with pytest.raises(UserError, match="holds an adaptation: set resume=true to go on with it"):
        anew._check_contents()
