"""Cycles that are launched before the one before is read give the completions of cycles that are read at once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bebop.config.fields import from_dict
from bebop.config.job import DecodingConfig, JobConfig
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.graphs import EagerRecorder
from bebop.rollout.engine import Request
from bebop.rollout.slots import Slots
from bebop.rollout.torch_builder import overlap_on
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.trajectory import Completion, DecodeStats
from tests.builders import needs_more, requests, tiny_policy
from tests.cases import slow_but
from tests.digests.decoding import VOCAB, wanted
from tests.rollout.driving import finished, resumed, started
from tests.rollout.test_graphs import STATIC, TapeRecorder

pytestmark = pytest.mark.slow  # quick tests of their seams are elsewhere, and the quick suite has a budget

# ---- comparison


def same(found: Mapping[int, Completion], expected: Mapping[int, Completion]) -> None:
    """All that completions carry is the same; numbers of fp64 differ by the rounding of a batch with one row more."""
    assert found.keys() == expected.keys()
    for i, b in expected.items():
        a = found[i]
        assert (a.finish_reason, a.text, a.exact) == (b.finish_reason, b.text, b.exact), i
        for name in ("token_ids", "versions", "contexts"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=f"{name} of {i}")
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-6)
        assert [start for start, _ in a.stretches] == [start for start, _ in b.stretches], i
        pairs = [(a.stats, b.stats), *((x, y) for (_, x), (_, y) in zip(a.stretches, b.stretches, strict=True))]
        for mine, theirs in pairs:
            same_stats(mine, theirs)
        assert a.state.keys() == b.state.keys()
        for name, column in b.state.items():
            np.testing.assert_allclose(a.state[name], column, rtol=0, atol=1e-9, err_msg=f"{name} of {i}")


def same_stats(found: DecodeStats, expected: DecodeStats) -> None:
    """Whole numbers are equal, sums of probabilities up to rounding."""
    for field in dataclasses.fields(expected):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(b, Mapping):
            assert a.keys() == b.keys()
        else:
            a, b = {field.name: a}, {field.name: b}
        for name, value in b.items():
            np.testing.assert_allclose(a[name], value, rtol=0, atol=1e-6, err_msg=name)


def engine(system: str, slots: int = 5, drafts: int = 3, **settings: Any) -> TorchEngine:
    """An engine in fp64 with weights of its own."""
    policy = tiny_policy(VOCAB, dtype=torch.float64, with_parts=needs_more(system))
    config = DecodingConfig(system=system, draft_tokens=drafts, cost_ratio=0.2, verify_ratio=0.1)
    return TorchEngine(policy, config, slots=slots, max_length=40, room=4, **settings)


def both(run: Callable[[TorchEngine], Mapping[int, Completion]], make: Callable[..., TorchEngine]) -> None:
    """Compare what a run gives with overlap and without."""
    expected, found = (run(make(overlap=overlap)) for overlap in (False, True))
    same(found, expected)


def ten() -> list[Request]:
    """Requests of which some end at a stop token, the others at their limit."""
    found = wanted()[:10]
    return [replace(r, params=replace(r.params, stop_token_ids=(2 + r.id % 4, VOCAB - 1))) for r in found]


QUICK = [("bebop", "as it is"), ("bebop_adaptive", "in buckets")]
CASES = [(system, recorded) for system in STATIC for recorded in ("as it is", "recorded")] + QUICK[1:]
CASES.remove(("bebop_adaptive", "as it is"))  # all rows draft on until the last one stops: one row more, more passes


def made(system: str, recorded: str, **settings: Any) -> Callable[..., TorchEngine]:
    """Return what makes an engine, with a recorder of its own each time."""
    recorders = {"recorded": TapeRecorder, "in buckets": EagerRecorder}

    def make(**more: Any) -> TorchEngine:
        recorder = {"recorder": recorders[recorded]()} if recorded in recorders else {}
        return engine(system, **settings, **recorder, **more)

    return make


# ---- completions


@pytest.mark.parametrize(
    ("system", "recorded"),
    slow_but(QUICK, CASES, several=True),
)
def test_more_requests_than_slots_with_all_that_is_kept_of_them(system: str, recorded: str) -> None:
    """Groups of four, rows that move while their next cycle is in flight, and slots that are taken again."""

    def run(one: TorchEngine) -> dict[int, Completion]:
        done = finished(started(one, ten()))
        assert {completion.finish_reason for completion in done.values()} == {"stop", "length"}
        return done

    both(run, made(system, recorded, keep_state=True))


@pytest.mark.parametrize(("system", "recorded"), slow_but(QUICK[1:], CASES, several=True))
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_weights_aborts_and_settings_come_between_two_cycles(system: str, recorded: str, on_update: str) -> None:
    """Each of them while a cycle is in flight; all requests have a slot, so cycles have the same weights."""
    other = tiny_policy(VOCAB, seed=4, dtype=torch.float64, with_parts=False)

    def run(one: TorchEngine) -> dict[int, Completion]:
        asked, done = wanted()[4:9], {}
        started(one, asked, cycles=3)
        one.load_weights(other.weights(mtp=True), version=1)
        for _ in range(2):
            done |= {f.id: f.completion for f in one.step()}
        aborted = {f.id: f.completion for f in one.abort([asked[1].id, asked[4].id])}
        done |= {i: c for i, c in aborted.items() if c.finish_reason != "abort"}
        cut = {i: c for i, c in aborted.items() if c.finish_reason == "abort"}
        assert cut
        one.configure(replace(one.decoding, draft_tokens=2))
        done |= {f.id: f.completion for f in one.step()}
        for request in resumed([request for request in asked if request.id in cut], cut):
            one.add(request)
        return done | {-1 - i: c for i, c in cut.items()} | finished(one)

    both(run, made(system, recorded, on_update=on_update))


@pytest.mark.slow  # 64 requests, twice
@pytest.mark.parametrize("system", ["autoregressive", "bebop", "bebop_block", "bebop_tree"])
def test_all_requests_of_the_digests(system: str) -> None:
    """Every sampling setting, groups of four, twelve slots."""
    both(lambda one: finished(started(one, wanted())), made(system, "as it is", slots=12))


def test_conversations_go_on_from_parked_caches() -> None:
    def run(one: TorchEngine) -> dict[int, Completion]:
        asked, done = [replace(request, park=True) for request in wanted()[:4]], {}
        asked = [replace(r, params=replace(r.params, max_new_tokens=5)) for r in asked]
        for turn in range(3):
            answers = generate(one, asked)
            done |= {10 * turn + i: answer for i, answer in enumerate(answers)}
            asked = [
                replace(r, token_ids=(*r.token_ids, *answer.token_ids.tolist(), 3))
                for r, answer in zip(asked, answers, strict=True)
            ]
        assert one.retention.counts.hits > 4
        return done

    both(run, made("bebop", "as it is", slots=3))


# ---- broken variants


def forgotten(self: Slots, before: Mapping[str, Tensor], emitted: Tensor, done: Tensor) -> None:
    """Freeze nothing."""


BROKEN: dict[str, tuple[type, str, Any]] = {
    "rows that end are not frozen": (Slots, "freeze", forgotten),
    "draft lengths learn from rows that ended": (Slots, "own_columns", lambda self, batch: {}),
    "cycles of rows that ended count": (DraftVerify, "_ran", lambda self, emitted: 1),
    "moved without what is in flight": (TorchEngine, "_most", lambda self, slot: self.fed[slot]),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_variants_give_other_completions(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[fault])
    with pytest.raises(AssertionError):
        both(lambda one: finished(started(one, ten())), made("bebop_adaptive", "in buckets", keep_state=True))


# ---- order of launches and reads


def watched(one: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by a word for each launch and for each read."""
    seen: list[str] = []
    launch, read = one._launch, one._read
    monkeypatch.setattr(one, "_launch", lambda: (seen.append("launch"), launch())[1])
    monkeypatch.setattr(one, "_read", lambda flight: (seen.append("read"), read(flight))[1])
    return seen


