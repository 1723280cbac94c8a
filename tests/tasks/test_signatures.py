"""The signatures of reward functions: which one a function has, what it is called with, and what it may return.

The functions run here and not in a process of their own, which ``test_rewards.py`` has.
"""

import asyncio
import functools
import math
import operator
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from bebop.config.job import RewardSignature
from bebop.errors import UserError
from bebop.tasks.signatures import SIGNATURES, Call, Function, Reply, trl_arguments, verl_arguments

ROW = {"problem": "2+2", "level": 3, "reward_model": {"ground_truth": "4"}, "extra_info": {"split": "a"}}
ITEM = {"question": "2+2", "answer": "4", "metadata": ROW | {"data_source": "sums"}}


def call(text: str = "so 4", **item: Any) -> Call:
    return Call(text=text, item=ITEM | item, task="file")


def replies(function: Callable[..., Any], *calls: Call, signature: RewardSignature = "auto") -> list[Reply]:
    """What becomes of completions; a coroutine that is cancelled has ended."""
    found, stuck = Function(function, signature).replies(calls or [call()], timeout=0.2)
    assert not stuck
    return found


def only(function: Callable[..., Any], signature: RewardSignature = "auto") -> Reply:
    [reply] = replies(function, signature=signature)
    return reply


def test_the_setting_has_these_signatures() -> None:
    assert get_args(RewardSignature) == ("auto", *SIGNATURES)


# ---- which signature


def text_one(text: str, item: dict[str, Any]) -> float:
    return float(item["answer"] in text)


def trl_one(completions: list[str], answer: list[str], **kwargs: Any) -> list[float | None]:
    return [float(right in one) for one, right in zip(completions, answer, strict=True)]


async def trl_async(prompts: list[str], completions: list[str], level: list[int]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(prompt) + n) for prompt, n in zip(prompts, level, strict=True)]


def verl_one(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    return {"score": float(ground_truth in solution_str), "acc": True, "pred": solution_str, "source": None}


def short_verl(solution_str: str, ground_truth: str, method: str = "strict") -> float:
    return float(ground_truth in solution_str)


class Judge:
    async def __call__(self, text: str, item: dict[str, Any]) -> float:
        return 0.5


def wrapped(*args: Any, **kwargs: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "signature", "batched", "reply"),
    [
        (text_one, "text", False, ("value", 1.0)),
        (functools.partial(text_one), "text", False, ("value", 1.0)),
        (trl_one, "trl", True, ("value", 1.0)),
        (trl_async, "trl", True, ("value", 6.0)),
        (verl_one, "verl", False, ("value", {"score": 1.0, "acc": 1.0, "pred": None, "source": None})),
        (short_verl, "verl", False, ("value", 1.0)),
        (Judge(), "text", True, ("value", 0.5)),
        (lambda text, item=None: len(text), "text", False, ("value", 4.0)),
    ],
)
def test_parameter_names_tell_the_signature(
    function: Callable[..., Any], signature: str, batched: bool, reply: Reply
) -> None:
    known = Function(function, "auto")
    assert (known.signature, known.batched) == (signature, batched)
    assert only(function) == reply


def test_a_function_written_in_c_is_called_with_text_and_item() -> None:
    assert Function(operator.contains, "auto").signature == "text"


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (wrapped, "auto", r"takes \(\*args, \*\*kwargs\), which may be more than one signature: .*reward_signature"),
        (lambda completions, solution_str: 1, "auto", r"takes \(completions, solution_str\), which may be more"),
        (lambda text: 1, "auto", r"takes \(text\), which is no signature of a reward: \(text, item\), TRL's with"),
        (lambda a, b, c: 1, "auto", r"takes \(a, b, c\), which is no signature"),
        (text_one, "trl", r"takes \(text, item\) and no 'completions': task.reward_signature=trl does not fit"),
        (text_one, "verl", "and no 'solution_str': task.reward_signature=verl does not fit"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(function: Callable[..., Any], given: RewardSignature, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        Function(function, given)
    assert "\n" not in str(error.value)


def test_the_setting_decides_where_names_do_not() -> None:
    assert only(wrapped, "text") == ("value", 1.0)
    assert only(lambda *args, **kwargs: [float("completions" in kwargs)], "trl") == ("value", 1.0)
    assert only(lambda *args, **kwargs: kwargs["ground_truth"] == "4", "verl") == ("value", 1.0)


# ---- arguments


def test_trl_is_given_columns_and_messages_where_the_question_has_them() -> None:
    asked = [{"role": "user", "content": "2+2"}]
    own = trl_arguments(
        [call("4"), call("5", question=asked, metadata={"level": 1, "completion": "x", "hint": "y"})], False
    )
    assert own["prompts"] == ["2+2", asked]
    assert own["completions"] == ["4", [{"role": "assistant", "content": "5"}]]
    assert (
        own["level"] == [3, 1]
        and own["hint"] == [None, "y"]
        and own["problem"] == ["2+2", None]
        and own["answer"] == ["4", "4"]
    )
    assert "completion" not in own and "metadata" not in own
    messages = trl_arguments([call("4")], True)
    assert messages["prompts"] == [asked] and messages["completions"] == [[{"role": "assistant", "content": "4"}]]


def test_trl_is_given_tokens_where_they_are_known() -> None:
    def length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    found = replies(length, *(replace(call(), token_ids=ids) for ids in ((1, 2, 3), ())))
    assert found == [("value", 3.0), ("value", 0.0)]


def test_a_function_that_reads_messages_out_of_texts_is_told_the_setting() -> None:
    def of_messages(completions: list[Any]) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    reply = only(of_messages)
    assert reply[0] == "raised" and str(reply[1]).endswith("set task.reward_signature=trl_messages")
    assert only(of_messages, "trl_messages") == ("value", 4.0)


def test_a_column_of_the_row_goes_before_the_answer_of_that_name() -> None:
    assert trl_arguments([call(metadata={"answer": "long #### 4"})], False)["answer"] == ["long #### 4"]


def test_verl_is_given_the_row_or_the_task() -> None:
    assert verl_arguments(call()) == {
        "data_source": "sums", "solution_str": "so 4", "ground_truth": "4", "extra_info": {"split": "a"},
    }  # fmt: skip
    bare = verl_arguments(call(metadata={"seed": 1}))
    assert (bare["data_source"], bare["extra_info"]) == ("file", {"seed": 1})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda completions, difficulty: [1.0], "needs 'difficulty', which no column has: there are question, answer"),
        (lambda completion_ids, **columns: [1.0], "needs 'completion_ids', which is TRL's own: there are"),
        (lambda completions, trainer_state: [1.0], "needs 'trainer_state', which is TRL's own: there are"),
        (lambda solution_str, truth: 1.0, "needs 'truth', which no column has: there are data_source, solution_str"),
    ],
)
def test_a_parameter_that_nothing_fills_is_named(function: Callable[..., Any], words: str) -> None:
    reply = only(function)
    assert reply[0] == "wrong" and words in str(reply[1])


