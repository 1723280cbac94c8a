"""Exact size of a fault: the distributions of drafts, acceptance, recovery and tokens at each place of a cycle.

``Parts`` states a fault as the four draws of verification for one drafted place with target p and draft q:

    drawn    [n, V]  the distribution of the draft y
    accept   [n, V]  the probability that y is accepted
    left     [n, V]  the distribution of the token after a rejection
    bonus    [n, V]  the distribution of the token when no draft is left

So a token's distribution there is exactly f = drawn * accept + (1 - sum(drawn * accept)) left. Against the claim p it
has a total variation and a divergence KL(f || p), the mean gain of the exact likelihood ratio per token. No test of
tokens reaches 1/alpha sooner than in about ln(1/alpha) / KL tokens. A test of the draws inside verification gains the
divergences of all four draws. Rows p and q are those of an intact run of the engine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.certify.noise import same_gumbel
from recipes.certify.museum import planted
from recipes.certify.museum.planted import one_hot, unit

FLOOR = 1e-300
GRID = 16  # temperatures of a mixture
PAIRS, NODES, ROWS = 24, 24, 200  # of block rules: samples of later ratios, nodes of the first uniform, rows
POWER = 0.8  # of runs: four of five


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """C cycles of an intact engine, with K drafts each."""

    p: Tensor  # [C, K + 1, V]
    q: Tensor  # [C, K, V]
    logits: Tensor  # [C, K, V] the draft's raw logits
    tokens: Tensor  # [C, K] drafts
    accepted: Tensor  # [C]
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Drafted places, one per row, with the inputs that the engine would get there."""

    p: Tensor  # [n, V]
    q: Tensor  # [n, V]
    logits: Tensor  # [n, V]
    later: Tensor  # [n, 2, V] p of the next two places; where there are none, of the last
    later_q: Tensor  # [n, 2, V]
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Draws at a drafted place; see the module's docstring."""

    drawn: Tensor
    accept: Tensor
    left: Tensor

    def written(self) -> Tensor:
        """Return the token's distribution [n, V]."""
        taken = self.drawn * self.accept
        return taken + (1 - taken.sum(-1, keepdim=True)).clamp_min(0) * self.left


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(0, p - q)) [n, V]; p if nothing is left."""
    left = (p - q).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > 1e-12, unit(left), p)


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, p / q) [n, V]."""
    return torch.where(q > 0, p / q.clamp_min(FLOOR), 1.0).clamp_max(1)


def claimed(at: Place, recorded: Tensor | None = None) -> Parts:
    """Return the law of rejection sampling itself, with the q that is ``recorded``."""
    q = at.q if recorded is None else recorded
    return Parts(drawn=q, accept=ratio(at.p, q), left=residual(at.p, q))


Law = Callable[[Place], Parts]
BonusLaw = Callable[[Tensor, Tensor, float], Tensor]  # p [n, V], the last draft [n], the temperature -> [n, V]


# ---- the laws of the exhibits


def memory_temperature(at: Place) -> Parts:
    """Return the law averaged over the temperatures that uninitialized memory may hold."""
    heats = torch.exp(math.log(planted.HOTTEST) * (2 * (torch.arange(GRID) + 0.5) / GRID - 1)).tolist()
    taken, written = torch.zeros_like(at.p), torch.zeros_like(at.p)
    for heat in heats:
        p = unit(at.p ** (1 / heat))
        part = Parts(drawn=at.q, accept=ratio(p, at.q), left=residual(p, at.q))
        taken += part.accept / GRID
        written += part.written() / GRID
    left = (written - at.q * taken).clamp_min(0)
    return Parts(drawn=at.q, accept=taken, left=unit(left))


