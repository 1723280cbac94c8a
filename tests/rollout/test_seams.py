"""What a part may rely on: layers that it asks for, columns and caches that move with rows, a mark on each answer."""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.rules import Rejection
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion, SamplingParams
from tests.builders import requests, tiny_policy

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9], [2, 2]]


def decoder_of(engine: TorchEngine) -> DraftVerify:
    assert isinstance(engine.decoder, DraftVerify)
    return engine.decoder


def engine(policy: Policy, slots: int = 3) -> TorchEngine:
    return TorchEngine(policy, DecodingConfig(draft_tokens=2), slots=slots, max_length=64, room=3)


class Reading(Rejection):
    """Keeps the states of the layers that it asks for, with the tokens at which they stand."""

    layers = (0, 1)

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, dict[int, Tensor]]] = []

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        self.seen.append((rows.context().clone(), rows.sizes.clone(), dict(out.layers)))
        return super().accept(rows, draft, out, uniforms)


def test_layers_that_a_rule_asks_for_are_those_of_the_model() -> None:
    policy = tiny_policy(seed=2)
    one, rule = engine(policy), Reading()
    decoder_of(one).rule = rule
    generate(one, requests(PROMPTS, max_new_tokens=12))
    context, sizes, layers = rule.seen[-1]
    assert set(layers) == {0, 1}
    size = int(sizes[0])
    ids = context[:1, :size]
    own = copy.deepcopy(policy.backbone.config)
    model: Any = AutoModelForCausalLM.from_config(own, attn_implementation="eager")
    model.load_state_dict(policy.backbone.state_dict())
    with torch.no_grad():
        stock = model.eval()(ids, output_hidden_states=True).hidden_states
    assert torch.allclose(layers[0][0, 0], stock[1][0, -1], atol=1e-5), "after layer 0, at the newest token"
    assert not torch.allclose(layers[0][0, 0], stock[0][0, -1], atol=1e-2)


