"""Decoding in pairs is what it is written down as, whatever the prompts, rows, interruptions and weights."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.metrics.metrics import values
from bebop.model.backbone import Policy
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Rows
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.pipo.decoding import PairDecoder, Second, answer_pairs
from bebop.systems.pipo.network import PairModel
from bebop.systems.pipo.options import PipoOptions
from bebop.trajectory import Completion, DecodeStats
from tests.builders import requests, tiny_pairs, tiny_policy
from tests.cases import slow_but
from tests.rollout.driving import aborted, finished, resumed, started, tokens
from tests.rollout.slow_pairs import (
    GATES,
    PROMPTS,
    VOCAB,
    drafted,
    engine,
    network_of,
    paired,
    same,
    shared,
    states,
    written,
)

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 5, "top_p": 0.9},
    "min_p and penalty": {"min_p": 0.05, "repetition_penalty": 1.3},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gate"),
    slow_but(
        [("min_p and penalty", 0), ("plain", 3)],
        [(name, gate) for name in SETTINGS for gate in range(len(GATES))],
        several=True,
    ),
)
def test_the_engine_draws_what_passes_over_the_whole_text_draw(name: str, gate: int) -> None:
    """Prompts of 1 to 9 tokens, even and odd, three side by side: rows leave, move and are filled again."""
    policy, options = shared(), GATES[gate]
    asked = requests(PROMPTS, max_new_tokens=15, stop_token_ids=(VOCAB - 1,), seed=3, **SETTINGS[name])
    asked = [dataclasses.replace(r, params=dataclasses.replace(r.params, max_new_tokens=9 + r.id)) for r in asked]
    for request, answer in zip(asked, generate(engine(policy, options), asked), strict=True):
        same(answer, written(request.token_ids, request.params, options))
        assert not answer.exact and answer.sampled_logprobs is None and not answer.state


class Checked(PairDecoder):
    """Holds every state against a pass over the whole text."""

    engine: TorchEngine
    worst = 0.0
    mixed = 0

    def read(self, rows: Rows) -> Tensor:
        self.pairs = [self.entries(slot, self.engine._context(slot)) for slot in range(rows.batch)]
        assert rows.fed.tolist() == [len(pairs) - 1 for pairs in self.pairs]
        found = super().read(rows)
        self.full = [states(self.policy, pairs) for pairs in self.pairs]
        wanted = torch.stack([full[-1] for full in self.full])
        self.worst = max(self.worst, float((found[:, 0] - wanted).abs().max()))
        self.mixed += len({len(pairs) for pairs in self.pairs}) > 1
        return found

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        u: list[Tensor] = []
        plain = self.network.confidence
        self.network.confidence = lambda h, found, *more: (u.append(found), plain(h, found, *more))[1]  # type: ignore[method-assign]
        second = super().draft(rows, states, token)
        del self.network.confidence
        for row, (pairs, full) in enumerate(zip(self.pairs, self.full, strict=True)):
            wanted = drafted(self.policy, pairs, full, int(token[row]))[-1]
            self.worst = max(self.worst, float((u[0][row] - wanted).abs().max()))
        return second


@pytest.mark.parametrize("tau", slow_but([0.5], [0.5, -1.0]))
@pytest.mark.slow
def test_states_are_those_of_a_full_forward(tau: float) -> None:
    """Both networks' to fp64's tolerance, with contexts shared, read anew and read from an aborted completion."""
    policy = paired()
    one = engine(policy, PipoOptions(tau=tau), slots=4)
    one.decoder.__class__ = Checked
    decoder = one.decoder
    assert isinstance(decoder, Checked)
    decoder.engine = one
    asked = requests([p for p in PROMPTS for _ in range(2)], max_new_tokens=12, stop_token_ids=(VOCAB - 1,))
    for turn in range(25):
        started(one, () if turn else asked, 1)
        if turn % 6 == 5:
            by_id = {r.id: r for r in asked}
            for cut in one.abort([request.id for request in one.active[::2]]):
                one.add(dataclasses.replace(by_id[cut.id], partial=cut.completion))
        if turn == 10:
            one._recompute()
    assert decoder.mixed > 10 and decoder.worst < 1e-12


def test_an_end_is_an_end_in_both_places_of_a_pair() -> None:
    """Stop tokens, stop strings and limits at every length: what is emitted and counted is the same for all three."""
    policy, ends = shared(), set[int]()
    [free] = requests([[4, 2, 5]], max_new_tokens=24, seed=5)
    whole = written(free.token_ids, free.params)
    seconds = np.cumsum([1 + (second != 0) for _, second in whole.pairs])
    lengths = [n for n in range(1, 24) if whole.token_ids[n - 1] not in whole.token_ids[: n - 1]]
    asked = []
    for length in lengths:
        token = whole.token_ids[length - 1]
        text = policy.tokenizer.decode([token])
        for own in ({"max_new_tokens": length}, {"stop_token_ids": (token,)}, {"stop": (text,)}):
            params = dataclasses.replace(free.params, **own)  # type: ignore[arg-type]
            asked.append(dataclasses.replace(free, id=len(asked), params=params))
    answers = generate(engine(policy, slots=len(asked)), asked)
    for length, *three in zip(lengths, answers[::3], answers[1::3], answers[2::3], strict=True):
        assert [answer.finish_reason for answer in three] == ["length", "stop", "stop"]
        found = []
        for answer in three:
            assert answer.token_ids.tolist() == whole.token_ids[:length]
            stats = answer.stats
            found.append((stats.cycles, stats.tokens, stats.reached.tolist(), stats.accepted.tolist()))
            found[-1] += (round(float(stats.draft_entropy.sum()), 9), round(float(stats.counts["confidence"].sum()), 6))
            assert [s.tokens for _, s in answer.stretches] == [length]
        assert found[0] == found[1] == found[2]
        ends.add(int(length in seconds))
    assert ends == {0, 1}, "answers ended in first and in second places, before a draft and after"


@pytest.mark.usefixtures("in_slots")
def test_an_entry_of_the_caches_is_a_pair() -> None:
    """P11: what is fed is the pairs of prompt and completion, all but the newest, in both networks' caches."""
    policy = paired()
    [request] = requests([[1, 2, 3, 4, 5]], max_new_tokens=30)
    one = engine(policy)
    decoder = one.decoder
    assert isinstance(decoder, PairDecoder)
    one.add(request)
    for cycles in range(1, 9):
        one.step()
        count = int(one.slots.count[0])
        pairs = answer_pairs(one.slots.tokens[0, :count].tolist(), decoder.kept[0].tolist(), 0)
        assert one.fed == [3 + cycles - 1] and len(pairs) == cycles
        written = decoder.cache.keys[:, 0].abs().sum((1, 3)) > 0  # [layers, entries]
        assert written.sum(1).tolist() == [3 + cycles - 1] * 3
    assert count > cycles, "some pairs are whole"


