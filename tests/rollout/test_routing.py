"""The engine records which experts computed each token of a completion: those of the target's own pass over it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bebop.config.job import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.graphs import EagerRecorder
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.trajectory import Completion, Trajectory, Turn
from tests.builders import bare_policy, requests, tiny_policy
from tests.model.families import experts_of, mixture, refused
from tests.rollout.driving import aborted, finished, resumed, started

pytestmark = pytest.mark.slow  # importing a family and its passes take seconds
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11, 12], [1, 2, 3]]
# Each way in which rows of a verification come to be kept or dropped: chains, trees, pseudo states, unequal lengths.
WAYS = ["autoregressive", "bebop", "bebop_adaptive", "bebop_tree", "firp", "firp_chain", "history", "ngram"]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return mixture()


def engine(policy: Policy, system: str = "bebop", max_length: int = 64, **settings: Any) -> TorchEngine:
    drafts = SYSTEMS[system].draft_tokens  # of a tree all, so that the path that is accepted is not its first nodes
    decoding = DecodingConfig(system=system, draft_tokens=drafts if SYSTEMS[system].tree else min(3, drafts))
    return TorchEngine(policy, decoding, slots=3, max_length=max_length, record_routing=True, **settings)


def asked() -> list[Request]:
    return requests(PROMPTS, max_new_tokens=24, temperature=0.8)


def check(policy: Policy, tasks: Sequence[Request], done: Sequence[Completion]) -> None:
    """All tokens but the last have the experts that transformers chooses for the text."""
    for request, completion in zip(tasks, done, strict=True):
        text = [*request.token_ids, *completion.token_ids.tolist()]
        routing, wanted = completion.routing, experts_of(policy, text)
        assert routing is not None and routing.shape == wanted.shape == (len(text), 2, 2) and routing.dtype == np.int8
        assert (routing[-1] == -1).all(), "nothing has read the last token"
        assert np.array_equal(np.sort(routing[:-1], -1), wanted[:-1])


@pytest.mark.parametrize("system", WAYS)
def test_routing_is_that_of_the_target_whatever_was_drafted(policy: Policy, system: str) -> None:
    one, tasks = engine(policy, system), asked()
    without = TorchEngine(policy, one.decoding, slots=3, max_length=64)
    for told in (one, without):
        told.remember(PROMPTS[0], [[3, 5, 7, 9, 11, 13]])
    done, plain = generate(one, tasks), generate(without, tasks)
    check(policy, tasks, done)
    assert [c.token_ids.tolist() for c in plain] == [c.token_ids.tolist() for c in done], "recording changes nothing"
    assert all(c.routing is None for c in plain)
    if SYSTEMS[system].drafts and system not in ("ngram", "history"):  # those draft too little of a random model
        stats = sum((c.stats for c in done[1:]), done[0].stats)
        assert 0 < stats.accepted.sum() < stats.reached.sum(), "some drafts were accepted and some were not"


@pytest.mark.parametrize(
    "settings",
    [
        {"paged": True, "prefill_tokens": 4},
        {"overlap": True},
        {"recorder": EagerRecorder(), "overlap": True, "paged": True},
        {"paged": True, "cache_tokens": 200, "max_length": 200},  # three do not fit at their full length
    ],
    ids=["paged-chunked", "overlap", "graphs", "preempted"],
)
def test_routing_is_that_of_the_target_however_it_is_run(policy: Policy, settings: dict[str, Any]) -> None:
    one = engine(policy, **settings)
    tasks = requests(PROMPTS, max_new_tokens=140 if "max_length" in settings else 24, temperature=0.8)
    check(policy, tasks, generate(one, tasks))
    assert one.preempted > 0 or "cache_tokens" not in settings


def test_an_aborted_completion_goes_on_with_the_routing_that_it_had(policy: Policy) -> None:
    tasks = asked()[:3]
    parts = aborted(started(engine(policy), tasks, cycles=4))
    assert all(len(part.token_ids) for part in parts.values())
    check(policy, tasks, [parts[task.id] for task in tasks])
    marked = {}
    for task in tasks:  # experts that no router would choose: what was known stays, whatever is computed again
        known = parts[task.id].routing
        assert known is not None
        marked[task.id] = dataclasses.replace(parts[task.id], routing=np.where(known[:-1] >= 0, 7, -1).astype(np.int8))
    done = finished(started(engine(policy), resumed(tasks, marked)))
    for task in tasks:
        held = marked[task.id].routing
        assert held is not None
        before, routing = len(held), done[task.id].routing
        assert routing is not None and (routing[1:before] == 7).all()
        text = [*task.token_ids, *done[task.id].token_ids.tolist()]
        assert np.array_equal(np.sort(routing[before + 1 : -1], -1), experts_of(policy, text)[before + 1 : -1])


def test_new_weights_leave_the_routing_under_which_tokens_were_sampled(policy: Policy) -> None:
    """Contexts are read anew under the new weights; what later tokens read has their routing."""
    for on_update in ("keep", "recompute"):
        one, tasks = engine(policy, on_update=on_update), asked()[:3]
        started(one, tasks, cycles=4)
        fed = list(one.fed)
        other = mixture(initializer_range=0.3)
        old = {name: tensor.clone() for name, tensor in policy.weights().items()}
        one.load_weights(other.weights(), 1)
        done = finished(one)
        one.load_weights(old, 0)
        for task, entries in zip(tasks, fed, strict=True):
            text, routing = [*task.token_ids, *done[task.id].token_ids.tolist()], done[task.id].routing
            assert routing is not None
            own = experts_of(policy, text)
            assert np.array_equal(np.sort(routing[:entries], -1), own[:entries]), on_update
            changed = np.sort(routing[entries:-1], -1)
            assert not np.array_equal(changed, own[entries:-1])
            if on_update == "recompute":
                assert np.array_equal(changed, experts_of(other, text)[entries:-1])


def test_a_turn_goes_on_with_the_routing_of_what_was_parked(policy: Policy) -> None:
    one = engine(policy, "bebop")
    first = [dataclasses.replace(task, park=True) for task in asked()[:2]]
    before = generate(one, first)
    observed = [3, 9]
    again = [
        dataclasses.replace(task, id=9 + i, token_ids=(*task.token_ids, *done.token_ids.tolist(), *observed))
        for i, (task, done) in enumerate(zip(first, before, strict=True))
    ]
    done = generate(one, again)
    assert one.retention.counts.hits == 2
    check(policy, again, done)
    for task, one_turn, next_turn in zip(first, before, done, strict=True):
        fresh = 1 + len(observed) + len(next_turn.token_ids)
        assert next_turn.routing is not None
        later = dataclasses.replace(next_turn, routing=next_turn.routing[-fresh:])
        turns = (
            Turn(observation=np.zeros(0, dtype=np.int64), completion=one_turn),
            Turn(observation=np.array(observed), completion=later),
        )
        joined = Trajectory(turns=turns, reward=0.0).completion
        assert joined.routing is not None
        text = [*task.token_ids, *joined.token_ids.tolist()]
        assert np.array_equal(np.sort(joined.routing[:-1], -1), experts_of(policy, text)[:-1])


def test_models_and_systems_without_routing_are_refused_in_one_line() -> None:
    dense = refused(lambda: engine(bare_policy()))
    assert "a qwen2 model without experts has no routing" in dense
    pairs = DecodingConfig(system="pipo", draft_tokens=1)
    cycle = refused(lambda: TorchEngine(tiny_policy(), pairs, slots=1, record_routing=True))
    assert "decoding.system='pipo' is not possible: its own cycle records no routing" in cycle


def test_more_experts_than_a_byte_names_take_two() -> None:
    wide = mixture(num_experts=160, num_local_experts=160)
    [done] = generate(engine(wide, "autoregressive"), asked()[:1])
    assert done.routing is not None and done.routing.dtype == np.int16
    text = [*PROMPTS[0], *done.token_ids.tolist()]
    assert np.array_equal(np.sort(done.routing[:-1], -1), experts_of(wide, text)[:-1]) and done.routing.max() > 127
