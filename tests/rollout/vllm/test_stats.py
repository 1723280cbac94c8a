"""From what was seen of single steps to the statistics of an answer."""

from types import SimpleNamespace

import numpy as np
import pytest

from bebop.rollout.vllm.core import Core
from bebop.rollout.vllm.steps import STEPS, StepCounts, StepRecord, Verified
from bebop.trajectory import MEASURED


def step(drafted: int, accepted: int, weight: int = 0) -> Verified:
    measured = {name: [0.5, 0.25, 0.125][:drafted] for name in MEASURED} if weight else {}
    return Verified(drafted=drafted, accepted=accepted, sampled=True, weight=weight, measured=measured)


def lists(counts: StepCounts) -> tuple[list[float], list[float]]:
    return counts.sums.reached.tolist(), counts.sums.accepted.tolist()


def test_tokens_come_out_of_a_prefill_and_of_cycles() -> None:
    counts = StepCounts(drafts=3, head=True)
    counts.add(1, None)
    counts.add(3, step(3, 2))
    counts.add(1, step(3, 0))
    counts.add(0, None)  # a step in which a part of another prompt was read
    counts.add(4, step(3, 3))
    counts.add(1, None)  # nothing was drafted
    found = counts.sums
    assert (found.tokens, found.prefilled, found.cycles, found.target_forwards) == (10, 1, 4, 4)
    assert found.draft_forwards == 12
    assert lists(counts) == ([3, 2, 2], [2, 2, 1])
    assert found.accept_length == 9 / 4


def test_an_end_cuts_off_what_was_accepted_behind_it() -> None:
    counts = StepCounts(drafts=3, head=True, prefill=False)
    counts.add(2, step(3, 3))  # the second token ends the answer
    assert lists(counts) == ([1, 1, 0], [1, 1, 0])
    assert counts.sums.tokens == 2


def test_fewer_drafts_reach_fewer_places() -> None:
    counts = StepCounts(drafts=3, head=False, prefill=False)
    counts.add(2, step(1, 1))
    assert lists(counts) == ([1, 0, 0], [1, 0, 0])
    assert counts.sums.draft_forwards == 0


def test_measures_stand_for_steps_that_were_not_measured() -> None:
    counts = StepCounts(drafts=3, head=True, prefill=False)
    counts.add(2, step(3, 1, weight=4))
    for _ in range(3):
        counts.add(2, step(3, 1))
    np.testing.assert_allclose(counts.sums.overlap, [4 * 0.5, 4 * 0.25, 0])
    np.testing.assert_allclose(counts.sums.overlap[:2] / counts.sums.reached[:2], [0.5, 0.25])


def test_keys_and_values_that_are_computed_again_are_a_prefill() -> None:
    counts = StepCounts(drafts=3, head=True)
    counts.add(1, None)
    counts.add(2, step(3, 1))
    counts.restarted()
    counts.add(1, None)
    assert (counts.sums.prefilled, counts.sums.cycles) == (2, 1)


def test_plain_decoding_has_cycles_alone() -> None:
    counts = StepCounts(drafts=0, head=False)
    for _ in range(3):
        counts.add(1, None)
    assert (counts.sums.prefilled, counts.sums.cycles, counts.sums.accept_length) == (0, 3, 1.0)


def test_a_version_is_that_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous engine's tokens come out after an update that they know nothing of."""
    core = Core({}, {}, drafts=3, head=True)
    core.engine = SimpleNamespace(reset_prefix_cache=lambda **named: None)
    for launches, version in ((4, 7), (4, 8), (9, 9)):
        monkeypatch.setattr(STEPS, "launches", launches)
        core.loaded(version, recompute=False)
    versions = [core._version_of(StepRecord(number=number)) for number in (0, 3, 4, 8, 9, 20, -1)]
    assert versions == [0, 0, 8, 8, 9, 9, 9]  # the last: vLLM gave tokens of no step that was seen


def test_a_step_in_flight_is_no_prefill() -> None:
    """Its drafts were verified, whatever was asked for meanwhile."""
    counts = StepCounts(drafts=3, head=True)
    counts.add(1, None)
    counts.restarted()
    counts.add(2, step(3, 1))
    counts.add(1, None)
    assert (counts.sums.prefilled, counts.sums.cycles) == (2, 1)
