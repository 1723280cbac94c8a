"""trajectories.sqlite holds what is written to it, for whoever asks for answers, steps and the text of tokens."""

import dataclasses
import json
import sqlite3
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from bebop.errors import UserError
from bebop.trajectory import MEASURED, NONE, Completion, DecodeStats, Group, Prompt, Trajectory
from bebop.trajectory_db.reader import NAME, StoredAnswer, Trajectories
from bebop.trajectory_db.schema import COLUMNS, SCHEMA
from bebop.trajectory_db.writer import TrajectoryLog, piece_of, summary_row
from tests.builders import letters
from tests.stored_answers import SIZE, TOKENS, group, opened, same, trace, write, written


def test_an_answer_is_read_back_as_it_was(tmp_path: Path) -> None:
    batches = written(tmp_path, 1, 2, 3)
    with Trajectories(tmp_path / NAME) as stored:
        for prompt, group in enumerate(g for batch in batches for g in batch):
            for member in range(SIZE):
                same(stored.answer(prompt * SIZE + member), group, member)
        one, other = stored.answer(4 * SIZE), stored.answer(4 * SIZE + 1)
    assert (one.step, one.prompt, one.member, one.task, one.system) == (3, 4, 0, "gcd", "bebop")
    assert (one.reward, one.timed_out, one.exact, one.finish, one.length) == (4.0, False, True, "length", TOKENS)
    assert (other.reward, other.timed_out, other.exact, other.length) == (4.5, True, False, TOKENS + 1)
    assert (one.version_first, one.version_last, one.staleness) == (0, 2, 2)
    assert (one.accept_length, one.accept_rate, one.overlap, one.target_entropy) == (2.5, 0.75, 0.375, 1.0)
    assert (one.cycles, one.tested, one.question, one.epoch) == (2, 4, None, 0)
    assert one.trainer_logprobs is not None and one.trainer_logprobs.tolist() == [-0.75] * TOKENS
    assert other.trainer_logprobs is None and other.trace is None


def test_traced_answers_of_some_steps_and_the_text_of_their_tokens(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3)
    with Trajectories(tmp_path / NAME) as stored:
        found = stored.traced_tokens(range(2, 4))
        assert [(one.step, one.id) for one in found] == [(2, 4), (2, 6), (3, 8), (3, 10)]
        assert {one.step for one in stored.traced_tokens(range(1, 2))} == {1}
        assert stored.traced_tokens(range(4, 9)) == []
        first = found[0].trace
        assert first is not None
        shown = {
            *found[0].ids,
            *found[0].prompt_ids,
            *first.drafts,
            *first.target_ids.ravel(),
            *first.draft_ids.ravel(),
        }
        assert stored.pieces([*shown, 10_000]) == {int(i): str(i) for i in shown if i != NONE}
        assert len(stored.pieces(range(-5, 20_000))) > len(shown)
        with pytest.raises(UserError, match=r"has no completion 99$"):
            stored.answer(99)


def test_a_token_is_asked_for_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def piece(number: int) -> str:
        asked.append(number)
        return "x"

    log = TrajectoryLog(tmp_path / NAME, "all", piece, SIZE)
    write(log, 1)
    write(log, 2)
    log.close()
    again = TrajectoryLog(tmp_path / NAME, "all", piece, SIZE, resume_from=2)
    write(again, 3)
    again.close()
    assert len(asked) == len(set(asked)) > 50


def test_an_answer_without_tokens_and_an_engine_that_says_little(tmp_path: Path) -> None:
    empty = np.zeros(0, dtype=np.int64)
    nothing = Completion(token_ids=empty, logprobs=empty.astype(np.float32), versions=empty, trace=trace(0))
    silent = Completion(token_ids=np.array([3]), logprobs=np.zeros(1, dtype=np.float32), versions=np.array([4]))
    silent.stats.cycles, silent.stats.tokens = 1, 1
    silent.stats.reached = silent.stats.accepted = np.ones(1)
    silent.stats.overlap = np.zeros(1)
    answers = tuple(Trajectory.single(completion=c, reward=0.0) for c in (nothing, silent))
    prompt = Prompt(index=0, task="t", text="", token_ids=(1,), item={})
    log = opened(tmp_path)
    log.write(7, [Group(prompt=prompt, trajectories=answers)], 6, "plain", {})
    log.close()
    with Trajectories(tmp_path / NAME) as stored:
        one, other = stored.answer(0), stored.answer(1)
    assert (one.length, one.version_first, one.staleness, one.accept_length, one.accept_rate) == (0, 6, 0, None, None)
    assert one.trace is not None and len(one.trace) == 0 and one.trace.target_ids.ndim == 2
    assert (other.staleness, other.accept_rate, other.overlap, other.target_entropy) == (2, 1.0, None, None)


