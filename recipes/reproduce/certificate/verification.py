"""Chain verification with one planted fault: each fault is a function of a chain, next to the intact verification."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.kernels.verify import sample
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput

ODD = 7  # the token that an overriding engine inserts


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Inputs of verification; ``size``: strength of the fault, or the share of rows that it hits."""

    tokens: Tensor  # [B, K]
    q: Tensor  # [B, K, V]
    p: Tensor  # [B, K + 1, V]
    u: Tensor  # [B, K + 2]
    size: float
    heat: float  # the temperature
    struck: Tensor  # [B] bool, True with probability ``size``

    @property
    def drafts(self) -> int:
        """Return K."""
        return self.tokens.shape[1]

    def at(self, probs: Tensor) -> Tensor:
        """Return the probabilities [B, K] of the drafted tokens under ``probs`` [B, K or more, V]."""
        return probs[:, : self.drafts].gather(-1, self.tokens[..., None])[..., 0]

    def or_struck(self, own: Tensor, other: Tensor) -> Tensor:
        """Return ``own`` [B, ...] with the struck rows replaced by those of ``other``."""
        return torch.where(self.struck.reshape(-1, *[1] * (own.dim() - 1)), other, own)


Outcome = tuple[Tensor, Tensor]  # accepted [B], the token after them [B]


def verified(
    chain: Chain,
    *,
    passed: Tensor | None = None,
    q: Tensor | None = None,
    p: Tensor | None = None,
    left: Callable[[Tensor, Tensor], Tensor] | None = None,
    bonus: Tensor | None = None,
    u: Callable[[Tensor], Tensor] | None = None,
    draw: Callable[[Tensor, Tensor], Tensor] = sample,
) -> Outcome:
    """Verify by rejection sampling, with each given argument in place of the right one.

    ``passed`` [B, K]: tests; ``left(rows, at)``: weights from which a recovered token is drawn; ``bonus`` [B, V]: the
    bonus token's distribution; ``u(at)`` [B]: the recovered token's uniform; ``draw``: its sampler.
    """
    q, p = chain.q if q is None else q, chain.p if p is None else p
    passed = chain.u[:, : chain.drafts] * chain.at(q) < chain.at(p) if passed is None else passed
    accepted = passed.long().cumprod(1).sum(1)
    rows, at, rejected = torch.arange(len(p)), accepted.clamp(max=chain.drafts - 1), accepted < chain.drafts
    residual = (p[rows, at] - q[rows, at]).clamp_min(0)
    if left is not None:
        residual = left(rows, at)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p[rows, at])
    recovered = draw(residual, chain.u[:, chain.drafts] if u is None else u(at))
    last = sample(p[:, chain.drafts] if bonus is None else bonus, chain.u[:, chain.drafts + 1])
    return accepted, torch.where(rejected, recovered, last)


def _bonus_row(c: Chain) -> Outcome:
    """Draw the bonus token from row K, as printed in the paper's Algorithms 3 and 4."""
    return verified(c, bonus=c.or_struck(c.p[:, -1], c.p[:, -2]))


def _row_shift(c: Chain) -> Outcome:
    """Use all target rows one place late."""
    return verified(c, p=c.or_struck(c.p, torch.cat([c.p[:, :1], c.p[:, :-1]], 1)))


def _unnormalised(c: Chain) -> Outcome:
    """Search the residual's CDF as if it ended at 1."""

    def draw(residual: Tensor, u: Tensor) -> Tensor:
        cdf = residual.cumsum(-1)
        wrong = torch.minimum((cdf <= u[:, None]).sum(-1), (cdf < cdf[:, -1:]).sum(-1))
        return c.or_struck(sample(residual, u), wrong)

    return verified(c, draw=draw)


def _residual_is_target(c: Chain) -> Outcome:
    """Draw a recovered token from p."""

    def left(rows: Tensor, at: Tensor) -> Tensor:
        return c.or_struck((c.p[rows, at] - c.q[rows, at]).clamp_min(0), c.p[rows, at])

    return verified(c, left=left)


def _residual_of_row_before(c: Chain) -> Outcome:
    """Draw a recovered token from the residual of p with the q of the previous draft."""

    def left(rows: Tensor, at: Tensor) -> Tensor:
        own, before = c.q[rows, at], c.q[rows, (at - 1).clamp_min(0)]
        return (c.p[rows, at] - c.or_struck(own, before)).clamp_min(0)

    return verified(c, left=left)


def _q_before_temperature(c: Chain) -> Outcome:
    """Verify with q = softmax(logits), while drafts are drawn at the temperature."""
    raw = c.q**c.heat
    return verified(c, q=c.or_struck(c.q, raw / raw.sum(-1, keepdim=True)))


def _reused_uniform(c: Chain) -> Outcome:
    """Draw a recovered token with the uniform of the test that failed."""

    def u(at: Tensor) -> Tensor:
        tested = c.u.gather(1, at[:, None])[:, 0]
        return c.or_struck(c.u[:, c.drafts], tested)

    return verified(c, u=u)


def _more_accepted(c: Chain) -> Outcome:
    """Accept with probability min(1, (1 + size) p / q)."""
    return verified(c, passed=c.u[:, : c.drafts] * c.at(c.q) < (1 + c.size) * c.at(c.p))


def _power_accepted(c: Chain) -> Outcome:
    """Accept with probability min(1, p / q) to the power of 1 - size."""
    chance = (c.at(c.p) / c.at(c.q)).clamp(max=1)
    return verified(c, passed=c.u[:, : c.drafts] < chance ** (1 - c.size))


def _unlikely_dropped(c: Chain) -> Outcome:
    """Never accept drafts with q < size."""
    sound = c.u[:, : c.drafts] * c.at(c.q) < c.at(c.p)
    return verified(c, passed=sound & (c.at(c.q) >= c.size))


def _override(c: Chain) -> Outcome:
    """Replace a share of tokens (those of a cycle count together) by one that nobody drew."""
    accepted, token = verified(c)
    chance = c.u[:, -1] * 2.0**20 % 1  # low bits of the bonus token's uniform, which nothing else uses
    return accepted, torch.where(chance < c.size * (accepted + 1), ODD, token)


RULES: Mapping[str, Callable[[Chain], Outcome]] = {
    "bonus row": _bonus_row,
    "row shift": _row_shift,
    "residual not normalised": _unnormalised,
    "residual = p": _residual_is_target,
    "q of the row before": _residual_of_row_before,
    "q before temperature": _q_before_temperature,
    "u reused": _reused_uniform,
    "over-acceptance": _more_accepted,
    "power of acceptance": _power_accepted,
    "unlikely drafts dropped": _unlikely_dropped,
    "override": _override,
}


class FaultyRule:
    """A faulty acceptance rule that claims to be exact rejection sampling."""

    exact, stepwise = True, True
    layers: tuple[int, ...] = ()
    counts: tuple[str, ...] = ()

    def __init__(self, kind: str, size: float, heat: float, seed: int) -> None:
        """Select the fault ``kind`` of ``RULES``; ``heat``: the temperature; ``seed``: decides the struck rows."""
        self.fault, self.size, self.heat = RULES[kind], size, heat
        self.numbers = torch.Generator().manual_seed(seed)

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Verify drafts with the fault; see ``AcceptanceRule``."""
        assert draft.probs is not None
        struck = torch.rand(rows.batch, generator=self.numbers) < self.size
        chain = Chain(
            tokens=draft.tokens, q=draft.probs, p=out.probs, u=uniforms, size=self.size, heat=self.heat, struck=struck
        )
        return Accepted.chain(draft, *self.fault(chain))
