"""Training of the network of pairs, from answers to a part that decodes, and its distillation on what it says."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bebop.adaptation.corpus import question_streams, read_corpus
from bebop.adaptation.part_job import store
from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config, write_down
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.model.parts import read_card
from bebop.systems.pipo.losses import PairRow
from bebop.systems.pipo.network import PairModel, as_pairs
from bebop.systems.pipo.training import PairTrainer, pad_ratio, pair_answers, pair_rows
from bebop.tasks.rewards import make_reward
from tests.cases import slow_but

SMALL = ["part=pipo", "task=gcd", "data.sequences=12", "data.sampling.max_new_tokens=12", "data.slots=32",
         "evaluation.prompts=3", "train.threads=1", "train.save_every=2", "progress=false", "model.check=false",
         "options.steps=4", "options.rows_per_step=4", "options.samples=2", "options.rollouts=12"]  # fmt: skip
REWARD = "def of_odd_length(text, item):\n    return float(len(text) % 2)\n"  # random weights solve nothing


def small(model: Path) -> list[str]:
    """The overrides of every training here, with a reward that about half of the answers get."""
    file = model.parent / "pipo_reward.py"
    file.write_text(REWARD)
    return [f"model.path={model}", f"task.reward={file}:of_odd_length", *SMALL]


def trained(model: Path, folder: Path, *overrides: str) -> PairTrainer:
    folder.mkdir(exist_ok=True)
    given = [*small(model), *overrides]
    asked = adapt_config([*given, f"dir={folder}"])
    job = PairTrainer(asked, folder)
    job.prepare()
    write_down(asked, given, folder)
    with patch("bebop.systems.pipo.training.HALVINGS", 5):  # each decodes all questions once more
        job.run()
    return job


@pytest.fixture(scope="module")
def sft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("sft")
    trained(model, folder)
    return folder


@pytest.fixture(scope="module")
def opd(model: Path, sft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("opd")
    trained(model, folder, "options.stage=opd", f"model.parts.pipo={sft / 'pipo.safetensors'}")
    return folder


def config_of(folder: Path) -> AdaptConfig:
    """As its card says it was made."""
    return adapt_config(shlex.split(read_card(folder / "pipo.safetensors").command)[3:])


def test_a_trained_part_says_what_it_is_and_decodes(model: Path, sft: Path) -> None:
    card, again = read_card(sft / "pipo.safetensors"), config_of(sft)
    assert card.part == "pipo" and card.settings["pad"] == 0 and 0 < card.settings["tau"] < 1
    assert {"reward", "tokens_per_pair", "pairs"} <= set(card.results)
    assert again == dataclasses.replace(adapt_config(small(model)), dir=None)
    assert {weight.dtype for weight in load_file(sft / "pipo.safetensors").values()} == {torch.bfloat16}
    with_part = dataclasses.replace(again.model, parts={"pipo": str(sft / "pipo.safetensors")})
    policy = load_policy(with_part, needs=("pipo",))
    network = policy.parts["pipo"]
    assert isinstance(network, PairModel) and network.tau == card.settings["tau"]
    _, held_out = question_streams(again, policy)
    for tau, share in ((-1.0, (0, 0.2)), (1.0, (1, 1))):
        answers = pair_answers(again, policy, held_out, {"tau": tau}, 0)
        assert share[0] <= pad_ratio(answers) <= share[1]


def test_right_answers_are_kept_and_no_question_is_held_out(sft: Path) -> None:
    config = config_of(sft)
    policy = load_policy(config.model)
    training, held_out = question_streams(config, policy)
    reward, asked = make_reward(config.task), {prompt.token_ids: prompt for prompt in training}
    rows = read_corpus(sft / "corpus.jsonl")
    assert 0 < len(rows) < 2 * len(training), "some answers of the model are wrong"
    for row in rows:
        assert reward(policy.tokenizer.decode(row.answer), asked[row.prompt]) >= 1
    assert not {row.prompt for row in rows} & {prompt.token_ids for prompt in held_out}


def test_a_question_that_is_held_out_is_not_trained_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a task has so few questions that one comes up in both."""
    config = adapt_config([*small(model), f"dir={tmp_path}"])
    job = PairTrainer(config, tmp_path)
    training, held_out = question_streams(config, job.policy)
    shared = [*training[:2], *held_out]
    monkeypatch.setattr("bebop.systems.pipo.training.question_streams", lambda *_: (shared, held_out))
    assert job.questions()[0] == training[:2]
    monkeypatch.setattr("bebop.systems.pipo.training.question_streams", lambda *_: (held_out, held_out))
    with pytest.raises(UserError, match="no question that is not held out"):
        job.questions()


@pytest.mark.parametrize("stage", slow_but(["sft"], ["sft", "opd"]))
def test_a_resumed_training_is_an_uninterrupted_one_to_the_bit(
    stage: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also in the middle of rollouts, half of which had been trained on."""
    whole: Path = request.getfixturevalue(stage)
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    checkpoints = store(half)
    shutil.rmtree(checkpoints.path(4))
    (half / "pipo.safetensors").unlink()
    given = json.loads((whole / "overrides.json").read_text())
    job = trained(model, half, *given[len(small(model)) :], "resume=true")
    assert job.found is not None and job.found.name.endswith("000002")
    ours, wanted = load_file(half / "pipo.safetensors"), load_file(whole / "pipo.safetensors")
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    steps = [json.loads(line)["step"] for line in (half / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_rollouts_are_kept_with_the_drafts_that_were_rejected(opd: Path) -> None:
    """The pairs are those that were fed: without PADs they are the answers."""
    rows = [PairRow.read(line) for line in (opd / "rollouts" / "00000.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    ends, rejected = 0, 0
    for row in rows:
        answer = row.pairs[row.prompt :]
        assert len(row.drafts) == len(answer) and all(first != 0 for first, _ in answer)
        for (_, second), draft in zip(answer, row.drafts, strict=True):
            assert second in (0, draft)
            rejected += second == 0 != draft
        ends += row.drafts[-1] == 0
    assert rejected > 0 and ends < len(rows) + 1


def test_rows_are_what_the_decoder_wrote(sft: Path) -> None:
    config = config_of(sft)
    with_part = dataclasses.replace(config.model, parts={"pipo": str(sft / "pipo.safetensors")})
    policy = load_policy(with_part, needs=("pipo",))
    _, held_out = question_streams(config, policy)
    answers = pair_answers(config, policy, held_out, {"tau": 0.5}, 0)
    for prompt, answer, row in zip(held_out, answers, pair_rows(held_out, answers, 0), strict=True):
        assert row.pairs[: row.prompt] == tuple(as_pairs(prompt.token_ids, 0))
        tokens = [token for pair in row.pairs[row.prompt :] for token in pair if token != 0]
        np.testing.assert_array_equal(tokens, answer.token_ids)
        assert len(row.drafts) == answer.stats.cycles


WRONG = [
    (["resume=true"], "no finished checkpoint"),
    (["options.stage=opd", "model.parts.pipo=nowhere.safetensors"], r"model\.parts\.pipo='nowhere"),
    (["options.rho=2"], r"options\.rho=2"),
    (["options.stage=rl"], r"options\.stage"),
]


@pytest.mark.parametrize(("overrides", "message"), slow_but(WRONG[1:2], WRONG, several=True))
def test_what_is_wrong_is_said_before_anything_is_written(
    overrides: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trained(model, tmp_path, *overrides)
    assert not any(tmp_path.iterdir())
