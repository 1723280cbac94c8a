"""Training of the network of pairs: what it learns from, what it keeps, and how the part decodes."""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bebop.adaptation import corpus
from bebop.adaptation.corpus import question_streams, read_corpus
from bebop.adaptation.ranks import ALONE
from bebop.config.adapt import AdaptConfig, DataConfig
from bebop.config.compose import adapt_config
from bebop.config.job import SamplingConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.model.parts import read_card
from bebop.rollout.engine import Finished
from bebop.systems.pipo.losses import PairRow
from bebop.systems.pipo.network import PairModel, as_pairs
from bebop.systems.pipo.training import PairTrainer, pad_ratio, pair_answers, pair_rows, texts_of
from bebop.tasks.rewards import make_reward
from bebop.trajectory import Prompt
from tests.adaptation.trainings import config


@pytest.fixture(scope="module")
def sft(finished: Callable[[str], Path]) -> Path:
    return finished("pipo")


def config_of(folder: Path) -> AdaptConfig:
    """As its card says it was made."""
    return adapt_config(shlex.split(read_card(folder / "pipo.safetensors").command)[3:])


def test_a_trained_part_decodes(sft: Path) -> None:
    card, again = read_card(sft / "pipo.safetensors"), config_of(sft)
    assert 0 < card.settings["tau"] < 1
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
    asked = config("pipo", model, tmp_path)
    job = PairTrainer(asked, tmp_path)
    training, held_out = question_streams(asked, job.policy)
    shared = [*training[:2], *held_out]
    monkeypatch.setattr("bebop.systems.pipo.training.question_streams", lambda *_: (shared, held_out))
    assert job.questions()[0] == training[:2]
    monkeypatch.setattr("bebop.systems.pipo.training.question_streams", lambda *_: (held_out, held_out))
    with pytest.raises(UserError, match="no question that is not held out"):
        job.questions()


@pytest.mark.slow
def test_a_stopped_corpus_goes_on_and_is_that_of_an_uninterrupted_job(
    sft: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = corpus.decoded

    def stopped(*given: Any) -> Iterator[Finished]:
        yield from itertools.islice(decoded(*given), 5)
        raise KeyboardInterrupt

    job = PairTrainer(config("pipo", model, tmp_path), tmp_path)
    questions, _ = job.questions()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(corpus, "decoded", stopped)
        job.corpus(questions)
    assert corpus.begun(tmp_path) and len(corpus.Parts(tmp_path / corpus.CORPUS, resume=True).read(ALONE)) == 5
    job.config = dataclasses.replace(job.config, resume=True)
    assert job.corpus(questions) == read_corpus(sft / corpus.CORPUS) == read_corpus(tmp_path / corpus.CORPUS)
    assert [file.name for file in tmp_path.iterdir()] == [corpus.CORPUS]


@pytest.mark.slow
def test_texts_are_those_of_the_engine(model: Path) -> None:
    """A completion may end with a stop token, a stop string, or at the limit."""
    policy = load_policy(config("pipo", model, model.parent).model)
    data = DataConfig(sampling=SamplingConfig(max_new_tokens=24, stop=("1", "a")))
    prompts = [Prompt(index=i, task="", text="", token_ids=(i + 4, 5), item={}) for i in range(48)]
    answers = corpus.run_engine(policy, prompts, data, corpus.drafting_config(policy))
    assert texts_of(policy, corpus.token_rows(prompts, answers), data.sampling) == [one.text for one in answers]
    ends = {(one.finish_reason, int(one.token_ids[-1]) in policy.eos_token_ids) for one in answers}
    assert ends == {("stop", True), ("stop", False), ("length", False)}


@pytest.mark.slow  # it makes a training
def test_rollouts_are_kept_with_the_drafts_that_were_rejected(finished: Callable[[str], Path]) -> None:
    """The pairs are those that were fed: without PADs they are the answers."""
    rows = [PairRow.read(line) for line in (finished("pipo-opd") / "rollouts" / "00000.jsonl").read_text().splitlines()]
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
