"""Rules that no sampler may break: what is found, what is not, and what it says."""

from typing import Any

import numpy as np
import pytest

from bebop.certify.answers import Answer
from bebop.certify.structure import check_structure

STOP = 11


def answer(*ids: int, request: int = 0, **known: Any) -> Answer:
    given = {"prompt": (1, 2), "finish_reason": "stop", "stops": (STOP,), "limit": 4, **known}
    for name, kind in (("logprobs", np.float64), ("versions", np.int64)):
        if name in given:
            given[name] = np.array(given[name], dtype=kind)
    return Answer(request=request, token_ids=np.array(ids, dtype=np.int64), **given)


def said(*answers: Answer, **rules: Any) -> list[str]:
    return [str(found) for found in check_structure(answers, vocabulary=12, **rules)]


@pytest.mark.parametrize(
    "fine",
    [
        answer(3, STOP),
        answer(3, 4, 5, STOP),  # the last one allowed is a stop token: both reasons are true
        answer(3, 4, 5, STOP, finish_reason="length"),
        answer(3, 4, 5, 6, finish_reason="length"),
        answer(3, 4, 5, finish_reason="length", limit=None),
        answer(3, finish_reason="abort"),
        answer(finish_reason="abort"),
        answer(3, STOP, logprobs=[0.0, 9e-6], versions=[2, 2], cycles=(1, 1), accepted=(0, 2)),
    ],
)
def test_what_engines_may_give(fine: Answer) -> None:
    assert said(fine) == []


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (answer(3, STOP, 5, 6, finish_reason="length"), "request 0, token 1: 2 tokens follow the stop token 11"),
        (answer(3, 4, STOP, 6, finish_reason="length"), "request 0, token 2: 1 token follows the stop token 11"),
        (
            answer(3, STOP, 5, STOP),
            "request 0, token 1: 2 tokens follow the stop token 11",
        ),  # although it ends with one
        (answer(3, 4), "request 0: it says that it stopped, but none of its 2 tokens is a stop token"),
        (answer(), "request 0: it says that it stopped, but none of its 0 tokens is a stop token"),
        (answer(3, 4, finish_reason="length"), "request 0: it says that it was cut for length, at 2 tokens of 4"),
        (
            answer(3, STOP, finish_reason="length"),
            "request 0, token 1: it ended with the stop token 11, but says that it was cut for length",
        ),
        (answer(3, 4, 5, 6, 7, finish_reason="length"), "request 0, token 4: it has 5 tokens where 4 were allowed"),
        (
            answer(3, STOP, finish_reason="eos"),
            "request 0: its finish reason is 'eos', which is none of stop, length, abort",
        ),
        (answer(12, STOP), "request 0, token 0: id 12 is not in the vocabulary of 12"),
        (answer(3, -1, STOP), "request 0, token 1: id -1 is not in the vocabulary of 12"),
        (answer(3, STOP, logprobs=[-0.5]), "request 0: it has 1 log-probs for 2 tokens"),
        (
            answer(3, STOP, logprobs=[-0.5, -np.inf]),
            "request 0, token 1: its log-prob is -inf: no token of probability 0 can be drawn",
        ),
        (answer(3, STOP, logprobs=[0.02, -1]), "request 0, token 0: its log-prob is 0.02: a probability above 1"),
        (answer(3, STOP, versions=[1]), "request 0: it has 1 weight versions for 2 tokens"),
        (
            answer(3, STOP, versions=[1, 2]),
            "request 0, token 1: its weight version goes from 1 to 2, but no weights were updated",
        ),
        (answer(3, STOP, cycles=(1, 2)), "request 0: its decoding cycles emitted 3 tokens, but it has 2"),
        (answer(3, STOP, accepted=(3, 2)), "request 0: it counts 3 drafts accepted of 2 tested"),
    ],
)
def test_what_no_engine_may_give(broken: Answer, sentence: str) -> None:
    assert said(broken) == [sentence]


def test_versions_may_rise_where_weights_are_updated_and_never_fall() -> None:
    assert said(answer(3, STOP, versions=[1, 2]), updated=True) == []
    assert said(answer(3, STOP, versions=[2, 1]), updated=True) == [
        "request 0, token 1: its weight version goes from 2 to 1"
    ]
    both = answer(3, STOP, versions=[1, 1]), answer(3, STOP, request=1, versions=[2, 2])
    assert said(*both, updated=True) == []
    assert said(*both) == ["request 1: completions have weight versions 1, 2, but no weights were updated"]


def test_a_request_is_answered_once() -> None:
    assert said(answer(3, STOP, request=5), answer(3, STOP, request=5)) == ["request 5: it was answered 2 times"]
