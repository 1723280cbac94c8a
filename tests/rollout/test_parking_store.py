"""What is parked, how long, and what of it is found."""

import torch

from bebop.rollout.kv_retention import KvRetention
from tests.builders import bare_policy
from tests.rollout.test_parking import engine


def parking(limit: float, answers: int = 0) -> tuple[KvRetention, list[list[int]]]:
    """A bound of ``limit`` answers, and so many parked."""
    one = engine(bare_policy(seed=3), "autoregressive")
    probe = KvRetention(one.slots, 2**30)
    probe.park(0, [*range(9)], 0)
    made = KvRetention(one.slots, int(limit * probe.counts.bytes))
    histories = [[i, *range(1, 9)] for i in range(answers)]
    for history in histories:
        made.park(0, history, 0)
    return made, histories


def test_the_bound_holds_and_what_was_wanted_longest_ago_goes_first() -> None:
    one, histories = parking(3.5, 3)
    whole = one.counts.bytes
    assert one.counts.evicted == 0 and one.counts.entries == 3 * 8 and whole == one.limit * 3 // 3.5
    one.park(0, [7, *range(1, 9)], 0)
    assert one.counts.bytes == whole and one.counts.evicted == 1
    assert one.find([*histories[0], 1], 0, 0) is None and one.find([*histories[2], 1], 0, 0) is not None
    one.park(0, [8, *range(1, 9)], 0)  # in the place of the one that was gone on from, not of one that waits longer
    waiting = (histories[1], [7, *range(1, 9)])
    assert [one.find([*h, 1], 0, 0) is not None for h in (histories[2], *waiting)] == [False, True, True]
    one.park(0, [7, *range(1, 9)], 0)  # in the place of its like
    assert one.counts.bytes == whole and one.counts.evicted == 2
    one.park(0, [*range(40)], 0)
    assert one.counts.refused == 1 and one.counts.bytes == whole
    one.clear()
    assert one.counts.bytes == one.counts.entries == 0 and one.counts.dropped == 3
    assert one.find([7, *range(1, 9), 1], 0, 0) is None


def test_the_longest_is_gone_on_from() -> None:
    one, _ = parking(20)
    for length in (3, 9, 6):
        one.park(0, [*range(length)], 0)
    for asked_for, found in ((4, 2), (8, 5), (20, 8)):
        there = one.find([*range(asked_for)], 0, 0)
        assert there is not None and there.entries == found
    assert one.find([0, 1], 0, 0) is None


def test_a_slot_gives_what_was_taken() -> None:
    """Of every cache, and nothing beyond the length."""
    one = engine(bare_policy(seed=3), "bebop")
    for cache in one.slots.caches.values():
        cache.keys.normal_()
        cache.values.normal_()
    held = one.slots.snapshot(1, 9)
    assert set(held) == {"target", "mtp"}
    before = {name: (c.keys.clone(), c.values.clone()) for name, c in one.slots.caches.items()}
    one.slots.restore(3, held, 7)
    for name, cache in one.slots.caches.items():
        for store, was in zip((cache.keys, cache.values), before[name], strict=True):
            assert torch.equal(store[:, 3, :, :7], was[:, 1, :, :7])
            assert torch.equal(store[:, 3, :, 7:], was[:, 3, :, 7:]) and torch.equal(store[:, :3], was[:, :3])


def test_of_equal_answers_the_one_with_newer_weights_serves_both() -> None:
    one, [history] = parking(2, 1)
    for version, seed in ((2, 7), (1, 8)):
        one.slots.oldest[0] = version
        one.park(0, history, seed)
    for seed in (0, 7, 8):
        found = one.find([*history, 1], seed, 9)
        assert found is not None and found.oldest == 2
    assert one.find([*history, 1], 9, 9) is None and one.counts.entries == 8 and one.counts.evicted == 0
