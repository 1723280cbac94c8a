"""Implementations of the faults: acceptance rules and drafters with one error each, and how to plant them in an engine.

Each is written from scratch after the public report. ``planted`` puts it into an embedded engine for the length of a
``with`` block and changes nothing of the product. A rule is a function of a ``Chain`` and its own random generator. A
drafter is a function of the draft's raw logits that returns tokens and the q that is recorded with them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bebop.certify.answers import Answer
from bebop.certify.embedded import EmbeddedEngine
from bebop.certify.reference import Progress
from bebop.kernels.uniforms import uniforms
from bebop.kernels.verify import sample
from bebop.rollout.decoding.base import Accepted, Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.mtp import MTPDrafter
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from recipes.reproduce.certificate.verification import Chain, Outcome, verified

HOTTEST = 4.0  # a temperature from memory lies between 1/4 and 4 times the one that was asked for
PAD, PADS = 22, 3  # a token that the built-in model writes often, and how often it is drafted for one place
ZERO_COIN = 2.0**-24  # chance that a float32 uniform of 24 bits is 0
NOISE_SEED = 1

Rule = Callable[[Chain, torch.Generator], Outcome]


def unit(weights: Tensor) -> Tensor:
    """Return distributions [..., V] from weights [..., V] that are not all zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """Return [..., V] with 1 at tokens [...]."""
    return torch.zeros_like(like).scatter_(-1, tokens[..., None], 1.0)


def _tests(c: Chain) -> Tensor:
    """Return the outcomes [B, K] of the correct tests, u < p / q."""
    return c.u[:, : c.drafts] * c.at(c.q) < c.at(c.p)


def _longest(passed: Tensor) -> Tensor:
    """Return [B, K] that is True up to the last passed test, whatever failed before it."""
    steps = torch.arange(1, passed.shape[1] + 1)
    return steps <= torch.where(passed, steps, 0).max(1).values[:, None]


# ---- acceptance rules


def memory_temperature(c: Chain, numbers: torch.Generator) -> Outcome:
    """Judge drafts at an uninitialized temperature, a different one for each row of a cycle; the bonus is correct."""
    heat = torch.exp(math.log(HOTTEST) * (2 * torch.rand(len(c.p), generator=numbers) - 1))[:, None, None]
    return verified(c, p=torch.cat([unit(c.p[:, :-1] ** (1 / heat)), c.p[:, -1:]], 1))


def block_by_token(c: Chain, numbers: torch.Generator) -> Outcome:
    """Compare products of p / q with products of uniforms; accept the longest prefix, with one token's residual."""
    ratio = (c.at(c.p) / c.at(c.q).clamp_min(1e-300)).cumprod(1)
    return verified(c, passed=_longest(ratio >= c.u[:, : c.drafts].cumprod(1)))


def block_one_hot(c: Chain, numbers: torch.Generator) -> Outcome:
    """Do the same for drafts without probabilities, with q = 1."""
    hot = one_hot(c.tokens, c.p[:, : c.drafts])
    passed = _longest(c.at(c.p).cumprod(1) >= c.u[:, : c.drafts].cumprod(1))
    return verified(c, passed=passed, q=hot)


def argmax_target(c: Chain, numbers: torch.Generator) -> Outcome:
    """Accept a draft if it is the target's likeliest token, else emit that token; the bonus is sampled."""
    top = c.p[:, : c.drafts].argmax(-1)
    passed = top == c.tokens
    at = passed.long().cumprod(1).sum(1).clamp(max=c.drafts - 1)
    return verified(c, passed=passed, draw=lambda residual, u: top.gather(1, at[:, None])[:, 0])


def argmax_always(c: Chain, numbers: torch.Generator) -> Outcome:
    """Use the greedy path for every request: drafts, recovered tokens and the bonus."""
    top = c.p.argmax(-1)
    accepted = (top[:, : c.drafts] == c.tokens).long().cumprod(1).sum(1)
    return accepted, top.gather(1, accepted[:, None])[:, 0]


