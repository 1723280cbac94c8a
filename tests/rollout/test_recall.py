"""What rows have matched, against a search through all that was said; what they draft and learn of it, and trust."""

import dataclasses
from collections.abc import Sequence
from copy import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.metrics.metrics import values
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.history import BEGIN, ROOT, Automaton
from bebop.rollout.slots import Slots, SlotSizes
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.base import HEAD_OVERLAP, HEAD_READ
from bebop.systems.history.decoding import HistoryMTPDrafter, _Row
from bebop.systems.history.matching import (
    BUCKETS,
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
    Trusted,
    prior,
    trusted,
)
from bebop.trajectory import Completion, DecodeStats
from tests.builders import bare_policy, requests
from tests.cases import slow_but
from tests.rollout.driving import aborted, drafter_of, resumed, started, tokens
from tests.rollout.test_history import found, searched

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6], [1, 2, 3], [9], [1, 2, 3]]
PAST = {(1, 2, 3): [[5, 6, 7, 5, 6], [2, 2, 2]], (4, 5, 6): [[7, 7, 8]]}
SYSTEMS = ("history", "bebop_history")


def engine(system: str = "history", siblings: bool = True, slots: int = 3, **settings: object) -> TorchEngine:
    config = DecodingConfig(system=system, draft_tokens=4, verify_ratio=0.01, options={"siblings": siblings})
    policy = bare_policy(seed=3, dtype=torch.float64)
    one = TorchEngine(policy, config, slots=slots, max_length=64, room=4, **settings)  # type: ignore[arg-type]
    for prompt, answers in PAST.items():
        one.remember(prompt, answers)
    return one


def check(
    one: TorchEngine, said: dict[int, Completion], siblings: bool, counted: bool, read: dict[int, int], ended: set[int]
) -> int:
    """Each running row that has drafted has matched what a search finds; how many there are.

    ``counted``: how often tokens followed, too; a row that comes with tokens is not counted where they are known.
    ``read``: how much of each completion is known, and is updated here: while another system is in charge, nothing.
    ``ended``: completions that had ended before.
    """
    matches, begun = one.slots.caches["history"].of, one.slots.columns["history/begun"]
    read |= {r.id: matches[slot].read for slot, r in enumerate(one.active) if begun[slot]}
    if one.decoding.system in SYSTEMS:
        read |= {i: len(answer.token_ids) for i, answer in said.items() if i not in ended}
    ended.update(said)
    now = {r.id: one._context(slot)[len(r.token_ids) :] for slot, r in enumerate(one.active)}
    every = {**{i: a.token_ids.tolist() for i, a in said.items()}, **now}
    checked = 0
    for slot, request in enumerate(one.active):
        match = one.slots.caches["history"].of[slot]
        if not one.slots.columns["history/begun"][slot]:
            continue
        texts = [[BEGIN, *answer] for answer in PAST.get(request.token_ids, ())]
        if siblings:
            known = [i for i in every if i in read and tuple(PROMPTS[i]) == request.token_ids]
            texts += [[BEGIN, *every[i][: read[i]]] for i in known]
        (size, follow), (wanted, after) = (
            found(match.texts, match.state, match.tokens),
            searched(texts, [BEGIN, *now[request.id]]),
        )
        assert size == wanted and [token for token, _ in follow] == [token for token, _ in after]
        assert follow == after or not counted
        checked += 1
    return checked


@pytest.mark.parametrize("siblings", [True, False])
@pytest.mark.parametrize("system", slow_but(["history"], SYSTEMS))
def test_matches_are_those_of_a_search(system: str, siblings: bool) -> None:
    """Rows come, move and go; new weights; another system for a while, another drafter from history; an abort."""
    one, said, checked = engine(system, siblings, on_update="recompute"), dict[int, Completion](), 0
    read, ended = dict[int, int](), set[int]()
    asked = requests(PROMPTS, max_new_tokens=14, stop_token_ids=(11,), seed=4)
    started(one, asked)
    other = SYSTEMS[system == "history"]
    changes = {
        8: lambda: one.configure(DecodingConfig(system="bebop", draft_tokens=2)),
        10: lambda: one.configure(dataclasses.replace(one.decoding, system=other, options={"siblings": siblings})),
        11: lambda: one.load_weights({n: w.detach() * 1.01 for n, w in one.policy.weights().items()}, 1),
        13: lambda: one.configure(DecodingConfig(system=system, draft_tokens=4, options={"siblings": siblings})),
    }
    for turn in range(60):
        changes.get(turn, lambda: None)()
        said |= {f.id: f.completion for f in one.step()}
        checked += check(one, said, siblings, turn < 8, read, ended)
        if turn == 15:
            parts = aborted(one)
            started(one, resumed([request for request in asked if request.id in parts], parts))
    assert len(said) == len(PROMPTS) and checked > 30


