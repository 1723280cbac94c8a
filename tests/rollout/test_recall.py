"""What rows have matched, wherever they go, against a search through all that was said; and what they learn of it."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.metrics import values
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.history import BEGIN, Automaton
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.base import HEAD_OVERLAP, HEAD_READ
from bebop.systems.history.decoding import HistoryMTPDrafter, _Row
from bebop.systems.history.matching import BUCKETS, Followers, SuffixMatch, Trusted
from bebop.trajectory import Completion, DecodeStats
from tests.builders import bare_policy, requests
from tests.cases import slow_but
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
    ``read``: how much of each answer is known, and is kept up to date here: while another system is in charge, nothing.
    ``ended``: answers that had ended before.
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
    for request in asked:
        one.add(request)
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
            parts = {f.id: f.completion for f in one.abort()}
            for request in asked:
                if request.id in parts:
                    one.add(dataclasses.replace(request, partial=parts[request.id]))
    assert len(said) == len(PROMPTS) and checked > 30


def test_rows_that_share_a_context_keep_their_own_prompts() -> None:
    """What is answer to one is prompt to the other, and new weights are read through one of them for both."""
    one = TorchEngine(
        bare_policy(seed=3, dtype=torch.float64),
        DecodingConfig(system="history", draft_tokens=4, options={"siblings": False}),
        slots=2, max_length=64, on_update="recompute",
    )  # fmt: skip
    [token] = generate(one, requests([[1, 2, 3]], temperature=0.0, max_new_tokens=1))[0].token_ids.tolist()
    first, second = requests([[1, 2, 3], [1, 2, 3, token]], temperature=0.0, max_new_tokens=20)
    one.add(first)
    one.step()  # nothing is known, so it is a token a cycle
    one.add(second)
    one.step()
    assert one._context(0) == one._context(1)
    one.load_weights(one.policy.weights(), 1)
    one.step()
    matches = one.slots.caches["history"].of
    assert [match.texts for match in matches] == [one.slots.history.of(r.token_ids) for r in (first, second)]
    assert [match.read for match in matches] == [3, 2]


@pytest.mark.slow
def test_answers_with_and_without_the_others() -> None:
    """Alone with the past an answer is the same in any company; beside siblings it is drafted otherwise."""

    def counts(siblings: bool, slots: int) -> list[tuple[list[int], int]]:
        answers = generate(engine("bebop_history", siblings, slots), requests(PROMPTS[:5], max_new_tokens=16))
        return [(answer.token_ids.tolist(), answer.stats.cycles) for answer in answers]

    assert counts(False, 1) == counts(False, 3)
    assert counts(True, 3) != counts(False, 3)


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_was_said_before_is_drafted_and_counted_by_its_source(system: str) -> None:
    """Greedy answers that were told: nearly all drafts are history's, and stand."""
    asked = requests([[1, 2, 3], [4, 5, 6, 7]], temperature=0.0, max_new_tokens=40)
    plain = TorchEngine(bare_policy(seed=3, dtype=torch.float64), DecodingConfig(), slots=2, max_length=64)
    answers = generate(plain, asked)
    one = engine(system, siblings=False)
    for request, answer in zip(asked, answers, strict=True):
        one.remember(request.token_ids, [answer.token_ids])
    again = generate(one, asked)
    assert [a.token_ids.tolist() for a in again] == [a.token_ids.tolist() for a in answers]
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
    assert isinstance(one.decoder, DraftVerify)
    drafter = one.decoder.drafter
    assert isinstance(drafter, HistoryMTPDrafter)

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


def test_an_engine_without_such_drafts_takes_past_answers_and_does_nothing() -> None:
    one = TorchEngine(bare_policy(seed=3), DecodingConfig(draft_tokens=2), slots=2, max_length=64)
    plain = [a.token_ids.tolist() for a in generate(one, requests(PROMPTS[:3], max_new_tokens=9))]
    one.remember([1, 2, 3], [np.array([5, 6, 7])])
    assert [a.token_ids.tolist() for a in generate(one, requests(PROMPTS[:3], max_new_tokens=9))] == plain
