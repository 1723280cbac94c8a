"""The seams of a decoding system: who drafts, who accepts, and how long a draft is.

Randomness comes in as uniforms, so that an acceptance rule is a pure function and kernel, reference and test can share
the numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """K drafted tokens for each of B rows, with the distributions that they were sampled from."""

    tokens: Tensor  # [B, K]
    probs: Tensor  # [B, K, V]; one-hot where the draft is greedy
    entropies: Tensor  # [B, K] of the draft distributions, nats
    lengths: Tensor | None  # [B] drafts that count in each row; None: all K
    forwards: int  # passes of the drafter that this took


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verification made of a draft."""

    accepted: Tensor  # [B] accepted drafts, 0..K
    next_token: Tensor  # [B] recovered or bonus token


class DraftModel(Protocol):
    """What a drafter may ask of the model runner, for the rows that are being decoded."""

    def draft_hidden(self) -> Tensor:
        """The drafter's hidden state [B, d] for the first draft."""
        ...

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [B, V] of hidden states [B, d]."""
        ...

    def draft_step(self, step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """One recursive pass: the tokens [B] just drafted at ``step`` and hidden [B, d] -> the next hidden [B, d]."""
        ...

    def seen(self) -> Tensor | None:
        """Tokens in the context of each row [B, V] (bool), where a penalty needs them."""
        ...


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, model: DraftModel, sampling: BatchSampling, length: "DraftLength", uniforms: Tensor) -> Draft:
        """Draft up to ``length.limit`` tokens a row; uniforms [B, K]."""
        ...


class AcceptanceRule(Protocol):
    """Decides which drafts stand. A pure function of its arguments."""

    @property
    def exact(self) -> bool:
        """Whether the output distribution is the target's."""
        ...

    def accept(self, draft: Draft, target_probs: Tensor, uniforms: Tensor) -> Verdict:
        """Verify against target distributions [B, K + 1, V] with uniforms [B, K + 2]."""
        ...


class DraftLength(Protocol):
    """Chooses how many tokens to draft."""

    @property
    def limit(self) -> int:
        """The most drafts in a cycle, K."""
        ...

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """Which rows draft token ``step`` (from 0), given the draft distributions' entropies [B, step + 1]; None: all.

        Called before the token is sampled. The rule may not look at the target, and may not drop a token once it has
        been sampled for being unlikely: that would filter the draft distribution and bias the output (SPEC 1.7).
        """
        ...

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """Learn from a cycle of the first B slots.

        What is learned belongs to the request (``Slots.add``): an answer may not depend on those beside it or before.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A decoding system: drafter, rule and length policy."""

    name: str
    summary: str  # one line for --help and the README
    drafter: Drafter | None  # None drafts nothing
    rule: AcceptanceRule
    drafts: int  # the most drafts in a cycle, K
    length: Callable[[Slots], DraftLength]  # made for an engine; what it learns of a request is a column there
