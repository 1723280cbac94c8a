"""The calculator: exact, bounded, numbers alone; and the questions that need it."""

import operator
import re
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.tasks.environment import Message
from bebop.tasks.environments.calc import BadExpression, Calc, calculate, item
from tests.tasks.environments.playing import count, play, reward

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def one_at_a_time(heard: Sequence[Message]) -> str:
    """Two numbers a call, with the sign that stands between them; brackets go from left to right, so they say nothing
    but that what is before a product is worked out first."""
    left = re.findall(r"\d+|[+*-]", heard[0]["content"].partition("?")[0])
    plain = "(" not in heard[0]["content"]
    for message in heard[1:]:
        at = left.index("*") - 1 if plain and "*" in left else 0
        left[at : at + 3] = [message["content"]]
    if len(left) == 1:
        return f"answer {left[0]}"
    at = left.index("*") - 1 if plain and "*" in left else 0
    return f"I go on.\ncalc {' '.join(left[at : at + 3])}"


@settings(deadline=None)
@given(index=st.integers(0, 10**6), seed=st.integers(0, 2**40), terms=st.integers(4, 12), digits=st.integers(1, 6))
def test_a_question_is_solved_call_by_call(index: int, seed: int, terms: int, digits: int) -> None:
    question = item(index, seed, terms=terms, digits=digits)
    assert question == item(index, seed, terms=terms, digits=digits)
    assert question["answer"] == str(eval(question["expression"]))  # ours, of digits and + - * ( ) alone
    heard, steps = play(Calc(turns=20), question, one_at_a_time)
    assert (reward(steps), len(steps), count(steps, "tool_calls")) == (1.0, terms, terms - 1)
    assert count(steps, "tool_errors") == 0 and {m["role"] for m in heard[1:]} == {"tool"}


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("calc 2 ** 10", "1024"),
        ("calc 7 / 3", "7/3"),
        ("calc -(1.5) * 4", "-6"),
        ("thoughts 1 + 1\n\ncalc 1 + 1  \n", "2"),
        ("calc 1 / 0", "error: division by zero"),
        ("calc 1 + 2 + 3 + 4", "error: more than 3 numbers"),
        ("calc 9 ** 9 ** 9", "error: too large"),
        ("calc __import__('os')", "error: only numbers, + - * / // % ** and brackets are known"),
        ("calc", "error: only numbers, + - * / // % ** and brackets are known"),
        ("calc (1", "error: not an expression"),
        ("answer 12.5", "error: say 'calc EXPRESSION', or 'answer NUMBER' with a whole number"),
        ("", "error: say 'calc EXPRESSION', or 'answer NUMBER' with a whole number"),
    ],
)
def test_every_turn_is_answered(turn: str, said: str) -> None:
    says = iter([turn, "answer 5"])
    heard, steps = play(Calc(), {"expression": "2 + 2", "answer": "4"}, lambda heard: next(says))
    assert heard[-1] == {"role": "tool", "content": said} and reward(steps) == 0.0
    assert count(steps, "tool_errors") == float(said.startswith("error"))


def test_turns_are_spent() -> None:
    _, steps = play(Calc(turns=5), item(0, 0), lambda heard: "calc 1 + 1")
    assert (reward(steps), len(steps)) == (0.0, 5)


@settings(deadline=None, max_examples=40)
@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        max_leaves=12,
    )
)
def test_it_computes_as_fractions_do(text: str) -> None:
    exact = re.sub(r"\d+", lambda found: f"Fraction({found[0]})", text)
    try:
        right = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(BadExpression, match="division by zero"):
            calculate(text)
    else:
        assert calculate(text) == right


@pytest.mark.parametrize(
    "text",
    [
        "10 ** 100000", "2 ** 2 ** 2 ** 2 ** 2 ** 2", "(9 ** 99) ** 99", "9 ** -999999", "0 ** -1", "2 ** (1 / 2)",
        "1" * 190, "(" * 99 + "1" + ")" * 99, "-" * 199 + "1", "1" * 201, "()", "1, 2", "...", "1(2)", "1 if 1 else 2",
        "1e9", "0x10", "1_000", "1j", "True", "x", "'a'", "[1]", "1\x00", "(1).real", "007", "1 == 1", "~1",
        "9" * 199 + ".",
    ],
)  # fmt: skip
def test_what_is_no_sum_of_bounded_size_is_refused_at_once(text: str) -> None:
    if text in ("(" * 99 + "1" + ")" * 99, "-" * 199 + "1"):
        assert abs(calculate(text)) == 1
        return
    tracemalloc.start()
    try:
        with pytest.raises(BadExpression):
            calculate(text)
        assert tracemalloc.get_traced_memory()[1] < 200_000  # bytes: it is not worked out first
    finally:
        tracemalloc.stop()


@settings(deadline=None)
@given(st.text("0123456789.+-*/%() eE_xj\n", max_size=210))
def test_anything_is_a_number_or_refused(text: str) -> None:
    try:
        assert len(str(calculate(text))) < 400
    except BadExpression as error:
        assert str(error) and "\n" not in str(error)
