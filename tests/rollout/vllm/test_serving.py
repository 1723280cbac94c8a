"""Statistics through the processes of a server, played one after another with plain objects and a pickle between."""

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bebop.rollout.vllm.plugin import FIELD, hand_on, summed, with_steps
from bebop.rollout.vllm.steps import STEPS, StepRecord, Verified
from bebop.trajectory import MEASURED

DRAFTS = 2


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    STEPS.take()
    yield
    STEPS.take()


def make(state: Any, new_token_ids: list[int], finish_reason: Any = None, kv_transfer_params: Any = None) -> Any:
    """In the place of ``RequestState.make_request_output``: answers whose end alone is asked for have one output."""
    if state.final_only and finish_reason is None:
        return None
    return SimpleNamespace(kv_transfer_params=kv_transfer_params)


def step(seen: dict[str, Verified], tokens: dict[str, list[int]], **more: Any) -> list[Any]:
    """Worker and scheduler: what the front end gets."""
    STEPS.done.append(StepRecord(_found=seen))
    output = pickle.loads(pickle.dumps(with_steps(SimpleNamespace())))
    requests = [SimpleNamespace(request_id=n, new_token_ids=ids, kv_transfer_params=None) for n, ids in tokens.items()]
    for one in requests:
        one.kv_transfer_params = more.get(one.request_id)
    hand_on(output, requests)
    return requests


def arrive(state: Any, one: Any, reason: Any = None) -> Any:
    given = {"new_token_ids": one.new_token_ids, "finish_reason": reason, "kv_transfer_params": one.kv_transfer_params}
    return summed(make, state, DRAFTS, given)


def verified(accepted: int, weight: int = 0) -> Verified:
    measured = {name: [0.5, 0.25] for name in MEASURED} if weight else {}
    return Verified(drafted=DRAFTS, accepted=accepted, sampled=True, weight=weight, measured=measured)


@pytest.mark.parametrize("final_only", [False, True])
def test_an_answer_has_the_sum_of_its_own_steps(final_only: bool) -> None:
    states = {name: SimpleNamespace(final_only=final_only) for name in ("a", "b")}
    steps = [
        step({}, {"a": [1], "b": [1]}),
        step({"a": verified(2, weight=2), "b": verified(0, weight=2)}, {"a": [1, 2, 3], "b": [1]}),
        step({"a": verified(1)}, {"a": [1, 2]}),
    ]
    for number, requests in enumerate(steps):
        for one in requests:
            last = arrive(states[one.request_id], one, "stop" if number == 2 else None)
    found = last.kv_transfer_params[FIELD]
    assert (found.tokens, found.prefilled, found.cycles) == (6, 1, 2)
    assert found.reached.tolist() == [2, 2] and found.accepted.tolist() == [2, 1]
    np.testing.assert_allclose(found.overlap, [1.0, 0.5])
    other = arrive(states["b"], SimpleNamespace(new_token_ids=[], kv_transfer_params=None), "abort")
    assert other.kv_transfer_params[FIELD].reached.tolist() == [1, 0]  # an aborted one has them, too


def test_what_others_send_stays_and_ours_goes_no_further() -> None:
    state = SimpleNamespace(final_only=False)
    (one,) = step({"a": verified(1)}, {"a": [1, 2]}, a={"block": 7})
    assert set(one.kv_transfer_params) == {"block", FIELD}
    seen: list[Any] = []

    def watching(state: Any, **given: Any) -> Any:
        seen.append(given["kv_transfer_params"])
        return SimpleNamespace(kv_transfer_params=given["kv_transfer_params"])

    found = summed(watching, state, DRAFTS, {"new_token_ids": [1, 2], "kv_transfer_params": one.kv_transfer_params})
    assert seen == [{"block": 7}] and set(found.kv_transfer_params) == {"block", FIELD}


def test_steps_without_output_or_drafts_pass() -> None:
    assert with_steps(None) is None
    requests = [SimpleNamespace(request_id="a", kv_transfer_params=None)]
    hand_on(SimpleNamespace(), requests)
    assert requests[0].kv_transfer_params is None
