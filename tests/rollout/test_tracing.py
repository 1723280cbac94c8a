"""The trace of an answer: each field against an independent reference, and whole wherever its answer goes."""

import dataclasses

import numpy as np
import pytest
import torch

from bebop.config import DecodingConfig, JobConfig
from bebop.model.backbone import Policy
from bebop.parsing import from_dict
from bebop.protocols import Assignment, PartialGroup
from bebop.rollout.decoding import verify_trace
from bebop.rollout.decoding.verify_trace import CHUNK, likeliest
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.rollout.worker import RolloutWorker
from bebop.systems import SYSTEMS
from bebop.token_trace import NONE, TOP, VERDICTS, Trace
from bebop.trajectory import Completion, Prompt
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.trace_reference import VOCAB, Listening, check, check_sums, config, engine, same, wanted

QUICK = ["bebop", "bebop_tree", "pad"]  # a chain, a tree, and drafts that were overridden
SHARED = [name for name, system in SYSTEMS.items() if not system.custom_cycle]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(VOCAB, seed=2, dtype=torch.float64)


def of(answer: Completion) -> Trace:
    assert answer.trace is not None and len(answer.trace) == len(answer.token_ids)
    return answer.trace


def head(trace: Trace, count: int) -> Trace:
    """Its first rows; names stay."""
    rows = {f.name: getattr(trace, f.name)[:count] for f in dataclasses.fields(Trace) if f.name != "names"}
    return Trace(names=trace.names, **rows)


@pytest.mark.parametrize("name", slow_but(QUICK, SHARED))
def test_every_field_is_what_the_model_and_the_drafter_say(policy: Policy, name: str) -> None:
    """More requests than slots: rows come, move and go."""
    listening, asked = Listening(engine(policy, name)), wanted()
    answers = listening.run(asked)
    for request in asked:
        check(policy, request, answers[request.id], listening.said[request.id], SYSTEMS[name].drafter_name)
        check_sums(answers[request.id])
    found = {VERDICTS[v] for answer in answers.values() for v in of(answer).verdicts}
    assert found >= ({"accepted", "recovered"} if SYSTEMS[name].drafts else {"plain"}) and "unknown" not in found


@pytest.mark.slow
def test_what_is_traced_depends_on_nobody_beside_it_and_changes_no_answer(policy: Policy) -> None:
    every, some, none = (generate(engine(policy, "bebop"), wanted(chosen)) for chosen in (range(6), (0, 2, 3), ()))
    one, late = engine(policy, "bebop", slots=6), {}
    for request in wanted():  # one comes in every cycle, beside those that run
        one.add(request)
        late |= {f.id: f.completion for f in one.step()}
    while one.unfinished:
        late |= {f.id: f.completion for f in one.step()}
    for i, (full, part, plain) in enumerate(zip(every, some, none, strict=True)):
        for other in (part, plain):
            assert full.token_ids.tolist() == other.token_ids.tolist()
            assert np.array_equal(full.logprobs, other.logprobs)
        assert plain.trace is None and (part.trace is None) == (i not in (0, 2, 3))
        assert part.trace is None or same(of(full), of(part))
        numbers = [
            (getattr(of(full), n), getattr(of(late[i]), n)) for n in ("overlap", "draft_probs", "target_entropy")
        ]
        assert all(np.allclose(a, b, atol=1e-5, equal_nan=True) for a, b in numbers)  # as batches differ
        assert np.array_equal(of(full).verdicts, of(late[i]).verdicts)


