"""Text for training an MTP head: right-padded rows, and the chains of drafts in them.

A chain at anchor t drafts tokens t + 2, t + 3, ...: step i stands for token t + i + 1. Chains start at the last anchor
that can draft the first token of the completion, and a step counts while its token is in the completion. With several
turns each turn is such a completion, and the text read before it such a prompt. A chain may begin there, as an engine's
first draft does, and never continues into the text that is read next.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

Per = Literal["step", "anchor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A prompt and a completion, such as prompt=(2, 17, 4), answer=(9, 1)."""

    prompt: tuple[int, ...]  # [P], P >= 1
    answer: tuple[int, ...]  # [T], the stop token included
    task: str = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the tokens of prompt and completion."""
        return (*self.prompt, *self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRow:
    """A prompt and a completion, in one or more turns, with the backbone's hidden states."""

    token_ids: Tensor  # [L]
    answer: Tensor  # [L] bool: tokens that the policy wrote
    hidden: Tensor  # [L, d]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRows:
    """Rows side by side, with the anchors of their chains."""

    token_ids: Tensor  # [B, L], right-padded with 0
    anchors: Tensor  # [B, A] positions; those beyond the end have no step
    steps: Tensor  # [B, A] steps that exist at each anchor, 0..depth

    def count(self, per: Per) -> int:
        """Return the number of steps, or of anchors with a step, in all rows."""
        return int(self.steps.sum() if per == "step" else (self.steps > 0).sum())

    def mask(self, depth: int) -> Tensor:
        """Return which steps exist [B, A, depth]."""
        return torch.arange(depth, device=self.steps.device) < self.steps[..., None]

    def tokens(self, step: int) -> Tensor:
        """Return the token of ``step`` (from 1) at each anchor [B, A]; arbitrary where the step does not exist."""
        return self.token_ids.gather(1, (self.anchors + step + 1).clamp_max(self.token_ids.shape[1] - 1))


def chain_rows(rows: Sequence[TokenRow], depth: int, device: torch.device | str = "cpu") -> ChainRows:
    """Lay out rows with chains of at most ``depth`` steps; rows without a completion have no step."""
    assert rows and all(row.prompt for row in rows), "every row needs a prompt of at least one token"
    return _lay([torch.tensor(row.token_ids) for row in rows], [len(row.answer) for row in rows], depth, device)


def known_chains(rows: Sequence[KnownRow], depth: int) -> ChainRows:
    """Lay out rows as ``chain_rows``, on the device of the hidden states; with several turns as ``masked_rows``."""
    device, ids = rows[0].hidden.device, [row.token_ids for row in rows]
    counts = [int(row.answer.sum()) for row in rows]
    if all(bool(row.answer[len(row.answer) - count :].all()) for row, count in zip(rows, counts, strict=True)):
        return _lay(ids, counts, depth, device)
    answer = pad_sequence([row.answer for row in rows], batch_first=True)
    return masked_rows(pad_sequence(ids, batch_first=True).to(device), answer.to(device), depth)


def _lay(ids: Sequence[Tensor], answers: Sequence[int], depth: int, device: torch.device | str) -> ChainRows:
    """Lay rows [L] side by side; their completions are at their ends."""
    lengths, answered = torch.tensor([len(row) for row in ids]), torch.tensor(answers)
    first = (lengths - answered - 2).clamp_min(0)
    token_ids = pad_sequence(list(ids), batch_first=True)
    token_ids = pad(token_ids, (0, max(0, 2 - token_ids.shape[1])))
    count = max(1, int((lengths - 1 - first).max()))
    anchors = first[:, None] + torch.arange(count)
    steps = (lengths[:, None] - 2 - anchors).clamp(0, depth)
    return ChainRows(
        token_ids=token_ids.to(device),
        anchors=anchors.to(device),
        steps=(steps * (answered > 0)[:, None]).to(device),
    )


