"""What is parked and found: a turn that goes on from a parked cache is the turn that a full prefill gives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.decoding import base
from bebop.rollout.engine import Request
from bebop.rollout.kv_retention import KvRetention
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.trajectory import Completion
from tests.builders import alone, bare_policy, requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.driving import finished

STOP = 11
PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9, 9, 2, 4], [2, 2]]
OBSERVED = [[], [3], [7, 7, 1, 0, 5, 2], [4, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7]]
# A cache beside the target's, and a drafter within its passes; the others are slow tests.
DIFFERENT = ("bebop", "firp")
EXTENDING = [name for name, system in SYSTEMS.items() if not system.custom_cycle]


def engine(policy: Policy, system: str = "bebop", **settings: object) -> TorchEngine:
    drafts = min(3, SYSTEMS[system].width)
    config = DecodingConfig(
        system=system, draft_tokens=drafts, cost_ratio=0.04, verify_ratio=0.02, options=alone(system)
    )
    settings = {"slots": 4, "max_length": 160, **settings}
    return TorchEngine(policy, config, **settings)  # type: ignore[arg-type]


@dataclass
class Talk:
    """Conversations beside one another, fed turn by turn."""

    one: TorchEngine
    asked: list[Request]

    def turn(self) -> list[Completion]:
        """Completions; what they were given next is part of the requests then."""
        answers = generate(self.one, [replace(request, park=True) for request in self.asked])
        self.asked = [
            replace(request, token_ids=(*request.token_ids, *answer.token_ids.tolist(), *OBSERVED[request.id % 5]))
            for request, answer in zip(self.asked, answers, strict=True)
        ]
        return answers


def asked(prompts: Sequence[Sequence[int]] = PROMPTS, **params: object) -> list[Request]:
    return requests(prompts, **{"max_new_tokens": 12, "stop_token_ids": (STOP,), "seed": 5, **params})


def same(kept: Completion, read: Completion) -> None:
    """In tokens, log-probs and in how they were drafted."""
    assert kept.token_ids.tolist() == read.token_ids.tolist()
    np.testing.assert_allclose(kept.logprobs, read.logprobs, atol=1e-5)
    assert kept.stats.cycles == read.stats.cycles
    for name in ("reached", "accepted"):
        np.testing.assert_array_equal(getattr(kept.stats, name), getattr(read.stats, name))
    for name in ("overlap", "target_only", "draft_entropy"):
        np.testing.assert_allclose(getattr(kept.stats, name), getattr(read.stats, name), atol=1e-6)


@pytest.mark.parametrize("system", slow_but(DIFFERENT, SYSTEMS))
@pytest.mark.slow
def test_turns_are_those_of_a_full_prefill(system: str) -> None:
    """Rows of all lengths and settings, completions cut by stop texts, one observation empty, new prompts too."""
    policy = tiny_policy(seed=3, dtype=torch.float64)
    own = [{}, {"repetition_penalty": 1.2}, {"temperature": 0.5}, {"stop": ("fa", "bd", "ai", "e")}, {"top_p": 0.9}]
    talks = []
    for limit in (2**20, 0):
        first = [replace(r, params=replace(r.params, **s)) for r, s in zip(asked(), own, strict=True)]  # type: ignore[arg-type]
        talks.append(Talk(engine(policy, system, parked_bytes=limit), first))
    kept, read = (talk.one.retention.counts for talk in talks)
    for turn in range(4):
        if turn == 2:
            for talk in talks:
                talk.asked.insert(1, replace(asked([[5, 1, 5]], seed=77)[0], id=5))
        for mine, theirs in zip(*(talk.turn() for talk in talks), strict=True):
            same(mine, theirs)
    if system in EXTENDING:
        assert kept.hits == 5 + 5 + 6 and kept.misses == 5 + 1 and kept.evicted == kept.refused == 0
        assert kept.reused > 3 * kept.prefilled and kept.reused + kept.prefilled == read.prefilled
    else:
        assert kept.hits == 0 and kept.prefilled == read.prefilled > 0 and kept.parked == 0
    assert read.hits == read.reused == read.parked == 0


@pytest.mark.parametrize("system", ["bebop", "pipo"])
def test_no_turn_draws_numbers_again(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all turns of a trajectory have one seed."""
    drawn: list[tuple[int, int]] = []
    plain = base.uniforms

    def watched(seeds: Tensor, counters: Tensor, count: int) -> Tensor:
        drawn.extend(zip(seeds.tolist(), counters.tolist(), strict=True))
        return plain(seeds, counters, count)

    monkeypatch.setattr(base, "uniforms", watched)
    talk = Talk(engine(tiny_policy(seed=3), system), asked())
    for _ in range(3):
        talk.turn()
    assert len(drawn) == len(set(drawn)) > 60