@pytest.mark.slow
def test_records_of_a_finished_completion_say_what_was_drafted() -> None:
    """Rejected drafts included, each with what it was drawn with; a completion without them asked for has none."""
    policy = shared()
    asked = requests(PROMPTS, max_new_tokens=15, stop_token_ids=(VOCAB - 1,))
    rejected = 0
    for request, answer in zip(asked, generate(engine(policy, keep_state=True), asked), strict=True):
        wanted, state, ids = written(request.token_ids, request.params), answer.state, answer.token_ids
        pairs = answer_pairs(ids.tolist(), state["pipo/kept"].tolist(), 0)
        assert pairs == wanted.pairs
        firsts = np.cumsum([0, *(1 + (second != 0) for _, second in pairs[:-1])])
        assert state["pipo/draft"][firsts].tolist() == wanted.drafts
        np.testing.assert_allclose(state["pipo/confidence"][firsts], wanted.confidence, atol=1e-6)
        drawn = np.isin(np.arange(len(ids)), firsts)
        assert (state["pipo/draft"][: len(ids)][~drawn] == -1).all()
        for (_, second), place in zip(pairs, firsts, strict=True):
            if second:
                assert state["pipo/draft_logprob"][place] == pytest.approx(answer.logprobs[place + 1], abs=1e-6)
        rejected += sum(draft >= 0 and not second for draft, (_, second) in zip(wanted.drafts, pairs, strict=True))
    assert rejected > 10


