"""A finite set of questions: each once an epoch, shuffled anew, and known again whenever it is asked."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.config.job import TaskConfig
from bebop.errors import UserError
from bebop.tasks.epochs import CACHED, Epochs
from bebop.tasks.files import FileItems
from bebop.tasks.source import EnvironmentSource, PromptSource
from tests.goodness_of_fit import p_value
from tests.tasks.test_source import jsonl, letters, numbered, source

SIZE = 12
CHAIN = {"min_terms": 2, "max_terms": 12}


def chain(size: int | None = SIZE, **more: Any) -> TaskConfig:
    return TaskConfig(name="chain_sum", args=CHAIN, size=size, **more)


def test_every_epoch_has_every_question_once_in_an_order_of_its_own() -> None:
    epochs = Epochs(SIZE, seed=3)
    places = [epochs.place(index) for index in range(5 * SIZE)]
    assert [epoch for epoch, _ in places] == [index // SIZE for index in range(5 * SIZE)]
    orders = [tuple(q for e, q in places if e == epoch) for epoch in range(5)]
    assert all(sorted(order) == list(range(SIZE)) for order in orders) and len(set(orders)) == 5
    other = Epochs(SIZE, seed=4)
    assert tuple(other.place(index)[1] for index in range(SIZE)) not in orders
    assert tuple(epochs.place(index, attempt=1)[1] for index in range(SIZE)) not in orders


def test_a_place_depends_on_nothing_that_was_asked_before() -> None:
    walked = Epochs(SIZE, seed=0)
    in_order = [walked.place(index) for index in range((CACHED + 3) * SIZE)]
    jumping = list(range(len(in_order)))
    random.Random(0).shuffle(jumping)
    again = Epochs(SIZE, seed=0)
    assert {index: again.place(index) for index in jumping} == dict(enumerate(in_order))


def shuffled(epoch: int) -> tuple[int, ...]:
    epochs = Epochs(4, seed=1)
    return tuple(epochs.place(4 * epoch + place)[1] for place in range(4))


def turned(epoch: int) -> tuple[int, ...]:
    """A shuffle that is none: one order, begun at another place each epoch."""
    start = random.Random(epoch).randrange(4)
    return tuple((start + place) % 4 for place in range(4))


@pytest.mark.parametrize(("order", "fits"), [(shuffled, True), (turned, False)])
def test_all_orders_are_as_likely(order: Callable[[int], tuple[int, ...]], fits: bool) -> None:
    found = Counter(map(order, range(2400)))
    counts = np.array([found[each] for each in permutations(range(4))])
    assert counts.sum() == 2400 and (p_value(counts, np.ones(24)) > 0.001) == fits


def test_a_question_has_the_same_tokens_in_every_epoch() -> None:
    stream, endless = source(chain()), source(chain(size=None))
    prompts = [stream.prompt(index) for index in range(4 * SIZE)]
    assert [p.index for p in prompts] == list(range(4 * SIZE))
    assert [p.epoch for p in prompts] == [index // SIZE for index in range(4 * SIZE)]
    for prompt in prompts:
        assert prompt.question is not None and prompt.number == prompt.question
        wanted = endless.prompt(prompt.question)
        assert (prompt.token_ids, prompt.text, prompt.item) == (wanted.token_ids, wanted.text, wanted.item)
    assert len({p.token_ids for p in prompts}) == SIZE
    assert [p.question for p in prompts[:SIZE]] != list(range(SIZE))
    assert [p.number for p in map(endless.prompt, range(3))] == [0, 1, 2]
    assert endless.prompt(7).question is None and endless.prompt(7).epoch == 0


def test_what_stands_in_for_a_long_question_is_the_same_in_every_epoch() -> None:
    free, bounded = source(chain()), source(chain(), most=110)
    long = {q for q in range(SIZE) if len(source(chain(size=None)).prompt(q).token_ids) > 110}
    assert 1 < len(long) < SIZE - 1
    seen: dict[int | None, set[tuple[int, ...]]] = {}
    for index in range(3 * SIZE):
        ours, whole = bounded.prompt(index), free.prompt(index)
        assert ours.question == whole.question and len(ours.token_ids) <= 110
        assert (ours.token_ids == whole.token_ids) == (whole.question not in long)
        seen.setdefault(ours.question, set()).add(ours.token_ids)
    assert all(len(tokens) == 1 for tokens in seen.values())


def test_rows_of_a_file_are_numbered_and_their_order_is_the_one_that_it_always_was(tmp_path: Path) -> None:
    stream = source(numbered(tmp_path / "n.jsonl", SIZE, seed=5))
    prompts = [stream.prompt(index) for index in range(3 * SIZE)]
    assert all(p.item["answer"] == p.question for p in prompts)
    assert [p.epoch for p in prompts] == [index // SIZE for index in range(3 * SIZE)]
    # Digests and runs of before: Python's own shuffle, seeded by a text.
    before = [row for epoch in range(3) for row in random.Random(f"5/{epoch}/0").sample(range(SIZE), SIZE)]
    assert [p.question for p in prompts] == before
    assert source(numbered(tmp_path / "n.jsonl", SIZE, seed=5)).prompt(30) == prompts[30]


def test_a_size_takes_the_first_rows_as_if_the_file_ended_there(tmp_path: Path) -> None:
    rows = [{"question": "x" * (500 if n == 3 else 5) + str(n), "answer": n} for n in range(SIZE)]
    unusable = [*rows, {"question": " ", "answer": "of a row that is not asked"}]
    whole, short = jsonl(tmp_path / "whole.jsonl", unusable), jsonl(tmp_path / "short.jsonl", rows[:8])
    cut = PromptSource(TaskConfig(source="file", path=whole, size=8), letters, 100)
    own = PromptSource(TaskConfig(source="file", path=short), letters, 100)
    assert [cut.prompt(index) for index in range(40)] == [own.prompt(index) for index in range(40)]
    assert {own.prompt(index).question for index in range(8)} == {0, 1, 2, 4, 5, 6, 7}  # 3 is too long


@pytest.mark.parametrize("size", [SIZE + 1, 1 << 20])
def test_more_questions_than_a_file_has(size: int, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "n.jsonl", [{"question": "q", "answer": n} for n in range(SIZE)])
    with pytest.raises(UserError, match=rf"task\.size={size} is not possible: .*n\.jsonl has {SIZE} rows") as error:
        FileItems(path, "question", "answer", 0, size)
    assert "\n" not in str(error.value)


def test_questions_of_environments_come_again() -> None:
    task = TaskConfig(source="environment", name="guess", size=5)
    finite, endless = EnvironmentSource(task), EnvironmentSource(TaskConfig(source="environment", name="guess"))
    prompts = [finite.prompt(index) for index in range(20)]
    for epoch in range(4):
        assert sorted(p.number for p in prompts if p.epoch == epoch) == list(range(5))
    assert all(p.item == endless.prompt(p.number).item for p in prompts)
    assert endless.prompt(3).question is None
