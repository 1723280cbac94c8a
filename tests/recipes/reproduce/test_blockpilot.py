"""What the study of block sizes makes of tables whose truth is known."""

import numpy as np
import pytest
import torch

from recipes.reproduce.blockpilot.decoding import Answers
from recipes.reproduce.blockpilot.protocol import fifths, noise_gain, share, tied, transfer
from recipes.reproduce.blockpilot.sweeps import halves

RNG = np.random.default_rng(0)


def answers() -> Answers:
    """Two completions: of 7 tokens in 3 cycles, the last of which emits two beyond the end; of 2 tokens in one."""
    emitted = np.array([[4, 2, 3, 0], [2, 0, 0, 0]])
    return Answers(
        tokens=np.array([7, 2]), cycles=np.array([3, 1]), drafted=emitted - 1, emitted=emitted, ids=((1,), (2,))
    )


def test_what_the_end_cuts_off_does_not_count() -> None:
    assert answers().kept.tolist() == [[4, 2, 1, 0], [2, 0, 0, 0]]


def test_halves_are_of_cycles() -> None:
    """One cycle of three, then the other two; a completion of one cycle has no first half."""
    first, second = halves(answers())
    assert first[0] == 4 and second.tolist() == [1.5, 2] and np.isnan(first[1])


def test_each_prompt_is_in_the_test_once_and_every_task_in_every_part() -> None:
    tasks = ["a"] * 20 + ["b"] * 10
    splits = fifths(tasks, 3)
    assert sorted(np.concatenate([test for _, _, test in splits]).tolist()) == list(range(30))
    for train, valid, test in splits:
        assert sorted([*train, *valid, *test]) == list(range(30))
        assert [len(train), len(valid), len(test)] == [18, 6, 6]
        assert sum(tasks[i] == "b" for i in test) == 2
    assert fifths(tasks, 4)[0][2].tolist() != splits[0][2].tolist()


def test_an_oracle_over_noise_gains_what_noise_gives() -> None:
    """300 prompts, five sizes, nothing but noise."""
    sizes, prompts = np.array([5.0, 5.1, 5.2, 5.1, 5.0]), RNG.normal(0, 1, (300, 1))
    noise = prompts + sizes + RNG.normal(0, 0.3, (300, 5))
    gain = noise.max(1).mean() - noise.mean(0).max()
    assert gain > 0.2 and noise_gain(noise, 0) == pytest.approx(gain, abs=0.04)
    apart = prompts + 3 * np.arange(5) + RNG.normal(0, 0.3, (300, 5))
    assert noise_gain(apart, 0) < 0.01, "where sizes lie apart by ten standard deviations, luck gains nothing"


def test_labels_of_noise_do_not_transfer_and_those_of_prompts_do() -> None:
    def noisy(table: np.ndarray) -> tuple[float, float, float]:
        return transfer(*(table + RNG.normal(0, 0.3, table.shape) for _ in range(2)))

    none, seeming, agreed = noisy(np.full((400, 5), 5.0))
    assert abs(none) < 0.02 and seeming > 0.05 and agreed < 0.3
    gain, seeming, agreed = noisy(5 + 2.0 * np.eye(5)[RNG.integers(0, 5, 400)])
    assert 0.2 < gain and 0.2 < seeming and agreed > 0.9


def test_share_and_ties() -> None:
    fixed, oracle = np.array([2.0, 2.0]), np.array([3.0, 5.0])
    assert share(oracle, fixed, oracle) == 1 and share(fixed, fixed, oracle) == 0
    assert share(np.array([2.5, 2.5]), fixed, oracle) == 0.25
    assert tied(np.array([[1.0, 2.0, 2.0], [3.0, 1.0, 2.0]])) == 0.5


def test_a_drafter_that_fails_does_so_where_it_should() -> None:
    """States are turned over in wide blocks of marked prompts alone."""
    from types import SimpleNamespace

    from bebop.systems.block.decoding import BlockDrafter
    from recipes.reproduce.blockpilot import marker

    prompts = torch.tensor([[marker.MARKER, 9], [9, marker.MARKER]])
    slots = SimpleNamespace(prompts=prompts, count=torch.tensor([0, 3]))
    rows = SimpleNamespace(fed=torch.tensor([1, 4]), batch=2, slots=slots)
    drafter = object.__new__(marker.Failing)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BlockDrafter, "_pass", lambda self, rows, block, wanted: torch.ones(2, block, 3))
        wide, narrow = (drafter._pass(rows, b, None)[:, 0, 0].tolist() for b in (8, 4))  # type: ignore[arg-type]
        mixed = drafter._pass(rows, 8, torch.tensor([7, 3]))[:, 0, 0].tolist()  # type: ignore[arg-type]
    assert wide == [1, -1] and narrow == [1, 1] and mixed == [1, 1]
