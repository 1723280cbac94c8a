"""Draft lengths: fixed, and drafting on while the draft's entropy makes it worth while."""

from typing import Any

import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.rollout.decoding.base import Accepted, Draft
from bebop.rollout.decoding.lengths import EntropyLength, FixedLength
from bebop.rollout.slots import Slots, SlotSizes
from bebop.systems.block.decoding import EmaLength


def policy(limit: int = 4, draft_cost: float = 0.15, verify_cost: float = 0.05, slots: int = 5) -> EntropyLength:
    made = Slots(SlotSizes(slots=slots, length=8, drafts=limit, vocab=2), torch.device("cpu"))
    config = DecodingConfig(draft_tokens=limit, cost_ratio=draft_cost, verify_ratio=verify_cost)
    return EntropyLength(None, made, config)  # type: ignore[arg-type]


def observed(entropies: list[list[float]], accepted: list[int], lengths: list[int] | None = None) -> tuple[Any, ...]:
    """A cycle in which the drafts had these entropies [B, K] and so many were accepted [B], as ``observe`` takes it."""
    e = torch.tensor(entropies)
    tokens = torch.zeros(e.shape, dtype=torch.long)
    draft = Draft(
        tokens=tokens,
        probs=torch.ones(*e.shape, 1),
        entropies=e,
        lengths=None if lengths is None else torch.tensor(lengths),
    )
    return None, draft, None, Accepted.chain(draft, torch.tensor(accepted), tokens[:, 0])


def test_a_fixed_length_never_asks() -> None:
    fixed = FixedLength(None, None, DecodingConfig(draft_tokens=3))  # type: ignore[arg-type]
    assert fixed.limit == 3
    assert all(fixed.extend(step, torch.full((2, step + 1), 9.0)) is None for step in range(3))
    fixed.observe(*observed([[0.1, 0.1, 0.1]], [0]))
    assert fixed.limit == 3


def test_the_first_draft_is_always_made() -> None:
    dear = policy(draft_cost=50.0)
    assert dear.extend(0, torch.tensor([[0.0], [5.0]])).tolist() == [True, True]
    assert dear.extend(1, torch.tensor([[0.0, 0.0], [5.0, 5.0]])).tolist() == [False, False]


def test_goes_on_at_low_entropy_and_stops_at_high() -> None:
    assert policy().extend(1, torch.tensor([[0.01, 0.01], [0.01, 3.0], [3.0, 0.01], [3.0, 3.0]])).tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_the_chance_is_that_of_the_whole_chain() -> None:
    """Prior acceptance at 0.3 nats is about 0.82: one such draft is worth it, six are not."""
    chain = policy(limit=8)
    rates = [bool(chain.extend(step, torch.full((1, step + 1), 0.3))) for step in range(8)]
    first_no = rates.index(False)
    assert 1 < first_no < 8 and rates == [True] * first_no + [False] * (8 - first_no)
    acceptance = float(torch.exp(torch.tensor(-0.7 * (0.2 * 0.4) ** 0.5)))
    rate = 2.0 / (1 + 0.15 + 0.05)
    expected = next(n for n in range(1, 9) if acceptance ** (n + 1) <= rate * 0.2)
    assert first_no == expected


def test_dearer_drafts_are_shorter() -> None:
    lengths = []
    for cost in (0.01, 0.1, 0.3, 1.0):
        chain = policy(limit=16, draft_cost=cost, verify_cost=0.0)
        lengths.append(sum(bool(chain.extend(s, torch.full((1, s + 1), 0.5))) for s in range(16)))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1] == 1


def test_learns_what_was_accepted() -> None:
    """Entropy of 2 nats always accepted, of 0.03 always rejected: afterwards it decides the other way round."""
    chain = policy(limit=2)
    high, low = torch.tensor([[2.0, 2.0]]), torch.tensor([[0.03, 0.03]])
    assert not chain.extend(1, high) and chain.extend(1, low)
    for _ in range(300):
        chain.observe(*observed([[2.0, 2.0]], [2]))
        chain.observe(*observed([[0.03, 0.03]], [0]))
    assert chain.extend(1, high) and not chain.extend(1, low)


