"""Functions as engines: both signatures, and what is no answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bebop.certify.answers import Answer
from bebop.certify.function import FunctionEngine, find
from bebop.certify.structure import check_structure
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion
from tests.builders import requests, tiny_policy

STOP = 11


def asked(count: int = 3) -> list[Request]:
    return requests([(1 + i, 2) for i in range(count)], seed=5, max_new_tokens=4, stop_token_ids=(STOP,))


def simple(prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> list[tuple[Any, Any]]:
    """The seed, then as many tokens as are allowed; or a stop token at once."""
    return [([seed] + [prompt[0]] * (max_new_tokens - 1), None) for prompt, seed in zip(prompts, seeds, strict=True)]


def answering(asked: list[Request]) -> list[Completion]:
    return generate(TorchEngine(tiny_policy(12), DecodingConfig(), slots=4, max_length=32), asked)


def test_prompts_seeds_and_length_in_tokens_and_log_probs_out() -> None:
    told: list[int] = []
    found = FunctionEngine(simple).sample(asked(), told.append)
    assert [answer.token_ids.tolist() for answer in found] == [[5, 1, 1, 1], [6, 2, 2, 2], [7, 3, 3, 3]]
    assert [answer.seed for answer in found] == [5, 6, 7] and [answer.request for answer in found] == [0, 1, 2]
    assert all(answer.finish_reason == "length" and answer.logprobs is None for answer in found)
    assert told == [12] and check_structure(found, vocabulary=12) == []


def test_answers_may_be_lists_arrays_or_tensors() -> None:
    def mixed(prompts: Any, seeds: Any, max_new_tokens: int) -> Any:
        return [
            ([3, STOP], [-1.0, -2.0]),
            (np.array([4, 5, 6, 7]), np.array([-1.0, -2, -3, -4])),
            (torch.tensor([STOP]), torch.tensor([-0.5])),
        ]

    found = FunctionEngine(mixed).sample(asked(), lambda tokens: None)
    assert [answer.finish_reason for answer in found] == ["stop", "length", "stop"]
    assert [answer.token_ids.dtype for answer in found] == [np.int64] * 3
    assert found[1].logprobs is not None and found[1].logprobs.tolist() == [-1, -2, -3, -4]
    assert check_structure(found, vocabulary=12) == []


def test_an_end_without_a_stop_token_is_broken_structure() -> None:
    found = FunctionEngine(lambda prompts, seeds, longest: [([3], None)] * 3).sample(asked(), lambda tokens: None)
    assert {one.sentence for one in check_structure(found, vocabulary=12)} == {
        "it says that it stopped, but none of its 1 tokens is a stop token"
    }


def test_a_function_of_requests_gives_completions_or_answers() -> None:
    whole = answering(asked())
    found = FunctionEngine(answering).sample(asked(), lambda tokens: None)
    assert [answer.token_ids.tolist() for answer in found] == [one.token_ids.tolist() for one in whole]
    assert found[0].versions is not None and check_structure(found, vocabulary=12) == []
    given = [Answer(request=i, prompt=(1,), token_ids=np.array([STOP])) for i in range(3)]
    assert FunctionEngine(lambda requests: given).sample(asked(), lambda tokens: None) == given


def test_functions_are_found_by_name() -> None:
    assert find("tests.certify.test_function:simple") is simple
    assert FunctionEngine(simple).describe() == {"function": "tests.certify.test_function:simple"}
    with pytest.raises(UserError, match=r"engine\.function='tests\.nowhere:simple': No module named"):
        find("tests.nowhere:simple")
    for name in ("missing", "STOP", ""):
        with pytest.raises(UserError, match=r"tests\.certify\.test_function has no function"):
            find(f"tests.certify.test_function:{name}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "gave NoneType for 3 requests: return a list of an answer each"),
        ([([1], None)], "gave 1 for 3 requests"),
        ([[1, 2]] * 3, r"gave list for an answer: return \(token ids, log-probs or None\)"),
        ([([1.5], None)] * 3, "gave token ids of type float64"),
        ([([[1]], None)] * 3, r"shape \(1, 1\)"),
        ([([1], ["a"])] * 3, "gave log-probs of type"),
        ([(None, None)] * 3, "gave token ids of type object"),
    ],
)
def test_what_is_no_answer(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FunctionEngine(lambda prompts, seeds, longest: given).sample(asked(), lambda tokens: None)


def test_what_is_no_such_function() -> None:
    with pytest.raises(UserError, match=r"takes 2 arguments: \(requests\), or \(prompts, seeds, max_new_tokens\)"):
        FunctionEngine(lambda prompts, seeds: [])  # type: ignore[arg-type,misc]
    with pytest.raises(UserError, match="gave int for an answer: return an Answer or a Completion"):
        FunctionEngine(lambda requests: [1, 2, 3]).sample(asked(), lambda tokens: None)  # type: ignore[arg-type,return-value]


def test_an_interrupted_function_gives_nothing() -> None:
    def interrupted(asked: Sequence[Request]) -> list[Answer]:
        raise KeyboardInterrupt

    found = FunctionEngine(interrupted).sample(asked(), lambda tokens: None)
    assert [answer.finish_reason for answer in found] == ["abort"] * 3 and [a.request for a in found] == [0, 1, 2]
    assert FunctionEngine(interrupted).sample([], lambda tokens: None) == []