def test_without_a_request_that_asks_nothing_is_looked_at(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(verify_trace, "condensed", looks)
    generate(engine(policy, "bebop"), wanted(()))
    with pytest.raises(AssertionError):
        generate(engine(policy, "bebop"), wanted((5,)))


@pytest.mark.parametrize("then", slow_but(["bebop", "bebop_tree"], ["bebop", "ngram", "bebop_tree", "autoregressive"]))
def test_an_interrupted_answer_has_the_rows_of_both_parts(policy: Policy, then: str) -> None:
    one, asked = engine(policy, "bebop", slots=6), wanted()
    for request in asked:
        one.add(request)
    early = {f.id: f.completion for _ in range(3) for f in one.step()}
    parts = {f.id: f.completion for f in one.abort()}
    assert len(parts) > 2 and all(len(of(part)) for part in (*early.values(), *parts.values()))
    again = [dataclasses.replace(r, id=i, partial=parts[r.id]) for i, r in enumerate(r for r in asked if r.id in parts)]
    for request, answer in zip(again, generate(engine(policy, then), again), strict=True):
        assert request.partial is not None
        done, trace = len(request.partial.token_ids), of(answer)
        assert same(head(dataclasses.replace(trace, names=("mtp",)), done), of(request.partial))
        assert trace.cycles[done] == trace.cycles[done - 1] + 1 and (np.diff(trace.cycles) >= 0).all()
        later = {trace.names[d] for d in trace.drafters[done:] if d != NONE}
        assert later <= {SYSTEMS[then].drafter_name} and (trace.verdicts != VERDICTS.index("unknown")).all()
        assert bool(later) == SYSTEMS[then].drafts or then == "ngram"
        if then in ("bebop", "autoregressive"):
            check_sums(answer)


def test_of_a_part_without_a_trace_nothing_is_known(policy: Policy) -> None:
    one, (asked,) = engine(policy, "bebop"), wanted()[5:]
    one.add(dataclasses.replace(asked, trace=False))
    one.step()
    one.step()
    (part,) = one.abort()
    assert part.completion.trace is None
    (answer,) = generate(engine(policy, "bebop"), [dataclasses.replace(asked, partial=part.completion)])
    trace, done = of(answer), len(part.completion.token_ids)
    first, rest = head(trace, done), trace.verdicts[done:]
    assert {VERDICTS[v] for v in first.verdicts} == {"unknown"} and (rest != VERDICTS.index("unknown")).all()
    assert (first.drafts == NONE).all() and (first.target_ids == NONE).all() and np.isnan(first.overlap).all()
    assert trace.cycles[: done + 1].tolist() == [NONE] * done + [0]
    one.add(asked)
    one._admit()
    (begun,) = one.abort()  # before its first cycle
    assert len(of(begun.completion)) == 0 and of(begun.completion).target_ids.shape == (0, TOP)


def test_what_a_stop_string_cuts_off_has_no_row(policy: Policy) -> None:
    (asked,) = requests([[1, 2]], max_new_tokens=40, seed=1)
    asked = dataclasses.replace(asked, trace=True)
    (whole,) = generate(engine(policy, "bebop"), [asked])
    text, shorter = policy.tokenizer.decode(whole.token_ids.tolist()), 0
    stops = [dataclasses.replace(asked.params, stop=(text[end - 2 : end],)) for end in range(2, 30)]
    ended = [dataclasses.replace(asked, id=i, params=params) for i, params in enumerate(stops)]
    for cut in generate(engine(policy, "bebop", slots=len(ended)), ended):
        count = len(cut.token_ids)
        assert same(of(cut), head(of(whole), count))
        check_sums(cut)
        shorter += of(whole).cycles[count] == of(cut).cycles[-1]
    assert shorter > 3, "no string ended within a cycle"


def test_who_drafted_is_known_when_systems_change_midway(policy: Policy) -> None:
    one, asked = engine(policy, "bebop", slots=6), wanted()
    for request in asked:
        one.add(request)
    done, cycle = {}, 0
    turns = ("autoregressive", "target_only", "firp_chain", "block", "bebop")
    while one.unfinished:
        done |= {f.id: f.completion for f in one.step()}
        cycle += 1
        one.configure(config(turns[(cycle - 1) % len(turns)]))
    longest = of(done[5])
    assert set(longest.names) == {"mtp", "firp", "block"} and longest.cycles[-1] + 1 == done[5].stats.cycles
    drafter = [SYSTEMS[name].drafter_name for name in ("bebop", *turns[:-1])]
    for t, number in enumerate(longest.cycles):
        inside = longest.names[longest.drafters[t]] if longest.drafters[t] != NONE else "none"
        bonus = VERDICTS[longest.verdicts[t]] == "bonus"
        assert inside == ("none" if bonus else drafter[number % len(drafter)])


def test_pairs_have_no_trace(policy: Policy) -> None:
    (answer,) = generate(
        TorchEngine(policy, DecodingConfig(system="pipo", draft_tokens=1), max_length=64), wanted()[:1]
    )
    assert answer.trace is None and len(answer.token_ids)


@pytest.mark.parametrize(("mode", "expected"), [("all", {0, 1, 2, 3, 4}), ("sample", {0, 2, 4}), ("off", set())])
def test_a_worker_asks_for_what_the_job_wants(policy: Policy, mode: str, expected: set[int]) -> None:
    sections = {
        "rollout": {"sampling": {"max_new_tokens": 3}, "dispatch": "static"},
        "trainer": {"group_size": 2, "groups_per_step": 2},
        "monitor": {"trace": mode},
    }
    one = RolloutWorker(engine(policy, "bebop"), lambda *_: 0.0, from_dict(JobConfig, sections), eos=(11,))
    prompts = [Prompt(index=i, task="test", text="", token_ids=(1, 2 + i), item={}) for i in range(5)]
    one.submit([Assignment(prompt=asked, members=(0, 1)) for asked in prompts])
    groups: list[PartialGroup] = []
    while len(groups) < 5:
        one.turn()
        groups += one.collect(0, seen=10**6).parts
    assert {g.prompt.index for g in groups for t in g.trajectories if t.completion.trace is not None} == expected
    assert all(len({t.completion.trace is None for t in g.trajectories}) == 1 for g in groups)


@pytest.mark.parametrize("vocabulary", [TOP * CHUNK, TOP * CHUNK + 1, 3000, 30 * CHUNK])
def test_the_likeliest_of_a_large_vocabulary(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    probs = (4 * torch.randn(3, 2, vocabulary, generator=generator)).softmax(-1)
    probs[0, 0, 2:] = 0  # two tokens are left
    ids, found = likeliest(probs, TOP)
    expected = probs.sort(-1, descending=True)
    assert torch.equal(found, expected.values[..., :TOP])
    assert torch.equal(ids[1:], expected.indices[1:, :, :TOP]) and ids[0, 0, 2:].tolist() == [NONE] * (TOP - 2)
