"""The embedded engine's own records: statistics at the end of answers and by stretch, versions, fingerprints."""

from dataclasses import replace

import numpy as np
import pytest

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import bare_policy, requests

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9], [2, 2]]


def engine(policy: Policy, slots: int = 4, **settings: object) -> TorchEngine:
    return TorchEngine(policy, DecodingConfig(draft_tokens=3), slots=slots, max_length=96, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [12, 10**9, -1])
def test_a_token_that_the_model_does_not_have_is_refused_as_it_arrives(token: int) -> None:
    made = engine(bare_policy())
    with pytest.raises(UserError, match=f"token {token}: the model has tokens 0 to 11"):
        made.add(requests([[1, token, 2]], max_new_tokens=4)[0])
    assert not made.unfinished
    made.add(requests([[0, 11]], max_new_tokens=4)[0])


def test_what_lies_beyond_the_end_counts_nowhere() -> None:
    """An answer ended by a stop token or string has the statistics of one that had no room for more."""
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
        for answer in three:
            assert answer.token_ids.tolist() == free.token_ids[:length].tolist()
            assert answer.stats.accept_length == length / answer.stats.cycles
            assert [s.tokens for _, s in answer.stretches] == [length]
            for name in ("cycles", "reached", "accepted", "overlap", "draft_entropy", "target_entropy"):
                np.testing.assert_allclose(getattr(answer.stats, name), getattr(limited.stats, name), atol=1e-5)
        ended += int(limited.stats.cycles + limited.stats.accepted.sum() > length)
    assert 0 < ended < len(whole), "some end with an accepted draft, some with the token after the drafts"


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_each_token_knows_the_oldest_weights_in_its_context(on_update: str) -> None:
    policy, other = bare_policy(seed=4), bare_policy(seed=5)
    running, late = engine(policy, on_update=on_update, slots=2), requests([PROMPTS[2]], max_new_tokens=30)[0]
    for request in (*requests(PROMPTS[:2], max_new_tokens=30), replace(late, id=2)):
        running.add(request)
    for _ in range(3):
        running.step()
    running.load_weights({n: p.detach().clone() for n, p in other.weights().items()}, version=1)
    running.step()
    [cut] = running.abort([0])  # taken up again, it is prefilled with the weights of then
    running.step()  # the one that waited is let in
    running.load_weights({n: p.detach().clone() for n, p in policy.weights().items()}, version=2)
    running.add(replace(requests(PROMPTS[:1], max_new_tokens=30)[0], partial=cut.completion))
    done = {}
    while running.unfinished:
        done |= {f.id: f.completion for f in running.step()}
    seen = {i: list(dict.fromkeys(zip(a.versions.tolist(), a.contexts.tolist(), strict=True))) for i, a in done.items()}
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


@pytest.mark.slow
def test_statistics_by_stretch_of_the_answer() -> None:
    """A cycle belongs to where it begins; an interruption changes nothing."""
    policy = bare_policy(seed=1)
    [long] = generate(engine(policy), requests([[1, 2, 3]], max_new_tokens=90))
    [short] = generate(engine(policy), requests([[1, 2, 3]], max_new_tokens=64))  # the same tokens, cut off
    assert [start for start, _ in long.stretches] == [0, 64] and [start for start, _ in short.stretches] == [0]
    assert long.stretches[0][1].cycles == short.stats.cycles < long.stats.cycles
    np.testing.assert_array_equal(long.stretches[0][1].overlap[:1], short.stats.overlap[:1])
    for name in ("cycles", "reached", "accepted", "overlap", "target_entropy"):
        parts = sum(getattr(stats, name) for _, stats in long.stretches)
        np.testing.assert_allclose(parts, getattr(long.stats, name), rtol=1e-12)
    one = engine(policy)
    one.add(requests([[1, 2, 3]], max_new_tokens=90)[0])
    while int(one.slots.count[0]) < 70:
        one.step()
    [cut] = one.abort()
    [resumed] = generate(engine(policy), [replace(requests([[1, 2, 3]], max_new_tokens=90)[0], partial=cut.completion)])
    assert [start for start, _ in resumed.stretches] == [0, 64]
    for (_, a), (_, b) in zip(resumed.stretches, long.stretches, strict=True):
        assert a.cycles == b.cycles
        np.testing.assert_allclose(a.accepted, b.accepted)
