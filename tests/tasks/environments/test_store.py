"""The chain of keys: its length, what solves it, and that nothing else does."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.tasks.environment import Message
from bebop.tasks.environments.store import Store, item
from tests.tasks.environments.playing import count, play, reward


def following(heard: Sequence[Message]) -> str:
    """Asks on with the number that was told last, and answers after as many as the question wants."""
    gets = int(re.findall(r"After (\d+) times", heard[0]["content"])[0])
    told = [m["content"].split()[-1] for m in heard[1:]] or re.findall(r"Start with (\d+)", heard[0]["content"])
    return f"{'answer' if len(heard) > gets else 'get'} {told[-1]}"


@settings(deadline=None)
@given(index=st.integers(0, 10**6), seed=st.integers(0, 2**40), length=st.sampled_from([0, *range(4, 31)]))
def test_it_takes_all_its_turns(index: int, seed: int, length: int) -> None:
    question = item(index, seed, length=length)
    heard, steps = play(Store(), question, following)
    assert reward(steps) == 1.0 and len(steps) == question["length"] and count(steps, "tool_errors") == 0
    assert question["length"] == (length or question["length"]) and 4 <= question["length"] <= 30
    assert question == item(index, seed, length=length) and (heard, steps) == play(Store(), question, following)


def test_lengths_are_drawn() -> None:
    assert {item(index, 0)["length"] for index in range(400)} == set(range(4, 31))
    assert item(1, 0) != item(1, 1) and item(1, 0) != item(2, 0)
    assert len(item(0, 0, size=100)["entries"]) == 100


@pytest.mark.parametrize("hop", range(1, 29))
def test_no_turn_can_be_left_out(hop: int) -> None:
    """Each entry before the last names another one than the answer."""
    question = item(7, 1, length=30)
    key = question["start"]
    for _ in range(hop):
        key = question["entries"][key]
    _, steps = play(Store(), question, lambda heard: f"answer {key}")
    assert reward(steps) == 0.0 and len(steps) == 1


def test_bad_turns_are_observations_until_the_turns_are_spent() -> None:
    says = iter(["", "get 99", "fetch 100", "get 100 200", "get 000", "thoughts\nget 514", "answer"])
    question = item(0, 0, length=4) | {"entries": {"514": "600"}, "start": "514"}
    heard, steps = play(Store(spare=3), question, lambda heard: next(says))
    assert [m["content"] for m in heard[1:]] == [
        *["error: say 'get NUMBER' or 'answer NUMBER', of three digits"] * 4, "error: there is no entry 000",
        "514 names 600",
    ]  # fmt: skip
    assert (reward(steps), len(steps), count(steps, "tool_errors")) == (0.0, 7, 6.0)
