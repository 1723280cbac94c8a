"""The loss of blocks against one that is written out block by block, and what training with it does.

Labels of block sizes on tables made by hand, and a predictor that has to find a marker in the prompt.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from bebop.errors import UserError
from bebop.kernels.truncation import truncate_
from bebop.model.attention import BlockContext, CausalContext
from bebop.model.backbone import Policy, shared_tables
from bebop.systems.block.losses import (
    Blocks,
    Evaluated,
    ReadText,
    Sweep,
    best,
    block_loss,
    evaluate,
    fit,
    goals,
    labels,
    lay_out,
    read_texts,
    slot_states,
    split,
)
from bebop.systems.block.network import FEATURES, BlockDraftNetwork, BlockLengthNetwork, PromptEnd, taps_of
from bebop.trainer.objectives import WHOLE, Sampling
from tests.builders import bare_policy, tiny_block, tiny_policy
from tests.cases import slow_but

DECAY, TEXTS = 2.0, [([1, 2, 3, 4, 5, 1, 0], 4), ([3, 2, 2], 1), ([5, 5, 1, 1, 2, 3, 4, 0, 1, 2, 3], 8)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return bare_policy(6, seed=3, dtype=torch.float64)


def read(policy: Policy) -> list[ReadText]:
    return read_texts(policy, TEXTS, (0, 1))


def alone(policy: Policy, network: BlockDraftNetwork, text: ReadText, anchor: int) -> Tensor:
    """Draft logits [b, V] of one block in a pass of its own."""
    context = BlockContext(torch.tensor([[anchor]]), network.block, len(text.token_ids))
    network.read({k: x[None] for k, x in text.layers.items()}, torch.arange(len(text.token_ids))[None], context)
    slots = network.slots(policy.embed(text.token_ids[None, anchor]), network.block)
    return policy.logits(network(slots, anchor + torch.arange(network.block)[None], context))[0]


def cross_entropy(draft: Tensor, target: Tensor) -> Tensor:
    return -(softmax(target, -1) * log_softmax(draft, -1)).sum(-1)


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    return 1 - torch.minimum(softmax(draft, -1), softmax(target, -1)).sum(-1)


def written_out(policy: Policy, blocks: Blocks, value: Callable[[Tensor, Tensor], Tensor], late: int = 0) -> float:
    """The mean over blocks and slots, one at a time; ``late``: the target's distribution is taken so much later."""
    network, total, weights = tiny_block().double(), 0.0, 0.0
    for text, anchors in zip(read(policy), blocks.anchors.tolist(), strict=True):
        target = policy.logits(text.hidden)
        for anchor in anchors:
            for slot in range(1, network.block):
                if anchor + slot < len(text.token_ids):
                    place = min(anchor + slot - 1 + late, len(target) - 1)
                    loss = value(alone(policy, network, text, anchor)[slot], target[place])
                    weight = float(torch.exp(torch.tensor(-(slot - 1) / DECAY)))
                    total, weights = total + weight * float(loss.detach()), weights + weight
    return total / weights


def packed(policy: Policy, blocks: Blocks, kind: str, decay: float = DECAY, sampling: Sampling = WHOLE) -> float:
    network = tiny_block().double()
    found = block_loss(network, *shared_tables(policy), blocks, kind=kind, decay=decay, sampling=sampling)
    return float(found.detach())


VALUES = [("ce", cross_entropy), ("tv", total_variation)]


@pytest.mark.parametrize(("kind", "value"), slow_but(VALUES[:1], VALUES, several=True))
def test_a_loss_is_that_of_blocks_one_at_a_time(policy: Policy, kind: str, value: Callable[..., Tensor]) -> None:
    blocks = lay_out(read(policy), 3, 0)
    assert packed(policy, blocks, kind) == pytest.approx(written_out(policy, blocks, value), rel=1e-6)
    assert packed(policy, blocks, kind, 20.0) != pytest.approx(written_out(policy, blocks, value), rel=1e-3)
    assert packed(policy, blocks, kind) != pytest.approx(written_out(policy, blocks, value, late=1), rel=1e-3)


