"""Text to train on: sampled prompts and held-out ones stay apart, files are read or refused in one line."""

import dataclasses
import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from bebop.adaptation import corpus
from bebop.adaptation.corpus import (
    CORPUS,
    HELD_OUT_SEED,
    Answer,
    Parts,
    answers_of,
    drafting_config,
    from_file,
    kept_rows,
    play_turns,
    question_streams,
    read_corpus,
    sample_turns,
    sampled_rows,
    split_rows,
    write_corpus,
)
from bebop.adaptation.ranks import ALONE
from bebop.config.adapt import AdaptConfig, DataConfig
from bebop.config.fields import from_dict
from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_tokenizer
from bebop.model.parity import stock_attention
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Completion, Prompt, Trajectory, Turn
from tests.adaptation.builders import config
from tests.builders import bare_policy
from tests.goodness_of_fit import p_value


def data(path: Path, *rows: Any, **changes: Any) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source="file", path=str(path), **changes)


def test_rows_come_back_as_they_were_kept(tmp_path: Path) -> None:
    rows = [TokenRow(prompt=(1, 2), answer=(3, 4, 5), task="gcd"), TokenRow(prompt=(6,), answer=(), task="")]
    write_corpus(rows, tmp_path / "corpus.jsonl")
    assert read_corpus(tmp_path / "corpus.jsonl") == rows
    kept = DataConfig(source="file", path=str(tmp_path / "corpus.jsonl"))
    assert from_file(kept, bare_policy()) == rows[:1], "rows without an answer are of no use"


def test_text_is_encoded_and_ends(tmp_path: Path) -> None:
    found = from_file(data(tmp_path / "a.jsonl", {"prompt": "ab", "answer": "cd"}), bare_policy())
    assert found[0].prompt[:2] == (0, 1) and found[0].answer == (2, 3, 11), "11 ends a text"
    named = data(tmp_path / "b.jsonl", {"q": "a", "a": "b", "task": "t"}, prompt_key="q", answer_key="a")
    assert from_file(named, bare_policy())[0].task == "t"


BAD = [
    ([], {}, "has no rows: give a file with at least one"),
    ([{"prompt": "a"}], {}, "data.answer_key='answer': line 1 of .* has no such key; it has prompt"),
    ([{"prompt": "a", "answer": None}], {}, "data.answer_key='answer': line 1 of .* has null there"),
    ([{"prompt": 5, "answer": "b"}], {}, "data.prompt_key='prompt': line 1 of .* holds '5'; give a text or a list"),
    ([{"prompt_ids": [1], "answer_ids": [2, 99]}], {}, "line 1 of .* has token 99, the model has 12"),
    ([{"prompt_ids": [], "answer_ids": [2]}], {}, "line 1 of .* has an empty prompt"),
    ([{"prompt_ids": "abc", "answer_ids": [2]}], {}, "line 1 of .* has token ids that are no whole numbers from 0 on"),
    ([{"prompt_ids": [1], "answer_ids": [-2]}], {}, "line 1 of .* has token ids that are no whole numbers from 0 on"),
    ([{"prompt_ids": 7, "answer_ids": [2]}], {}, "line 1 of .* has token ids that are no whole numbers from 0 on"),
    ([{"prompt_ids": [1] * 600, "answer_ids": [2]}], {}, "none of its 1 rows has an answer and at most"),
]


@pytest.mark.parametrize(("rows", "changes", "message"), BAD)
def test_what_cannot_be_used_is_refused(tmp_path: Path, rows: list[Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        from_file(data(tmp_path / "bad.jsonl", *rows, **changes), bare_policy())
    assert "\n" not in str(caught.value)


def test_no_more_rows_are_read_than_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [i], "answer_ids": [1]} for i in range(9)]
    some = data(tmp_path / "x.jsonl", *rows, sequences=4)
    assert len(from_file(some, bare_policy())) == 4
    assert len(from_file(dataclasses.replace(some, sequences=0), bare_policy())) == 9


