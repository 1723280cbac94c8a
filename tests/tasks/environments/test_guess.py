"""The game of guesses, and what the built-in model learns it from."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.tasks.environment import Message
from bebop.tasks.environments.guess import Guess, demonstrations, item
from tests.tasks.environments.playing import count, play, reward


def halving(heard: Sequence[Message]) -> str:
    """The range is read off all hints, as a policy has to."""
    low, high = 1, 64
    for message in heard[1:]:
        guess = (low + high) // 2
        low, high = (guess + 1, high) if message["content"] == "more" else (low, guess - 1)
    return f"{low} {high} {(low + high) // 2}"


def test_halving_finds_all_numbers_but_one() -> None:
    won = {number: reward(play(Guess(), {**item(0, 0), "number": number}, halving)[1]) for number in range(1, 65)}
    assert [number for number, got in won.items() if got != 1.0] == [64]  # the seventh guess would find it


def test_what_is_said_and_counted() -> None:
    says = iter(["1 64 40", "I think 12", "1 39 10", "10 39", "11 39 20"])
    heard, steps = play(Guess(), {"number": 20, "numbers": 64, "tries": 6}, lambda heard: next(says))
    said = [m["content"] for m in heard]
    assert said == ["number 1 to 64, 6 tries", "less", "lo hi guess", "more", "lo hi guess"]
    assert {m["role"] for m in heard} == {"user"}
    assert (reward(steps), count(steps, "tool_errors"), len(steps)) == (1.0, 2.0, 5)


@pytest.mark.parametrize(
    "text", ["", "1 64 21", "20", "1 64 20 20", "1 64 " + "9" * 400, "1 64 \u0662\u0660", "-1 64 20"]
)
def test_six_tries_and_no_more(text: str) -> None:
    _, steps = play(Guess(), {"number": 20, "numbers": 64, "tries": 6}, lambda heard: text)
    assert (reward(steps), len(steps)) == (0.0, 6)
    assert count(steps, "tool_errors") == (0 if text == "1 64 21" else 6)


def test_questions_are_drawn_by_number_and_seed() -> None:
    drawn = [item(index, 3)["number"] for index in range(400)]
    assert drawn == [item(index, 3)["number"] for index in range(400)] and set(drawn) == set(range(1, 65))
    assert drawn != [item(index, 4)["number"] for index in range(400)]
    assert item(5, 3, numbers=9, tries=2) | {"number": 0} == {"number": 0, "numbers": 9, "tries": 2}
    assert [item(index, 3)["number"] for index in range(4)] == [40, 23, 1, 25]  # as in every job with this seed


@settings(deadline=None)
@given(index=st.integers(0, 10**6), seed=st.integers(0, 2**40), slips=st.floats(0, 1))
def test_demonstrations_are_games(index: int, seed: int, slips: float) -> None:
    """Word for word what the environment says to those turns; it ends where the environment ends it."""
    messages = demonstrations(index, seed, slips)
    turns = iter(m["content"] for m in messages if m["role"] == "assistant")
    heard, steps = play(Guess(), item(index, seed), lambda _: next(turns))
    assert next(turns, None) is None and heard == [m for m in messages if m["role"] != "assistant"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * len(steps)
    assert count(steps, "tool_errors") == 0 and demonstrations(index, seed, slips) == messages


def solved(slips: float) -> float:
    def won(index: int) -> bool:
        return int(demonstrations(index, 10**6, slips)[-1]["content"].split()[2]) == item(index, 10**6)["number"]

    return sum(map(won, range(4000))) / 4000


def test_slips_leave_something_to_mend() -> None:
    """Without them it is halving; with those that ship .65 of the numbers are found."""
    assert solved(0.0) == pytest.approx(63 / 64, abs=0.01)
    assert solved(0.28) == pytest.approx(0.73, abs=0.03) and solved(0.4) == pytest.approx(0.65, abs=0.03)
    texts = [m["content"] for m in itertools.chain(*(demonstrations(i, 0) for i in range(200)))]
    assert max(map(len, texts)) < 30
