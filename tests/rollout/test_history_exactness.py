"""Drafts from history leave the output distribution as it is, whatever history says; and faults that must be seen."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.kernels.verify import sample
from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, DraftLength, Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.drafters.history import HistoryDrafter
from bebop.rollout.decoding.drafters.history_mtp import HistoryMTPDrafter
from bebop.rollout.decoding.matching import Followers, Next
from bebop.rollout.decoding.recall import Cycle, Recall
from bebop.rollout.decoding.trust import BUCKETS, Trusted
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.goodness_of_fit import p_value
from tests.rollout.test_exactness import DRAWS, LEVEL, PROMPTS, TOKENS, VOCAB, exact_distribution

SYSTEMS = ("history", "bebop_history")
TELLING = ("overlapping", "misleading")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(VOCAB, seed=11, sharp=16.0)


def told(expected: np.ndarray, how: str) -> list[tuple[int, ...]]:
    """Past answers: twelve that the policy gives, or two each of its least likely ones."""
    if how == "overlapping":
        chosen = np.random.default_rng(0).choice(expected.size, 12, p=expected.ravel() / expected.sum())
    else:
        chosen = np.repeat(expected.ravel().argsort()[:6], 2)
    return [tuple(int(i) for i in np.unravel_index(place, expected.shape)) for place in chosen]


def smallest_p(
    policy: Policy,
    system: str,
    how: str,
    temperature: float = 1.0,
    siblings: bool = False,
    fault: type | None = None,
    auto: bool = False,
) -> float:
    """As in ``test_exactness``, of an engine that was told of past answers; ``fault``: a drafter in the place of its
    own; ``auto``: as many drafts in each row as pay by a clock that says anything."""
    config = DecodingConfig(
        system=system,
        draft_tokens="auto" if auto else 3,
        most_drafts=3,
        verify_ratio=0.0,
        cost_ratio=0.0,
        options={"siblings": siblings},
    )
    values, seconds = [], np.random.default_rng(0).lognormal(-3.0, 2.0, size=100_000).cumsum().tolist()
    for prompt in PROMPTS[:1]:
        engine = TorchEngine(policy, config, slots=1000, max_length=16, clock=iter(seconds).__next__)
        assert isinstance(engine.decoder, DraftVerify)
        if fault is not None:
            engine.decoder.drafter = fault(policy, engine.slots, config)
            engine.decoder.drafters = {"fault": engine.decoder.drafter}
        expected = exact_distribution(policy, prompt, temperature)
        engine.remember(prompt, told(expected, how))
        asked = requests([prompt] * DRAWS, temperature=temperature, max_new_tokens=TOKENS + 2)
        answers = generate(engine, asked)
        reached, accepted, history = (
            sum(part.sum() for part in parts)
            for parts in zip(
                *((a.stats.reached, a.stats.accepted, a.stats.counts["history"]) for a in answers), strict=True
            )
        )
        # What misleads is left out of a mixture soon.
        least = 0.05 if how == "overlapping" or system == "history" else 0.0
        assert reached > (0.2 if auto else 1) * DRAWS and accepted > (0.1 * reached if how == "overlapping" else 0), (
            "nothing is tested"
        )
        assert history >= least * reached, "nothing is tested"
        counts = np.zeros((VOCAB,) * TOKENS)
        for tokens, count in Counter(tuple(a.token_ids[:TOKENS].tolist()) for a in answers).items():
            counts[tokens] = count
        axes = [tuple(a for a in range(TOKENS) if a != axis) for axis in range(TOKENS)]
        values += [p_value(counts, expected)]
        values += [p_value(counts.sum(others), expected.sum(others)) for others in axes]
    return min(values) * len(values)


def half(_: Recall, rows: Rows) -> list[Trusted]:
    """Every draft is of the mean of history and head, whatever was learned."""
    return [Trusted(share=[0.5] * BUCKETS, alone=[0.5] * BUCKETS, gain=[1.0] * BUCKETS)] * rows.batch


@pytest.mark.parametrize("how", slow_but(["overlapping"], TELLING))
def test_the_output_distribution_of_mixtures_is_the_target(
    policy: Policy, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recall, "trusted", half)
    assert smallest_p(policy, "bebop_history", how) > LEVEL


@pytest.mark.parametrize("how", slow_but(["misleading"], TELLING))
@pytest.mark.parametrize(
    ("system", "temperature", "siblings"),
    [
        ("history", 1.0, False),
        pytest.param("bebop_history", 1.0, False, marks=pytest.mark.slow),
        ("bebop_history", 0.7, True),
    ],
)
def test_the_output_distribution_is_the_target(
    policy: Policy, system: str, temperature: float, siblings: bool, how: str
) -> None:
    assert smallest_p(policy, system, how, temperature, siblings) > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_output_distribution_is_the_target_with_as_many_drafts_as_pay(policy: Policy, system: str) -> None:
    assert smallest_p(policy, system, "overlapping", auto=True) > LEVEL


class HeadReported(HistoryMTPDrafter):
    """Draws from the mixture, and hands the head's own distribution to verification."""

    def _draft(self, rows: Rows, lines: Any, followers: Followers, *given: Any) -> Draft:
        draft, head = super()._draft(rows, lines, followers, *given), given[-1]
        if draft.probs is None or head is None:
            return draft
        probs = draft.probs.clone()
        for row, line in enumerate(lines):
            probs[row, : line.headed] = head.probs[row, : line.headed]
        return Draft(tokens=draft.tokens, probs=probs, lengths=draft.lengths, sources=draft.sources)