def match_or_ratio(c: Chain, numbers: torch.Generator) -> Outcome:
    """Accept a draft if a draw of the target equals it, and also if it passes the ratio test."""
    own = sample(c.p[:, : c.drafts], torch.rand(c.tokens.shape, generator=numbers))
    return verified(c, passed=(own == c.tokens) | _tests(c))


def pads_add_up(c: Chain, numbers: torch.Generator) -> Outcome:
    """Test the one drafted token ``PADS`` times, so that it is accepted with probability min(1, n p)."""
    hot = one_hot(c.tokens, c.p[:, : c.drafts])
    return verified(c, passed=c.u[:, : c.drafts] < PADS * c.at(c.p), q=hot)


def bonus_without_draft(c: Chain, numbers: torch.Generator) -> Outcome:
    """Draw the bonus from a row in which recovery has zeroed the last draft's probability in place."""
    return verified(c, bonus=unit(c.p[:, -1].scatter(-1, c.tokens[:, -1:], 0.0)))


def zero_coin(c: Chain, numbers: torch.Generator) -> Outcome:
    """Accept u <= p / q where u may be 0, so that a draft with p = 0 may pass. ``size`` is the chance of such a u."""
    zero = torch.rand(c.tokens.shape, generator=numbers, dtype=torch.float64) < c.size
    return verified(c, passed=zero | _tests(c))


def accept_all(c: Chain, numbers: torch.Generator) -> Outcome:
    """Accept every draft: the test's uniform is always 0."""
    return verified(c, passed=torch.ones_like(c.tokens, dtype=torch.bool))


def recover_from_target(c: Chain, numbers: torch.Generator) -> Outcome:
    """Draw a recovered token from p instead of the residual."""
    return verified(c, left=lambda rows, at: c.p[rows, at])


def without_temperature(c: Chain, numbers: torch.Generator) -> Outcome:
    """Verify with softmax(logits) for p and q, while drafts are drawn at the requested temperature."""
    return verified(c, p=unit(c.p**c.heat), q=unit(c.q**c.heat))


def target_draw(c: Chain, numbers: torch.Generator) -> Outcome:
    """Accept a draft if the target's own draw equals it, else emit that draw; this is exact."""
    own = sample(c.p[:, : c.drafts], torch.rand(c.tokens.shape, generator=numbers))
    passed = own == c.tokens
    at = passed.long().cumprod(1).sum(1).clamp(max=c.drafts - 1)
    return verified(c, passed=passed, draw=lambda residual, u: own.gather(1, at[:, None])[:, 0])


def q_ignored(c: Chain, numbers: torch.Generator) -> Outcome:
    """Judge sampled drafts as if q were 1 at the draft, with the matching residual; this is exact."""
    return verified(c, q=one_hot(c.tokens, c.q))


class StaleQ:
    """Acceptance rule that verifies with the q of the previous cycle, of the same rows as far as they existed."""

    def __init__(self) -> None:
        self.before: Tensor | None = None

    def __call__(self, c: Chain, numbers: torch.Generator) -> Outcome:
        old, self.before = self.before, c.q
        rows, drafts = c.q.shape[:2]
        fits = old is not None and len(old) >= rows and old.shape[1] >= drafts
        return verified(c, q=old[:rows, :drafts] if fits and old is not None else c.q)


# ---- drafters: raw logits [B, V] -> tokens [B] and the q [B, V] that is recorded


@dataclass(slots=True, kw_only=True)
class Step:
    """One step of a drafter."""

    logits: Tensor  # [B, V] raw
    q: Tensor  # [B, V] processed, as verification ought to be given it
    u: Tensor  # [B] uniforms
    temperature: float


Draw = Callable[[Step], tuple[Tensor, Tensor | None]]


def greedy_as_sampled(step: Step) -> tuple[Tensor, Tensor]:
    """Draft the likeliest token and record q."""
    return step.q.argmax(-1), step.q


def greedy(step: Step) -> tuple[Tensor, None]:
    """Draft the likeliest token and record no q."""
    return step.q.argmax(-1), None