# ---- values


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "returned 'None': a finite number is wanted"),
        ("1", "returned '1': a finite number"),
        (math.nan, "returned 'nan': a finite number"),
        (np.ones(2), "returned '[1. 1.]': a finite number"),
        ({}, "returned no parts"),
        ({"a": "x"}, "returned 'x' as 'a': a finite number or None is wanted"),
        ({"a": -math.inf}, "returned '-inf' as 'a'"),
        ({"score": "x"}, "returned 'x' as 'score'"),
        ({"score": 1.0, "acc": math.nan}, "returned 'nan' as 'acc'"),
        ({1: 1.0}, "returned a part '1': names of letters, digits and _ are wanted"),
        ({"a/b": 1.0}, "returned a part 'a/b'"),
    ],
    ids=str,
)
def test_values_that_are_none(value: Any, words: str) -> None:
    reply = only(lambda text, item: value)
    assert reply[0] == "wrong" and words in str(reply[1])


@pytest.mark.parametrize(
    ("value", "number"), [(2, 2.0), (True, 1.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (np.array(3), 3.0)]
)
def test_values_that_are_numbers(value: Any, number: float) -> None:
    assert only(lambda text, item: value) == ("value", number)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "returned 1 rewards for 2 completions: one for each is wanted"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 completions"),
        (1.0, "returned '1.0': a list with a number for each completion is wanted"),
        ("ab", "returned 'ab': a list with a number"),
        ({"a": [1, 2], "b": [1, 2]}, "a list with a number for each completion"),
        ([1.0, math.nan], "returned 'nan': a finite number"),
    ],
    ids=str,
)
def test_lists_that_are_wrong(values: Any, words: str) -> None:
    found = replies(lambda completions: values, call("a"), call("b"))
    assert len(found) == 2 and {reply[0] for reply in found} == {"wrong"} and words in str(found[0])


def test_none_in_a_list_does_not_apply_and_arrays_are_lists() -> None:
    assert replies(lambda completions: [None, 2], call("a"), call("b")) == [("value", None), ("value", 2.0)]
    assert replies(lambda completions: np.arange(2), call("a"), call("b")) == [("value", 0.0), ("value", 1.0)]
    parts = replies(lambda completions: [{"a": 1, "b": None}] * 2, call("a"), call("b"))
    assert parts == [("value", {"a": 1.0, "b": None})] * 2


# ---- coroutines


async def waits(text: str, item: dict[str, Any]) -> float:
    if text == "raise":
        raise KeyError("no\nkey")
    await asyncio.sleep(10 if text == "hang" else 0.05)
    return float(len(text))


def test_coroutines_wait_together_and_each_has_its_own_end() -> None:
    began = time.monotonic()
    found = replies(waits, *(call(text) for text in ("ab", "raise", "hang", *["abc"] * 8)))
    assert time.monotonic() - began < 8 * 0.05 + 0.2
    assert found[0] == ("value", 2.0) and found[2] == ("late",) and found[3:] == [("value", 3.0)] * 8
    assert found[1][:2] == ("raised", "KeyError: 'no\\nkey'") and "raise KeyError" in str(found[1])


def test_one_that_does_not_end_when_it_is_cancelled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bebop.tasks.signatures.CANCEL_SECONDS", 0.05)

    async def stubborn(text: str, item: dict[str, Any]) -> float:
        while True:
            try:
                await asyncio.sleep(0.3)
                return 1.0
            except asyncio.CancelledError:
                pass

    found, stuck = Function(stubborn, "auto").replies([call()], timeout=0.05)
    assert found == [("late",)] and stuck