def test_an_engine_that_measures_some_cycles_stores_their_mean() -> None:
    """Such a cycle counts four times, whether the completion has fewer or more."""
    completion = group(0).trajectories[0].completion
    for cycles in (2.0, 6.0):
        stats = DecodeStats.with_drafts(1, cycles=int(cycles), tokens=int(cycles), reached=np.array([cycles]))
        trajectory = Trajectory.single(completion=dataclasses.replace(completion, stats=stats), reward=0.0)
        row = summary_row(trajectory, 0)
        assert (row["overlap"], row["target_entropy"]) == (None, None)
        stats.add_measured({name: [0.7] for name in MEASURED}, 1, 4)
        row = summary_row(trajectory, 0)
        assert (row["overlap"], row["target_entropy"]) == (pytest.approx(0.7), pytest.approx(0.7))
        assert (row["tested"], json.loads(row["counts"])) == (cycles, {"weighed": 4})


def test_the_top_of_a_small_vocabulary_has_fewer_columns(tmp_path: Path) -> None:
    small = group(0)
    completion = dataclasses.replace(small.trajectories[0].completion, trace=trace(TOKENS, most=3))
    small = dataclasses.replace(small, trajectories=(Trajectory.single(completion=completion, reward=0.0),) * SIZE)
    log = opened(tmp_path)
    log.write(1, [small], 0, "bebop", {})
    log.close()
    with Trajectories(tmp_path / NAME) as stored:
        same(stored.answer(0), small, 0)


@pytest.mark.slow
def test_ten_thousand_answers(tmp_path: Path) -> None:
    random = group(0, tokens=64)
    log, started = opened(tmp_path), time.process_time()
    for step in range(1, 6):
        asked = [dataclasses.replace(random.prompt, index=1000 * step + i) for i in range(1000)]
        batch = [dataclasses.replace(random, prompt=prompt) for prompt in asked]
        log.write(step, batch, step - 1, "bebop", {})
    assert time.process_time() - started < 10
    log.close()
    tokens = 5000 * (64 + 65)
    # 142 bytes a traced token, 12 of another; the rest is rows and pages.
    assert (tmp_path / NAME).stat().st_size < 1.1 * (5000 * 64 * 138 + 5000 * 65 * 12) + 10_000 * 400, tokens
    with Trajectories(tmp_path / NAME) as stored:
        assert stored.query("SELECT count(*) FROM answers")[0][0] == 10_000


def test_pieces_are_texts_and_parts_of_characters_as_the_vocabulary_has_them() -> None:
    class Tokenizer:
        raw: ClassVar = {0: "a", 1: "Ġb", 2: "ð", 3: "▁c"}

        def convert_ids_to_tokens(self, number: int) -> str | None:
            return self.raw.get(number)

        def decode(self, ids: list[int], clean_up_tokenization_spaces: bool = True) -> str:
            return {0: "a", 1: " b", 2: "\ufffd", 3: "c"}[ids[0]]

    piece = piece_of(Tokenizer())
    assert [piece(number) for number in range(5)] == ["a", " b", "ð", " c", "<4>"]
    real = piece_of(letters(5))
    assert [real(number) for number in range(6)] == ["a", "b", "c", "d", "<eos>", "<5>"]


def test_the_schema_and_the_reader_name_the_same_columns() -> None:
    file = sqlite3.connect(":memory:")
    file.executescript(SCHEMA)
    columns = {row[1] for row in file.execute("PRAGMA table_info(tokens)")}
    assert columns == {"answer", "drafter_names", *COLUMNS}
    answers = {row[1] for row in file.execute("PRAGMA table_info(answers)")}
    assert answers - {"traced"} <= {field.name for field in dataclasses.fields(StoredAnswer)}