def test_a_draft_learns_what_is_left_of_a_cut_distribution(policy: Policy) -> None:
    def cut(draft: Tensor, target: Tensor) -> Tensor:
        left = truncate_(target.clone()[None], 1.0, 1.0, 3)[0]
        return total_variation(draft, left)

    blocks = lay_out(read(policy), 3, 0)
    found = packed(policy, blocks, "tv", sampling=Sampling(target_top_k=3))
    assert found == pytest.approx(written_out(policy, blocks, cut), rel=1e-6)
    assert found != pytest.approx(packed(policy, blocks, "tv"), rel=1e-3)


def test_the_end_to_end_loss_is_one_minus_the_share_of_drafts_that_are_accepted(policy: Policy) -> None:
    """Expected accepted drafts of a block are the sum of products of overlaps (SPEC Eq. 12)."""
    blocks, network = lay_out(read(policy), 3, 0), tiny_block().double()
    shares = []
    for text, anchors in zip(read(policy), blocks.anchors.tolist(), strict=True):
        target = softmax(policy.logits(text.hidden), -1)
        for anchor in anchors:
            count = min(network.block - 1, len(text.token_ids) - 1 - anchor)
            if count > 0:
                draft = softmax(alone(policy, network, text, anchor)[1 : count + 1], -1)
                overlap = torch.minimum(draft, target[anchor : anchor + count]).sum(-1)
                shares.append(float(overlap.cumprod(0).sum().detach()) / count)
    assert packed(policy, blocks, "e2e_tv") == pytest.approx(1 - sum(shares) / len(shares), rel=1e-6)


def test_anchors_are_places_from_which_the_answer_is_drafted(policy: Policy) -> None:
    """From the last token of the prompt to the one before the last of the answer, none twice, others each time."""
    drawn = [lay_out(read(policy), 5, seed) for seed in range(40)]
    for row, (ids, answer) in enumerate(TEXTS):
        wanted = set(range(len(ids) - answer - 1, len(ids) - 1))
        seen = [[a for a in blocks.anchors[row].tolist() if a < len(ids) - 1] for blocks in drawn]
        assert set().union(*seen) == wanted
        assert all(len(places) == len(set(places)) == min(5, answer) for places in seen)
    assert torch.equal(lay_out(read(policy), 5, 7).anchors, drawn[7].anchors)
    assert not torch.equal(drawn[0].anchors, drawn[1].anchors)


def test_what_lies_behind_a_text_counts_nowhere(policy: Policy) -> None:
    """Other padding, the same loss and states; other states of the text, another loss."""
    blocks = lay_out(read(policy), 4, 0)
    before = packed(policy, blocks, "ce")
    padded = torch.arange(blocks.hidden.shape[1]) >= blocks.ends[:, None]
    for tensor in (blocks.hidden, *blocks.layers.values()):
        tensor[padded] = 3.0
    assert packed(policy, blocks, "ce") == pytest.approx(before, rel=1e-12)
    blocks.hidden[~padded] += 0.5 * torch.randn_like(blocks.hidden[~padded])
    assert packed(policy, blocks, "ce") != pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize("kind", slow_but(["e2e_tv"], ["ce", "tv", "e2e_tv"]))