@pytest.mark.slow
def test_a_higher_threshold_keeps_fewer_drafts() -> None:
    """Of first pairs, which all thresholds draw alike, a subset; along whole completions, fewer."""
    policy, prompts = shared(), [[1 + i % 10, 1 + i // 10] for i in range(60)]

    def answers(options: PipoOptions, count: int) -> list[Completion]:
        return generate(engine(policy, options, slots=60), requests(prompts, max_new_tokens=count))

    kept = []
    for tau in (-1.0, 0.4, 0.47, 0.5, 0.53, 0.6, 0.999, 1.0):
        first = answers(PipoOptions(tau=tau), 2)
        kept.append({i for i, answer in enumerate(first) if answer.stats.accepted.sum()})
    assert all(more >= fewer for more, fewer in itertools.pairwise(kept)) and len({len(k) for k in kept}) > 4
    assert kept[0] == {*range(60)} and kept[-1] == set()
    share = []
    for tau in (-1.0, 0.47, 0.53, 1.0):
        whole = answers(PipoOptions(tau=tau), 16)
        share.append(sum(a.stats.tokens for a in whole) / sum(a.stats.cycles for a in whole))
    assert share == sorted(share, reverse=True) and share[0] == 2 and share[-1] == 1
    stats = sum((a.stats for a in answers(GATES[3], 16)), DecodeStats())
    assert stats.accepted.sum() / stats.reached.sum() == pytest.approx(0.6, abs=0.05)


def test_a_pad_token_that_ends_completions_is_refused() -> None:
    policy = paired()
    network_of(policy).pad = VOCAB - 1
    with pytest.raises(UserError, match=r"'pipo' is not possible: its pad token 11, which is never drawn"):
        engine(policy)


class PadAllowed(PairModel):
    """Does not take PAD out of the second token's distribution, as one may who thinks of the first alone."""

    def logits(self, policy: Policy, states: Tensor) -> Tensor:
        first = super().logits(policy, states)
        return first if self.calls.__next__() % 2 == 0 else policy.logits(states)


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [False, True])
def test_no_completion_holds_a_pad(allowed: bool) -> None:
    """Of 2,400, under every setting, by a model whose likeliest token PAD would often be."""
    one = tiny_policy(VOCAB, seed=3)
    network = tiny_pairs(one)
    one.parts["pipo"] = network
    with torch.no_grad():
        one.backbone.lm_head.weight[0] = 2 * one.backbone.lm_head.weight[5]
    if allowed:
        network.__class__, network.calls = PadAllowed, itertools.count()  # type: ignore[assignment]
    seen = Counter[int]()
    settings = (
        {},
        {"temperature": 1.5},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"repetition_penalty": 1.3},
    )
    for number, own in enumerate(settings):
        config = DecodingConfig(system="pipo", draft_tokens=1, options={"tau": 0.45})
        engine = TorchEngine(one, config, slots=400, max_length=32)
        prompts = [[1 + i % 11, *range(1, 1 + i % 6)] for i in range(400)]
        for answer in generate(engine, requests(prompts, max_new_tokens=8, seed=number << 20, **own)):
            seen.update(answer.token_ids.tolist())
    assert seen.total() == 6 * 400 * 8 and len(seen) == VOCAB - 1 + allowed
    assert (seen[0] > 200) == allowed


def test_no_word_of_a_number_that_was_not_measured() -> None:
    """Kept drafts and confidence are in the usual records; overlap, which needs a target, is missing and not 0."""
    answers = generate(engine(shared()), requests(PROMPTS[:4], max_new_tokens=12))
    told = values(decode_metrics(sum((a.stats for a in answers), DecodeStats())))
    names = {"accept_length", "accept_rate/1", "confidence/1", "forwards_per_token", "target_entropy"}
    assert set(told) == {"draft/entropy", *(f"rollout/{name}" for name in names)}
    assert told["rollout/accept_length"] == pytest.approx(1 / told["rollout/forwards_per_token"])


# ---- interruptions and changes