def masked_rows(token_ids: Tensor, answer: Tensor, depth: int, most: int = 0, seed: int = 0) -> ChainRows:
    """Return chains of right-padded rows [B, L] whose drafted tokens all lie where ``answer`` [B, L] holds.

    For a prompt and a completion these are the chains of ``chain_rows``. A hole (the output of a tool) ends a chain.

    ``most`` limits the anchors of a row, drawn by ``seed``; 0 keeps all. Attention of later steps needs anchors times
    length numbers a head, which for 64 K tokens is too much for all anchors.
    """
    length = token_ids.shape[1]
    held = pad(answer.bool(), (0, depth + 1))
    ahead = torch.stack([held[:, step + 1 : step + 1 + length] for step in range(1, depth + 1)], -1)
    steps = ahead.long().cumprod(-1).sum(-1)  # [B, L]
    rank = (steps > 0).double()
    if most:
        numbers = torch.Generator().manual_seed(seed)  # on the CPU: ranks that share rows must draw the same
        rank = rank * (1 + torch.rand(rank.shape, generator=numbers).to(rank.device))
    count = max(1, int((steps > 0).sum(1).max()))
    count = min(count, most) if most else count
    anchors = rank.sort(stable=True, dim=1, descending=True).indices[:, :count].sort(1).values
    return ChainRows(
        token_ids=token_ids,
        anchors=anchors,
        steps=steps.gather(1, anchors),
    )


def spaced(rows: ChainRows, every: int, seed: int) -> ChainRows:
    """Return each ``every``-th chain of a row, starting at one that the row's tokens and ``seed`` determine; all for 1.

    Neighbouring chains are nearly the same, and a chain costs its logits. With a large vocabulary a share of the chains
    of more rows teaches more than all chains of few rows. Each chain is equally likely to be chosen, so means over
    chains stay unbiased. The choice in a row does not depend on the rows beside it.
    """
    if every == 1:
        return rows
    live = rows.steps > 0
    first = (rows.token_ids.sum(1, keepdim=True) + random.Random(seed).randrange(every)) % every
    chosen = live & ((live.cumsum(1) - 1) % every == first)
    count = max(1, int(chosen.sum(1).max()))
    order = chosen.long().sort(stable=True, dim=1, descending=True).indices[:, :count]
    return ChainRows(
        token_ids=rows.token_ids,
        anchors=rows.anchors.gather(1, order),
        steps=(rows.steps * chosen).gather(1, order),
    )


def side_by_side(packed: Tensor, starts: Tensor) -> Tensor:
    """Return rows [B, L, ...], right-padded, from rows laid end to end [T, ...] that begin at ``starts`` [B + 1].

    The last entry of ``starts`` is the end of the last row.
    """
    bounds = starts.tolist()
    return pad_sequence([packed[a:b] for a, b in pairwise(bounds)], batch_first=True)


def rows_of_step(count: int, size: int, seed: int, step: int) -> list[int]:
    """Return which of ``count`` rows step ``step`` (from 0) trains on; each epoch has an order of its own."""
    places = [divmod(index, count) for index in range(step * size, (step + 1) * size)]
    orders = {epoch: random.Random(f"{seed}/{epoch}").sample(range(count), count) for epoch in dict(places)}
    return [orders[epoch][place] for epoch, place in places]


def random_anchors(ends: Tensor, answers: Tensor, anchors: int, seed: int) -> Tensor:
    """Return at most ``anchors`` random positions [B, A] of each text, none twice.

    They lie from the last token of its prompt to its last token but one. A text with fewer has some beyond its end.
    ``ends``, ``answers`` [B]: tokens of the text, and of its completion.
    """
    numbers = torch.Generator().manual_seed(seed)
    rank = torch.rand(len(ends), max(anchors, int(answers.max())), generator=numbers)
    # Positions that a completion does not have come last, where nothing is predicted.
    rank[torch.arange(rank.shape[1]) >= answers[:, None]] += 1
    return rank.argsort(1)[:, :anchors] + (ends - answers - 1)[:, None]
