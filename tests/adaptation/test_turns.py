"""Turns of trajectories as text to train a head on: histories, order, draws that are held out."""

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from bebop.adaptation.corpus import CORPUS, drafting
from bebop.adaptation.turns import Answer, answers_of, play, sampled_turns
from bebop.config import ModelConfig
from bebop.config_adapt import AdaptConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_tokenizer
from bebop.parsing import from_dict
from bebop.trajectory import Completion, Prompt, Trajectory, Turn
from tests.builders import bare_policy

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


def config(slots: int = 8, resume: bool = False, folder: Path | None = None) -> AdaptConfig:
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


def completion(*token_ids: int) -> Completion:
    count = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids), logprobs=np.zeros(count, np.float32), versions=np.zeros(count, np.int64)
    )


def test_a_turn_answers_all_that_stands_before_it() -> None:
    prompt = Prompt(index=4, task="guess", text="", token_ids=(1, 2), item={})
    none, read = np.array([], np.int64), np.array([7, 8])
    turns = (
        Turn(observation=none, completion=completion(3, 9)),
        Turn(observation=read, completion=completion(4, 9)),
        Turn(observation=read[:1], completion=completion(5)),
    )
    found = answers_of(prompt, Trajectory(turns=turns, reward=1.0))
    assert [(p.token_ids, ids(c)) for p, c in found] == [
        ((1, 2), (3, 9)),
        ((1, 2, 3, 9, 7, 8), (4, 9)),
        ((1, 2, 3, 9, 7, 8, 4, 9, 7), (5,)),
    ]
    assert {p.index for p, _ in found} == {4}


def test_turns_are_those_of_the_first_games_however_many_are_played_at_once() -> None:
    chosen = config()
    found = play(chosen, chosen.task, TURNS, policy(), drafting(policy()), None)
    assert len(found) == TURNS
    numbers = [prompt.index for prompt, _ in found]
    assert numbers == sorted(numbers) and set(numbers) == set(range(max(numbers) + 1))
    several = [game for game in games(found) if len(game) > 1]
    assert len(several) > 2
    for (before, answer), (after, _) in ((a, b) for game in several for a, b in itertools.pairwise(game)):
        begun = before.token_ids + ids(answer)
        assert after.token_ids[: len(begun)] == begun and len(after.token_ids) > len(begun)
    other = play(config(slots=3), chosen.task, TURNS, policy(), drafting(policy()), None)
    assert [(p.token_ids, ids(c)) for p, c in other] == [(p.token_ids, ids(c)) for p, c in found]


def test_held_out_games_are_other_games_and_what_is_kept_is_read_back(tmp_path: Path) -> None:
    """All games of guess begin with the same question: with the same draws, the first turns would be the same."""
    training, rows, held_out = sampled_turns(config(), policy(), tmp_path / CORPUS, drafting(policy()), None)
    assert len(rows) == len(training) == TURNS and len(held_out) == 12
    known = {row.prompt for row in rows}
    histories = {prompt.token_ids for prompt in held_out}
    later = {history for history in histories if len(history) > min(map(len, histories))}
    assert later and not later & known
    again = sampled_turns(config(resume=True, folder=tmp_path), policy(), tmp_path / CORPUS, drafting(policy()), None)
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
    _, rows, held_out = sampled_turns(chosen, policy(), tmp_path / CORPUS, drafting(policy()), None)
    assert (len(rows), len(held_out)) == (2, 2)
