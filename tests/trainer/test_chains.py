"""Which chains a text holds, and that each of their steps stands against the right position."""

import dataclasses

import pytest
import torch
from torch import Tensor

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.trainer.chains import ChainRows, TokenRow, chain_rows, masked_rows, rows_of_step, spaced
from bebop.trainer.objectives import Sampling, Steps, unroll
from tests.builders import bare_policy
from tests.model.test_mtp import LENGTH, STEPS, drafted, runner_at, successor_policy, text, trained
from tests.trainer.test_heads import rows as texts

VOCAB = 12


def steps_of(policy: Policy, rows: ChainRows) -> Steps:
    """The chain over rows, as training sees it."""
    assert policy.mtp is not None
    positions = torch.arange(rows.token_ids.shape[1]).expand_as(rows.token_ids)
    hidden = policy.hidden(rows.token_ids, positions, CausalContext())
    weight = policy.backbone.get_output_embeddings().weight
    return unroll(policy.mtp, policy.embed(rows.token_ids), hidden, weight, rows, Sampling())


def test_layout_by_hand() -> None:
    rows = chain_rows([TokenRow(prompt=(7, 8, 9), answer=(1, 2, 3)), TokenRow(prompt=(5,), answer=(4,))], depth=2)
    assert rows.token_ids.tolist() == [[7, 8, 9, 1, 2, 3], [5, 4, 0, 0, 0, 0]]
    # Anchor 1 drafts token 3, the first of the answer; anchor 3 drafts the last. The prompt of one token has none.
    assert rows.anchors[0].tolist() == [1, 2, 3, 4] and rows.steps.tolist() == [[2, 2, 1, 0], [0, 0, 0, 0]]
    assert rows.mask(2)[0].tolist() == [[True, True], [True, True], [True, False], [False, False]]
    assert rows.tokens(1)[0, :3].tolist() == [1, 2, 3] and rows.tokens(2)[0, :2].tolist() == [2, 3]


def test_a_row_without_an_answer_has_no_step() -> None:
    assert chain_rows([TokenRow(prompt=(1, 2, 3, 4), answer=())], depth=3).steps.sum() == 0


def test_rows_of_steps_go_through_every_row_once_an_epoch() -> None:
    order = [row for step in range(12) for row in rows_of_step(9, 6, seed=3, step=step)]
    epochs = [order[i : i + 9] for i in range(0, 72, 9)]
    assert all(sorted(epoch) == list(range(9)) for epoch in epochs) and epochs[0] != epochs[1]
    assert rows_of_step(9, 6, seed=3, step=5) == order[30:36], "a step can be asked for by itself, as a resume does"
    assert rows_of_step(9, 6, seed=4, step=5) != order[30:36]


def live(rows: ChainRows) -> list[list[tuple[int, int]]]:
    """Anchors that have a step, with their steps, a list a row."""
    pairs = zip(rows.anchors.tolist(), rows.steps.tolist(), strict=True)
    return [[(a, s) for a, s in zip(*row, strict=True) if s > 0] for row in pairs]


def test_spaced_chains_are_every_so_many_th_and_each_is_as_likely() -> None:
    some = texts(count=6)
    rows = chain_rows(some, depth=3)
    whole, seeds = live(rows), range(300)
    found = [live(spaced(rows, 3, seed)) for seed in seeds]
    assert spaced(rows, 1, seed=5) is rows
    for row, every in enumerate(whole):
        counts = {pair: sum(pair in one[row] for one in found) for pair in every}
        assert all(75 < count < 125 for count in counts.values()), counts
        assert {tuple(one[row]) for one in found} <= {tuple(every[first::3]) for first in range(3)}
    assert len({tuple(one[0] == whole[0][first::3] for first in range(3)) for one in found}) == 3


def test_spaced_chains_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    some = texts(count=6)
    together = live(spaced(chain_rows(some, depth=3), 4, seed=1))
    assert together == [live(spaced(chain_rows([row], depth=3), 4, seed=1))[0] for row in some]
    whole = live(chain_rows(some, depth=3))
    firsts = {every.index(row[0]) for row, every in zip(together, whole, strict=True) if row}
    assert len(firsts) > 1, "rows begin at different places"


def counting(first: int, prompt: int, answer: int) -> TokenRow:
    """A text in which every token is its predecessor + 1."""
    tokens = [(first + i) % VOCAB for i in range(prompt + answer)]
    return TokenRow(prompt=tuple(tokens[:prompt]), answer=tuple(tokens[prompt:]))