def test_held_out_prompts_do_not_occur_in_training() -> None:
    """Few different questions: the plain second stream would share most of them with the first."""
    task = {"name": "chain_sum", "args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    settings = config(task={**task, "system": None}, data={"sequences": 100}, evaluation={"prompts": 20})
    policy = dataclasses.replace(bare_policy(64), tokenizer=load_tokenizer(ModelConfig(path="tiny")))  # knows digits
    training, held_out = question_streams(settings, policy)
    assert len(training) == 100 and len(held_out) == 20
    texts = {p.text for p in training}
    assert not texts & {p.text for p in held_out}
    fresh = dataclasses.replace(settings.task, seed=settings.task.seed + HELD_OUT_SEED)
    plain = question_streams(dataclasses.replace(settings, task=fresh), policy)[0]
    assert texts & {p.text for p in plain[:20]}
    other = dataclasses.replace(settings, seed=5)  # data of another seed of the run: the same questions
    assert [p.text for p in question_streams(other, policy)[0]] == [p.text for p in training]


@pytest.mark.parametrize(
    ("questions", "asked", "held_out"),
    [
        (40, 100, 8),  # all are asked: a fifth is held out, and training asks the others
        (40, 30, 10),  # ten are left over
        (40, 10, 16),  # as many as are wanted
        (11, 20, 2),
        (9, 5, 4),
        (9, 50, "has 9 different questions: give 10 or more, as a fifth is held out"),
    ],
)
def test_of_a_small_file_no_question_is_trained_on_and_held_out(
    questions: int, asked: int, held_out: int | str, tmp_path: Path
) -> None:
    policy = dataclasses.replace(bare_policy(64), tokenizer=load_tokenizer(ModelConfig(path="tiny")))
    rows = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(questions)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"source": "file", "name": "sums", "path": str(tmp_path / "q.jsonl")}
    settings = config(task=task, data={"sequences": asked}, evaluation={"prompts": 16})
    if isinstance(held_out, str):
        with pytest.raises(UserError, match=held_out):
            question_streams(settings, policy)
        return
    training, other = question_streams(settings, policy)
    apart = {p.text for p in training}, {p.text for p in other}
    assert not apart[0] & apart[1] and len(apart[1]) == len(other) == held_out
    assert len(training) == asked and len(apart[0]) == min(asked, questions - held_out)


def test_rows_of_one_prompt_are_on_one_side() -> None:
    """Several answers to a prompt, which is in a file as often: the last prompts are held out with all of them."""
    rows = [TokenRow(prompt=(i % 12,), answer=(i,), task="") for i in range(36)]
    training, held_out = split_rows(config(), rows)
    assert {row.prompt for row in held_out} == {(10,), (11,)} and len(held_out) == 6
    assert not {row.prompt for row in training} & {row.prompt for row in held_out} and len(training) == 30
    with pytest.raises(UserError, match="has 9 different prompts in 27 usable rows: give 10 or more"):
        split_rows(config(), [row for row in rows if row.prompt[0] < 9])


def test_held_out_questions_are_none_of_a_finite_set(tmp_path: Path) -> None:
    """Training goes through the set again and again; of a file the rows behind it are held out."""
    policy = dataclasses.replace(bare_policy(64), tokenizer=load_tokenizer(ModelConfig(path="tiny")))
    rows = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(20)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_file = {"source": "file", "name": "sums", "path": str(tmp_path / "q.jsonl")}
    for task in ({"name": "gcd"}, of_file):
        settings = config(task={**task, "size": 8}, data={"sequences": 24}, evaluation={"prompts": 6})
        training, held_out = question_streams(settings, policy)
        assert {p.question for p in training} == {*range(8)} and len({p.text for p in training}) == 8
        assert len(held_out) == 6 and not {p.text for p in held_out} & {p.text for p in training}
    assert all(p.number >= 8 for p in held_out)


# ---- Turns of trajectories as text to train a head on: histories, order, draws that are held out

TURNS = 30


@cache
def policy() -> Policy:
    """Random, in float64, with the built-in model's tokenizer; one token in five or so ends a turn."""
    tokenizer = load_tokenizer(ModelConfig(path="tiny"))
    made = bare_policy(len(tokenizer), dtype=torch.float64, sharp=3.0)
    made.tokenizer = tokenizer
    stops = [tokenizer.eos_token_id, *range(300, 307)]
    made.backbone.generation_config = GenerationConfig(eos_token_id=stops)
    with torch.no_grad():
        rows = made.backbone.lm_head.weight
        rows[stops[:4]] *= 6
        rows[stops[4:]] = -rows[stops[:4]]  # of two opposite ones, one is likely
    return made


def game_config(slots: int = 8, resume: bool = False, folder: Path | None = None) -> AdaptConfig:
    sections = {
        "model": {"path": "tiny", "device": "cpu"},
        "task": {"source": "environment", "name": "guess"},
        "data": {"sequences": TURNS, "slots": slots, "max_length": 200, "sampling": {"max_new_tokens": 24}},
        "evaluation": {"prompts": 12},
        "resume": resume,
        "dir": None if folder is None else str(folder),
    }
    return from_dict(AdaptConfig, sections)


def games(answers: list[Answer]) -> list[list[Answer]]:
    """The answers by game, in order."""
    found: dict[int, list[Answer]] = {}
    for prompt, completion in answers:
        found.setdefault(prompt.index, []).append((prompt, completion))
    return list(found.values())


def ids(answer: Completion) -> tuple[int, ...]:
    return tuple(answer.token_ids.tolist())