def first_turn(one: TorchEngine, **params: object) -> tuple[Request, list[int]]:
    """A parked completion: its request, and its history."""
    [request] = asked([[4, 5, 6, 7, 8, 1]], **params)
    [answer] = generate(one, [replace(request, park=True)])
    return request, [*request.token_ids, *answer.token_ids.tolist()]


def test_one_changed_token_is_a_miss(paged: bool) -> None:
    """Wherever it is; the last one, too, which the target was not fed, but a drafter may have seen."""
    policy = tiny_policy(seed=3, dtype=torch.float64)
    one = engine(policy)
    request, history = first_turn(one)
    assert one.retention.find([*history, 3, 3], 5, 0) is not None and one.retention.find(history, 5, 0) is not None
    for place in range(len(history)):
        other = [*history, 3, 3]
        other[place] = (other[place] + 1) % 11
        assert one.retention.find(other, 5, 0) is None
        assert one.retention.find(history[:place], 5, 0) is None
    other = replace(request, token_ids=(*history[:-2], (history[-2] + 1) % 11, history[-1], 3, 3))
    [answer], [wanted] = generate(one, [other]), generate(engine(policy), [other])
    same(answer, wanted)
    assert one.retention.counts.hits == 0 and one.retention.counts.misses == 1


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_new_weights_keep_what_is_parked_or_drop_it(on_update: str, paged: bool) -> None:
    """Each token knows the oldest weights among the keys and values it saw, those of earlier turns included."""
    policy, other = tiny_policy(seed=4, dtype=torch.float64), tiny_policy(seed=5, dtype=torch.float64)
    one = engine(policy, on_update=on_update)
    request, history = first_turn(one)
    one.load_weights({n: p.detach().clone() for n, p in other.weights(mtp=True).items()}, 1)
    again = replace(request, token_ids=(*history, 3, 3), park=True)
    [answer] = generate(one, [again])
    kept = on_update == "keep"
    assert set(answer.versions.tolist()) == {1} and set(answer.oldest.tolist()) == {0 if kept else 1}
    [fresh] = generate(engine(other), [again])
    differs = answer.token_ids.tolist() != fresh.token_ids.tolist() or np.abs(answer.logprobs - fresh.logprobs).max()
    assert bool(differs > 1e-3) == kept
    assert one.retention.counts.hits == kept and one.retention.counts.dropped == (not kept)
    # What was parked of it then is as old as what it went on from.
    third = (*again.token_ids, *answer.token_ids.tolist(), 3)
    [last] = generate(one, [replace(request, token_ids=third)])
    assert set(last.oldest.tolist()) == {0 if kept else 1} and one.retention.counts.hits == 1 + kept


def test_another_request_goes_on_from_the_newest_weights_alone() -> None:
    """Older ones may be from before its prompt was let in, against the bound on staleness."""
    one = engine(tiny_policy(seed=4))
    _, history = first_turn(one)
    assert one.retention.find([*history, 3], 99, 0) is not None
    one.load_weights({}, 1)
    assert one.retention.find([*history, 3], 99, 1) is None and one.retention.find([*history, 3], 5, 1) is not None