def test_rows_that_share_a_context_keep_their_own_prompts() -> None:
    """What is a completion to one is prompt to the other, and new weights are read through one of them for both."""
    one = TorchEngine(
        bare_policy(seed=3, dtype=torch.float64),
        DecodingConfig(system="history", draft_tokens=4, options={"siblings": False}),
        slots=2, max_length=64, on_update="recompute",
    )  # fmt: skip
    [token] = generate(one, requests([[1, 2, 3]], temperature=0.0, max_new_tokens=1))[0].token_ids.tolist()
    first, second = requests([[1, 2, 3], [1, 2, 3, token]], temperature=0.0, max_new_tokens=20)
    started(one, [first], 1)  # nothing is known, so it is a token a cycle
    started(one, [second], 1)
    assert one._context(0) == one._context(1)
    one.load_weights(one.policy.weights(), 1)
    one.step()
    matches = one.slots.caches["history"].of
    assert [match.texts for match in matches] == [one.slots.history.of(r.token_ids) for r in (first, second)]
    assert [match.read for match in matches] == [3, 2]


@pytest.mark.slow
def test_completions_with_and_without_the_others() -> None:
    """Alone with the past a completion is the same in any company; beside siblings it is drafted otherwise."""

    def counts(siblings: bool, slots: int) -> list[tuple[list[int], int]]:
        answers = generate(engine("bebop_history", siblings, slots), requests(PROMPTS[:5], max_new_tokens=16))
        return [(answer.token_ids.tolist(), answer.stats.cycles) for answer in answers]

    assert counts(False, 1) == counts(False, 3)
    assert counts(True, 3) != counts(False, 3)


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_was_said_before_is_drafted_and_counted_by_its_source(system: str) -> None:
    """Greedy completions that were told: nearly all drafts are history's, and stand."""
    asked = requests([[1, 2, 3], [4, 5, 6, 7]], temperature=0.0, max_new_tokens=40)
    plain = TorchEngine(bare_policy(seed=3, dtype=torch.float64), DecodingConfig(), slots=2, max_length=64)
    answers = generate(plain, asked)
    one = engine(system, siblings=False)
    for request, answer in zip(asked, answers, strict=True):
        one.remember(request.token_ids, [answer.token_ids])
    again = generate(one, asked)
    assert tokens(again) == tokens(answers)
    stats = sum((a.stats for a in again), DecodeStats())
    history, kept = stats.counts["history"], stats.counts["history_accepted"]
    assert stats.accept_length > 3 and history.sum() > 0.9 * stats.reached.sum()
    assert (kept <= history).all() and (kept <= stats.accepted).all() and kept.sum() > 0.9 * history.sum()
    assert system == "bebop_history" or stats.draft_forwards == 0


def test_the_overlap_of_the_head_alone_is_that_of_plain_drafts() -> None:
    """Whatever history adds to the mixture: of first drafts, a forward pass over the whole text gives the same."""
    asked = requests(PROMPTS[:3], max_new_tokens=24, seed=2)
    policy, found = bare_policy(seed=3, dtype=torch.float64), []
    one = engine("bebop_history")

    def observe(rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted, emitted: Tensor) -> None:
        """What the head's own state says at the newest token, against the target there."""
        own = rows.probs(policy.logits(one.slots.columns["mtp/hidden"][: rows.batch])[:, None])[:, 0]
        if draft.head is not None:
            found.extend(torch.minimum(own, out.probs[:, 0]).sum(-1).tolist())

    one.decoder.observers.append(observe)
    answers = generate(one, asked)
    stats = sum((a.stats for a in answers), DecodeStats())
    overlap = stats.counts[HEAD_OVERLAP]
    read = stats.counts[HEAD_READ]
    assert overlap[0] == pytest.approx(sum(found)) and not overlap[1:].any()
    assert read.tolist() == [len(found), 0, 0, 0] and found
    assert abs(overlap[0] - stats.overlap[0]) > 0.01 * stats.cycles, "the mixture's is another"
    logged = values(decode_metrics(stats))
    assert logged["rollout/head_overlap/1"] == pytest.approx(overlap[0] / len(found))
    assert (
        "rollout/head_overlap/2" not in logged and "rollout/head_read/1" not in logged and "rollout/history/2" in logged
    )
    known = {
        HEAD_OVERLAP: np.array([1.5, 0.0]),
        HEAD_READ: np.array([3.0, 0.0]),
    }  # of four cycles, three asked the head
    some = DecodeStats(cycles=4, tokens=8, reached=np.array([4.0, 4.0]), counts=known)
    assert values(decode_metrics(some))["rollout/head_overlap/1"] == 0.5
    blind = engine("bebop_history", measure=False)
    assert not any(a.stats.counts[HEAD_OVERLAP].any() for a in generate(blind, asked))


