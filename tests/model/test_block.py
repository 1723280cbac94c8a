"""The block drafter's network: what a slot of a block depends on, in training as while drafting."""

import torch
from torch import Tensor

from bebop.model.attention import BlockContext, SlotContext
from bebop.systems.block.network import BlockDraftNetwork
from tests.builders import tiny_block

LENGTH, BLOCK, SIZE = 12, 4, 32
ANCHORS = torch.tensor([[0, 3, 4, 9], [2, 5, 6, 11]])


def text(seed: int = 0) -> tuple[dict[int, Tensor], Tensor]:
    """States [2, L, d] of two tapped layers, and embeddings [2, L, d]."""
    numbers = torch.Generator().manual_seed(seed)
    a, b, c = torch.randn(3, 2, LENGTH, SIZE, generator=numbers, dtype=torch.float64).unbind(0)
    return {0: a, 1: b}, c


def network() -> BlockDraftNetwork:
    return tiny_block().double()


def trained(states: dict[int, Tensor], embeddings: Tensor, context: type[BlockContext] = BlockContext) -> Tensor:
    """States [2, A, b, d] of all blocks of the two texts in one pass."""
    own = network()
    seen = context(ANCHORS, BLOCK, LENGTH)
    own.read(states, torch.arange(LENGTH).expand(2, -1), seen)
    newest = embeddings.gather(1, ANCHORS[..., None].expand(-1, -1, SIZE))
    places = ANCHORS[..., None] + torch.arange(BLOCK)
    return own(own.slots(newest, BLOCK).flatten(1, 2), places.flatten(1), seen).unflatten(1, (-1, BLOCK))


def drafted(states: dict[int, Tensor], embeddings: Tensor, row: int, anchor: int) -> Tensor:
    """States [b, d] of one block, with the engine's cache."""
    own = network()
    cache = SlotContext(2, 1, 32, own.kv_heads, own.head_dim, own.mask)
    if anchor:
        places = torch.arange(anchor)[None]
        cache.place(places, 0)
        own.read({layer: x[row : row + 1, :anchor] for layer, x in states.items()}, places, cache)
    places = torch.arange(anchor, anchor + BLOCK)[None]
    cache.place(places, 32, (places[:, 0], torch.ones(1, BLOCK, BLOCK, dtype=torch.bool)))
    return own(own.slots(embeddings[row : row + 1, anchor], BLOCK), places, cache)[0]


def apart(context: type[BlockContext] = BlockContext) -> float:
    """How far the blocks of one packed pass are from each drafted alone."""
    states, embeddings = text()
    packed = trained(states, embeddings, context)
    alone = torch.stack(
        [
            torch.stack([drafted(states, embeddings, row, int(a)) for a in anchors])
            for row, anchors in enumerate(ANCHORS)
        ]
    )
    return float((packed - alone).abs().max())


class CausalBlocks(BlockContext):
    """A slot does not see those after it."""

    def __init__(self, anchors: Tensor, block: int, length: int) -> None:
        super().__init__(anchors, block, length)
        count = anchors.shape[1] * block
        self.seen[..., length:] &= torch.ones(count, count, dtype=torch.bool).tril()


class OneText(BlockContext):
    """Blocks see one another."""

    def __init__(self, anchors: Tensor, block: int, length: int) -> None:
        super().__init__(anchors, block, length)
        self.seen[..., length:] = True


class WithAnchor(BlockContext):
    """The context goes up to the anchor."""

    def __init__(self, anchors: Tensor, block: int, length: int) -> None:
        super().__init__(anchors, block, length)
        owner = torch.arange(anchors.shape[1] * block) // block
        self.seen[:, 0, :, :length] = torch.arange(length) <= anchors[:, owner, None]


def test_blocks_of_a_packed_pass_are_those_that_are_drafted() -> None:
    assert apart() < 1e-10
    for broken in (CausalBlocks, OneText, WithAnchor):
        assert apart(broken) > 1e-2


def test_a_block_depends_on_text_strictly_before_its_anchor() -> None:
    states, embeddings = text()
    other, _ = text(1)
    before = trained(states, embeddings)
    for row in (0, 1):
        for place, anchor in enumerate(ANCHORS[row].tolist()):
            later = {layer: torch.cat([x[:, :anchor], other[layer][:, anchor:]], 1) for layer, x in states.items()}
            assert torch.equal(trained(later, embeddings)[row, place], before[row, place])
            if anchor:
                earlier = {
                    layer: torch.cat([x[:, : anchor - 1], other[layer][:, anchor - 1 :]], 1)
                    for layer, x in states.items()
                }
                assert not torch.allclose(trained(earlier, embeddings)[row, place], before[row, place])


def test_every_slot_but_the_newest_token_is_the_mask() -> None:
    own, newest = network(), torch.randn(2, 3, SIZE, dtype=torch.float64)
    slots = own.slots(newest, 5)
    assert slots.shape == (2, 3, 5, SIZE)
    assert torch.equal(slots[..., 0, :], newest) and (slots[..., 1:, :] == own.mask).all()
    assert own.slots(newest, 1).shape == (2, 3, 1, SIZE)