@pytest.mark.parametrize("system", slow_but(["bebop_adaptive"], ["bebop", "bebop_adaptive", "firp_chain", "block_ema"]))
def test_abort_and_resume_of_a_turn_that_went_on(system: str, paged: bool) -> None:
    """With ``park`` the aborted part is found again as well; without it, all is read anew."""
    policy = tiny_policy(seed=3, dtype=torch.float64)
    whole, cut = engine(policy, system), engine(policy, system)
    histories = []
    for one in (whole, cut):
        histories.append(first_turn(one, max_new_tokens=30, stop_token_ids=()))
    request, history = histories[0]
    again = replace(request, token_ids=(*history, 3, 1, 3), park=True)
    [wanted] = generate(whole, [again])
    cut.add(again)
    for hits in (2, 3):
        for _ in range(3):
            assert not cut.step()
        [part] = cut.abort()
        assert 0 < len(part.completion.token_ids) < 30 and cut.retention.counts.hits == hits - 1
        cut.add(replace(again, partial=part.completion))
    [done] = finished(cut).values()
    same(done, wanted)
    assert cut.retention.counts.hits == 3 and set(done.oldest.tolist()) == {0}


def test_a_group_goes_on_from_one_cache_and_shares_what_it_reads(paged: bool) -> None:
    """Greedy members say the same; beside them one that goes on from elsewhere, and one that is new."""
    policy = tiny_policy(seed=3, dtype=torch.float64)
    talks = [
        Talk(engine(policy, parked_bytes=limit, slots=8), asked([[1, 2, 3]] * 3 + [[9, 8, 7, 6]], temperature=0.0))
        for limit in (2**20, 0)
    ]
    for talk in talks:
        talk.asked = [replace(r, id=r.id * 5) for r in talk.asked]  # one observation for all
        talk.turn()
        talk.one.load_weights({}, 1)  # the same ones: members of a trajectory's own are still gone on from
        new = replace(asked([[6, 6, 6, 6, 6]])[0], id=100)
        talk.asked = [talk.asked[0], new, *[replace(r, token_ids=(*r.token_ids, 3)) for r in talk.asked[1:]]]
        talk.asked[0] = replace(talk.asked[0], token_ids=(*talk.asked[0].token_ids, 3))
    mine, theirs = (talk.turn() for talk in talks)
    for one, other in zip(mine, theirs, strict=True):
        same(one, other)
        assert set(other.oldest.tolist()) == {1}
    counts = talks[0].one.retention.counts
    assert counts.hits == 4 and counts.parked == 2 + 3, "those that say the same are parked once"
    assert [set(a.oldest.tolist()) for a in mine] == [{0}, {1}, {0}, {0}, {0}]
    ends = [len(r.token_ids) for r in (talks[0].asked[0], talks[0].asked[4])]
    assert counts.reused < sum(ends), "the three members' entries were copied back once"


def test_nothing_is_parked_without_room_or_without_being_asked() -> None:
    policy = tiny_policy(seed=3)
    none, unasked = engine(policy, parked_bytes=0), engine(policy)
    first_turn(none)
    generate(unasked, asked())
    for one in (none, unasked):
        assert one.retention.counts.parked == one.retention.held_bytes == 0
    assert unasked.retention.counts.misses == 0
    with pytest.raises(UserError, match=r"rollout\.parked_bytes=\d+ is not possible: cpu has \d+ bytes"):
        engine(policy, parked_bytes=2**60)


def test_a_drafter_that_is_new_has_read_nothing_of_what_is_parked() -> None:
    policy = tiny_policy(seed=3, dtype=torch.float64)
    one = engine(policy, "ngram")
    request, history = first_turn(one)
    again = replace(request, token_ids=(*history, 3, 3))
    one.configure(DecodingConfig(system="ngram", draft_tokens=2))
    assert one.retention.counts.dropped == 0
    one.configure(DecodingConfig(draft_tokens=3))
    assert one.retention.counts.dropped == 1
    same(*generate(one, [again]), *generate(engine(policy), [again]))


def test_padding_never_lands_on_a_row_that_ends_at_its_slot(paged: bool) -> None:
    """A long context that reads one token, beside one that reads many: its padding goes beyond what it can have."""
    policy = tiny_policy(seed=3, dtype=torch.float64)
    length = 64
    pair = [asked([[i % 11 for i in range(40)]], max_new_tokens=12, stop_token_ids=())[0],
            asked([[5, 6]], max_new_tokens=4, stop_token_ids=())[0]]  # fmt: skip
    found = []
    for limit in (2**20, 0):
        one = engine(policy, parked_bytes=limit, max_length=length)
        answers = generate(one, [replace(r, park=True) for r in pair])
        long, short = ([*r.token_ids, *a.token_ids.tolist()] for r, a in zip(pair, answers, strict=True))
        next_turn = [
            replace(
                pair[0], token_ids=(*long, 3), params=replace(pair[0].params, max_new_tokens=length - len(long) - 1)
            ),
            replace(pair[1], token_ids=(*short, *[i % 7 for i in range(54)])),
        ]
        found.append(generate(one, next_turn))
    for mine, theirs in zip(*found, strict=True):
        same(mine, theirs)