def test_each_request_learns_for_itself() -> None:
    """What the rows beside it saw leaves a row's decisions as they were, to the bit."""
    chain, alone = policy(limit=2), policy(limit=2)
    for _ in range(50):
        chain.observe(*observed([[0.3, 0.3], [0.3, 0.3], [2.0, 0.1]], [2, 0, 1]))
        alone.observe(*observed([[0.3, 0.3]], [2]))
    asked = torch.tensor([[0.3, 0.3]])
    assert chain.extend(1, asked.repeat(3, 1)).tolist() == [True, False, True]
    for column in ("tested", "passed", "rate"):
        assert torch.equal(getattr(chain, column)[0], getattr(alone, column)[0])
        assert torch.equal(getattr(chain, column)[4], getattr(policy(limit=2), column)[4]), "a row without a request"


def test_counts_only_drafts_that_were_tested() -> None:
    chain = policy(limit=3)
    tested, passed = chain.tested.clone(), chain.passed.clone()
    # Row 0: one of three accepted, so two were tested. Row 1: drafted one token, accepted; nothing else was tested.
    chain.observe(*observed([[0.01, 0.3, 0.6], [0.15, 0.15, 0.15]], [1, 1], lengths=[3, 1]))
    new_tested, new_passed = (chain.tested - tested)[:2], (chain.passed - passed)[:2]
    assert new_tested.tolist() == [[1, 0, 0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]]
    assert new_passed[0].tolist() == pytest.approx([1, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    assert new_passed[1].tolist() == pytest.approx([0, 0, 0, 1, 0, 0, 0, 0, 0, 0])


@pytest.mark.slow
def test_the_rate_follows_tokens_and_time() -> None:
    chain = policy(limit=3)
    for _ in range(4_000):  # 3 tokens in 1 + 2 * 0.2 steps, again and again; the start fades
        chain.observe(*observed([[0.1, 0.1]], [2]))
    emitted, spent = chain.rate[0].tolist()
    assert emitted / spent == pytest.approx(3 / 1.4, rel=1e-3)
    assert emitted == pytest.approx(3000, rel=0.02)  # the memory of a thousand cycles


def test_a_threshold_on_what_was_drawn_would_not_do() -> None:
    """The rule takes distributions only: rows with equal entropies decide alike, whatever tokens will be drawn."""
    same = torch.tensor([[0.2, 0.7]]).repeat(5, 1)
    assert len(set(policy().extend(1, same).tolist())) == 1


# ---- from what was accepted lately


class Batch:
    """The two rows of a cycle, as far as a length asks for them."""

    batch = 2


def ema(verify_cost: float = 0.05, decay: float = 0.5) -> EmaLength:
    made = Slots(SlotSizes(slots=2, length=8, drafts=8, vocab=2), torch.device("cpu"))
    options = {"system": "block_ema", "draft_tokens": 8, "options": {"decay": decay}}
    return EmaLength(None, made, DecodingConfig(**options, cost_ratio=0.15, verify_ratio=verify_cost))  # type: ignore[arg-type]


def after(length: EmaLength, accepted: list[int], drafted: list[int], cycles: int = 20) -> list[int]:
    """Drafts wanted after so many cycles that were alike."""
    for _ in range(cycles):
        _, draft, _, told = observed([[0.0] * 8] * 2, accepted, drafted)
        length.observe(Batch(), draft, None, told)  # type: ignore[arg-type]
    wanted = length.start(Batch())  # type: ignore[arg-type]
    assert wanted is not None
    return wanted.tolist()


def test_blocks_grow_where_drafts_are_accepted_and_shrink_where_not() -> None:
    """A row of which nothing is ever accepted drafts one token, one of which everything is drafts all it may."""
    assert after(ema(), [8, 0], [8, 8]) == [8, 1]
    assert after(ema(), [1, 1], [1, 4]) == [8, 3], "one of one is all; one of two tested is a half"


def test_the_size_is_that_of_most_tokens_per_time() -> None:
    """By hand at rate 1/2: tokens 1.5, 1.75, 1.875, 1.9375 over times 1.15 + K v: K = 2 at v = .1, 4 at .02."""
    for verify, wanted in ((0.1, 2), (0.02, 4)):
        gains = [(2 - 0.5**k) / (1.15 + k * verify) for k in range(1, 9)]
        assert gains.index(max(gains)) + 1 == wanted
        assert after(ema(verify), [1, 1], [8, 8]) == [wanted, wanted]


def test_what_is_long_ago_fades_and_rows_learn_for_themselves() -> None:
    one = ema()
    assert after(one, [8, 0], [8, 8]) == [8, 1]
    assert after(one, [0, 8], [8, 8]) == [1, 8]
    lasting = ema(decay=0.99)
    assert after(lasting, [8, 0], [8, 8], 40)[0] == 8
    assert after(lasting, [0, 8], [8, 8], 2)[0] > 1, "two cycles in forty"
