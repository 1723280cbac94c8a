"""Decoding in pairs is what it is written down as, whatever the prompts, rows and interruptions."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.metrics import values
from bebop.monitor.estimators import decode_metrics
from bebop.options import PipoOptions
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.pipo import PairDecoder, Second, answer_pairs
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import DecodeStats
from tests.builders import requests
from tests.rollout.slow_pairs import (
    GATES,
    PROMPTS,
    VOCAB,
    decode,
    drafted,
    engine,
    network_of,
    paired,
    same,
    states,
)

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 5, "top_p": 0.9},
    "min_p and penalty": {"min_p": 0.05, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("options", GATES, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_engine_draws_what_passes_over_the_whole_text_draw(name: str, options: PipoOptions) -> None:
    """Prompts of 1 to 9 tokens, even and odd, three side by side: rows leave, move and are filled again."""
    policy = paired()
    asked = requests(PROMPTS, max_new_tokens=15, stop_token_ids=(VOCAB - 1,), seed=3, **SETTINGS[name])
    asked = [dataclasses.replace(r, params=dataclasses.replace(r.params, max_new_tokens=9 + r.id)) for r in asked]
    for request, answer in zip(asked, generate(engine(policy, options), asked), strict=True):
        same(answer, decode(policy, request.token_ids, request.params, options))
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


@pytest.mark.parametrize("tau", [0.5, -1.0])
def test_states_are_those_of_a_full_forward(tau: float) -> None:
    """Both networks' to fp64's tolerance, with contexts that are shared, read anew and read from an aborted answer."""
    policy = paired()
    one = engine(policy, PipoOptions(tau=tau), slots=4)
    assert isinstance(one.decoder, PairDecoder)
    one.decoder.__class__ = Checked
    decoder = one.decoder
    assert isinstance(decoder, Checked)
    decoder.engine = one
    asked = requests([p for p in PROMPTS for _ in range(2)], max_new_tokens=12, stop_token_ids=(VOCAB - 1,))
    for request in asked:
        one.add(request)
    for turn in range(25):
        one.step()
        if turn % 6 == 5:
            by_id = {r.id: r for r in asked}
            for cut in one.abort([request.id for request in one.active[::2]]):
                one.add(dataclasses.replace(by_id[cut.id], partial=cut.completion))
        if turn == 10:
            one._recompute()
    assert decoder.mixed > 10 and decoder.worst < 1e-12


def test_an_end_is_an_end_in_both_places_of_a_pair() -> None:
    """Stop tokens, stop strings and limits at every length: what is emitted and counted is the same for all three."""
    policy, ends = paired(), set[int]()
    [free] = requests([[4, 2, 5]], max_new_tokens=24, seed=5)
    whole = decode(policy, free.token_ids, free.params, GATES[0])
    seconds = np.cumsum([1 + (second != 0) for _, second in whole.pairs])
    for length in range(1, 24):
        token = whole.token_ids[length - 1]
        if token in whole.token_ids[: length - 1]:
            continue
        found = []
        text = policy.tokenizer.decode([token])
        for own in ({"max_new_tokens": length}, {"stop_token_ids": (token,)}, {"stop": (text,)}):
            params = dataclasses.replace(free.params, **own)  # type: ignore[arg-type]
            [answer] = generate(engine(policy), [dataclasses.replace(free, params=params)])
            assert answer.token_ids.tolist() == whole.token_ids[:length]
            assert answer.finish_reason == ("length" if "max_new_tokens" in own else "stop")
            stats = answer.stats
            found.append((stats.cycles, stats.tokens, stats.reached.tolist(), stats.accepted.tolist()))
            found[-1] += (round(float(stats.draft_entropy.sum()), 9), round(float(stats.counts["confidence"].sum()), 6))
            assert [s.tokens for _, s in answer.stretches] == [length]
        assert found[0] == found[1] == found[2]
        ends.add(int(length in seconds))
    assert ends == {0, 1}, "answers ended in first and in second places, before a draft and after"


def test_an_entry_of_the_caches_is_a_pair() -> None:
    """P11: what is fed is the pairs of prompt and answer, all but the newest, in both networks' caches."""
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


def test_records_of_a_finished_answer_say_what_was_drafted() -> None:
    """Rejected drafts included, each with what it was drawn with; an answer without them asked for has none."""
    policy = paired()
    asked = requests(PROMPTS, max_new_tokens=15, stop_token_ids=(VOCAB - 1,))
    rejected = 0
    for request, answer in zip(asked, generate(engine(policy, keep_state=True), asked), strict=True):
        wanted, state, ids = decode(policy, request.token_ids, request.params, GATES[0]), answer.state, answer.token_ids
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


@pytest.mark.parametrize("sees_draft", [False, True])
def test_a_head_that_sees_the_draft_is_shown_it(sees_draft: bool) -> None:
    policy = paired(sees_draft=sees_draft)
    asked = requests(PROMPTS, max_new_tokens=12, temperature=0.8)
    for request, answer in zip(asked, generate(engine(policy), asked), strict=True):
        same(answer, decode(policy, request.token_ids, request.params, GATES[0]))


def test_a_higher_threshold_keeps_fewer_drafts() -> None:
    """Of first pairs, which all thresholds draw alike, a subset; along whole answers, fewer."""
    policy, grid = paired(), (-1.0, 0.4, 0.47, 0.5, 0.53, 0.6, 0.999, 1.0)
    prompts = [[1 + i % 10, 1 + i // 10] for i in range(100)]
    kept, share = [], []
    for tau in grid:
        first = generate(engine(policy, PipoOptions(tau=tau), slots=50), requests(prompts, max_new_tokens=2))
        kept.append({i for i, answer in enumerate(first) if answer.stats.accepted.sum()})
        whole = generate(engine(policy, PipoOptions(tau=tau), slots=50), requests(prompts, max_new_tokens=30))
        share.append(sum(a.stats.tokens for a in whole) / sum(a.stats.cycles for a in whole))
    assert all(more >= fewer for more, fewer in itertools.pairwise(kept)) and len({len(k) for k in kept}) > 4
    assert kept[0] == {*range(100)} and kept[-1] == set()
    assert share == sorted(share, reverse=True) and share[0] == 2 and share[-1] == 1
    chance = generate(engine(policy, GATES[3], slots=50), requests(prompts, max_new_tokens=30))
    stats = sum((a.stats for a in chance), DecodeStats())
    assert stats.accepted.sum() / stats.reached.sum() == pytest.approx(0.6, abs=0.04)


def test_a_pad_token_that_ends_answers_is_refused() -> None:
    policy = paired()
    network_of(policy).pad = VOCAB - 1
    with pytest.raises(UserError, match=r"'pipo' is not possible: its pad token 11, which is never drawn"):
        engine(policy)


def test_no_word_of_a_number_that_was_not_measured() -> None:
    """Kept drafts and confidence are in the usual records; overlap, which needs a target, is missing and not 0."""
    answers = generate(engine(paired()), requests(PROMPTS, max_new_tokens=20))
    told = values(decode_metrics(sum((a.stats for a in answers), DecodeStats())))
    names = {"accept_length", "accept_rate/1", "confidence/1", "forwards_per_token", "target_entropy"}
    assert set(told) == {"draft/entropy", *(f"rollout/{name}" for name in names)}
    assert told["rollout/accept_length"] == pytest.approx(1 / told["rollout/forwards_per_token"])