def parking(limit: float, answers: int = 0) -> tuple[KvRetention, list[list[int]]]:
    """A bound of ``limit`` completions, and so many parked."""
    one = engine(bare_policy(seed=3), "autoregressive")
    probe = KvRetention(one.slots, 2**30)
    probe.park(0, [*range(9)], 0)
    made = KvRetention(one.slots, int(limit * probe.held_bytes))
    histories = [[i, *range(1, 9)] for i in range(answers)]
    for history in histories:
        made.park(0, history, 0)
    return made, histories


def test_the_bound_holds_and_what_was_wanted_longest_ago_goes_first() -> None:
    one, histories = parking(3.5, 3)
    whole = one.held_bytes
    assert one.counts.evicted == 0 and one.counts.entries == 3 * 8 and whole == one.limit * 3 // 3.5
    one.park(0, [7, *range(1, 9)], 0)
    assert one.held_bytes == whole and one.counts.evicted == 1
    assert one.find([*histories[0], 1], 0, 0) is None and one.find([*histories[2], 1], 0, 0) is not None
    one.park(0, [8, *range(1, 9)], 0)  # in the place of the one that was gone on from, not of one that waits longer
    waiting = (histories[1], [7, *range(1, 9)])
    assert [one.find([*h, 1], 0, 0) is not None for h in (histories[2], *waiting)] == [False, True, True]
    one.park(0, [7, *range(1, 9)], 0)  # in the place of its like
    assert one.held_bytes == whole and one.counts.evicted == 2
    one.park(0, [*range(40)], 0)
    assert one.counts.refused == 1 and one.held_bytes == whole
    one.clear()
    assert one.held_bytes == one.counts.entries == 0 and one.counts.dropped == 3
    assert one.find([7, *range(1, 9), 1], 0, 0) is None


def test_the_longest_is_gone_on_from() -> None:
    one, _ = parking(20)
    for length in (3, 9, 6):
        one.park(0, [*range(length)], 0)
    for asked_for, found in ((4, 2), (8, 5), (20, 8)):
        there = one.find([*range(asked_for)], 0, 0)
        assert there is not None and there.entries == found
    assert one.find([0, 1], 0, 0) is None


@pytest.mark.usefixtures("in_slots")
def test_a_slot_gives_what_was_taken() -> None:
    """Of every cache, and nothing beyond the length."""
    one = engine(bare_policy(seed=3), "bebop")
    for cache in one.slots.caches.values():
        cache.keys.normal_()
        cache.values.normal_()
    held = one.slots.snapshot(1, 9)
    assert set(held.copies) == {"target", "mtp"}
    before = {name: (c.keys.clone(), c.values.clone()) for name, c in one.slots.caches.items()}
    one.slots.restore(3, held, 7)
    for name, cache in one.slots.caches.items():
        for store, was in zip((cache.keys, cache.values), before[name], strict=True):
            assert torch.equal(store[:, 3, :, :7], was[:, 1, :, :7])
            assert torch.equal(store[:, 3, :, 7:], was[:, 3, :, 7:]) and torch.equal(store[:, :3], was[:, :3])


def test_of_equal_completions_the_one_with_newer_weights_serves_both() -> None:
    one, [history] = parking(2, 1)
    for version, seed in ((2, 7), (1, 8)):
        one.slots.oldest[0] = version
        one.park(0, history, seed)
    for seed in (0, 7, 8):
        found = one.find([*history, 1], seed, 9)
        assert found is not None and found.oldest == 2
    assert one.find([*history, 1], 9, 9) is None and one.counts.entries == 8 and one.counts.evicted == 0
