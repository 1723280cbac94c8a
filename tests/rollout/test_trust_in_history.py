"""What drafters from history learn of their matches, and what they then trust in."""

from collections.abc import Sequence

import pytest
import torch

from bebop.config import DecodingConfig
from bebop.rollout.decoding.base import Rows, TargetOutput
from bebop.rollout.history import BEGIN, ROOT, Automaton
from bebop.rollout.slots import Slots, SlotSizes
from bebop.systems.history.matching import (
    DOUBT,
    HEAD,
    KINDS,
    NONE,
    PRIOR,
    SEVERAL,
    Cycle,
    Followers,
    HeadProbs,
    MatchState,
    Next,
    SuffixMatch,
    prior,
    trusted,
)


def recall(slots: int = 2, siblings: bool = False) -> tuple[MatchState, Rows]:
    """And rows, each of which has a match."""
    made = Slots(SlotSizes(slots=slots, length=8, drafts=2, vocab=4), torch.device("cpu"))
    config = DecodingConfig(system="history", draft_tokens=2, options={"siblings": siblings})
    one, rows = MatchState(made, config), Rows(made, slots, 1)
    one.ahead(rows)
    return one, rows


def after(matched: int, counts: Sequence[int], greedy: bool = False) -> Next:
    """What a match of so many tokens finds, after which tokens 0, 1, ... came so often."""
    texts = Automaton()
    for token, count in enumerate(counts):
        for _ in range(count):
            state = ROOT
            for said in (BEGIN, *[9] * matched, token):
                state = texts.append(state, said)
    match = SuffixMatch(texts)
    for said in [9] * matched:
        match.advance(said)
    found = Next.of(match, greedy)
    assert found is not None and match.tokens == matched
    return found


def test_longer_matches_and_more_followers_are_trusted_more() -> None:
    """Several tokens after a match are a kind of their own, trusted less."""
    by_length = [after(matched, [1]).bucket for matched in (1, 2, 3, 4, 5, 8, 9, 16, 17, 40)]
    assert by_length == [KINDS * place for place in (0, 1, 2, 2, 3, 3, 4, 4, 5, 5)]
    assert [after(2, counts).bucket - KINDS for counts in ([1], [2], [3], [5])] == [0, 1, 2, 2]
    assert [after(2, counts).bucket - KINDS for counts in ([1, 1], [2, 1], [5, 5])] == [3, 3, 3]
    [begun] = trusted(prior()[None])
    alone = torch.tensor(begun.alone[:NONE]).reshape(-1, KINDS)
    assert ((alone > 0) & (alone < 1)).all() and begun.alone[NONE] == begun.share[NONE] == 0
    assert (alone.diff(dim=0) > 0).all() and (alone[:, :3].diff(dim=1) > 0).all()
    assert torch.allclose(alone[:, 3], SEVERAL * alone[:, 0]) and alone[0, 0] == pytest.approx(1 / (1 + DOUBT))


def test_history_is_mixed_in_where_overlaps_were_largest() -> None:
    """Three buckets: history is better, the head is, their mean is. A draft that stands lets as many more follow."""
    sums = prior()[None].repeat(2, 1, 1)
    sums[0, 0], sums[0, 1], sums[0, 2] = (
        torch.tensor([alone, both, head, 10.0, 20.0, 0.0, 0.0])
        for alone, both, head in ((9.0, 15.0, 14.0), (2.0, 9.0, 14.0), (5.0, 16.0, 14.0))
    )
    sums[0, :, 5], sums[0, :, 6] = 2.0, 3.0
    found, other = trusted(sums)
    assert found.share[:3] == [1.0, 0.0, 0.5] and found.alone[:3] == [0.9, 0.2, 0.5]
    assert found.gain[:3] == pytest.approx([0.0, 2.5 * (0.7 - 0.2), 2.5 * (0.8 - 0.5)])
    assert other == trusted(prior()[None])[0] and other.gain[NONE] == pytest.approx(2 * HEAD)