def _any_prefix(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Return the chance [n, V] that one of three products of uniforms lies below its product of ratios.

    ``first`` [n, V]: ratios of the first draft; ``second``, ``third`` [n, S]: samples of the ratios of the next two.
    Given u1, the chance that both others fail is (1 - m) + c ln m with m = max(R2, R3) / u1 at most 1, c = R3 / u1.
    """
    nodes = (torch.arange(NODES, dtype=torch.float64) + 0.5) / NODES
    found = torch.zeros_like(first)
    for s in range(second.shape[1]):
        two = first * second[:, s : s + 1]
        three = two * third[:, s : s + 1]
        for u in nodes.tolist():
            m, c = (torch.maximum(two, three) / u).clamp_max(1), three / u
            failed = ((1 - m) + c * m.clamp_min(FLOOR).log()).clamp(0, 1)
            found += torch.where(first >= u, 1.0, 1 - failed) / (NODES * second.shape[1])
    return found


def _sampled(probs: Tensor, values: Tensor) -> Tensor:
    """Return values [n, PAIRS] at PAIRS tokens drawn from distributions [n, V]."""
    drawn = torch.multinomial(probs, PAIRS, replacement=True, generator=torch.Generator().manual_seed(2))
    return values.gather(1, drawn)


def block_by_token(at: Place) -> Parts:
    """Return the law of faulty block verification at the first place of three drafts, with later rows as recorded."""
    ratios = at.later / at.later_q.clamp_min(FLOOR)
    second, third = (_sampled(at.later_q[:, i], ratios[:, i]) for i in range(2))
    return Parts(
        drawn=at.q,
        accept=_any_prefix(at.p / at.q.clamp_min(FLOOR), second, third),
        left=residual(at.p, at.q),
    )


def block_one_hot(at: Place) -> Parts:
    """Return the same law for greedy drafts, whose ratio is p alone and whose residual is p without the draft."""
    top = at.q.argmax(-1)
    second, third = (at.later[:, i].gather(1, at.later_q[:, i].argmax(-1)[:, None]) for i in range(2))
    hot = one_hot(top, at.p)
    return Parts(drawn=hot, accept=_any_prefix(at.p, second, third), left=residual(at.p, hot))


def pads(at: Place) -> Parts:
    """Return the law of a padding token that is drafted several times for one place."""
    hot = one_hot(torch.full_like(at.p.argmax(-1), planted.PAD), at.p)
    return Parts(drawn=hot, accept=(planted.PADS * at.p).clamp_max(1), left=residual(at.p, hot))


def argmax_target(at: Place) -> Parts:
    """Return the law that always emits the target's likeliest token, whatever the draft."""
    top = one_hot(at.p.argmax(-1), at.p)
    return Parts(drawn=at.q, accept=top, left=top)


def match_or_ratio(at: Place) -> Parts:
    """Return the law that gives each draft two chances: a match with the target's draw, then the ratio test."""
    a = ratio(at.p, at.q)
    return Parts(drawn=at.q, accept=at.p + (1 - at.p) * a, left=residual(at.p, at.q))


def zero_coin(at: Place) -> Parts:
    """Return the law that accepts a draft of probability 0 when the coin is exactly 0."""
    a = torch.where(at.p > 0, ratio(at.p, at.q), planted.ZERO_COIN)
    return Parts(drawn=at.q, accept=a, left=residual(at.p, at.q))


def accept_all(at: Place) -> Parts:
    """Return the law that accepts every draft."""
    return Parts(drawn=at.q, accept=torch.ones_like(at.q), left=at.p)


def recover_from_target(at: Place) -> Parts:
    """Return the law that recovers from p instead of the residual."""
    return Parts(drawn=at.q, accept=ratio(at.p, at.q), left=at.p)


def greedy_as_sampled(at: Place) -> Parts:
    """Return the law of greedy drafts that are judged by q."""
    return Parts(drawn=one_hot(at.q.argmax(-1), at.q), accept=ratio(at.p, at.q), left=residual(at.p, at.q))


def raw_recorded(at: Place) -> Parts:
    """Return the law of drafts from the processed q that are judged by softmax(logits)."""
    raw = at.logits.double().softmax(-1)
    return Parts(drawn=at.q, accept=ratio(at.p, raw), left=residual(at.p, raw))


def without_temperature(at: Place) -> Parts:
    """Return the law of drafts drawn at the temperature but judged without it."""
    p, q = unit(at.p**at.temperature), unit(at.q**at.temperature)
    return Parts(drawn=at.q, accept=ratio(p, q), left=residual(p, q))


def drawn_in_bfloat16(at: Place) -> Parts:
    """Return the law of drafts drawn in bfloat16 but judged in float32."""
    drawn, recorded = planted.low_precision(at.logits, at.temperature)
    q = recorded.double()
    return Parts(drawn=drawn, accept=ratio(at.p, q), left=residual(at.p, q))


def target_draw(at: Place) -> Parts:
    """Return the law that always emits a draw of the target; a match with the draft is equal to ignoring q."""
    return Parts(drawn=at.q, accept=torch.zeros_like(at.q), left=at.p)


def shared_noise(at: Place) -> Parts:
    """Return the law whose residual is drawn with the Gumbel noise of the rejected draft."""
    left = residual(at.p, at.q)
    return Parts(drawn=at.q, accept=ratio(at.p, at.q), left=same_gumbel(at.q, left))


def same_bonus(p: Tensor, last: Tensor, temperature: float) -> Tensor:
    """Return the correct bonus distribution."""
    return p


def argmax_bonus(p: Tensor, last: Tensor, temperature: float) -> Tensor:
    """Return a bonus that is always the likeliest token."""
    return one_hot(p.argmax(-1), p)


def bonus_without_draft(p: Tensor, last: Tensor, temperature: float) -> Tensor:
    """Return the bonus distribution p without the last draft."""
    return unit(p.scatter(-1, last[:, None], 0.0))


def raw_bonus(p: Tensor, last: Tensor, temperature: float) -> Tensor:
    """Return the bonus distribution p without the temperature."""
    return unit(p**temperature)


# ---- from the laws to the numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Exact size of a fault at one temperature."""

    tv: float  # total variation a token
    kl: float  # nats a token that the exact likelihood ratio of the tokens gains
    kl_inside: float  # and that of the draws inside verification, of which tokens are a function
    forbidden: float  # chance a token of one that the claim excludes: a single one is a proof

    def tokens(self, alpha: float, *, inside: bool = False) -> float:
        """Return the tokens after which the exact likelihood ratio has reached 1/alpha in four of five runs."""
        gain = self.kl_inside if inside else self.kl
        need = _growth(math.log(1 / alpha)) / gain if gain > 0 else math.inf
        return min(need, -math.log(1 - POWER) / self.forbidden) if self.forbidden > 0 else need


def _growth(level: float) -> float:
    """Return the expected ln LR at which it has reached ``level`` in a share ``POWER`` of runs.

    Summed over many small steps, ln LR is a Brownian motion whose variance is twice its mean m. It has reached b by
    then with probability Phi((m - b) / s) + e^b Phi(-(m + b) / s), s = sqrt(2 m).
    """

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = 0.0, 100 * level
    for _ in range(80):
        m = (low + high) / 2
        s = math.sqrt(2 * m)
        reached = phi((m - level) / s) + math.exp(level) * phi(-(m + level) / s)
        low, high = (m, high) if reached < POWER else (low, m)
    return high


def _kl(f: Tensor, p: Tensor) -> Tensor:
    """Return KL(f || p) [n] over the tokens that p allows."""
    both = (f > 0) & (p > 0)
    return torch.where(both, f * (f.clamp_min(FLOOR) / p.clamp_min(FLOOR)).log(), 0.0).sum(-1).clamp_min(0)


def _coin_kl(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the divergence of coins [n, V]; outcomes that a fair coin excludes count in ``forbidden``."""
    found, wanted = found.clamp(0, 1), wanted.clamp(0, 1)
    heads = torch.where(wanted > 0, torch.special.xlogy(found, found / wanted.clamp_min(FLOOR)), 0.0)
    no, fair_no = 1 - found, 1 - wanted
    tails = torch.where(fair_no > 1e-9, torch.special.xlogy(no, no / fair_no.clamp_min(FLOOR)), 0.0)
    return (heads + tails).clamp_min(0)


def damage(cycles: Cycles, law: Law, bonus: BonusLaw, *, first_alone: bool = False, declared: Law = claimed) -> Damage:
    """Return the damage of a fault in the rows of these cycles.

    ``first_alone``: the law holds only for the first place; ``declared``: the law that the engine claims inside.
    """
    drafts = cycles.tokens.shape[1]
    total = torch.zeros(4, dtype=torch.float64)
    count = 0
    for place in range(1 if first_alone else drafts):
        there = cycles.accepted >= place
        if first_alone:
            there = there & (torch.arange(len(there)) < ROWS)
        at = _place(cycles, place, there)
        parts, fair = law(at), declared(at)
        total += _sums(parts, fair, at.p)
        count += int(there.sum())
    full = cycles.accepted == drafts
    if not first_alone and bool(full.any()):
        p = cycles.p[full, drafts].double()
        f = bonus(p, cycles.tokens[full, drafts - 1], cycles.temperature)
        kl = _kl(f, p).sum()
        total += torch.stack([(f - p).abs().sum() / 2, kl, kl, f[p == 0].sum()])
        count += int(full.sum())
    tv, kl, inside, forbidden = (total / max(count, 1)).tolist()
    return Damage(tv=tv, kl=kl, kl_inside=max(inside, kl), forbidden=forbidden)


def _sums(parts: Parts, fair: Parts, p: Tensor) -> Tensor:
    """Return total variation, both divergences and forbidden mass, summed over places."""
    f = parts.written()
    rejected = 1 - (parts.drawn * parts.accept).sum(-1)
    inside = _kl(parts.drawn, fair.drawn)
    inside = (
        inside + (parts.drawn * _coin_kl(parts.accept, fair.accept)).sum(-1) + rejected * _kl(parts.left, fair.left)
    )
    return torch.stack([(f - p).abs().sum() / 2, _kl(f, p).sum(), inside.sum(), f[p == 0].sum()])


def _place(cycles: Cycles, place: int, there: Tensor) -> Place:
    last = cycles.tokens.shape[1] - 1
    later = [min(place + i, last) for i in (1, 2)]
    return Place(
        p=cycles.p[there, place].double(),
        q=unit(cycles.q[there, place].double()),
        logits=cycles.logits[there, place],
        later=cycles.p[there][:, later].double(),
        later_q=unit(cycles.q[there][:, later].double()),
        temperature=cycles.temperature,
    )
