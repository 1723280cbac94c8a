"""Who is asked for what: whole groups where there is much to do, equal shares where there is little, never too much."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.driver.pool import DISPATCH, Dispatch, HandOut, PullDispatch, StaticDispatch, in_flight

SIZE = 4
ALL = tuple(range(SIZE))


def answers(handed: list[HandOut]) -> Counter[tuple[int, int]]:
    return Counter((prompt, member) for _, prompt, members in handed for member in members)


def load(handed: list[HandOut]) -> Counter[int]:
    return Counter(worker for worker, _, members in handed for _ in members)


def test_static_is_by_number_and_whole() -> None:
    dispatch = StaticDispatch(3, SIZE)
    dispatch.add([5, 1, 0, 4])
    assert dispatch.hand_out() == [(0, 0, ALL), (1, 1, ALL), (1, 4, ALL), (2, 5, ALL)]
    assert dispatch.hand_out() == []


def test_static_keeps_what_a_worker_lost_for_its_replacement() -> None:
    dispatch = StaticDispatch(2, SIZE)
    dispatch.add([0, 2, 1])
    dispatch.hand_out()
    assert dispatch.take(0, 2, 1) and not dispatch.take(0, 2, 1) and not dispatch.take(1, 0, 0)
    assert dispatch.leave(0) == [0, 2]
    dispatch.add([4, 3])
    assert dispatch.hand_out() == [(1, 3, ALL)]
    assert not dispatch.take(0, 0, 0), "it is to be decoded again"
    dispatch.enter(0)
    assert dispatch.hand_out() == [(0, 0, ALL), (0, 2, (0, 2, 3)), (0, 4, ALL)]


def test_with_much_to_do_groups_stay_whole_up_to_the_bound() -> None:
    dispatch = PullDispatch(2, SIZE, slots=8, bound=14)
    dispatch.add(range(20))
    handed = dispatch.hand_out()
    assert [members for *_, members in handed] == [ALL] * 6
    assert load(handed) == {0: 12, 1: 12} and [prompt for _, prompt, _ in handed] == list(range(6))
    assert dispatch.hand_out() == []
    assert dispatch.take(1, 1, 0) and dispatch.hand_out() == []  # no free slot, and no room for a group: 3 of 4
    assert dispatch.take(1, 1, 1) and dispatch.hand_out() == [(1, 6, ALL)]


def test_a_free_slot_takes_a_piece_of_a_group() -> None:
    dispatch = PullDispatch(1, SIZE, slots=6, bound=6)
    dispatch.add([0, 1])
    assert dispatch.hand_out() == [(0, 0, ALL), (0, 1, (0, 1))]
    dispatch.take(0, 0, 2)
    assert dispatch.hand_out() == [(0, 1, (2,))]


@pytest.mark.parametrize(("workers", "prompts"), [(4, 3), (8, 1), (3, 5), (16, 2)])
def test_an_idle_fleet_shares_what_there_is(workers: int, prompts: int) -> None:
    dispatch = PullDispatch(workers, SIZE, slots=64, bound=72)
    dispatch.add(range(prompts))
    handed = dispatch.hand_out()
    assert answers(handed) == Counter((p, m) for p in range(prompts) for m in ALL)
    assert max(load(handed).values()) == -(-prompts * SIZE // workers)
    assert len(handed) <= prompts + workers  # as few pieces as that allows for


def test_who_owes_fewest_comes_first_and_the_slow_get_less() -> None:
    """Worker 1 answers half as fast as the others, and is asked for half as much in the long run."""
    dispatch = PullDispatch(3, SIZE, slots=8, bound=16)
    dispatch.add(range(300))
    owed: dict[int, list[tuple[int, int]]] = {i: [] for i in range(3)}
    done: Counter[int] = Counter()
    for time in range(200):
        for worker, prompt, members in dispatch.hand_out():
            owed[worker] += [(prompt, member) for member in members]
        for worker, speed in enumerate((2, 1, 2)):
            for _ in range(speed if owed[worker] else 0):
                assert dispatch.take(worker, *owed[worker].pop(0)), time
                done[worker] += 1
    assert done == {0: 400, 1: 200, 2: 400}


def test_what_a_dead_worker_lost_goes_to_others_at_once_and_first() -> None:
    dispatch = PullDispatch(2, SIZE, slots=4, bound=4)
    dispatch.add(range(4))
    assert dispatch.hand_out() == [(0, 0, ALL), (1, 1, ALL)]
    assert dispatch.take(0, 0, 3)
    assert dispatch.leave(0) == [0] and dispatch.hand_out() == []
    assert not dispatch.take(0, 0, 0)
    for member in ALL:
        assert dispatch.take(1, 1, member)
    assert dispatch.hand_out() == [(1, 0, (0, 1, 2)), (1, 2, (0,))]
    dispatch.enter(0)
    assert dispatch.hand_out() == [(0, 2, (1, 2, 3)), (0, 3, (0,))]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 9), st.integers(0, 9))
def test_nothing_is_lost_doubled_or_above_the_bound(seed: int, workers: int, slots: int, more: int) -> None:
    """Against a plain account of who owes what, through answers, deaths and returns in any order."""
    chance, bound = random.Random(seed), slots + more
    dispatch: Dispatch = PullDispatch(workers, SIZE, slots, bound)
    owed: dict[int, set[tuple[int, int]]] = {i: set() for i in range(workers)}
    down: set[int] = set()
    finished: set[tuple[int, int]] = set()
    added = 0
    for _ in range(60):
        worker, what = chance.randrange(workers), chance.random()
        if what < 0.3:
            dispatch.add(range(added, added + 2))
            added += 2
        elif what < 0.4:
            dispatch.leave(worker)
            down.add(worker)
            owed[worker] = set()
        elif what < 0.55:
            dispatch.enter(worker)
            down.discard(worker)
        else:
            for one in chance.sample(sorted(owed[worker]), len(owed[worker]) // 2):
                assert dispatch.take(worker, *one) and not dispatch.take(worker, *one)
                owed[worker].discard(one)
                finished.add(one)
        for asked, prompt, members in dispatch.hand_out():
            assert asked not in down and members
            pieces = {(prompt, member) for member in members}
            assert not pieces & finished and not any(pieces & theirs for theirs in owed.values())
            owed[asked] |= pieces
        there = [i for i in range(workers) if i not in down]
        assert all(len(owed[i]) <= bound for i in there)
        waiting = added * SIZE - len(finished) - sum(map(len, owed.values()))
        assert waiting >= 0
        assert not waiting or all(len(owed[i]) >= slots for i in there), "a free slot waits"


@pytest.mark.parametrize("workers", [10, 10_000])
@pytest.mark.slow
def test_an_answer_costs_the_same_for_any_number_of_workers(workers: int) -> None:
    """Counted in lines that are run, which no other work on the machine can change."""
    import sys

    dispatch = PullDispatch(workers, SIZE, slots=8, bound=16)
    dispatch.add(range(workers * 4 + 500))
    handed = dispatch.hand_out()
    lines = 0

    def count(frame: object, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        for worker, prompt, members in handed[:500]:
            for member in members:
                dispatch.take(worker, prompt, member)
                dispatch.hand_out()
    finally:
        sys.settrace(None)
    assert lines / (min(500, len(handed)) * SIZE) < 40


def config(**rollout: object) -> JobConfig:
    return from_dict(JobConfig, {"rollout": rollout, "trainer": {"group_size": SIZE}})


def test_what_settings_choose() -> None:
    chosen = {
        (dispatch, staleness): type(
            DISPATCH[config(dispatch=dispatch, staleness=staleness).rollout.dealing](config(), 2)
        )
        for dispatch in ("auto", "static", "pull")
        for staleness in (0, 1)
    }
    pulled = {place for place, kind in chosen.items() if kind is PullDispatch}
    assert pulled == {("auto", 1), ("pull", 0), ("pull", 1)}
    assert in_flight(config(slots=10)) == 10 + SIZE and in_flight(config(in_flight=3)) == 3
