"""Text as pairs of tokens: which token fills which place, and where a text without PADs meets them (SPEC 2.3, 2.4).

Of a row of pairs [n, 2] place (i, 0) holds a token and (i, 1) a token or the pad token. A *split* is the token before a
PAD that is not at the end of prompt or answer.
"""

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bebop.model.pipo import as_pairs
from bebop.trainer.chains import TokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """A prompt and an answer in pairs. pairs=((2, 17), (4, 0), (9, 1)), prompt=2."""

    pairs: tuple[tuple[int, int], ...]
    prompt: int  # pairs of the prompt
    drafts: tuple[int, ...] = ()  # second token that was drawn for each pair of the answer, pad if none; () in SFT

    def line(self) -> str:
        """As a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def read(cls, line: str) -> Self:
        """From such a line."""
        row = json.loads(line)
        pairs = tuple((first, second) for first, second in row["pairs"])
        return cls(pairs=pairs, prompt=row["prompt"], drafts=tuple(row["drafts"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """Rows side by side, filled up on the right with pairs of two PADs."""

    pairs: Tensor  # [B, n, 2]
    answer: Tensor  # [B, n] whether a pair belongs to the answer
    drafts: Tensor  # [B, n] second tokens that were drawn, pad if none
    pad: int

    @property
    def firsts(self) -> Tensor:
        """Whether the first token of pair i + 1 is trained on [B, n - 1]."""
        return self.answer[:, 1:] & (self.pairs[:, 1:, 0] != self.pad)

    @property
    def seconds(self) -> Tensor:
        """Whether the second token of pair i + 1 is trained on [B, n - 1]: that of the text."""
        return self.answer[:, 1:] & (self.pairs[:, 1:, 1] != self.pad)

    @property
    def drafted(self) -> Tensor:
        """Whether a second token was drawn for pair i + 1 [B, n - 1], kept or not."""
        return self.answer[:, 1:] & (self.drafts[:, 1:] != self.pad)


def split_row(row: TokenRow, pad: int, share: float, numbers: random.Random) -> PairRow:
    """Return a text in pairs, prompt and completion each filled up to an even number, some pairs of the latter split.

    PADs come after random tokens, and what follows is paired anew, as after a rejected draft. The paper turns (a, b)
    into (a, PAD), (b, PAD), which keeps every token in a place that it would not have in decoding.

    Args:
        row: prompt and completion.
        pad: the token that stands in the place of a second token.
        share: of the tokens of the completion that a PAD follows.
        numbers: which they are.
    """
    prompt, answer = as_pairs(row.prompt, pad), list(row.answer)
    chosen = set(numbers.sample(range(len(answer)), round(share * len(answer))))
    placed: list[tuple[int, int]] = []
    at = 0
    while at < len(answer):
        alone = at in chosen or at + 1 == len(answer)
        placed.append((answer[at], pad if alone else answer[at + 1]))
        at += 1 if alone else 2
    return PairRow(pairs=(*prompt, *placed), prompt=len(prompt))


def batch_rows(rows: Sequence[PairRow], pad: int, device: torch.device | None = None) -> PairBatch:
    """Rows of different lengths as one batch."""

    def side_by_side(values: list[Tensor]) -> Tensor:
        return pad_sequence(values, batch_first=True, padding_value=pad).to(device)

    pairs = side_by_side([torch.tensor(row.pairs) for row in rows])
    starts = torch.tensor([row.prompt for row in rows])[:, None]
    drafts = side_by_side([torch.tensor([*[pad] * row.prompt, *row.drafts]).long() for row in rows])
    if drafts.shape[1] < pairs.shape[1]:
        drafts = torch.nn.functional.pad(drafts, (0, pairs.shape[1] - drafts.shape[1]), value=pad)
    places = torch.arange(pairs.shape[1])
    ends = torch.tensor([len(row.pairs) for row in rows])[:, None]
    answer = ((places >= starts) & (places < ends)).to(device)
    return PairBatch(pairs=pairs, answer=answer, drafts=drafts, pad=pad)


def without_pads(pairs: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Rows of pairs [B, n, 2] as text for a model of single tokens, and where each place is in it.

    Returns:
        The tokens without PADs [B, 2 n], filled up with ``pad``; and for each place [B, n, 2] the index of the newest
        token at it or before it, so that a PAD stands for the token before it.
    """
    flat = pairs.flatten(1)
    real = flat != pad
    order = real.logical_not().long().argsort(dim=1, stable=True)
    index = (real.long().cumsum(1) - 1).clamp_min(0)
    return flat.gather(1, order), index.view_as(pairs)
