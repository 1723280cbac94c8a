"""What the positions of a cohort have whatever the reference is."""

from typing import Any

import numpy as np
import torch

from bebop.certify.answers import Answer, columns, seen


def answer(request: int, ids: list[int], prompt: tuple[int, ...] = (1, 2), **known: Any) -> Answer:
    return Answer(request=request, prompt=prompt, token_ids=np.array(ids, dtype=np.int64), **known)


COHORT = [
    answer(0, [3, 4, 5], cycles=(1, 2), logprobs=np.array([-1.0, -2.0, -3.0])),
    answer(1, [3, 6], cycles=None),
    answer(2, [], prompt=(7,)),
    answer(3, [8], prompt=(7,), cycles=(2,)),  # cut by the end of the answer, so the cycles do not add up
]


def test_places_tokens_and_what_came_before() -> None:
    found = {name: None if value is None else value.tolist() for name, value in columns(COHORT).items()}
    assert found["tokens"] == [3, 4, 5, 3, 6, 8]
    assert found["request"] == [0, 0, 0, 1, 1, 3] and found["position"] == [0, 1, 2, 0, 1, 0]
    assert found["last"] == [2, 3, 4, 2, 3, 7]
    assert found["cycle"] == [0, 0, 1, -1, -1, -1]
    np.testing.assert_array_equal(found["reported"], [-1, -2, -3, np.nan, np.nan, np.nan])


def test_what_nobody_says_is_left_out() -> None:
    found = columns([answer(0, [3, 4]), answer(1, [5], prompt=(9,))])
    assert found["cycle"] is None and found["reported"] is None and found["twin"] is None
    assert [len(value) for value in columns([]).values() if value is not None] == [0] * 4


def test_twins_are_held_against_each_other_as_far_as_their_contexts_agree() -> None:
    first, second = answer(4, [3, 4, 5, 6]), answer(5, [3, 4, 7, 6])
    assert columns([first, second])["twin"].tolist() == [-1] * 4 + [3, 4, 5, -1]  # type: ignore[union-attr]
    shorter = columns([answer(4, [3]), answer(5, [3, 4])])["twin"]
    assert shorter is not None and shorter.tolist() == [-1, 3, -1]
    assert columns([answer(5, [3]), answer(6, [3])])["twin"] is None  # neighbours, but no twins
    assert columns([answer(4, [3]), answer(5, [3], prompt=(2, 2))])["twin"] is None


def test_what_was_seen_is_known_before_the_token() -> None:
    found = seen(COHORT, None, 9)
    assert [row.nonzero()[:, 0].tolist() for row in found] == [
        [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2], [1, 2, 3], [7],
    ]  # fmt: skip
    ids = torch.tensor([[3, 1, -1]] * 6)
    assert seen(COHORT, ids, 9).tolist() == [
        [False, True, False], [True, True, False], [True, True, False],
        [False, True, False], [True, True, False], [False, False, False],
    ]  # fmt: skip
    assert seen([], None, 9).shape == (0, 9)