def test_a_cycle_is_launched_before_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one = started(engine("bebop", overlap=True), requests([[1, 2, 3], [4]], max_new_tokens=30))
    seen = watched(one, monkeypatch)
    for _ in range(4):
        one.step()
    assert seen == ["launch", "launch", "read", "launch", "read", "launch", "read"]
    one.load_weights(one.policy.weights(mtp=True), 1)
    assert seen[-1] == "read" and one.flight is None
    finished(one)
    assert one.flight is None and not one.active and one.step() == []


def test_what_ends_in_the_cycle_in_flight_is_not_lost() -> None:
    """Weights, settings and an abort read it; the next call returns it, and until then it is unfinished."""
    for call in (
        lambda one: one.load_weights(one.policy.weights(mtp=True), 1),
        lambda one: one.configure(one.decoding),
        lambda one: None,
    ):
        one = started(engine("autoregressive", overlap=True), requests([[1, 2, 3]], max_new_tokens=2), cycles=2)
        assert one.flight is not None
        call(one)
        assert one.unfinished == 1
        [ended] = one.abort()
        assert ended.completion.finish_reason == "length" and len(ended.completion.token_ids) == 2
        assert one.unfinished == 0 and one.step() == []


SERIAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "requests have stop strings": ("bebop", {}, {"stop": ("ab", "ca", "b")}),
    "requests are traced": ("bebop", {}, {"trace": True}),
    "decoding.draft_tokens=auto learns from": ("bebop", {"draft_tokens": "auto", "most_drafts": 2}, {}),
    "decoding.draft_temperature=auto reads the device": ("bebop", {"draft_temperature": "auto"}, {}),
    "decoding.system=history reads the device": ("history", {}, {}),
    "decoding.system=pad reads the device": ("pad", {}, {}),
    "decoding.system=pipo has a cycle of its own": ("pipo", {}, {}),
}


