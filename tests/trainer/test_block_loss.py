"""The loss of blocks against one that is written out block by block, and what training with it does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from bebop.errors import UserError
from bebop.model.attention import BlockContext, CausalContext
from bebop.model.backbone import Policy, shared_tables
from bebop.systems.block.losses import Blocks, ReadText, block_loss, lay_out, read_texts, slot_states
from bebop.systems.block.network import BlockDraftNetwork, taps_of
from tests.builders import bare_policy, tiny_block
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


def packed(policy: Policy, blocks: Blocks, kind: str, decay: float = DECAY) -> float:
    network = tiny_block().double()
    return float(block_loss(network, *shared_tables(policy), blocks, kind=kind, decay=decay).detach())


VALUES = [("ce", cross_entropy), ("tv", total_variation)]


@pytest.mark.parametrize(("kind", "value"), slow_but(VALUES[:1], VALUES, several=True))
def test_a_loss_is_that_of_blocks_one_at_a_time(policy: Policy, kind: str, value: Callable[..., Tensor]) -> None:
    blocks = lay_out(read(policy), 3, 0)
    assert packed(policy, blocks, kind) == pytest.approx(written_out(policy, blocks, value), rel=1e-6)
    assert packed(policy, blocks, kind, 20.0) != pytest.approx(written_out(policy, blocks, value), rel=1e-3)
    assert packed(policy, blocks, kind) != pytest.approx(written_out(policy, blocks, value, late=1), rel=1e-3)


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
