"""Staleness, order and completeness of the buffer, simulated over arbitrary orders in which groups finish."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.driver.buffer import MAX_BATCHES, GroupBuffer, has_spread
from bebop.errors import UserError
from bebop.trajectory import Batch, Completion, Group, Prompt, Trajectory
from tests.builders import oldest_version


def group(index: int, version: int) -> Group:
    """A group of one answer, all of it decoded with weights ``version``."""
    one = np.array([1])
    completion = Completion(token_ids=one, logprobs=np.float32([0.0]), versions=np.array([version]))
    prompt = Prompt(index=index, task="test", text="", token_ids=(1,), item={})
    return Group(prompt=prompt, trajectories=(Trajectory.single(completion=completion, reward=0.0),))


def spread(index: int) -> bool:
    """Of every third group the rewards are all equal, and of 9 to 14."""
    return index % 3 > 0 and not 9 <= index < 15


class FirstReady(GroupBuffer):
    """Broken: a batch is made of whatever is ready first."""

    async def take(self) -> Batch:
        async with self._arrival:
            await self._arrival.wait_for(lambda: len(self.ready) >= self.groups_per_batch)
        return Batch(groups=tuple(list(self.ready.values())[: self.groups_per_batch]))

    def advance(self) -> None:
        for index in list(self.ready)[: self.groups_per_batch]:
            del self.ready[index]
        self.version += 1
        self._choose()

    def _choose(self) -> None:
        self._next = self.version * self.groups_per_batch  # any prompt may still come


class OneTooMany(GroupBuffer):
    """Broken: admits one prompt beyond the bound."""

    def admit(self) -> list[int]:
        fresh = super().admit()
        self.admitted += 1
        return [*fresh, self.admitted - 1]


async def simulate(buffer: GroupBuffer, steps: int, seed: int) -> list[tuple[int, Batch]]:
    """(version trained, batch) of each step; groups finish in an order drawn from ``seed``.

    A group's answers are decoded with the weights that were current when its prompt was handed out.
    """
    rng, running, trained = random.Random(seed), {}, []
    for _ in range(steps):
        running |= {index: buffer.version for index in buffer.admit()}
        taking = asyncio.create_task(buffer.take())
        for _ in range(1000):
            if taking.done() and taking.result() is not None:
                break
            if taking.done():  # groups were passed over: the next in order take their places
                running |= {index: buffer.version for index in buffer.admit()}
                taking = asyncio.create_task(buffer.take())
            if running:
                index = rng.choice(sorted(running))
                await buffer.put(group(index, running.pop(index)))
            for _ in range(3):  # the waiting task needs some turns to see it
                await asyncio.sleep(0)
        else:
            taking.cancel()
            raise AssertionError("nothing is running, and no batch is there")
        trained.append((buffer.version, taking.result()))
        for _ in range(rng.randrange(3)):  # while the trainer is at work, later prompts finish
            if running:
                index = rng.choice(sorted(running))
                await buffer.put(group(index, running.pop(index)))
        buffer.advance()
    return trained


def faults(trained: list[tuple[int, Batch]], size: int, staleness: int) -> list[str]:
    """What is wrong with a history: order, loss, repetition or staleness."""
    found = []
    order = [g.prompt.index for _, batch in trained for g in batch.groups]
    if order != list(range(len(trained) * size)):
        found.append("order")
    if max(version - oldest_version(g) for version, batch in trained for g in batch.groups) > staleness:
        found.append("staleness")
    return found


@given(staleness=st.integers(0, 3), size=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_bound_and_order_hold_for_any_completion_order(staleness: int, size: int, seed: int) -> None:
    trained = asyncio.run(simulate(GroupBuffer(size, staleness), 6, seed))
    assert [version for version, _ in trained] == list(range(6))
    assert not faults(trained, size, staleness)
    # The bound is reached, not only kept: from step `staleness` on, the first prompts admitted so early lag by it.
    lags = [version - oldest_version(g) for version, batch in trained for g in batch.groups]
    assert max(lags) == min(staleness, 5)


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_taking_what_is_ready_first_is_caught(staleness: int) -> None:
    found: set[str] = set()
    for seed in range(30):
        found.update(faults(asyncio.run(simulate(FirstReady(2, staleness), 8, seed)), 2, staleness))
    assert found == {"order", "staleness"}


def test_admitting_one_too_many_is_caught() -> None:
    trained = asyncio.run(simulate(OneTooMany(2, 0), 4, seed=0))
    assert faults(trained, 2, 0) == ["staleness"]


def test_prompts_are_handed_out_once_and_only_within_the_bound() -> None:
    buffer = GroupBuffer(3, 1)
    assert buffer.admit() == [0, 1, 2, 3, 4, 5]
    assert buffer.admit() == []
    asyncio.run(fill(buffer, [2, 0, 1]))
    assert [g.prompt.index for g in asyncio.run(buffer.take()).groups] == [0, 1, 2]
    assert buffer.admit() == []  # taken is not yet trained on
    buffer.advance()
    assert (buffer.version, buffer.taken) == (1, 3) and buffer.admit() == [6, 7, 8]
    assert list(buffer.ready) == []  # what was trained on is gone, the rest has not come back


async def fill(buffer: GroupBuffer, indices: list[int]) -> None:
    for index in indices:
        await buffer.put(group(index, buffer.version))


def test_groups_that_nobody_asked_for_are_refused() -> None:
    buffer = GroupBuffer(2, 0)
    buffer.admit()
    for wrong, indices in {"not handed out": [2], "came back twice": [1, 1]}.items():
        with pytest.raises(AssertionError, match=wrong):
            asyncio.run(fill(buffer, indices))


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_restored_buffer_goes_on_without_loss(staleness: int) -> None:
    """Groups that were ready are kept, prompts in flight start again, and nothing is trained on twice."""
    before = GroupBuffer(2, staleness)
    trained = asyncio.run(simulate(before, 3, seed=4))
    before.admit()
    asyncio.run(fill(before, [before.admitted - 1]))
    state = before.state()
    after = GroupBuffer(2, staleness)
    after.restore(state)
    kept = [g.prompt.index for g in state["ready"]]
    assert kept and after.version == 3 and sorted([*after.admit(), *kept]) == list(range(6, before.admitted))
    after.admitted = after.taken  # hand them out again, to the simulation
    trained += asyncio.run(simulate(after, 3, seed=5))
    assert not faults(trained, 2, staleness)
    assert [version for version, _ in trained] == list(range(6))


@pytest.mark.slow
@given(staleness=st.integers(0, 3), size=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_groups_without_spread_are_passed_over_in_order(staleness: int, size: int, seed: int) -> None:
    """Batches are the first groups in order that are kept, whoever finishes first, and the bound holds."""
    buffer = GroupBuffer(size, staleness, keeps=lambda group: spread(group.prompt.index))
    trained = asyncio.run(simulate(buffer, 6, seed))
    order = [g.prompt.index for _, batch in trained for g in batch.groups]
    assert order == [index for index in range(100) if spread(index)][: 6 * size]
    lags = [version - oldest_version(g) for version, batch in trained for g in batch.groups]
    assert max(lags) <= staleness


def test_where_no_group_has_spread_training_goes_on() -> None:
    trained = asyncio.run(simulate(GroupBuffer(2, 1, keeps=lambda group: False), 2, seed=3))
    most = 2 * MAX_BATCHES
    assert [[g.prompt.index for g in batch.groups] for _, batch in trained] == [
        [most, most + 1],
        [2 * most + 2, 2 * most + 3],
    ]


def test_a_checkpoint_knows_what_was_passed_over() -> None:
    """Prompts trained on after a resume are those of a run that was not interrupted."""
    before = GroupBuffer(2, 1, keeps=lambda group: spread(group.prompt.index))
    asyncio.run(simulate(before, 3, seed=4))
    after = GroupBuffer(2, 1, keeps=before.keeps)
    after.restore(before.state())
    assert (after.version, after.taken) == (before.version, before.taken) and before.taken > 6
    trained = asyncio.run(simulate(after, 3, seed=5))
    order = [g.prompt.index for _, batch in trained for g in batch.groups]
    assert order == [index for index in range(100) if spread(index)][6:12]


def test_a_group_has_spread_if_rewards_differ() -> None:
    one = group(0, 0)

    def rewarded(*rewards: float) -> Group:
        return replace(one, trajectories=tuple(replace(one.trajectories[0], reward=r) for r in rewards))

    assert has_spread(rewarded(0.0, 0.5)) and not has_spread(rewarded(0.5, 0.5))
    assert not has_spread(rewarded(1.0)) and not has_spread(rewarded())  # of members that are left


def test_another_batch_size_cannot_be_restored() -> None:
    with pytest.raises(UserError, match=r"^trainer\.groups_per_step=3 is not possible: .* made with 2, .*$"):
        GroupBuffer(3, 0).restore(GroupBuffer(2, 0, version=4).state())


def test_groups_that_were_trained_on_are_not_restored() -> None:
    def group(index: int) -> Group:
        return Group(prompt=Prompt(index=index, task="test", text="", token_ids=(1,), item={}), trajectories=())

    buffer = GroupBuffer(2, 1)
    ready = [group(1), group(3), group(4), group(6)]
    buffer.restore({"version": 2, "groups_per_batch": 2, "taken": 4, "ready": ready})
    assert list(buffer.ready) == [4, 6] and buffer.admit() == [5, 7]