def test_training_makes_drafts_that_are_accepted(policy: Policy, kind: str) -> None:
    """On text of the policy itself, and no gradient reaches the policy."""
    ids = torch.randint(0, 5, (8, 12), generator=torch.Generator().manual_seed(0))
    for place in range(4, 12):  # the likeliest continuation
        positions = torch.arange(place).expand(8, -1)
        with torch.no_grad():
            ids[:, place] = policy.logits(policy.hidden(ids[:, :place], positions, CausalContext()))[:, -1].argmax(-1)
    texts = read_texts(policy, [(row, 8) for row in ids.tolist()], (0, 1))
    network = tiny_block().double().requires_grad_()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    before, after = accepted(policy, network, texts), 0.0
    for step in range(40):
        optimizer.zero_grad()
        block_loss(network, *shared_tables(policy), lay_out(texts, 4, step), kind=kind, decay=DECAY).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = accepted(policy, network, texts)
    assert after > before + 0.1
    assert all(p.grad is None for p in policy.backbone.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


@torch.no_grad()
def accepted(policy: Policy, network: BlockDraftNetwork, texts: list[ReadText]) -> float:
    """Mean overlap of the first two slots with the target."""
    blocks = lay_out(texts, 4, 99)
    states = slot_states(network, shared_tables(policy)[0], blocks, network.block)[:, :, 1:3]
    places = blocks.anchors[..., None] + torch.arange(2)
    mask = places + 1 < blocks.ends[:, None, None]
    rows = torch.arange(len(texts))[:, None, None]
    target = blocks.hidden[rows, places.clamp_max(blocks.hidden.shape[1] - 1)]
    overlap = torch.minimum(softmax(policy.logits(states), -1), softmax(policy.logits(target), -1)).sum(-1)
    return float(overlap[mask].mean())


def test_tapped_layers_are_evenly_spaced() -> None:
    assert taps_of(12, 2) == [1, 9] and taps_of(36, 5) == [1, 9, 17, 25, 33] and taps_of(12, 1) == [6]
    with pytest.raises(UserError, match=r"options\.taps=12"):
        taps_of(12, 12)


# ---- the choice of block sizes


SIZES = (2, 4, 6, 8)


def sweep(tokens: object, cycles: object) -> Sweep:
    table = np.asarray(cycles, float)
    return Sweep(sizes=SIZES, tokens=np.asarray(tokens, float), cycles=table, features=torch.zeros(len(table), 1))


# ---- labels


def test_a_label_is_the_size_of_the_most_tokens_a_cycle() -> None:
    """30 tokens in 20, 12, 10 and 11 cycles; then an answer that every size needs as many cycles for."""
    table = sweep([[30] * 4, [9] * 4], [[20, 12, 10, 11], [6, 6, 6, 6]])
    assert labels(table).tolist() == [2, 0], "of sizes that tie, the smallest"


def test_ties_go_to_the_smallest_size_whatever_rounding_does() -> None:
    third = 1 / 3
    assert best(np.array([[0.1, third, 1 - 2 * third, third]])).tolist() == [1]
    assert np.argmax([0.1, third, 1 - 2 * third, third]) == 2, "rounding alone would decide"


def test_a_larger_block_has_to_be_worth_its_time() -> None:
    """By tau the size of 6 wins; its 1.2 times as many tokens do not pay a cycle of 1.5 times the length."""
    table = sweep([[30] * 4], [[20, 12, 10, 10]])
    assert labels(table).tolist() == [2]
    assert labels(table, np.array([0.9, 1.0, 1.5, 2.0])).tolist() == [1]
    assert labels(table, np.array([1.0, 1.0, 1.1, 2.0])).tolist() == [2]


def test_the_splits_are_disjoint_and_whole() -> None:
    parts = split(50, 3)
    assert [len(part) for part in parts] == [30, 10, 10]
    assert sorted(np.concatenate(parts).tolist()) == list(range(50))
    assert not np.array_equal(parts[0], split(50, 4)[0])


# ---- a planted signal


def prompts(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Prompts [N, 8] of random tokens of which the last is a marker, 1 or 2; and which [N]."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 23, (count, 8), generator=numbers)
    marked = torch.randint(0, 2, (count,), generator=numbers)
    ids[:, 7] = 1 + marked
    return ids, marked


@cache
def planted(count: int = 1600) -> Sweep:
    """After marker 2 text is predictable, and large blocks are good; after marker 1 small ones are, within noise."""
    policy = tiny_policy(24, seed=3)
    ids, marked = prompts(count, 0)
    with torch.no_grad():
        hidden = policy.hidden(ids, torch.arange(8).expand_as(ids), CausalContext())
        features = policy.logits(hidden[:, -1])
    means = np.array([[2.5, 2.2, 1.9, 1.6], [1.6, 1.9, 2.2, 2.5]])[marked.numpy()]
    tau = means + np.random.default_rng(0).normal(0, 0.05, means.shape)
    return Sweep(sizes=SIZES, tokens=tau * 100, cycles=np.full_like(tau, 100), features=features)


def found(table: Sweep, features: Tensor, target: str = "classify") -> Evaluated:
    """What a predictor that was trained on three fifths of the prompts makes of a fifth that it has not seen."""
    train, _, test = split(len(table.tau), 0)
    wanted = goals(table, target)
    torch.manual_seed(0)
    network = BlockLengthNetwork(inputs=features.shape[1], candidates=SIZES, default=4, hidden=64)
    seen, steps = torch.from_numpy(train), 1000 if target == "regress" else 300
    fit(network, features[seen], wanted[seen], steps=steps, lr=5e-3, batch=64, seed=0)
    with torch.no_grad():
        sizes = network.sizes(features[torch.from_numpy(test)])
    choice = np.searchsorted(SIZES, sizes.numpy())
    return evaluate(table.part(test), choice, int(table.part(train).tau.mean(0).argmax()))


def test_a_marker_that_decides_predictability_is_found() -> None:
    table = planted()
    seen = found(table, table.features)
    assert seen.accuracy > 0.9 and seen.share.low > 0.8
    assert seen.tau["best_fixed"].value < seen.tau["predicted"].value <= seen.tau["oracle"].value


@pytest.mark.slow
def test_a_regression_of_the_tokens_of_every_size_finds_it_too() -> None:
    table = planted()
    seen = found(table, table.features, "regress")
    assert seen.accuracy > 0.9 and seen.share.low > 0.8


def test_what_is_regressed_on_has_the_label_as_its_largest_value() -> None:
    table = planted(50)
    for seconds in (None, np.array([1.0, 1.1, 1.3, 1.6])):
        assert goals(table, "regress", seconds).argmax(1).tolist() == labels(table, seconds).tolist()
    assert goals(table, "classify").tolist() == labels(table).tolist()


def test_sorted_logits_do_not_tell_tokens_apart() -> None:
    """Any order of the vocabulary gives the same; the entropy of four equal logits is ln 4, their margin 0."""
    logits = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    hidden, lengths = torch.zeros(3, 2), torch.tensor([5, 6, 700])
    seen = [
        FEATURES["sorted"](PromptEnd(logits=given, hidden=hidden, lengths=lengths))
        for given in (logits, logits[:, torch.randperm(24)])
    ]
    torch.testing.assert_close(*seen)
    even = PromptEnd(logits=torch.zeros(1, 4), hidden=hidden, lengths=lengths)
    torch.testing.assert_close(FEATURES["sorted"](even)[0], torch.tensor([0.0, 0, 0, 0, math.log(4), 0]))
    assert FEATURES["length"](even)[2].item() == pytest.approx(7)


def test_permuted_features_find_nothing() -> None:
    """Trained on the features of other prompts, a predictor cannot beat the best fixed size."""
    table = planted()
    order = torch.randperm(len(table.features), generator=torch.Generator().manual_seed(1))
    blind = found(table, table.features[order])
    assert blind.accuracy < 0.7 and abs(blind.share.value) < 0.25


# ---- the comparison


def test_the_oracle_has_all_of_the_gain_and_the_best_fixed_size_none() -> None:
    table = planted(100)
    fixed = int(table.tau.mean(0).argmax())
    assert evaluate(table, labels(table), fixed).share.value == pytest.approx(1)
    nothing = evaluate(table, np.full(100, fixed), fixed)
    assert nothing.share.value == 0 and nothing.tau["predicted"].value == pytest.approx(table.tau[:, fixed].mean())