@pytest.mark.parametrize("reason", SERIAL)
def test_what_the_host_has_to_know_is_read_at_once(
    reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, changes, own = SERIAL[reason]
    asked = requests([[1, 2, 3], [4, 5], [1, 2, 3]], max_new_tokens=9)
    trace = own.get("trace", False)
    asked = [replace(r, trace=trace, params=replace(r.params, stop=own.get("stop", ()))) for r in asked]
    found: list[dict[int, Completion]] = []
    for overlap in (False, True):
        clock = iter(range(10**6))
        policy = tiny_policy(VOCAB, dtype=torch.float64, with_parts=needs_more(system))
        config = DecodingConfig(**{"system": system, "draft_tokens": SYSTEMS[system].draft_tokens, **changes})
        one = TorchEngine(
            policy, config, slots=2, max_length=40, overlap=overlap, clock=lambda clock=clock: float(next(clock))
        )
        seen = watched(one, monkeypatch)
        found.append(finished(started(one, asked)))
        assert seen == ["launch", "read"] * (len(seen) // 2) and seen
    same(found[1], found[0])
    assert [reason in message for message in caplog.messages] == [True]


def test_a_request_with_stop_strings_comes_and_goes_between_cycles_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = requests([[1, 2, 3], [4, 5], [6]], max_new_tokens=20)
    second = replace(second, params=replace(second.params, stop=("ab", "b"), max_new_tokens=6))

    def run(one: TorchEngine) -> dict[int, Completion]:
        done: dict[int, Completion] = {}
        for request in (first, second, third):
            one.add(request)
            done |= {f.id: f.completion for _ in range(3) for f in one.step()}
        return done | finished(one)

    both(run, made("bebop", "as it is"))
    one = started(engine("bebop", overlap=True), [first], cycles=3)
    seen = watched(one, monkeypatch)
    one.add(second)
    one.step()
    assert seen == ["read", "launch", "read"]


def test_a_job_overlaps_on_a_gpu_or_where_it_is_asked_to() -> None:
    asked = {None: (False, True), True: (True, True), False: (False, False)}
    for value, expected in asked.items():
        config = from_dict(JobConfig, {"rollout": {"torch": {"overlap": value}}})
        assert tuple(overlap_on(config, torch.device(name)) for name in ("cpu", "cuda")) == expected


# ---- rounding


class Products(TorchDispatchMode):
    """Keeps the shapes of matrix products, and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator; in inference mode even those arrive that are made of others."""
        name = func._schema.name
        if any(word in name for word in ("mm", "linear", "matmul", "attention")):
            self.shapes.add((name, tuple(tuple(x.shape) for x in args if isinstance(x, Tensor))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("system", slow_but(["autoregressive"], ["autoregressive", "bebop", "bebop_adaptive"]))
def test_rows_in_one_bucket_have_the_rounding_of_that_bucket(system: str) -> None:
    """Prompts of one token, so that nothing is computed outside of cycles; in fp32, to the bit. One is traced."""
    policy = tiny_policy(VOCAB, dtype=torch.float32, with_parts=False)
    config, asked = DecodingConfig(system=system, draft_tokens=3), requests([[1], [2], [5]], max_new_tokens=12, seed=3)
    asked[0] = replace(asked[0], trace=True, params=replace(asked[0].params, max_new_tokens=6))
    shapes: list[bool] = []
    for invariant in (False, True):
        seen, logprobs = [], []
        for some in (asked, *([request] for request in asked)):
            one = TorchEngine(
                policy, config, slots=4, max_length=60, recorder=EagerRecorder(), batch_invariant=invariant
            )
            with Products() as products:
                logprobs += [answer.logprobs.tolist() for answer in generate(one, some)]
            seen.append(products.shapes)
        shapes.append(all(one == seen[0] for one in seen) and len(seen[0]) > 2)
        if invariant:
            assert logprobs[:3] == logprobs[3:]
    assert shapes == [False, True]


def test_rows_that_move_while_a_flight_is_read_keep_their_pages() -> None:
    """A request that is read at once comes while a cycle in flight, not read yet, ends another one."""
    policy = tiny_policy(VOCAB, dtype=torch.float64, with_parts=False)
    short, long, late = requests([[1, 2, 3], [4, 5], [6, 7, 8, 9]], max_new_tokens=8)
    short = replace(short, params=replace(short.params, max_new_tokens=3))

    def run(one: TorchEngine) -> dict[int, Completion]:
        done: dict[int, Completion] = {}
        started(one, [short, long])
        for _ in range(3):
            done |= {f.id: f.completion for f in one.step()}
        return done | finished(started(one, [replace(late, trace=True)]))

    config = DecodingConfig(system="autoregressive", draft_tokens=0)
    both(run, lambda **more: TorchEngine(policy, config, slots=3, max_length=40, paged=True, **more))
