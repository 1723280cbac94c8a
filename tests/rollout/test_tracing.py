"""The trace of a completion: each field against an independent reference, and whole wherever its completion goes."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.fields import from_dict
from bebop.config.job import DecodingConfig, JobConfig
from bebop.driver.protocols import Assignment, PartialGroup
from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding import verify_trace
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.verify_trace import CHUNK, likeliest
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.rollout.worker import RolloutWorker
from bebop.systems import SYSTEMS
from bebop.systems.pad.options import PadOptions
from bebop.trajectory import NONE, TOP, VERDICTS, Completion, Prompt, Trace
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.driving import aborted, decoder_of, finished, started

VOCAB, EOS = 12, 11
PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9, 9, 9], [2, 3, 2, 3], [5, 1]]
DISTRIBUTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.6}, {"top_k": 3}, {"temperature": 0.0}, {"repetition_penalty": 1.4}, {"top_p": 0.9}
]  # fmt: skip


def config(name: str) -> DecodingConfig:
    options = {"tau": 0.6, "p_min": 0.01} if SYSTEMS[name].options is PadOptions else {}  # it overrides now and then
    return DecodingConfig(system=name, draft_tokens=6 if SYSTEMS[name].tree else 3, options=options)


def engine(policy: Policy, name: str, slots: int = 3) -> TorchEngine:
    return TorchEngine(policy, config(name), slots=slots, max_length=64, room=6)


def wanted(traced: Sequence[int] = range(len(PROMPTS))) -> list[Request]:
    """Completions of 5 to 25 tokens, each under a distribution of its own; those of ``traced`` are traced."""
    asked = []
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, DISTRIBUTIONS, strict=True)):
        (one,) = requests([prompt], seed=40 + i, max_new_tokens=5 + 4 * i, stop_token_ids=(EOS,), **sampling)
        asked.append(dataclasses.replace(one, id=i, trace=i in traced))
    return asked


# ---- what the parts said, by request


@dataclass
class Said:
    """A cycle of a request: the draft, how many of it were accepted, along which nodes, and what came out of it."""

    drafts: list[int]
    parents: list[int]
    probs: np.ndarray | None  # [K, V]
    accepted: int
    nodes: list[int]  # those that stand
    count: int = 0  # tokens


@dataclass
class Listening:
    """Wraps drafter and rule of an engine; ``step`` advances it and notes every cycle of every request."""

    one: TorchEngine
    said: dict[int, list[Said]] = field(default_factory=dict)
    done: dict[int, Completion] = field(default_factory=dict)
    latest: tuple[Draft, Accepted] | None = None

    def __post_init__(self) -> None:
        decoder = decoder_of(self.one)
        rule = decoder.rule.accept

        def accept(rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
            accepted = rule(rows, draft, out, uniforms)
            self.latest = (draft, accepted)
            return accepted

        decoder.rule.accept = accept  # type: ignore[method-assign]

    def run(self, asked: Sequence[Request]) -> dict[int, Completion]:
        for request in asked:
            self.one.add(request)
        while self.one.unfinished:
            self.step()
        return self.done

    def step(self) -> None:
        before = {r.id: self._written(r) for r in self.one.active}
        self.one._admit()
        active = list(self.one.active)
        ended = {f.id: f.completion for f in self.one.step()}
        self.done |= ended
        now = {r.id: self._written(r) for r in self.one.active} | {i: len(c.token_ids) for i, c in ended.items()}
        for slot, request in enumerate(active):
            cycle = self._row(slot)
            cycle.count = now[request.id] - before.get(request.id, 0)
            self.said.setdefault(request.id, []).append(cycle)

    def _written(self, request: Request) -> int:
        return int(self.one.slots.count[self.one.active.index(request)])

    def _row(self, slot: int) -> Said:
        assert self.latest is not None
        draft, accepted = self.latest
        count = draft.tokens.shape[1] if draft.lengths is None else int(draft.lengths[slot])
        parents = list(range(-1, count - 1)) if draft.parents is None else draft.parents[slot].tolist()
        stands = int(accepted.lengths[slot])
        nodes = list(range(stands)) if draft.parents is None else (accepted.rows[slot, 1 : 1 + stands] - 1).tolist()
        return Said(
            drafts=draft.tokens[slot, :count].tolist(),
            parents=parents[:count],
            probs=None if draft.probs is None else draft.probs[slot, :count].double().numpy(),
            accepted=stands,
            nodes=nodes,
        )


# ---- what follows from that


def target(policy: Policy, request: Request, answer: np.ndarray) -> np.ndarray:
    """[T, V] that each token was drawn from, by a pass over the whole text and arithmetic of its own."""
    ids = torch.tensor([*request.token_ids, *answer.tolist()])
    with torch.no_grad():
        hidden = policy.hidden(ids[None], torch.arange(len(ids))[None], PackedContext(torch.tensor([len(ids)])))
        logits = policy.logits(hidden)[0].double().numpy()[len(request.token_ids) - 1 : -1]
    rows, params = [], request.params
    for t, row in enumerate(logits):
        seen = [*request.token_ids, *answer[:t].tolist()]
        z = row.copy()
        for token in set(seen):
            z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
        if params.temperature == 0:
            rows.append(np.eye(VOCAB)[z.argmax()])
            continue
        p = np.exp((z - z.max()) / params.temperature)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        ranked = p[order]
        kept = np.arange(VOCAB) < (params.top_k or VOCAB)
        ranked = ranked * kept / (ranked * kept).sum()
        ranked = ranked * (ranked.cumsum() - ranked < (params.top_p if params.top_p < 1 else np.inf))
        p[order] = ranked / ranked.sum()
        rows.append(p)
    return np.array(rows)


def entropy(p: np.ndarray) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def check_top(ids: np.ndarray, top: np.ndarray, p: np.ndarray) -> None:
    """The likeliest first; equal ones in any order."""
    known = ids != NONE
    np.testing.assert_allclose(top.astype(float), np.sort(p)[::-1][: len(top)], atol=1e-3)
    np.testing.assert_allclose(p[ids[known]], top[known].astype(float), atol=1e-3)
    assert len(set(ids[known].tolist())) == known.sum() == min(TOP, (p > 0).sum())


def check(policy: Policy, request: Request, answer: Completion, cycles: Sequence[Said], drafter: str) -> None:
    """Every field of every row."""
    trace, p = answer.trace, target(policy, request, answer.token_ids)
    assert trace is not None and len(trace) == len(answer.token_ids) == sum(c.count for c in cycles)
    t = 0
    for number, cycle in enumerate(cycles):
        node = -1
        for k in range(cycle.count):
            children = [i for i, parent in enumerate(cycle.parents) if parent == node]
            token, stands = int(answer.token_ids[t]), k < cycle.accepted
            last = "plain" if not cycle.drafts else "recovered" if children else "bonus"
            assert VERDICTS[trace.verdicts[t]] == ("accepted" if stands else last)
            assert trace.cycles[t] == number
            np.testing.assert_allclose(trace.target_entropy[t], entropy(p[t]), atol=1e-5)
            check_top(trace.target_ids[t], trace.target_top[t], p[t])
            if children:
                check_draft(trace, t, p[t], cycle, children[0], token if stands else None)
                assert trace.names[trace.drafters[t]] == drafter
            else:
                assert trace.drafters[t] == trace.drafts[t] == NONE and (trace.draft_ids[t] == NONE).all()
                numbers = (trace.draft_target_probs, trace.draft_probs, trace.overlap, trace.draft_entropy)
                assert all(np.isnan(values[t]) for values in numbers) and np.isnan(trace.draft_top[t]).all()
            node = cycle.nodes[k] if stands else -2
            t += 1


def check_draft(trace: Trace, t: int, p: np.ndarray, cycle: Said, first: int, kept: int | None) -> None:
    """The first child says what was proposed; the draft is the one that stands, if one does."""
    drafted = cycle.drafts[first] if kept is None else kept
    assert trace.drafts[t] == drafted
    np.testing.assert_allclose(trace.draft_target_probs[t], p[drafted], atol=1e-5)
    if cycle.probs is None:
        q, chance = np.eye(VOCAB)[cycle.drafts[first]], 1.0
    else:
        q = cycle.probs[first]
        chance = q[drafted]
    np.testing.assert_allclose(trace.draft_probs[t], chance, atol=1e-6)
    np.testing.assert_allclose(trace.overlap[t], np.minimum(p, q).sum(), atol=1e-5)
    np.testing.assert_allclose(trace.draft_entropy[t], entropy(q), atol=1e-5)
    check_top(trace.draft_ids[t], trace.draft_top[t], q)


def check_sums(answer: Completion) -> None:
    """Rows add up to the completion's own statistics, position by position."""
    trace, stats = answer.trace, answer.stats
    assert trace is not None
    place = np.arange(len(trace)) - np.searchsorted(trace.cycles, trace.cycles)
    tested = trace.drafts != NONE
    sums: Mapping[str, np.ndarray] = {
        "reached": tested.astype(float),
        "accepted": (trace.verdicts == VERDICTS.index("accepted")).astype(float),
        "overlap": trace.overlap,
        "target_entropy": trace.target_entropy,
        "draft_entropy": trace.draft_entropy,
    }
    assert len(np.unique(trace.cycles)) == stats.cycles
    for name, values in sums.items():
        own = getattr(stats, name)
        found = np.array([values[tested & (place == k)].sum() for k in range(len(own))])
        np.testing.assert_allclose(found, own, atol=1e-4, err_msg=name)
        assert place[tested].max(initial=-1) < len(own) or not tested.any()


def same(a: Trace | None, b: Trace | None) -> bool:
    assert a is not None and b is not None
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Trace)]
    return all(np.array_equal(x, y, equal_nan=np.asarray(x).dtype.kind == "f") for x, y in pairs)


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
def test_what_is_traced_depends_on_nobody_beside_it_and_changes_no_completion(policy: Policy) -> None:
    every, some, none = (generate(engine(policy, "bebop"), wanted(chosen)) for chosen in (range(6), (0, 2, 3), ()))
    one, late = engine(policy, "bebop", slots=6), {}
    for request in wanted():  # one comes in every cycle, beside those that run
        one.add(request)
        late |= {f.id: f.completion for f in one.step()}
    late |= finished(one)
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
def test_an_interrupted_completion_has_the_rows_of_both_parts(policy: Policy, then: str) -> None:
    asked = wanted()
    one = started(engine(policy, "bebop", slots=6), asked)
    early = {f.id: f.completion for _ in range(3) for f in one.step()}
    parts = aborted(one)
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
    (part,) = started(one, [dataclasses.replace(asked, trace=False)], 2).abort()
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
    one, done, cycle = started(engine(policy, "bebop", slots=6), wanted()), {}, 0
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