class Peeking(HistoryMTPDrafter):
    """Draws from history and from the head with one number, and gives w = 1 to the one whose token the target likes
    better: a w that knows the target at the position being drafted, and what would come of it."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        self.catch_up(rows)
        uniforms, lines = rows.uniforms[:, 0], self.recall.ahead(rows)
        own = rows.probs(self.policy.logits(self.hidden[: rows.batch])[:, None])[:, 0]
        past = own.clone()
        found = [Next.of(line, greedy=False) for line in lines]
        for row, one in enumerate(found):
            if one is not None:
                past[row] = torch.zeros(VOCAB).index_put((torch.tensor(one.tokens),), torch.tensor(one.chances))
        target = self.target(rows)
        tokens = torch.stack([sample(probs, uniforms) for probs in (own, past)], 1)  # [B, 2]
        better = target.gather(1, tokens).argmax(1)
        probs = torch.where((better == 1)[:, None], past, own)[:, None]
        lengths = torch.ones_like(better)
        self.recall.drafted = Cycle(followers=Followers(), lengths=lengths, passes=1.0)
        chosen = tokens.gather(1, better[:, None])
        return Draft(tokens=chosen, probs=probs, sources={"history": better[:, None].float()})

    def target(self, rows: Rows) -> Tensor:
        """p [B, V] at the position that is being drafted, by a pass over the whole context."""
        sizes = rows.sizes
        ids = torch.cat([line[:size] for line, size in zip(rows.context(), sizes.tolist(), strict=True)])
        places = torch.cat([torch.arange(size) for size in sizes.tolist()])
        hidden = self.policy.hidden(ids[None], places[None], PackedContext(sizes))
        return rows.probs(self.policy.logits(hidden)[0, sizes.cumsum(0) - 1][:, None])[:, 0]


@pytest.mark.parametrize("fault", slow_but([HeadReported], [HeadReported, Peeking]))
def test_broken_mixtures_are_caught(policy: Policy, fault: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recall, "trusted", half)
    assert smallest_p(policy, "bebop_history", "overlapping", fault=fault) < LEVEL / 100


def test_a_mixture_that_is_not_the_one_drawn_from_is_caught(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of history alone: what is handed to verification is flatter than what was drawn from."""
    propose = HistoryDrafter.propose

    def flatter(self: HistoryDrafter, rows: Rows, length: DraftLength) -> Draft:
        draft = propose(self, rows, length)
        probs = None if draft.probs is None else 0.5 * draft.probs + 0.5 / VOCAB
        return Draft(tokens=draft.tokens, probs=probs, lengths=draft.lengths, sources=draft.sources)

    monkeypatch.setattr(HistoryDrafter, "propose", flatter)
    assert smallest_p(policy, "history", "overlapping") < LEVEL / 100
