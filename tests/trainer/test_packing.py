import numpy as np
import pytest
import torch

from bebop.trainer.packing import PackedRows, Row, pack
from bebop.trajectory import Completion
from tests.trainer.builders import completion


def row(prompt: tuple[int, ...], answer: list[int], advantage: float = 0.0, weight: float = 1.0) -> Row:
    logprobs = [-token / 10 for token in answer]
    return Row(prompt=prompt, completion=completion(answer, logprobs, version=2), advantage=advantage, weight=weight)


def rows_of_lengths(lengths: list[int]) -> list[Row]:
    return [row((i,), [i] * (length - 1)) for i, length in enumerate(lengths)]


def test_alignment_by_hand() -> None:
    mixed = Completion(token_ids=np.array([6]), logprobs=np.array([-0.5]), versions=np.array([3]))
    second = Row(prompt=(5,), completion=mixed, advantage=-1.0, weight=0.5)
    (packed,) = pack([row((7, 8), [9, 1], 2.0, 0.25), second], max_tokens=10)
    assert packed.token_ids.tolist() == [7, 8, 9, 1, 5, 6]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.lengths.tolist() == [4, 2]
    assert packed.predictors.tolist() == [1, 2, 4]
    assert packed.targets.tolist() == [9, 1, 6]
    assert packed.rollout_logprobs.tolist() == pytest.approx([-0.9, -0.1, -0.5])
    assert packed.versions.tolist() == [2, 2, 3]
    assert packed.advantages.tolist() == [2.0, 2.0, -1.0]
    assert packed.weights.tolist() == [0.25, 0.25, 0.5]


def answers(packed: list[PackedRows]) -> list[int]:
    return sorted(token for part in packed for token in part.targets.tolist())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_answer_token_is_predicted_once_by_the_token_before_it(world: int) -> None:
    rows = rows_of_lengths(np.random.default_rng(0).integers(2, 30, 40).tolist())
    packed = pack(rows, max_tokens=64, world=world)
    assert len(packed) % world == 0
    assert all(len(part.token_ids) <= 64 for part in packed)
    assert answers(packed) == sorted(t for r in rows for t in r.completion.token_ids.tolist())
    for part in packed:
        assert torch.equal(part.token_ids[part.predictors + 1], part.targets)
        assert int(part.lengths.sum()) == len(part.token_ids)
        starts = (part.lengths.cumsum(0) - part.lengths).tolist()
        assert not set(starts) & {int(i) + 1 for i in part.predictors}, "an answer token starts a row"


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_are_level(world: int) -> None:
    packed = pack(rows_of_lengths([10] * 31), max_tokens=1000, world=world)
    loads = [sum(len(part.token_ids) for part in packed[r::world]) for r in range(world)]
    assert max(loads) - min(loads) <= 10 * world
    assert len(packed) == world  # filling up to the limit would leave the last rank without work


def test_a_row_longer_than_the_limit_is_alone() -> None:
    packed = pack(rows_of_lengths([5, 50, 4, 3]), max_tokens=12)
    assert [part.lengths.tolist() for part in packed] == [[50], [5, 4, 3]]


def test_a_rank_without_rows_gets_a_pass_that_predicts_nothing() -> None:
    packed = pack(rows_of_lengths([5]), max_tokens=12, world=2)
    assert [len(part.targets) for part in packed] == [4, 0]
    assert len(packed[1].token_ids) == 1


def test_packing_is_deterministic() -> None:
    rows = rows_of_lengths([7, 3, 7, 9, 3, 7])
    first, second = pack(rows, 16), pack(rows, 16)
    assert all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(first, second, strict=True))


def test_rows_come_out_with_their_number_answer_and_states() -> None:
    rows = rows_of_lengths([3, 7, 1, 5])  # row i: prompt (i,), an answer of i alone; the third has none
    number = {}
    for part in pack(rows, max_tokens=8, world=5):
        states = torch.stack([part.token_ids, part.positions], 1)
        for index, known in zip(part.rows.tolist(), part.known(states), strict=True):
            number[index] = known
            assert known.hidden.tolist() == [[token, place] for place, token in enumerate(known.token_ids.tolist())]
    assert not number.pop(-1).answer.any(), "the pass of the rank without rows"
    assert {i: (k.token_ids.tolist(), int(k.answer.sum())) for i, k in number.items()} == {
        i: ([i] * row.length, row.length - 1) for i, row in enumerate(rows)
    }