def given_completion(*token_ids: int) -> Completion:
    count = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids), logprobs=np.zeros(count, np.float32), versions=np.zeros(count, np.int64)
    )


def test_a_turn_answers_all_that_stands_before_it() -> None:
    prompt = Prompt(index=4, task="guess", text="", token_ids=(1, 2), item={})
    none, read = np.array([], np.int64), np.array([7, 8])
    turns = (
        Turn(observation=none, completion=given_completion(3, 9)),
        Turn(observation=read, completion=given_completion(4, 9)),
        Turn(observation=read[:1], completion=given_completion(5)),
    )
    found = answers_of(prompt, Trajectory(turns=turns, reward=1.0))
    assert [(p.token_ids, ids(c)) for p, c in found] == [
        ((1, 2), (3, 9)),
        ((1, 2, 3, 9, 7, 8), (4, 9)),
        ((1, 2, 3, 9, 7, 8, 4, 9, 7), (5,)),
    ]
    assert {p.index for p, _ in found} == {4}


@pytest.mark.slow
def test_turns_are_those_of_the_first_games_however_many_are_played_at_once() -> None:
    chosen = game_config()
    found = play_turns(chosen, chosen.task, TURNS, policy(), drafting_config(policy()), None)
    assert len(found) == TURNS
    numbers = [prompt.index for prompt, _ in found]
    assert numbers == sorted(numbers) and set(numbers) == set(range(max(numbers) + 1))
    several = [game for game in games(found) if len(game) > 1]
    assert len(several) > 2
    for (before, answer), (after, _) in ((a, b) for game in several for a, b in itertools.pairwise(game)):
        begun = before.token_ids + ids(answer)
        assert after.token_ids[: len(begun)] == begun and len(after.token_ids) > len(begun)
    other = play_turns(game_config(slots=3), chosen.task, TURNS, policy(), drafting_config(policy()), None)
    assert [(p.token_ids, ids(c)) for p, c in other] == [(p.token_ids, ids(c)) for p, c in found]


@pytest.mark.slow
def test_held_out_games_are_other_games_and_what_is_kept_is_read_back(tmp_path: Path) -> None:
    """All games of guess begin with the same question: with the same draws, the first turns would be the same."""
    training, rows, held_out = sample_turns(game_config(), policy(), tmp_path / CORPUS, drafting_config(policy()), None)
    assert len(rows) == len(training) == TURNS and len(held_out) == 12
    known = {row.prompt for row in rows}
    histories = {prompt.token_ids for prompt in held_out}
    later = {history for history in histories if len(history) > min(map(len, histories))}
    assert later and not later & known
    again = sample_turns(
        game_config(resume=True, folder=tmp_path), policy(), tmp_path / CORPUS, drafting_config(policy()), None
    )
    assert again[1] == rows
    assert [p.token_ids for p in again[0]] == [p.token_ids for p in training] == [row.prompt for row in rows]
    assert [p.token_ids for p in again[2]] == [p.token_ids for p in held_out]


@pytest.mark.parametrize("seed", [0, (1 << 23) - 1])
def test_seeds_of_requests_fit(seed: int, tmp_path: Path) -> None:
    """Also those of held-out games of the largest seed."""
    chosen = from_dict(
        AdaptConfig,
        {
            "model": {"path": "tiny", "device": "cpu"}, "task": {"source": "environment", "name": "guess"},
            "data": {"sequences": 2, "slots": 2, "max_length": 100, "sampling": {"max_new_tokens": 4}},
            "evaluation": {"prompts": 2}, "seed": seed,
        },
    )  # fmt: skip
    _, rows, held_out = sample_turns(chosen, policy(), tmp_path / CORPUS, drafting_config(policy()), None)
    assert (len(rows), len(held_out)) == (2, 2)


# ---- a corpus that was not finished


def test_what_a_stopped_process_kept_is_read_again_but_for_a_torn_line(tmp_path: Path) -> None:
    parts = Parts(tmp_path / CORPUS, resume=True)
    with parts.writer(ALONE) as keep:
        assert keep is not None
        keep(3, (1, 2))
        keep(0, ())
    with (tmp_path / "corpus.part1.jsonl").open("w") as file:  # of a second rank
        file.write('{"number": 5, "answer_ids": [7]}\n{"number": 6, "answer_ids": [8')
    assert parts.read(ALONE) == {3: (1, 2), 0: (), 5: (7,)}
    assert [one.name for one in parts.files()] == ["corpus.part0.jsonl"], "one process holds all of them now"
    with parts.writer(ALONE) as keep:
        assert keep is not None
        keep(6, (9,))
    assert parts.read(ALONE) == {3: (1, 2), 0: (), 5: (7,), 6: (9,)}
    assert Parts(tmp_path / CORPUS, resume=False).read(ALONE) == {}, "a new run begins anew"