def test_the_head_is_left_out_once_history_is_sure() -> None:
    """And costs a pass a draft where it is not asked again."""
    asked = requests([[1, 2, 3]], temperature=0.0, max_new_tokens=40)
    [answer] = generate(engine("bebop_history", siblings=False), asked)
    one = engine("bebop_history", siblings=False)
    one.remember([1, 2, 3], [answer.token_ids] * 4)
    [again] = generate(one, asked)
    sure, unsure = (a.stats.draft_forwards / (a.stats.reached.sum()) for a in (again, answer))
    assert sure < 0.5 < unsure
    asked_in = [a.stats.counts[HEAD_READ].sum() / a.stats.cycles for a in (again, answer)]
    assert asked_in[0] < 0.3 < 0.7 < asked_in[1], "nothing of the head is known where it is not asked"


ONE = Trusted(share=[0.0] * BUCKETS, alone=[0.0] * BUCKETS, gain=[1.0] * BUCKETS)  # the head adds a token


@pytest.mark.parametrize(("siblings", "headed"), [(True, [False] * 4), (False, [True, False, False, False])])
def test_rows_earn_a_pass_of_the_head_together(siblings: bool, headed: list[bool]) -> None:
    """A token that one of four rows may gain is worth its own share of the pass, and not all of it."""
    one = engine("bebop_history", siblings, slots=4)
    drafter = drafter_of(one, HistoryMTPDrafter)

    def going_on(chances: list[float]) -> list[bool]:
        lines = [
            _Row(match=SuffixMatch(Automaton()), trusted=ONE, pace=2.0, greedy=False, limit=4, chance=chance)
            for chance in chances
        ]
        drafter._found(lines, 1, Followers(), [[0.0] * 4] * 4)
        return [line.alive for line in lines]

    cost = 2.0 * drafter.matching.costs.draft
    assert going_on([1.5 * cost, 0.0, 0.0, 0.0]) == headed
    assert going_on([1.5 * cost] * 4) == [True] * 4 and going_on([0.9 * cost] * 4) == [False] * 4


def test_an_engine_without_such_drafts_takes_past_completions_and_does_nothing() -> None:
    one = TorchEngine(bare_policy(seed=3), DecodingConfig(draft_tokens=2), slots=2, max_length=64)
    plain = tokens(generate(one, requests(PROMPTS[:3], max_new_tokens=9)))
    one.remember([1, 2, 3], [np.array([5, 6, 7])])
    assert tokens(generate(one, requests(PROMPTS[:3], max_new_tokens=9))) == plain


# ---- one loop that draws

DRAFTS = 12


def step_by_step(
    followers: Followers, row: int, step: int, match: SuffixMatch, trust: list[float], uniforms: list[float], *,
    greedy: bool, chance: float, least: float, always: bool,
) -> list[int]:  # fmt: skip
    """``Followers.go_on`` as its docstring says it."""
    drawn: list[int] = []
    for uniform in uniforms:
        found = Next.of(match, greedy)
        if found is None:
            break
        chance *= trust[found.bucket]
        if chance <= least and (drawn or not always):
            break
        followers.add(row, step + len(drawn), found, 1.0)
        drawn.append(found.draw(uniform))
        match.advance(drawn[-1])
    return drawn


def test_one_loop_draws_what_single_steps_do() -> None:
    """Of random completions of few words, so that matches end, split and start again, and of likely and doubtful."""
    rng = np.random.default_rng(0)
    lengths, several = [], 0
    for _ in range(300):
        texts, words = Automaton(), int(rng.integers(2, 6))
        common = rng.integers(0, words, 20)
        for _ in range(int(rng.integers(1, 6))):
            said = np.where(rng.random(20) < 0.8, common, rng.integers(0, words, 20))
            state = ROOT
            for token in (BEGIN, *said[: int(rng.integers(1, 20))].tolist()):
                state = texts.append(state, token)
        match = SuffixMatch(texts)
        for token in common[: int(rng.integers(0, 10))].tolist():
            match.advance(token)
        trust, uniforms = rng.uniform(0.6, 1.0, BUCKETS).tolist(), rng.random(DRAFTS).tolist()
        how = {
            "greedy": bool(rng.random() < 0.3),
            "chance": float(rng.uniform(0.3, 1.0)),
            "least": float(rng.choice([0.0, 0.2, 0.9])),
            "always": bool(rng.random() < 0.5),
        }
        one, other = copy(match), copy(match)
        found, wanted = Followers(), Followers()
        drawn = found.go_on(3, 2, one, trust, uniforms, **how)
        assert drawn == step_by_step(wanted, 3, 2, other, trust, uniforms, **how)
        assert found.places == wanted.places and found.chances == wanted.chances
        assert Next.of(one, False) == Next.of(other, False)  # both have read as far
        lengths.append(len(drawn))
        several += len(found.places) > len(drawn)
    assert min(lengths) == 0 and max(lengths) == DRAFTS and several > 30


# ---- what is learned, and then trusted


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