def pad(step: Step) -> tuple[Tensor, None]:
    """Draft the padding token."""
    return torch.full_like(step.q.argmax(-1), PAD), None


def raw_recorded(step: Step) -> tuple[Tensor, Tensor]:
    """Draw at the requested temperature and truncation, and record softmax(logits)."""
    return sample(step.q, step.u), step.logits.double().softmax(-1).to(step.q.dtype)


def low_precision(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the distribution sampled in bfloat16 and the one recorded in float32, [..., V], of the same logits."""
    native = logits.bfloat16()
    return unit((native / temperature).softmax(-1).double()), (native.float() / temperature).softmax(-1)


def drawn_in_bfloat16(step: Step) -> tuple[Tensor, Tensor]:
    """Draw in the logits' own precision, and record the distribution in float32."""
    drawn, recorded = low_precision(step.logits, step.temperature)
    return sample(drawn, step.u), recorded.to(step.q.dtype)


class PlantedDrafter(MTPDrafter):
    """Drafter with a fault in what it draws or records."""

    def __init__(self, engine: TorchEngine, draw: Draw, limit: int | None, temperature: float) -> None:
        """Set the fault ``draw``; ``limit`` is the most drafts per cycle, None for no limit."""
        super().__init__(engine.policy, engine.slots, engine.decoding)
        self.draw, self.limit, self.heat = draw, limit, temperature

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft a chain; see ``Drafter``."""
        hidden = self.hidden[: rows.batch]
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        count = length.limit if self.limit is None else min(self.limit, length.limit)
        for at in range(count):
            logits = self.policy.logits(hidden)
            own = rows.probs(logits[:, None])[:, 0]
            token, recorded = self.draw(Step(logits=logits, q=own, u=rows.uniforms[:, at], temperature=self.heat))
            tokens.append(token)
            if recorded is not None:
                probs.append(recorded)
            if at + 1 < count:
                hidden = self.step(rows, at, token, hidden)
        return Draft(tokens=torch.stack(tokens, 1), probs=torch.stack(probs, 1) if probs else None, forwards=count)


class PlantedRule:
    """Acceptance rule with a fault that claims to be exact."""

    exact, stepwise = True, True
    layers: tuple[int, ...] = ()
    counts: tuple[str, ...] = ()

    def __init__(self, rule: Rule, size: float, temperature: float, seed: int) -> None:
        """Set ``size``, the fault's strength if it has one, and ``seed`` of its own randomness."""
        self.rule, self.size, self.heat = rule, size, temperature
        self.numbers = torch.Generator().manual_seed(seed)

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """See ``AcceptanceRule``."""
        q = one_hot(draft.tokens, out.probs[:, :-1]) if draft.probs is None else draft.probs
        chain = Chain(
            tokens=draft.tokens,
            q=q,
            p=out.probs,
            u=uniforms,
            size=self.size,
            heat=self.heat,
            struck=torch.ones(rows.batch, dtype=torch.bool),
        )
        return Accepted.chain(draft, *self.rule(chain, self.numbers))


Made = tuple[Rule | None, Draw | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Parts to put into an engine; ``make`` is called once per engine, so that the parts may keep state."""

    make: Callable[[], Made]
    limit: int | None = None  # drafts of a cycle at most
    size: float = 1.0


def fault(rule: Rule | None = None, draw: Draw | None = None, limit: int | None = None, size: float = 1.0) -> Fault:
    """Return a fault whose parts keep no state."""
    return Fault(make=lambda: (rule, draw), limit=limit, size=size)


def shared_noise() -> Made:
    """Return a drafter that keeps its Gumbel noise, and a rule that draws the recovered token with it."""
    kept: list[Tensor] = []
    numbers = torch.Generator().manual_seed(NOISE_SEED)

    def draw(step: Step) -> tuple[Tensor, Tensor]:
        e = -torch.rand(step.q.shape, generator=numbers, dtype=torch.float64).clamp_min(1e-300).log()
        kept.append(e)
        return (step.q.double() / e).argmax(-1), step.q

    def rule(c: Chain, _: torch.Generator) -> Outcome:
        e = torch.stack(kept, 1)
        kept.clear()
        at = _tests(c).long().cumprod(1).sum(1).clamp(max=c.drafts - 1)
        own = e[torch.arange(len(at)), at]
        return verified(c, draw=lambda residual, u: (residual.double() / own).argmax(-1))

    return rule, draw


def stale_q() -> Made:
    """Return a rule that verifies with the q of the previous cycle."""
    return StaleQ(), None


@contextmanager
def planted(engine: TorchEngine, fault: Fault, temperature: float, seed: int) -> Iterator[TorchEngine]:
    """Put a fault into an engine that nobody else uses, and remove it afterwards."""
    decoder = engine.decoder
    assert isinstance(decoder, DraftVerify)
    before = decoder.rule, decoder.drafter, decoder.drafters
    rule, draw = fault.make()
    if rule is not None:
        decoder.rule = PlantedRule(rule, fault.size, temperature, seed)
    if draw is not None:
        drafter = PlantedDrafter(engine, draw, fault.limit, temperature)
        decoder.drafter, decoder.drafters = drafter, {"mtp": drafter}
    try:
        yield engine
    finally:
        decoder.rule, decoder.drafter, decoder.drafters = before


# ---- faults of the front: what is asked for, and what is said of it


class ResumedEngine(EmbeddedEngine):
    """Engine that decodes each request in two halves; the second follows the text of the first, with the same seed."""

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Return an ``Answer`` for each request, as if it had been decoded in one piece."""
        first = super().sample([_limited(one, one.params.max_new_tokens // 2) for one in requests], progress)
        left = [
            (i, dataclasses.replace(one, token_ids=(*one.token_ids, *map(int, half.token_ids))))
            for i, (one, half) in enumerate(zip(requests, first, strict=True))
            if half.finish_reason == "length"
        ]
        rest = super().sample(
            [_limited(one, one.params.max_new_tokens - one.params.max_new_tokens // 2) for _, one in left], progress
        )
        joined = list(first)
        for (i, _), second in zip(left, rest, strict=True):
            joined[i] = _joined(first[i], second)
        return [
            dataclasses.replace(one, limit=asked.params.max_new_tokens)
            for one, asked in zip(joined, requests, strict=True)
        ]


def _limited(request: Request, tokens: int) -> Request:
    return dataclasses.replace(request, params=dataclasses.replace(request.params, max_new_tokens=tokens))


def _joined(first: Answer, second: Answer) -> Answer:
    assert first.logprobs is not None and second.logprobs is not None
    return dataclasses.replace(
        first,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        finish_reason=second.finish_reason,
        cycles=None if first.cycles is None or second.cycles is None else (*first.cycles, *second.cycles),
        versions=None,
        accepted=first.accepted,
    )


class ShiftedReports(EmbeddedEngine):
    """Engine that reports, for the first token of a cycle, the log-prob of the token before it, from the last cycle."""

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Return an ``Answer`` for each request."""
        return [_shifted(answer) for answer in super().sample(requests, progress)]


def _shifted(answer: Answer) -> Answer:
    if answer.logprobs is None or answer.cycles is None:
        return answer
    starts = np.cumsum([0, *answer.cycles[:-1]])[1:]
    told = answer.logprobs.copy()
    told[starts] = answer.logprobs[starts - 1]
    return dataclasses.replace(answer, logprobs=told)


@contextmanager
def seeds_without_prefix() -> Iterator[None]:
    """Key uniforms only by the request's own token count, so that a resumed request repeats those of its beginning."""
    intact = Rows._uniforms

    def by_count(rows: Rows, seeds: Tensor) -> Tensor:
        return uniforms(seeds, rows.slots.count[: rows.batch], 2 * rows.slots.sizes.drafts + 2)

    Rows._uniforms = by_count  # type: ignore[method-assign]
    try:
        yield
    finally:
        Rows._uniforms = intact  # type: ignore[method-assign]
