"""The embedded engine's own records: where completions end, what a resumed one keeps, statistics, versions, queues."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import OPENING, Completion, DecodeStats
from tests.builders import bare_policy, requests
from tests.rollout.driving import aborted, finished, resumed, started, tokens

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9], [2, 2]]
SAME = [[1, 2, 3]] * 50
SUMS = ("reached", "accepted", "overlap", "target_entropy")


def engine(policy: Policy, slots: int = 4, **settings: Any) -> TorchEngine:
    settings = {"max_length": 96, **settings}
    return TorchEngine(policy, DecodingConfig(draft_tokens=3), slots=slots, **settings)


def exact(seed: int) -> Policy:
    return bare_policy(seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("token", [12, 10**9, -1])
def test_a_token_that_the_model_does_not_have_is_refused_as_it_arrives(token: int) -> None:
    made = engine(bare_policy())
    with pytest.raises(UserError, match=f"token {token}: the model has tokens 0 to 11"):
        made.add(requests([[1, token, 2]], max_new_tokens=4)[0])
    assert not made.unfinished
    made.add(requests([[0, 11]], max_new_tokens=4)[0])


def test_the_queue_is_first_come_first_served() -> None:
    """With one slot, completions end in the order in which they were asked for."""
    one = started(engine(bare_policy(), slots=1), requests([[1], [2], [3], [4]], max_new_tokens=3))
    assert list(finished(one)) == [0, 1, 2, 3]


# ---- where completions end


def test_what_lies_beyond_the_end_counts_nowhere() -> None:
    """A completion ended by a stop token or string has the statistics of one that had no room for more."""
    policy, asked, lengths = bare_policy(seed=6), [], []
    first = requests(PROMPTS * 2, max_new_tokens=40)
    whole = generate(engine(policy, slots=10), first)
    for request, free in zip(first, whole, strict=True):
        ids = free.token_ids.tolist()
        token = ids[-10]
        lengths.append(ids.index(token) + 1)
        ends = ({"stop_token_ids": (token,)}, {"stop": (policy.tokenizer.decode([token]),)})
        for own in (*ends, {"max_new_tokens": lengths[-1]}):
            params = replace(request.params, **own)  # type: ignore[arg-type]
            asked.append(replace(request, id=len(asked), params=params))
    answers, ended = generate(engine(policy, slots=30), asked), 0
    for number, (free, length) in enumerate(zip(whole, lengths, strict=True)):
        three = answers[3 * number : 3 * number + 3]
        limited = three[2]
        assert [answer.finish_reason for answer in three] == ["stop", "stop", "length"]
        for answer in three:
            assert answer.token_ids.tolist() == free.token_ids[:length].tolist()
            assert answer.stats.tokens == length and answer.stats.accept_length == length / answer.stats.cycles
            assert [s.tokens for _, s in answer.stretches] == [length]
            for name in ("cycles", "draft_entropy", *SUMS):
                np.testing.assert_allclose(getattr(answer.stats, name), getattr(limited.stats, name), atol=1e-5)
        ended += int(limited.stats.cycles + limited.stats.accepted.sum() > length)
    assert 0 < ended < len(whole), "some end with an accepted draft, some with the token after the drafts"


def test_drafts_after_the_end_of_a_completion_do_not_count() -> None:
    """Of three drafts the first at most is part of a completion of one token, whatever was accepted."""
    long = generate(engine(bare_policy(seed=1), slots=50), requests(SAME, max_new_tokens=12))
    assert sum(answer.stats.accepted[1] for answer in long) > 20  # later drafts do stand, where there is room
    for answer in generate(engine(bare_policy(seed=1), slots=50), requests(SAME, max_new_tokens=1)):
        assert len(answer.token_ids) == 1 and answer.stats.cycles == 1
        assert not any(getattr(answer.stats, name)[1:].any() for name in SUMS)


def test_a_stop_token_changes_nothing_before_it_and_is_kept() -> None:
    """Wherever in a cycle it falls, a completion is what it would have been, up to and with the stop token."""
    stop, policy = 5, bare_policy(seed=1)
    free = generate(engine(policy, slots=50), requests(SAME, max_new_tokens=40))
    cut = generate(engine(policy, slots=50), requests(SAME, max_new_tokens=40, stop_token_ids=(stop,)))
    for ids, short in zip(tokens(free), cut, strict=True):
        assert short.token_ids.tolist() == (ids[: ids.index(stop) + 1] if stop in ids else ids)
        assert short.finish_reason == ("stop" if stop in ids else "length")
        assert short.stats.reached.sum() <= len(short.token_ids) == short.stats.tokens


def test_distributions_of_bfloat16_logits_are_single_precision() -> None:
    """A softmax in bfloat16 would be off by a hundredth in places, and so would every log-prob."""
    logits = (4 * torch.randn(50, 1, 300, generator=torch.Generator().manual_seed(0))).bfloat16()
    wanted = logits.double().softmax(-1)
    for columns in ({}, {"temperature": torch.ones(50)}, {"top_p": torch.ones(50)}):
        got = BatchSampling(**columns).probs(logits)
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.double().log(), wanted.log(), atol=1e-5)
    assert (logits.softmax(-1).double().log() - wanted.log()).abs().max() > 3e-3  # the broken variant


# ---- interrupted and taken up again


def interrupted(
    policy: Policy, asked: Sequence[Request], cycles: int, version: int, slots: int = 4
) -> dict[int, Completion]:
    """Return what requests have after some cycles under weights of a version."""
    one = engine(policy, slots)
    one.load_weights({}, version)
    return aborted(started(one, asked, cycles))


def test_log_probs_and_versions_of_the_part_before_are_kept() -> None:
    before, after = exact(3), exact(4)
    asked = requests(PROMPTS[:4], max_new_tokens=30, seed=9)
    parts = interrupted(before, asked, cycles=4, version=5)
    second = engine(after)
    second.load_weights({}, 7)
    answers, alone = generate(second, resumed(asked, parts)), generate(engine(after), asked)
    for i, answer in enumerate(answers):
        part, done = parts[i], len(parts[i].token_ids)
        assert 0 < done < 30 == len(answer.token_ids)
        np.testing.assert_array_equal(answer.token_ids[:done], part.token_ids)
        np.testing.assert_array_equal(answer.logprobs[:done], part.logprobs)
        assert (part.logprobs < 0).all() and answer.versions.tolist() == [5] * done + [7] * (30 - done)
        # The other weights would have given the same tokens other log-probs: keeping is not computing again.
        assert np.abs(alone[i].logprobs[:done] - part.logprobs).max() > 1e-3


def test_what_waits_is_given_back_with_what_it_had() -> None:
    policy = bare_policy(seed=3)
    asked = requests(PROMPTS[:4], max_new_tokens=30, seed=9)
    parts = interrupted(policy, asked, cycles=2, version=5)
    again = interrupted(policy, resumed(asked, parts), cycles=0, version=6)  # none has got a slot
    for i, part in parts.items():
        np.testing.assert_array_equal(again[i].token_ids, part.token_ids)
        np.testing.assert_array_equal(again[i].logprobs, part.logprobs)
        assert again[i].versions.tolist() == [5] * len(part.token_ids)


COMPANIES = {
    # Prompts of one length side by side, under distributions of their own, rows that leave at different times.
    "mixed": [
        {"max_new_tokens": 5 + 9 * (i % 3), **own}
        for i, own in enumerate([{}, {"temperature": 0.3}, {"top_k": 2}, {"temperature": 1.5}, {"top_p": 0.5}])
    ],
    # The last slot leaves before the others: nobody moves into its place then.
    "last leaves": [{"max_new_tokens": count, "temperature": 0.5 + i} for i, count in enumerate((25, 12, 4))],
}


@pytest.mark.parametrize("name", COMPANIES)
def test_completions_do_not_depend_on_the_slots_of_others(name: str) -> None:
    prompts = [[1, 2, 3], [3, 2, 1], [5, 5, 5], [1, 2, 3], [2, 2, 2, 2, 2, 2, 2]] if name == "mixed" else SAME[:3]
    policy = exact(2)
    asked = [
        replace(requests([prompt], seed=i, **own)[0], id=i)
        for i, (prompt, own) in enumerate(zip(prompts, COMPANIES[name], strict=True))
    ]
    for request, answer in zip(asked, generate(engine(policy, slots=3), asked), strict=True):
        [alone] = generate(engine(policy, slots=1), [request])
        assert answer.token_ids.tolist() == alone.token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-6)


# ---- weights


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_each_token_knows_the_oldest_weights_in_its_context(on_update: str) -> None:
    policy, other = bare_policy(seed=4), bare_policy(seed=5)
    late = replace(requests([PROMPTS[2]], max_new_tokens=30)[0], id=2)
    running = engine(policy, on_update=on_update, slots=2)
    started(running, [*requests(PROMPTS[:2], max_new_tokens=30), late], 3)
    running.load_weights({n: p.detach().clone() for n, p in other.weights().items()}, version=1)
    running.step()
    [cut] = running.abort([0])  # taken up again, it is prefilled with the weights of then
    running.step()  # the one that waited is let in
    running.load_weights({n: p.detach().clone() for n, p in policy.weights().items()}, version=2)
    running.add(replace(requests(PROMPTS[:1], max_new_tokens=30)[0], partial=cut.completion))
    seen = {
        i: list(dict.fromkeys(zip(a.versions.tolist(), a.contexts.tolist(), strict=True)))
        for i, a in finished(running).items()
    }
    if on_update == "keep":
        assert seen == {0: [(0, 0), (1, 0), (2, 2)], 1: [(0, 0), (1, 0), (2, 0)], 2: [(1, 1), (2, 1)]}
    else:
        assert seen == {0: [(0, 0), (1, 1), (2, 2)], 1: [(0, 0), (1, 1), (2, 2)], 2: [(1, 1), (2, 2)]}


def test_the_fingerprint_is_that_of_the_head_at_the_last_load() -> None:
    policy, other = bare_policy(seed=3), bare_policy(seed=4)
    one = engine(policy)
    first = one.head
    assert first == engine(bare_policy(seed=3)).head != engine(other).head
    one.load_weights({n: w.detach() for n, w in other.weights().items()}, 1)
    assert one.head == first, "the backbone alone was sent"
    one.load_weights({n: w.detach() for n, w in other.weights(mtp=True).items()}, 2)
    assert one.head == engine(other).head


# ---- statistics by stretch


@pytest.mark.slow
def test_statistics_by_stretch_of_a_completion() -> None:
    """A cycle belongs to where it begins; an interruption changes nothing."""
    policy, asked = bare_policy(seed=1), requests([[1, 2, 3]], max_new_tokens=90)
    [long] = generate(engine(policy), asked)
    [short] = generate(engine(policy), requests([[1, 2, 3]], max_new_tokens=64))  # the same tokens, cut off
    assert [start for start, _ in long.stretches] == [0, 64] and [start for start, _ in short.stretches] == [0]
    assert long.stretches[0][1].cycles == short.stats.cycles < long.stats.cycles
    np.testing.assert_array_equal(long.stretches[0][1].overlap[:1], short.stats.overlap[:1])
    for name in ("cycles", *SUMS):
        parts = sum(getattr(stats, name) for _, stats in long.stretches)
        np.testing.assert_allclose(parts, getattr(long.stats, name), rtol=1e-12)
    one = started(engine(policy), asked)
    while int(one.slots.count[0]) < 70:
        one.step()
    [again] = generate(engine(policy), resumed(asked, aborted(one)))
    assert [start for start, _ in again.stretches] == [0, 64]
    for (_, a), (_, b) in zip(again.stretches, long.stretches, strict=True):
        assert a.cycles == b.cycles
        np.testing.assert_allclose(a.accepted, b.accepted)


def turns(prompts: Sequence[Sequence[int]], park: bool = True, **params: int) -> list[Request]:
    return [replace(request, park=park) for request in requests(prompts, **params)]


@pytest.mark.slow
def test_the_first_cycle_of_a_turn_is_a_stretch_of_its_own() -> None:
    """And nothing else changes; there are more requests than slots, so that rows move."""
    plain, opened = (
        generate(
            engine(bare_policy(seed=1), slots=2, max_length=128),
            turns([[1, 2, 3], [4, 5], [6, 7, 8, 9]], park, max_new_tokens=70),
        )
        for park in (False, True)
    )
    for one, other in zip(plain, opened, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert [start for start, _ in one.stretches] == [0, 64]
        assert [start for start, _ in other.stretches] == [OPENING, 0, 64]
        first, rest = other.stretches[0][1], dict(other.stretches)[0]
        assert first.cycles == 1 and 1 <= first.tokens <= 4
        whole = sum((stats for _, stats in other.stretches), DecodeStats())
        assert (whole.cycles, whole.tokens) == (one.stats.cycles, one.stats.tokens) == (other.stats.cycles, 70)
        joined = first + rest
        for name in SUMS:
            np.testing.assert_allclose(getattr(joined, name), getattr(one.stretches[0][1], name), rtol=1e-12)
            np.testing.assert_allclose(getattr(other.stats, name), getattr(one.stats, name), rtol=1e-12)
        assert first.reached[0] == 1 and first.tokens == 1 + int(first.accepted.sum())


def test_what_went_on_after_an_interruption_has_one_first_cycle() -> None:
    one, asked = engine(bare_policy(seed=1), slots=1, max_length=128), turns([[1, 2, 3]], max_new_tokens=40)
    [whole] = generate(one, asked)
    started(one, asked)
    while int(one.slots.count[0]) < 10:
        one.step()
    [again] = generate(one, resumed(asked, aborted(one)))
    found, wanted = ([(start, stats.cycles) for start, stats in each.stretches] for each in (again, whole))
    assert found == wanted and found[0][1] == 1


def test_a_completion_cut_off_in_its_first_cycle_counts_what_is_left_of_it() -> None:
    one = engine(bare_policy(seed=1), slots=1, max_length=128)
    for seed in range(8):
        [answer] = generate(one, turns([[1, 2, 3]], max_new_tokens=1, seed=seed))
        assert [(start, stats.cycles, stats.tokens) for start, stats in answer.stretches] == [(OPENING, 1, 1)]
        assert answer.stretches[0][1].reached.tolist() == answer.stats.reached.tolist()
