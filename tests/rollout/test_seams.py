"""What a part may rely on: layers that it asks for, columns and caches that move with rows, marks on completions."""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bebop.config.job import DecodingConfig
from bebop.model.backbone import Policy
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.rules import Rejection
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion, SamplingParams
from tests.builders import bare_policy, requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.driving import aborted, decoder_of, finished, read_at_once, resumed, started

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9], [2, 2]]


def engine(policy: Policy, slots: int = 3, rule: Rejection | None = None) -> TorchEngine:
    one = TorchEngine(policy, DecodingConfig(draft_tokens=2), slots=slots, max_length=64, room=3)
    if rule is not None:
        decoder_of(one).rule = rule
    return one


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
    rule = Reading()
    generate(engine(policy, rule=rule), requests(PROMPTS, max_new_tokens=12))
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


def test_a_context_is_prompt_and_completion_wherever_its_row_went() -> None:
    """Also of a completion that goes on from another engine's."""
    policy = tiny_policy(seed=2)
    asked = requests(PROMPTS, max_new_tokens=20)
    one = started(engine(policy), resumed(asked, aborted(started(engine(policy), asked, 3))))
    decoder, checked, done = decoder_of(one), 0, dict[int, Completion]()
    while one.unfinished:
        done |= {f.id: f.completion for f in one.step()}
        rows = Rows(one.slots, len(one.active), max(one.fed, default=0))
        for slot, context in enumerate(rows.context().tolist() if one.active else []):
            assert context[: int(rows.sizes[slot])] == one._context(slot)
            checked += 1
    assert checked > 20 and len(done) == len(asked) and decoder.drafter is not None


def test_a_drafter_that_was_not_there_reads_running_completions() -> None:
    """From drafts looked up to drafts of the head, in flight: its states are those of a head that had read them."""
    policy = tiny_policy(seed=3, dtype=torch.float64)
    one = TorchEngine(policy, DecodingConfig(system="ngram", draft_tokens=2), slots=3, max_length=64)
    started(one, requests(PROMPTS, max_new_tokens=20), 4).configure(DecodingConfig(draft_tokens=2))
    other = read_at_once(one, engine(policy))
    states, wanted = (e.slots.columns["mtp/hidden"][: len(one.active)] for e in (one, other))
    assert torch.allclose(states, wanted) and states.abs().sum(1).min() > 0
    assert all(completion.exact for completion in finished(one).values())


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
    asked = requests(PROMPTS, max_new_tokens=12)
    halves = aborted(started(one, asked, 3))
    whole = generate(one, [dataclasses.replace(r, partial=halves.get(r.id)) for r in asked])
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
    """As it takes back what else was counted beyond the end of the completion."""
    one = engine(tiny_policy(seed=2))
    one.slots.extend_stats(Counting.counts)
    one.slots.start(0, [SamplingParams()], [[1, 2]])
    one.slots.record(["reached", "ids"], torch.tensor([[[1.0, 1.0, 1.0], [3.0, 4.0, 5.0]]]), torch.tensor([4]))
    one.slots.count[0] = 4
    one.slots.cut(0, 2)
    row = one.slots.stats[0].sum(0)
    assert row[one.slots.names.index("ids")].tolist() == [3.0, 4.0, 0.0]
    assert row[0].tolist() == [1.0, 1.0, 0.0]


# ---- inexact rules


class Says(Rejection):
    """Claims to draw each token with probability exp(-token)."""

    exact = False

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        accepted = super().accept(rows, draft, out, uniforms)
        return dataclasses.replace(accepted, logprobs=-accepted.tokens.double())


class SaysNothing(Rejection):
    exact = False


def as_claimed(answer: Completion, first: int, last: int) -> bool:
    assert answer.sampled_logprobs is not None and answer.sampled_logprobs.dtype == np.float32
    return bool((answer.sampled_logprobs[first:last] == -answer.token_ids[first:last]).all())


def test_what_a_rule_says_stands_beside_log_p() -> None:
    """Also as rows leave and others move into their places."""
    policy = bare_policy(seed=2)
    asked = requests([*PROMPTS[1:], [3, 1]], max_new_tokens=9)
    answers, plain = (generate(engine(policy, 2, rule), asked) for rule in (Says(), Rejection()))
    for answer, same in zip(answers, plain, strict=True):
        assert np.array_equal(answer.logprobs, same.logprobs) and as_claimed(answer, 0, len(answer.token_ids))
        assert answer.weighable and answer.drawn_logprobs is answer.sampled_logprobs
        assert same.sampled_logprobs is None and same.weighable and same.drawn_logprobs is same.logprobs
    silent = generate(engine(policy, 2, SaysNothing()), asked)
    assert not any(a.weighable for a in silent) and all(a.sampled_logprobs is None for a in silent)


RULES = {"exact": Rejection, "says": Says, "says nothing": SaysNothing}
PAIRS = [(early, late, again) for early in RULES for late in RULES for again in (True, False)]


@pytest.mark.parametrize(
    ("first", "second", "again"),
    slow_but([("says", "exact", True), ("says nothing", "exact", False)], PAIRS, several=True),
)
def test_a_completion_of_two_rules_is_known_where_both_are(first: str, second: str, again: bool) -> None:
    """The mark is of the completion, not of the rule in force at its end, and it survives an abort.

    Beside it is one that began under the second rule.
    """
    policy, early, late = bare_policy(seed=3), RULES[first](), RULES[second]()
    asked = requests([[1, 2, 3], [4, 5]], max_new_tokens=30)
    one = started(engine(policy, 2, early), asked[:1], 1)
    begun = one.fed[0] + 1 - len(asked[0].token_ids)
    decoder_of(one).rule = late
    started(one, asked[1:], 1)
    if again:
        one = started(engine(policy, 2, late), resumed(asked, aborted(one)))
    done = finished(one)
    answer, rules = done[0], (early, late)
    assert done[1].exact == late.exact and done[1].weighable == (second != "says nothing")
    assert answer.exact == all(rule.exact for rule in rules)
    assert answer.weighable == ("says nothing" not in (first, second))
    if answer.exact or not answer.weighable:
        assert answer.sampled_logprobs is None
        return
    assert answer.sampled_logprobs is not None
    for rule, begin, end in ((early, 0, begun), (late, begun, 30)):
        claimed = as_claimed(answer, begin, end)
        same = bool((answer.sampled_logprobs[begin:end] == answer.logprobs[begin:end]).all())
        assert (claimed, same) == (isinstance(rule, Says), not isinstance(rule, Says))
