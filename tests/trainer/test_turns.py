"""Answers in several turns: what was read between them is context, and nothing else."""

import numpy as np
import pytest
import torch

from bebop.trainer.chains import KnownRow, TokenRow, chain_rows, known_chains
from bebop.trainer.packing import Row, pack
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Batch, Group, Prompt, Trajectory, Turn, join_turns
from tests.trainer.builders import completion, job, plain, policy
from tests.trainer.builders import plain_logprobs as scored
from tests.trainer.test_chains import pairs

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
