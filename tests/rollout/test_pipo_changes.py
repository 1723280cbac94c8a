"""Answers in pairs go on in their pairs: aborted, beside others of their prompt, under new weights and settings."""

import dataclasses

import numpy as np
import pytest
import torch

from bebop.config import DecodingConfig
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion
from tests.builders import requests, tiny_pairs
from tests.rollout.slow_pairs import (
    GATES,
    PROMPTS,
    decode,
    engine,
    paired,
    same,
)


def test_an_aborted_answer_goes_on_in_its_pairs() -> None:
    policy = paired()
    asked = requests(PROMPTS, max_new_tokens=20, seed=8)
    whole = [decode(policy, r.token_ids, r.params, GATES[0]) for r in asked]
    parts: dict[int, Completion] = {}
    for _ in range(3):
        first = engine(policy, slots=len(asked))
        for request in asked:
            first.add(dataclasses.replace(request, partial=parts.get(request.id)))
        for _ in range(3):
            assert not first.step()
        parts = {f.id: f.completion for f in first.abort()}
    again = generate(engine(policy), [dataclasses.replace(r, partial=parts[r.id]) for r in asked])
    for answer, wanted in zip(again, whole, strict=True):
        same(answer, wanted)
    lost = [dataclasses.replace(r, partial=dataclasses.replace(parts[r.id], state={})) for r in asked]
    other = [a.token_ids.tolist() for a in generate(engine(policy), lost)]
    assert other != [a.token_ids.tolist() for a in again], "without its pairs an answer is another text"


def test_equal_tokens_in_other_pairs_are_not_shared() -> None:
    """Two answers to one prompt, interrupted where they have the same tokens and not the same pairs."""
    policy = paired()
    [request] = requests([[1, 2, 3]], max_new_tokens=20)
    first = engine(policy)
    first.add(request)
    for _ in range(4):
        first.step()
    [cut] = [f.completion for f in first.abort()]
    kept = np.array(cut.state["pipo/kept"])
    assert kept.any()
    alone = dataclasses.replace(cut, state={**cut.state, "pipo/kept": np.zeros_like(kept)})
    asked = [dataclasses.replace(request, id=i, partial=part) for i, part in enumerate((cut, alone, cut))]
    together = [a.token_ids.tolist() for a in generate(engine(policy), asked)]
    apart = [generate(engine(policy), [one])[0].token_ids.tolist() for one in asked]
    assert together == apart and apart[0] == apart[2] != apart[1]


def test_groups_share_their_prompt_and_differ() -> None:
    policy = paired()
    asked = [r for p in ([1, 2, 3], [4]) for r in requests([p] * 4, max_new_tokens=12, seed=40)]
    asked = [dataclasses.replace(r, id=i) for i, r in enumerate(asked)]
    reads: list[int] = []
    one = engine(policy, slots=8)
    prefill = one.decoder.prefill
    one.decoder.prefill = lambda first, contexts: (reads.append(len(contexts)), prefill(first, contexts))[1]  # type: ignore
    answers = generate(one, asked)
    assert reads == [2], "two contexts were read for eight answers"
    for request, answer in zip(asked, answers, strict=True):
        same(answer, decode(policy, request.token_ids, request.params, GATES[0]))
    assert len({tuple(a.token_ids.tolist()) for a in answers}) == 8


def cut_after(one: TorchEngine, asked: list[Request], cycles: int) -> list[Request]:
    """The requests with what they have after some cycles."""
    for request in asked:
        one.add(request)
    for _ in range(cycles):
        assert not one.step()
    parts = {f.id: f.completion for f in one.abort()}
    return [dataclasses.replace(request, partial=parts[request.id]) for request in asked]


def finished(one: TorchEngine) -> list[list[int]]:
    done: dict[int, list[int]] = {}
    while one.unfinished:
        done |= {f.id: f.completion.token_ids.tolist() for f in one.step()}
    return [done[i] for i in sorted(done)]


def test_a_threshold_that_comes_back_finds_the_entries_that_were_left_out() -> None:
    """Beyond 1 nothing is drafted, and the draft layer has no entries of that time."""
    policy, asked = paired(), requests(PROMPTS[:3], max_new_tokens=20)
    halves = cut_after(engine(policy, GATES[2]), asked, 4)
    assert all(half.partial is not None and half.partial.stats.draft_forwards == 0 for half in halves)
    wanted = [a.token_ids.tolist() for a in generate(engine(policy), halves)]
    one = engine(policy, GATES[2])
    for request in asked:
        one.add(request)
    for _ in range(4):
        one.step()
    one.configure(DecodingConfig(system="pipo", draft_tokens=1, options={"tau": 0.5}))
    assert finished(one) == wanted


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_new_weights_reach_it_through_embedding_and_head_alone(on_update: str) -> None:
    policy, other, asked = paired(), paired(seed=2), requests(PROMPTS[:3], max_new_tokens=20)
    other.parts["pipo"] = tiny_pairs(policy)
    with torch.no_grad():
        for ours, theirs in zip(other.parts["pipo"].parameters(), policy.parts["pipo"].parameters(), strict=True):
            ours.copy_(theirs)
    wanted = [a.token_ids.tolist() for a in generate(engine(other), cut_after(engine(policy), asked, 4))]
    one = engine(policy, on_update=on_update)
    for request in asked:
        one.add(request)
    for _ in range(4):
        one.step()
    before = {name: value.clone() for name, value in policy.parts["pipo"].state_dict().items()}
    one.load_weights({name: value.detach().clone() for name, value in other.weights().items()}, version=1)
    assert all(torch.equal(value, before[name]) for name, value in policy.parts["pipo"].state_dict().items())
    assert (finished(one) == wanted) == (on_update == "recompute")
