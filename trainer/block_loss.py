"""What a block drafter is trained on: random anchors of an answer, many blocks of a text in one pass (SPEC 5.1).

Slot k of a block at anchor t predicts token t + k and stands against the target's distribution for it, which knows the
tokens t + 1..t + k - 1 that the slot does not see. Target, embedding and language-model head are constants.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bebop.kernels.draft_losses import needs_labels
from bebop.kernels.linear_losses import linear_draft_loss, linear_e2e_tv_loss
from bebop.model.attention import BlockContext, CausalContext
from bebop.model.backbone import Policy, tapped
from bebop.model.block import BlockDraftNetwork
from bebop.model.mtp import gather_rows

END_TO_END = "e2e_tv"  # the objective that looks at a block as a whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """A prompt and an answer through which the target has already gone."""

    token_ids: Tensor  # [L]
    answer: int  # tokens at the end that are the answer
    hidden: Tensor  # [L, d] final, normed
    layers: Mapping[int, Tensor]  # layer -> [L, d] after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Texts side by side, with anchors at which blocks begin."""

    token_ids: Tensor  # [B, L], right-padded with 0
    hidden: Tensor  # [B, L, d]
    layers: Mapping[int, Tensor]  # layer -> [B, L, d]
    anchors: Tensor  # [B, A] positions, from the last token of the prompt on
    ends: Tensor  # [B] tokens of each text

    def mask(self, block: int) -> Tensor:
        """Which of the slots 1..b-1 lie within the text [B, A, b - 1]."""
        places = self.anchors[..., None] + torch.arange(1, block, device=self.anchors.device)
        return places < self.ends[:, None, None]


@torch.no_grad()
def read_texts(policy: Policy, texts: Sequence[tuple[Sequence[int], int]], taps: Sequence[int]) -> list[ReadText]:
    """The target's pass over texts (token ids, how many of them are the answer), those of like length together."""
    read: dict[int, ReadText] = {}
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))
    for start in range(0, len(order), 32):
        part = order[start : start + 32]
        ids = pad_sequence([torch.tensor(texts[i][0], device=policy.device) for i in part], batch_first=True)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with tapped(policy.backbone.get_decoder().layers, taps) as layers:
            hidden = policy.hidden(ids, positions, CausalContext())
        for row, i in enumerate(part):
            length = len(texts[i][0])
            own = {layer: states[row, :length].clone() for layer, states in layers.items()}
            read[i] = ReadText(
                token_ids=ids[row, :length], answer=texts[i][1], hidden=hidden[row, :length].clone(), layers=own
            )
    return [read[i] for i in range(len(texts))]


def random_anchors(ends: Tensor, answers: Tensor, anchors: int, seed: int) -> Tensor:
    """At most ``anchors`` positions [B, A] a text, from the last token of its prompt to its last but one, none twice.

    A text with fewer has some beyond its end. ``ends``, ``answers`` [B]: tokens of the text, and of its answer.
    """
    numbers = torch.Generator().manual_seed(seed)
    rank = torch.rand(len(ends), max(anchors, int(answers.max())), generator=numbers)
    # Positions that an answer does not have come last, where nothing is predicted.
    rank[torch.arange(rank.shape[1]) >= answers[:, None]] += 1
    return rank.argsort(1)[:, :anchors] + (ends - answers - 1)[:, None]


def lay_out(texts: Sequence[ReadText], anchors: int, seed: int) -> Blocks:
    """At most ``anchors`` blocks a text, at random positions; a text with fewer places has some beyond its end."""
    ends = torch.tensor([len(text.token_ids) for text in texts])
    chosen = random_anchors(ends, torch.tensor([text.answer for text in texts]), anchors, seed)
    taps = texts[0].layers
    device = texts[0].hidden.device
    return Blocks(
        token_ids=pad_sequence([text.token_ids for text in texts], batch_first=True),
        hidden=pad_sequence([text.hidden for text in texts], batch_first=True),
        layers={tap: pad_sequence([text.layers[tap] for text in texts], batch_first=True) for tap in taps},
        anchors=chosen.to(device),
        ends=ends.to(device),
    )


def slot_states(network: BlockDraftNetwork, embedding: Tensor, blocks: Blocks, block: int) -> Tensor:
    """States [B, A, b, d] of every slot of every block; ``embedding`` [V, d] is the target's."""
    length = blocks.token_ids.shape[1]
    anchors = blocks.anchors.clamp_max(length - 1)
    context = BlockContext(anchors, block, length)
    network.read(blocks.layers, torch.arange(length, device=anchors.device).expand_as(blocks.token_ids), context)
    newest = embedding[blocks.token_ids.gather(1, anchors)]
    positions = anchors[..., None] + torch.arange(block, device=anchors.device)
    states = network(network.slots(newest, block).flatten(1, 2), positions.flatten(1), context)
    return states.unflatten(1, (anchors.shape[1], block))


def block_loss(
    network: BlockDraftNetwork,
    embedding: Tensor,
    weight: Tensor,
    blocks: Blocks,
    *,
    kind: str,
    decay: float,
    temperature: float = 1.0,
) -> Tensor:
    """Mean of a draft loss over the slots that lie in their text, slot k weighing exp(-(k - 1) / ``decay``).

    Args:
        network: receives the gradient.
        embedding: [V, d] of the target.
        weight: [V, d], the target's language-model head.
        blocks: see ``lay_out``.
        kind: a row of ``kernels/draft_losses.py``, as "ce" or "tv"; or "e2e_tv", 1 - expected accepted drafts over
            their number (SPEC Eq. 13), where slots have no weights.
        decay: g, in slots.
        temperature: of both distributions.
    """
    block = network.block
    mask = blocks.mask(block)
    states = slot_states(network, embedding, blocks, block)[:, :, 1:]
    last = blocks.token_ids.shape[1] - 1
    steps = torch.arange(block - 1, device=mask.device)
    places = (blocks.anchors[..., None] + steps).clamp_max(last)
    target = gather_rows(blocks.hidden, places.flatten(1)).view_as(states)
    if kind == END_TO_END:
        drafts, wanted = states.flatten(0, 1), target.flatten(0, 1)
        return linear_e2e_tv_loss(drafts, weight, wanted, weight, mask.flatten(0, 1), temperature=temperature)
    labels = blocks.token_ids.gather(1, (places + 1).clamp_max(last).flatten(1)).view_as(mask)[mask]
    losses = linear_draft_loss(
        states[mask],
        weight,
        target[mask],
        weight,
        kind=kind,
        labels=labels if needs_labels(kind) else None,
        temperature=temperature,
    ).loss
    weights = torch.exp(-steps / decay).expand_as(mask)[mask]
    return (weights * losses).sum() / weights.sum().clamp_min(1e-9)


def shared_tables(policy: Policy) -> tuple[Tensor, Tensor]:
    """Embedding and language-model head of the target, both [V, d]."""
    backbone = policy.backbone
    embedding, head = backbone.get_input_embeddings().weight, backbone.get_output_embeddings().weight
    return embedding.detach(), head.detach()
