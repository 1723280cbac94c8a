"""How drafters from history read other answers to a prompt: a match that runs ahead, and what followed it.

Which tokens followed is a walk through dictionaries, a few microseconds a token and row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

from bebop.rollout.decoding.trust import KINDS, LENGTHS
from bebop.rollout.history import ROOT, Automaton


@dataclass(slots=True)
class Match:
    """How far a row has matched the other answers to its prompt; a copy of it runs ahead while it drafts."""

    texts: Automaton
    state: int = ROOT
    tokens: int = 0  # matched
    read: int = 0  # tokens of the answer

    def advance(self, token: int) -> None:
        """Read a token."""
        self.state, self.tokens = self.texts.advance(self.state, self.tokens, token)


class Next(NamedTuple):
    """What followed the longest match of a row."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]  # of each, they sum to 1
    bucket: int

    @classmethod
    def of(cls, match: Match, greedy: bool) -> Self | None:
        """None where nothing did. ``greedy``: what followed most often alone."""
        texts = match.texts
        match.state, match.tokens = texts.followed(match.state, match.tokens)
        if match.state == ROOT:
            return None
        length = KINDS * min((match.tokens - 1).bit_length(), LENGTHS - 1)
        follow = texts.follow[match.state]
        if len(follow) == 1:  # mostly
            [(token, after)] = follow.items()
            return cls((token,), (1.0,), length + min(texts.count[after], KINDS - 1) - 1)
        found = texts.followers(match.state)
        if greedy:
            return cls((max(found, key=lambda one: one[1])[0],), (1.0,), length + KINDS - 1)
        total = sum(count for _, count in found)
        return cls(tuple(t for t, _ in found), tuple(c / total for _, c in found), length + KINDS - 1)

    def draw(self, uniform: float) -> int:
        """The token at a number in [0, 1), by inverting the distribution."""
        if len(self.tokens) == 1:
            return self.tokens[0]
        sums = accumulate(self.chances)
        return next((t for t, total in zip(self.tokens, sums, strict=True) if uniform < total), self.tokens[-1])


class Followers:
    """The followers in a cycle's distributions one by one, each with the place of its draft."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, int, int]] = []  # row, step, token, bucket
        self.chances: list[tuple[float, float]] = []  # in history, and the weight w that history has there

    def add(self, row: int, step: int, found: Next, weight: float) -> None:
        """The distribution of a draft has what was found in it, with this weight."""
        self.places += [(row, step, token, found.bucket) for token in found.tokens]
        self.chances += [(chance, weight) for chance in found.chances]

    def go_on(
        self,
        row: int,
        step: int,
        match: Match,
        trust: Sequence[float],
        uniforms: Sequence[float],
        *,
        greedy: bool,
        chance: float = 1.0,
        least: float,
        always: bool,
    ) -> list[int]:
        """Draft a row from history alone, from ``step`` on: a token for each of ``uniforms``, while the ``chance`` that
        all stand, by what each bucket is trusted, exceeds ``least``. ``always``: the first one in any case.

        It is ``Next.of`` and ``Match.advance`` in one loop, which does without their calls where a single token
        followed, as one mostly does: this is most of what drafts from history cost.
        """
        texts, drawn = match.texts, list[int]()
        follow, link, length, count = texts.follow, texts.link, texts.length, texts.count
        state, matched = texts.followed(match.state, match.tokens)
        for uniform in uniforms:
            while state != ROOT and not follow[state]:
                state = link[state]
                matched = length[state]
            if state == ROOT:
                break
            after, found = follow[state], None
            if len(after) == 1:
                [(token, there)] = after.items()
                bucket = KINDS * min((matched - 1).bit_length(), LENGTHS - 1) + min(count[there], KINDS - 1) - 1
            else:
                match.state, match.tokens = state, matched
                found = Next.of(match, greedy)
                assert found is not None
                token, bucket = found.draw(uniform), found.bucket
                there = after[token]
            chance *= trust[bucket]
            if chance <= least and (drawn or not always):
                break
            if found is None:
                self.places.append((row, step, token, bucket))
                self.chances.append((1.0, 1.0))
            else:
                self.add(row, step, found, 1.0)
            drawn.append(token)
            state, matched, step = there, matched + 1, step + 1
        match.state, match.tokens = state, matched
        return drawn

    def tensors(self, device: torch.device, start: int = 0) -> tuple[Tensor, ...]:
        """Row, step, token, bucket, chance, weight [N] of those from number ``start`` on."""
        places = torch.tensor(self.places[start:], dtype=torch.long, device=device).reshape(-1, 4)
        chances = torch.tensor(self.chances[start:], dtype=torch.float64, device=device).reshape(-1, 2)
        return (*places.unbind(1), *chances.unbind(1))
