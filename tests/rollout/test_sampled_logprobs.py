"""What an inexact rule says of the distribution it really draws from goes with each token, wherever its answer goes."""

import dataclasses

import numpy as np
import pytest
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.rules import Rejection
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion
from tests.builders import bare_policy, requests
from tests.cases import slow_but

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 1], [9], [2, 2], [3, 1]]


class Says(Rejection):
    """Claims to draw each token with probability exp(-token)."""

    exact = False

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        accepted = super().accept(rows, draft, out, uniforms)
        return dataclasses.replace(accepted, logprobs=-accepted.tokens.double())


class SaysNothing(Rejection):
    exact = False


def engine(policy: Policy, rule: Rejection) -> TorchEngine:
    one = TorchEngine(policy, DecodingConfig(draft_tokens=2), slots=2, max_length=64)
    assert isinstance(one.decoder, DraftVerify)
    one.decoder.rule = rule
    return one


def as_claimed(answer: Completion, first: int, last: int) -> bool:
    assert answer.sampled_logprobs is not None and answer.sampled_logprobs.dtype == np.float32
    return bool((answer.sampled_logprobs[first:last] == -answer.token_ids[first:last]).all())


def test_what_a_rule_says_stands_beside_log_p() -> None:
    """Also as rows leave and others move into their places."""
    policy = bare_policy(seed=2)
    asked = requests(PROMPTS, max_new_tokens=9)
    answers, plain = (generate(engine(policy, rule), asked) for rule in (Says(), Rejection()))
    for answer, same in zip(answers, plain, strict=True):
        assert np.array_equal(answer.logprobs, same.logprobs) and as_claimed(answer, 0, len(answer.token_ids))
        assert answer.weighable and answer.drawn_logprobs is answer.sampled_logprobs
        assert same.sampled_logprobs is None and same.weighable and same.drawn_logprobs is same.logprobs
    silent = generate(engine(policy, SaysNothing()), asked)
    assert not any(a.weighable for a in silent) and all(a.sampled_logprobs is None for a in silent)


@pytest.mark.slow
@pytest.mark.parametrize("early", [Rejection(), Says(), SaysNothing()])
@pytest.mark.parametrize("late", [Rejection(), Says(), SaysNothing()])
@pytest.mark.parametrize("resumed", slow_but([True], [False, True]))
def test_an_answer_of_two_rules_is_known_where_both_are(early: Rejection, late: Rejection, resumed: bool) -> None:
    policy = bare_policy(seed=3)
    (request,) = requests([[1, 2, 3]], max_new_tokens=30)
    one = engine(policy, early)
    one.add(request)
    one.step()
    begun = one.fed[0] + 1 - len(request.token_ids)
    if resumed:
        part = one.abort()[0].completion
        one = engine(policy, late)
        one.add(dataclasses.replace(request, partial=part))
    assert isinstance(one.decoder, DraftVerify)
    one.decoder.rule = late
    done: list[Completion] = []
    while one.unfinished:
        done += [f.completion for f in one.step()]
    answer, rules = done[0], (early, late)
    assert answer.exact == all(rule.exact for rule in rules)
    assert answer.weighable == (not any(isinstance(rule, SaysNothing) for rule in rules))
    if answer.exact or not answer.weighable:
        assert answer.sampled_logprobs is None
        return
    assert answer.sampled_logprobs is not None
    for rule, first, last in ((early, 0, begun), (late, begun, 30)):
        claimed = as_claimed(answer, first, last)
        same = bool((answer.sampled_logprobs[first:last] == answer.logprobs[first:last]).all())
        assert (claimed, same) == (isinstance(rule, Says), not isinstance(rule, Says))