def test_no_layer_is_kept_that_nobody_asks_for() -> None:
    one = engine(tiny_policy(seed=2))
    decoder, outs = decoder_of(one), list[TargetOutput]()
    accept = decoder.rule.accept

    def watched(rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        outs.append(out)
        return accept(rows, draft, out, uniforms)

    decoder.rule.accept = watched  # type: ignore[method-assign]
    generate(one, requests(PROMPTS[:1], max_new_tokens=4))
    assert outs and not any(out.layers for out in outs)


def test_a_context_is_prompt_and_answer_wherever_its_row_went() -> None:
    """Also of an answer that goes on from another engine's."""
    policy = tiny_policy(seed=2)
    asked = requests(PROMPTS, max_new_tokens=20)
    first = engine(policy)
    for request in asked:
        first.add(request)
    for _ in range(3):
        first.step()
    parts = {f.id: f.completion for f in first.abort()}
    one, done = engine(policy), dict[int, Completion]()
    decoder, checked = decoder_of(one), 0
    for request in asked:
        one.add(dataclasses.replace(request, partial=parts[request.id]))
    while one.unfinished:
        done |= {f.id: f.completion for f in one.step()}
        rows = Rows(one.slots, len(one.active), max(one.fed, default=0))
        for slot, context in enumerate(rows.context().tolist() if one.active else []):
            assert context[: int(rows.sizes[slot])] == one._context(slot)
            checked += 1
    assert checked > 20 and len(done) == len(asked) and decoder.drafter is not None


class Inexact(Rejection):
    exact = False


@pytest.mark.parametrize("resumed", [False, True])
def test_an_answer_is_exact_if_all_its_cycles_were(resumed: bool) -> None:
    """The mark is of the answer, not of the rule in force at its end, and it survives an abort."""
    policy = tiny_policy(seed=3)
    early, late = requests([[1, 2, 3], [4, 5]], max_new_tokens=40)
    one, done = engine(policy, slots=2), dict[int, Completion]()
    one.add(early)
    decoder_of(one).rule = Inexact()
    one.step()
    one.configure(DecodingConfig(draft_tokens=3))
    one.add(late)
    one.step()
    if resumed:
        parts = {f.id: f.completion for f in one.abort()}
        assert [parts[i].exact for i in (0, 1)] == [False, True]
        one = engine(policy, slots=2)
        for request in (early, late):
            one.add(dataclasses.replace(request, partial=parts[request.id]))
    while one.unfinished:
        done |= {f.id: f.completion for f in one.step()}
    assert [done[i].exact for i in (0, 1)] == [False, True]


def test_a_drafter_that_was_not_there_reads_running_answers() -> None:
    """From drafts looked up to drafts of the head, in flight: its states are those of a head that had read them."""
    policy = tiny_policy(seed=3, dtype=torch.float64)
    one = TorchEngine(policy, DecodingConfig(system="ngram", draft_tokens=2), slots=3, max_length=64)
    for request in requests(PROMPTS, max_new_tokens=20):
        one.add(request)
    for _ in range(4):
        one.step()
    contexts = [one._context(slot) for slot in range(len(one.active))]
    one.configure(DecodingConfig(draft_tokens=2))
    other = engine(policy)
    decoder_of(other).prefill(0, contexts)
    states, wanted = (e.slots.columns["mtp/hidden"][: len(contexts)] for e in (one, other))
    assert torch.allclose(states, wanted) and states.abs().sum(1).min() > 0
    while one.unfinished:
        assert all(f.completion.exact for f in one.step())


class Counting(Rejection):
    """Counts the drafts that were tested and, at each position, the tokens' ids."""

    counts = ("tested", "ids")

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        accepted = super().accept(rows, draft, out, uniforms)
        counts = {"tested": torch.ones_like(draft.tokens), "ids": draft.tokens}
        return dataclasses.replace(accepted, counts=counts)


@pytest.mark.parametrize("measure", [True, False])
def test_what_a_rule_counts_is_summed_where_drafts_were_reached(measure: bool) -> None:
    """By request, over an interruption too; without measurements as well."""
    one = engine(tiny_policy(seed=2))
    decoder = decoder_of(one)
    decoder.measure, decoder.rule = measure, Counting()
    one.slots.extend_stats(decoder.rule.counts)
    for request in requests(PROMPTS, max_new_tokens=12):
        one.add(request)
    for _ in range(3):
        one.step()
    halves = {f.id: f.completion for f in one.abort()}
    whole = generate(
        one, [dataclasses.replace(r, partial=halves.get(r.id)) for r in requests(PROMPTS, max_new_tokens=12)]
    )
    for answer in whole:
        stats = answer.stats
        assert stats.reached.sum() > 0
        assert np.array_equal(stats.counts["tested"], stats.reached)
        assert sum(part.counts["tested"] for _, part in answer.stretches).tolist() == stats.reached.tolist()
        assert stats.counts["ids"].sum() > 0
        metrics = decode_metrics(stats)
        assert metrics["rollout/tested/1"].value == 1
        assert metrics["rollout/ids/1"].value == stats.counts["ids"][0] / stats.reached[0]


def test_a_cut_takes_its_counts_back() -> None:
    """As it takes back what else was counted beyond the end of the answer."""
    one = engine(tiny_policy(seed=2))
    one.slots.extend_stats(Counting.counts)
    one.slots.start(0, [SamplingParams()], [[1, 2]])
    one.slots.record(["reached", "ids"], torch.tensor([[[1.0, 1.0, 1.0], [3.0, 4.0, 5.0]]]), torch.tensor([4]))
    one.slots.count[0] = 4
    one.slots.cut(0, 2)
    row = one.slots.stats[0].sum(0)
    assert row[one.slots.names.index("ids")].tolist() == [3.0, 4.0, 0.0]
    assert row[0].tolist() == [1.0, 1.0, 0.0]