def test_drafts_are_drawn_as_often_as_tokens_followed() -> None:
    """The most frequent one alone where the target is greedy."""
    found, greedy = after(3, [1, 0, 3]), after(3, [1, 0, 3], greedy=True)
    assert found.tokens == (0, 2) and found.chances == (0.25, 0.75)
    assert greedy.tokens == (2,) and greedy.chances == (1.0,) and greedy.bucket == found.bucket


def test_draws_invert_the_distribution_of_what_followed() -> None:
    found = Next(tokens=(2, 5, 7), chances=(0.5, 0.25, 0.25), bucket=0)
    assert [found.draw(u) for u in (0.0, 0.499, 0.5, 0.74, 0.75, 0.999999)] == [2, 2, 5, 5, 7, 7]


H, M, P = [0.0, 0.75, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25], [0.2, 0.4, 0.4, 0.0]  # history, head, target


def seen(one: MatchState, rows: Rows, emitted: Sequence[int], at: int = 0) -> None:
    """A cycle of two drafts in a row, with the head asked for both; the first had a match, whose weight was 1."""
    followers = Followers()
    followers.add(at, 0, Next(tokens=(1, 2), chances=(0.75, 0.25), bucket=4), 1.0)
    head = HeadProbs(probs=torch.tensor(M).repeat(rows.batch, 2, 1), places=[(at, 0, 4), (at, 1, NONE)])
    one.drafted = Cycle(followers=followers, lengths=torch.tensor([2] * rows.batch), passes=0.5, head=head)
    p = torch.tensor(P).repeat(rows.batch, 3, 1)
    one.learn(rows, TargetOutput(hidden=p, logits=p, probs=p), torch.tensor(emitted))


def test_trust_follows_overlaps_with_the_target() -> None:
    """Worked by hand, of what was reached: history's, the head's and their mean's, whatever the mixture was."""
    one, rows = recall()
    before, pace = one.overlaps.sums(one._texts(rows)).clone(), one.rate.clone()
    seen(one, rows, [1, 1])
    change = one.overlaps.sums(one._texts(rows)) - before
    alone, head = 0.4 + 0.25, 0.2 + 0.25 + 0.25
    both = 0.125 + 0.4 + 0.25
    assert change[0, 4].tolist() == pytest.approx([alone, both, head, 1.0, 1.0, 0.0, 0.0])
    change[0, 4] = 0
    assert not change.any(), "of the second draft, which was not reached, nothing"
    time = 1 + 0.5 * one.costs.draft + 2 * one.costs.verify
    assert torch.allclose(one.rate, 0.999 * pace + torch.tensor([1.0, time], dtype=torch.float64))
    assert one.drafted is None and before[0, 0, 3] == PRIOR
    seen(one, rows, [3, 1])  # both stood, and nothing is known of what came after the second
    change = one.overlaps.sums(one._texts(rows)) - before
    assert change[0, 4].tolist() == pytest.approx([2 * alone, 2 * both, 2 * head, 2.0, 2.0, 1.0, 1.0])
    assert change[0, NONE].tolist() == pytest.approx([0.0, 3 * 0.125, head, 0.0, 1.0, 1.0, 0.0])


def test_rows_of_a_prompt_learn_together_where_siblings_count() -> None:
    """Those of another prompt do not; and each for itself where siblings do not count."""
    for siblings in (True, False):
        one, rows = recall(3, siblings)
        one.matches.of[2] = SuffixMatch(Automaton())
        seen(one, rows, [2, 1, 1])
        sums = one.overlaps.sums(one._texts(rows))
        assert not torch.equal(sums[0], prior()) and torch.equal(sums[2], prior())
        assert torch.equal(sums[0], sums[1]) == siblings
        seen(one, rows, [1, 1, 2], at=2)
        assert torch.equal(one.overlaps.sums(one._texts(rows))[2], sums[0])
        assert torch.equal(one.overlaps.sums(one._texts(rows))[0], sums[0])