def test_an_aborted_completion_goes_on_in_its_pairs() -> None:
    policy = shared()
    asked = requests(PROMPTS[:5], max_new_tokens=20, seed=8)
    whole = [written(r.token_ids, r.params) for r in asked]
    parts: dict[int, Completion] = {}
    for _ in range(3):
        again = [dataclasses.replace(request, partial=parts.get(request.id)) for request in asked]
        parts = aborted(started(engine(policy, slots=len(asked)), again, 3))
        assert len(parts) == len(asked)
    done = generate(engine(policy), resumed(asked, parts))
    for answer, wanted in zip(done, whole, strict=True):
        same(answer, wanted)
    lost = [dataclasses.replace(r, partial=dataclasses.replace(parts[r.id], state={})) for r in asked]
    assert tokens(generate(engine(policy), lost)) != tokens(done), "without its pairs a completion is another text"


def test_equal_tokens_in_other_pairs_are_not_shared() -> None:
    """Two completions to one prompt, interrupted where they have the same tokens and not the same pairs."""
    policy = shared()
    [request] = requests([[1, 2, 3]], max_new_tokens=20)
    [cut] = aborted(started(engine(policy), [request], 4)).values()
    kept = np.array(cut.state["pipo/kept"])
    assert kept.any()
    alone = dataclasses.replace(cut, state={**cut.state, "pipo/kept": np.zeros_like(kept)})
    asked = [dataclasses.replace(request, id=i, partial=part) for i, part in enumerate((cut, alone, cut))]
    together = tokens(generate(engine(policy), asked))
    apart = [ids for one in asked for ids in tokens(generate(engine(policy), [one]))]
    assert together == apart and apart[0] == apart[2] != apart[1]


def test_groups_share_their_prompt_and_differ() -> None:
    policy = shared()
    asked = [r for p in ([1, 2, 3], [4]) for r in requests([p] * 4, max_new_tokens=12, seed=40)]
    asked = [dataclasses.replace(r, id=i) for i, r in enumerate(asked)]
    reads: list[int] = []
    one = engine(policy, slots=8)
    prefill = one.decoder.prefill
    one.decoder.prefill = lambda first, contexts, _: (reads.append(len(contexts)), prefill(first, contexts))[1]  # type: ignore
    answers = generate(one, asked)
    assert reads == [2], "two contexts were read for eight answers"
    for request, answer in zip(asked, answers, strict=True):
        same(answer, written(request.token_ids, request.params))
    assert len({tuple(a.token_ids.tolist()) for a in answers}) == 8


def cut_after(one: TorchEngine, asked: list[Request], cycles: int) -> list[Request]:
    """Return the requests with what they have after some cycles."""
    return resumed(asked, aborted(started(one, asked, cycles)))


def rest(one: TorchEngine) -> list[list[int]]:
    return tokens([answer for _, answer in sorted(finished(one).items())])


def test_a_threshold_that_comes_back_finds_the_entries_that_were_left_out() -> None:
    """Beyond 1 nothing is drafted, and the draft layer has no entries of that time."""
    policy, asked = shared(), requests(PROMPTS[:3], max_new_tokens=20)
    halves = cut_after(engine(policy, GATES[2]), asked, 4)
    assert all(half.partial is not None and half.partial.stats.draft_forwards == 0 for half in halves)
    wanted = tokens(generate(engine(policy), halves))
    one = started(engine(policy, GATES[2]), asked, 4)
    one.configure(DecodingConfig(system="pipo", draft_tokens=1, options={"tau": 0.5}))
    assert rest(one) == wanted


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_new_weights_reach_it_through_embedding_and_head_alone(on_update: str) -> None:
    policy, other, asked = paired(), paired(seed=2), requests(PROMPTS[:3], max_new_tokens=20)
    other.parts["pipo"] = tiny_pairs(policy)
    with torch.no_grad():
        for ours, theirs in zip(other.parts["pipo"].parameters(), policy.parts["pipo"].parameters(), strict=True):
            ours.copy_(theirs)
    wanted = tokens(generate(engine(other), cut_after(engine(policy), asked, 4)))
    one = started(engine(policy, on_update=on_update), asked, 4)
    before = {name: value.clone() for name, value in policy.parts["pipo"].state_dict().items()}
    one.load_weights({name: value.detach().clone() for name, value in other.weights().items()}, version=1)
    assert all(torch.equal(value, before[name]) for name, value in policy.parts["pipo"].state_dict().items())
    assert (rest(one) == wanted) == (on_update == "recompute")
