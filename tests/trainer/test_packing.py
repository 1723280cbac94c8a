import numpy as np
import pytest
import torch

from bebop.trainer.chains import KnownRow, TokenRow, chain_rows, known_chains
from bebop.trainer.packing import PackedRows, Row, pack
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Batch, Completion, Group, Prompt, Trajectory, Turn, join_turns
from tests.trainer.builders import completion, job, plain, policy
from tests.trainer.builders import plain_logprobs as scored
from tests.trainer.test_chains import pairs


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


# ---- Answers in several turns: what was read between them is context, and nothing else

PROMPT = (7, 8, 9)
WRITTEN = ([4, 5, 1], [6, 1], [3])
READ = ([], [20, 21], [22, 23, 24])


def turns(logprobs: list[list[float]] | None = None, versions: tuple[int, ...] = (2, 3, 4)) -> tuple[Turn, ...]:
    """Three turns, of one version of the weights each."""
    given = logprobs or [[-token / 10 for token in answer] for answer in WRITTEN]
    return tuple(
        Turn(observation=np.array(read, dtype=np.int64), completion=completion(answer, own, version=versions[i]))
        for i, (read, answer, own) in enumerate(zip(READ, WRITTEN, given, strict=True))
    )


def test_a_single_turn_is_its_completion() -> None:
    one = completion([4, 5, 1])
    assert Trajectory.single(one, reward=1.0).completion is one
    assert Trajectory.single(one, reward=1.0).written == 3 and one.written.all()


def test_turns_are_joined_with_what_was_read_between_them() -> None:
    whole = join_turns(turns())
    assert whole.token_ids.tolist() == [4, 5, 1, 20, 21, 6, 1, 22, 23, 24, 3]
    assert whole.written.tolist() == [True] * 3 + [False] * 2 + [True] * 2 + [False] * 3 + [True]
    assert whole.versions[whole.written].tolist() == [2, 2, 2, 3, 3, 4]
    assert whole.logprobs[whole.written].tolist() == pytest.approx([-0.4, -0.5, -0.1, -0.6, -0.1, -0.3])
    assert Trajectory(turns=turns(), reward=0.0).written == 6


def test_only_what_the_policy_wrote_is_predicted() -> None:
    row = Row(prompt=PROMPT, completion=join_turns(turns()), advantage=2.0, weight=0.5)
    (packed,) = pack([row], max_tokens=100)
    assert packed.targets.tolist() == [4, 5, 1, 6, 1, 3]
    assert packed.token_ids[packed.predictors].tolist() == [9, 4, 5, 21, 6, 24]
    assert packed.rollout_logprobs.tolist() == pytest.approx([-0.4, -0.5, -0.1, -0.6, -0.1, -0.3])
    assert packed.versions.tolist() == [2, 2, 2, 3, 3, 4] and packed.answers.tolist() == [6]
    (known,) = packed.known(torch.zeros(len(packed.token_ids), 2))
    assert known.answer.tolist() == [False] * 3 + row.completion.written.tolist()


def test_an_update_knows_the_log_probs_of_every_turn() -> None:
    """The engine scores each turn after all that came before it; the trainer scores the whole in one pass."""
    source = policy()
    model, context, given = plain(source), list(PROMPT), []
    for read, answer in zip(READ, WRITTEN, strict=True):
        context += read
        given.append(scored(model, context, answer).tolist())
        context += answer
    asked = Prompt(index=0, task="test", text="", token_ids=PROMPT, item={})

    def error(*members: list[list[float]]) -> float:
        made = [
            Trajectory(turns=turns(own, (0, 0, 0)), reward=float(number == 0)) for number, own in enumerate(members)
        ]
        trainer = PolicyTrainer(policy(), job(trainer={"groups_per_step": 1}))
        found = trainer.update(Batch(groups=(Group(prompt=asked, trajectories=tuple(made)),)))
        return found["train/ratio_error_max"].value

    assert error(given, given, given) < 1e-5
    for turn in range(3):
        wrong = [[*own[:-1], own[-1] + 0.1 * (i == turn)] for i, own in enumerate(given)]
        assert error(wrong, given, given) > 0.05


def test_chains_begin_in_what_was_read_and_never_cross_into_it() -> None:
    whole = join_turns(turns())
    ids = torch.tensor([*PROMPT, *whole.token_ids])
    answer = torch.tensor([False] * len(PROMPT) + whole.written.tolist())
    found = pairs(known_chains([KnownRow(token_ids=ids, answer=answer, hidden=torch.zeros(len(ids), 2))], 3))
    wanted = {}
    for anchor in range(len(ids) - 2):
        steps = 0
        while steps < 3 and anchor + steps + 2 < len(ids) and answer[anchor + steps + 2]:
            steps += 1
        if steps:
            wanted[0, anchor] = steps
    assert found == wanted
    begins = [0, *(i for i in range(1, len(ids)) if answer[i] and not answer[i - 1])][1:]
    assert all((0, begin - 2) in found for begin in begins), "the first draft of an engine after an observation"


def test_chains_of_single_turns_are_laid_out_as_ever() -> None:
    rows = [TokenRow(prompt=PROMPT, answer=(4, 5, 1)), TokenRow(prompt=(5,), answer=(4,))]
    known = [
        KnownRow(
            token_ids=torch.tensor(row.token_ids),
            answer=torch.arange(len(row.token_ids)) >= len(row.prompt),
            hidden=torch.zeros(len(row.token_ids), 2),
        )
        for row in rows
    ]
    ours, theirs = known_chains(known, 3), chain_rows(rows, 3)
    for name in ("token_ids", "anchors", "steps"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