def mass_on_data(steps: Steps, side: str) -> Tensor:
    """Probability of the data's token at every step that exists, under the target or the draft."""
    distributions = (getattr(steps, side) @ steps.weight.T).softmax(-1)
    return distributions.gather(-1, steps.tokens[..., None])[..., 0][steps.mask]


@torch.no_grad()
def test_targets_put_all_mass_on_the_data_of_a_copy_task() -> None:
    rows = chain_rows([counting(3, 4, 9), counting(0, 1, 5), counting(8, 2, 7)], depth=4)
    found = steps_of(successor_policy(), rows)
    assert mass_on_data(found, "target").min() > 0.999
    assert mass_on_data(found, "draft").min() > 0.999, "the head knows it as well, at every recursive step"
    assert found.mask.sum() == sum(min(4, 9 - i) for i in range(9)) + sum(min(4, n) for n in (4, 3, 2, 1)) + sum(
        min(4, 7 - i) for i in range(7)
    )


@pytest.mark.parametrize("shift", [-1, 1])
@torch.no_grad()
def test_targets_off_by_one_are_caught(shift: int) -> None:
    rows = chain_rows([counting(3, 4, 9), counting(8, 2, 7)], depth=4)
    right = steps_of(successor_policy(), rows)
    wrong = steps_of(successor_policy(), dataclasses.replace(rows, anchors=(rows.anchors + shift).clamp_min(0)))
    assert mass_on_data(dataclasses.replace(right, target=wrong.target), "target").median() < 1e-3
    assert mass_on_data(steps_of(successor_policy("hidden"), rows), "draft").max() < 1e-3, "a head one step late"


@torch.no_grad()
def test_chains_at_anchors_are_those_of_every_position_and_what_the_engine_drafts() -> None:
    policy, ids, first = bare_policy(seed=3), text(4), 5
    row = TokenRow(prompt=tuple(ids[: first + 2].tolist()), answer=tuple(ids[first + 2 :].tolist()))
    found = steps_of(policy, chain_rows([row], STEPS))
    anchors = list(range(first, LENGTH - 1 - STEPS))  # those with every step
    engine = drafted(runner_at(policy, ids, anchors), ids, anchors)
    for step, (everywhere, seen) in enumerate(zip(trained(policy, ids), engine, strict=True)):
        ours = found.draft[0, : len(anchors), step]
        assert torch.allclose(ours, everywhere[anchors], atol=1e-5) and torch.allclose(ours, seen, atol=1e-5)
        assert not torch.allclose(ours, everywhere[[a - 1 for a in anchors]], atol=1e-2)


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    policy = bare_policy(seed=1)
    short, long = TokenRow(prompt=(1, 2), answer=(3, 4, 5)), TokenRow(prompt=(6,) * 9, answer=(7,) * 12)
    alone, beside = steps_of(policy, chain_rows([short], 3)), steps_of(policy, chain_rows([short, long], 3))
    width = alone.mask.shape[1]
    for side in ("draft", "target"):
        a, b = getattr(alone, side)[0][alone.mask[0]], getattr(beside, side)[0, :width][beside.mask[0, :width]]
        assert torch.allclose(a, b, atol=1e-6)


def test_masked_rows_are_chain_rows() -> None:
    for step in range(5):
        some = [*texts(step), TokenRow(prompt=(1, 2, 3), answer=())]
        wanted = chain_rows(some, 3)
        answer = torch.zeros_like(wanted.token_ids)
        for i, row in enumerate(some):
            answer[i, len(row.prompt) : len(row.token_ids)] = 1
        assert pairs(masked_rows(wanted.token_ids, answer, 3)) == pairs(wanted)
    holes = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1]])
    every = pairs(masked_rows(torch.zeros_like(holes), holes, 3))
    assert every == {(0, 0): 2, (0, 1): 1, (0, 3): 3, (0, 4): 2, (0, 5): 1}
    few = pairs(masked_rows(torch.zeros_like(holes), holes, 3, most=2))
    assert len(few) == 2 and few.items() <= every.items()


def pairs(chains: ChainRows) -> dict[tuple[int, int], int]:
    """Row and anchor of every chain, with its steps."""
    return {
        (i, int(anchor)): int(steps)
        for i, (anchors, row) in enumerate(zip(chains.anchors, chains.steps, strict=True))
        for anchor, steps in zip(anchors, row, strict=True)
        if steps > 0
    }