@pytest.mark.slow
def test_a_stopped_corpus_goes_on_and_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, given = bare_policy(), [Prompt(index=i, task="t", text="", token_ids=(i % 5,), item={}) for i in range(6)]
    settings = config(data={"sampling": {"max_new_tokens": 4}, "slots": 2})
    plain = drafting_config(policy)
    whole = kept_rows(settings, policy, given, tmp_path / "whole.jsonl", plain, 1, None)
    decoded, asked = corpus.decoded, list[int]()

    def stopped(engine: Any, requests: Any, bar: Any) -> Any:
        asked.append(len(requests))
        for count, finished in enumerate(decoded(engine, requests, bar)):
            yield finished
            if count == 2 and len(asked) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "decoded", stopped)
    path = tmp_path / "half.jsonl"
    with pytest.raises(KeyboardInterrupt):
        kept_rows(settings, policy, given, path, plain, 1, None)
    assert not path.exists()
    again = kept_rows(dataclasses.replace(settings, dir="x", resume=True), policy, given, path, plain, 1, None)
    assert again == whole == read_corpus(path) and asked == [6, 3]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["half.jsonl", "whole.jsonl"]


# ---- completions by transformers, of backbones that the engine cannot decode


def generated(prompts: list[tuple[int, ...]], seed: int = 0, **sampling: Any) -> tuple[Policy, list[TokenRow]]:
    policy = dataclasses.replace(bare_policy(), stock=True)
    # Settings that checkpoints come with, and that would change the distribution.
    policy.backbone.generation_config = GenerationConfig(eos_token_id=11, repetition_penalty=9.0, min_p=0.5, top_k=2)
    given = [Prompt(index=i, task=f"t{i}", text="", token_ids=ids, item={}) for i, ids in enumerate(prompts)]
    chosen = from_dict(DataConfig, {"slots": 1000, "sampling": {"max_new_tokens": 4, **sampling}})
    with stock_attention(policy.backbone, "sdpa"):
        return policy, sampled_rows(policy, given, chosen, drafting_config(policy), seed)


@pytest.mark.slow  # a thousand completions
@torch.no_grad()
def test_transformers_samples_the_jobs_distribution_and_nothing_else() -> None:
    prompt = (0, 3, 1)
    policy, rows = generated([prompt] * 2000, temperature=0.7, top_p=0.9, top_k=6, max_new_tokens=12)
    ids = torch.tensor([prompt])
    logits = policy.logits(dataclasses.replace(policy, stock=False).hidden(ids, torch.arange(3)[None], CausalContext()))
    one = torch.ones(1)
    probs = BatchSampling(temperature=0.7 * one, top_p=0.9 * one, top_k=6 * one.long()).probs(logits[:, -1:])[0, 0]
    counts = np.bincount([row.answer[0] for row in rows], minlength=12)
    assert p_value(counts, probs.double().numpy()) > 1e-3
    assert all(row.answer.count(11) == (row.answer[-1] == 11) for row in rows), "a stop token ends a completion"
    assert {len(row.answer) for row in rows if row.answer[-1] != 11} == {12}
    assert min(len(row.answer) for row in rows) < 12


@pytest.mark.slow
@torch.no_grad()
def test_prompts_of_other_lengths_beside_it_do_not_change_a_completion() -> None:
    prompts = [(0, 3, 1), (4, 5), (2, 2, 2, 7, 1), (6, 1), (3,)]
    policy, rows = generated(prompts, top_k=1)
    own = dataclasses.replace(policy, stock=False)
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.prompt == prompt
        for place, token in enumerate(row.answer):
            ids = torch.tensor([[*prompt, *row.answer[:place]]])
            hidden = own.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
            assert token == int(own.logits(hidden)[0, -1].argmax())


@pytest.mark.slow
@torch.no_grad()
def test_transformers_samples_what_the_embedded_engine_could_where_it_is_asked_to() -> None:
    """The model was loaded with bebop's attention, which it has again afterwards."""
    policy, given = bare_policy(), [Prompt(index=0, task="t", text="", token_ids=(0, 3, 1), item={})]
    settings = {"sampling": {"max_new_tokens": 8, "top_k": 1}}
    wanted, found = (
        sampled_rows(policy, given, from_dict(DataConfig, {"engine": name, **settings}), drafting_config(policy))
        for name in ("torch", "transformers")
    )
    assert found == wanted and len(found[0].answer) > 1
    assert policy.backbone.config._attn_implementation == "bebop"


@pytest.mark.slow
def test_transformers_draws_others_with_another_seed_and_the_same_with_the_same() -> None:
    prompts = [(0, 3, 1), (4, 5)]
    first, again, other = (generated(prompts, seed)[1] for seed in (1, 1, 2))
    assert first == again != other
