"""Estimators and rules of the beyond recipe where the truth can be worked out."""

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch

from bebop.adaptation.probe import NUMBERS, Probe, probe
from bebop.rollout.decoding.base import Draft, TargetOutput
from bebop.rollout.decoding.rules import Rejection
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling
from recipes.reproduce.beyond import cold
from recipes.reproduce.beyond.analysis import inside_gain
from recipes.reproduce.beyond.estimators import ESTIMATORS, Sums, bias, estimate, sums
from recipes.reproduce.beyond.findings import HEADS, RULES
from recipes.reproduce.beyond.heads import equal_time
from recipes.reproduce.beyond.on_text import TextSampling, accept_lengths, expected
from recipes.reproduce.beyond.recording import Cycles, RecordingRule, cycles
from recipes.reproduce.measured import of
from recipes.reproduce.study import policy
from recipes.reproduce.verdicts import judge

# BatchSampling over two tokens at step 1, and at step 2 after each of them.
P1, Q1 = np.array([0.7, 0.3]), np.array([0.3, 0.7])
P2 = np.array([[0.95, 0.05], [0.5, 0.5]])
Q2 = np.array([[0.9, 0.1], [0.02, 0.98]])


def overlap(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.minimum(p, q).sum())


def true_length() -> float:
    """E[A] by enumeration: accepted prefixes follow min(p, q)."""
    return overlap(P1, Q1) + sum(min(P1[y], Q1[y]) * overlap(P2[y], Q2[y]) for y in (0, 1))


def decoded(count: int, seed: int = 0) -> tuple[Cycles, Probe]:
    """``count`` cycles of two drafts, ten a completion, and text of the target with an anchor at each start."""
    rng = np.random.default_rng(seed)
    y = (rng.random(count) < Q1[1]).astype(int)
    second = (rng.random(count) < Q2[y, 1]).astype(int)
    survive = np.stack([np.minimum(1, P1[y] / Q1[y]), np.minimum(1, P2[y, second] / Q2[y, second])], 1)
    accepted = np.cumprod(rng.random((count, 2)) < survive, 1).sum(1).astype(float)
    overlaps = np.stack([np.full(count, overlap(P1, Q1)), [overlap(P2[i], Q2[i]) for i in y]], 1)
    answer, place = np.arange(count) // 10, 3 * (np.arange(count) % 10)
    text = (rng.random(count) < P1[1]).astype(int)
    table = np.stack([np.full(count, overlap(P1, Q1)), [overlap(P2[i], Q2[i]) for i in text]], 1)
    decoding = Cycles(
        answer=answer, start=place, accepted=accepted, survive=survive, overlap=overlaps, live=np.ones((count, 2))
    )
    shown = Probe(
        row=answer, place=place, task=np.full(count, "x"), numbers={n: table for n in NUMBERS},
        accept=1 + table[:, 0] + np.minimum(1, Q1[text] / P1[text]) * table[:, 1], accept_greedy=np.ones(count),
    )  # fmt: skip
    return decoding, shown


def test_unbiased_estimates_hit_the_truth_and_shortcuts_do_not() -> None:
    totals = sums(*decoded(20_000))
    value = {name: estimate(name, totals).value for name in ESTIMATORS}
    for name in list(ESTIMATORS)[:5]:
        assert value[name] == pytest.approx(true_length(), abs=0.02), name
        assert estimate(name, totals).low <= true_length() <= estimate(name, totals).high
    drafted = overlap(P1, Q1) * (1 + sum(Q1[y] * overlap(P2[y], Q2[y]) for y in (0, 1)))
    along_text = overlap(P1, Q1) * (1 + sum(P1[y] * overlap(P2[y], Q2[y]) for y in (0, 1)))
    assert value["overlaps multiplied along drafted paths"] == pytest.approx(drafted, abs=0.01)
    assert value["mean overlaps multiplied"] == pytest.approx(drafted, abs=0.01)
    assert value["overlaps multiplied along text"] == pytest.approx(along_text, abs=0.01)
    shortcuts = list(ESTIMATORS)[5:]
    assert not any(bias(name, totals).low <= 0 <= bias(name, totals).high for name in shortcuts)
    biases = {f"{head}, {name}": of(bias(name, totals)) for name in ESTIMATORS for head in HEADS}
    findings = judge(RULES[:5], biases)
    assert all(f.side == "confirmed" and f.p < 0.01 and f.untested is None for f in findings)


def test_forgetting_the_prefix_is_caught() -> None:
    real, shown = decoded(20_000)
    broken = dataclasses.replace(real, survive=np.ones_like(real.survive))  # as if every prefix were accepted
    assert bias("drafted paths, unbiased", sums(broken, shown)).low > 0.1


def test_steps_after_a_stop_token_do_not_count() -> None:
    real, shown = decoded(1000)
    live = real.live.copy()
    live[:, 1] = 0
    totals = sums(dataclasses.replace(real, live=live), shown)
    assert estimate("drafted paths, unbiased", totals).value == pytest.approx(overlap(P1, Q1))
    assert estimate("mean overlaps multiplied", totals).value == pytest.approx(overlap(P1, Q1))


def test_watching_keeps_what_the_rule_saw_and_changes_nothing() -> None:
    torch.manual_seed(0)
    q, p = torch.rand(64, 3, 5).softmax(-1), torch.rand(64, 4, 5).softmax(-1)
    tokens = torch.distributions.Categorical(q).sample()
    draft = Draft(tokens=tokens, probs=q, entropies=torch.zeros(64, 3), lengths=None, forwards=2)
    uniforms = torch.rand(64, 5)
    rule = RecordingRule(Rejection(), (4,))
    out = TargetOutput(hidden=p, logits=p.log(), probs=p)
    recorded, plain = (r.accept(None, draft, out, uniforms) for r in (rule, Rejection()))
    assert torch.equal(recorded.lengths, plain.lengths) and torch.equal(recorded.tokens, plain.tokens)
    [seen] = rule.seen
    for row, step in product(range(64), range(3)):
        y = tokens[row, step]
        assert seen["survive"][row, step] == pytest.approx(min(1, float(p[row, step, y] / q[row, step, y])), rel=1e-5)
        assert bool(seen["live"][row, step]) == (4 not in tokens[row, :step].tolist())
        stop = [*tokens[row].tolist(), 4].index(4)
        assert int(seen["accepted"][row]) == min(int(plain.lengths[row]), stop + 1)
        assert int(seen["emitted"][row]) == min(int(plain.lengths[row]), stop) + 1


def test_cycles_know_where_they_begin() -> None:
    def step(*emitted: int) -> dict[str, torch.Tensor]:
        blank = torch.ones(len(emitted), 2)
        counts = torch.tensor(emitted)
        return {"accepted": counts - 1, "emitted": counts, "survive": blank, "overlap": blank, "live": blank}

    table = cycles([step(2, 3), step(1, 1), step(2)], [[0, 1], [1, 0], [1]])
    assert table.answer.tolist() == [0, 1, 1, 0, 1]
    assert table.start.tolist() == [0, 0, 3, 2, 4]


@pytest.mark.slow
def test_text_at_draft_temperature_one_is_the_probe_and_zero_is_target_only() -> None:
    model = policy()
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(4, 60, (n,), generator=generator).tolist() for n in (9, 14, 6)]
    rows = [TokenRow(prompt=tuple(ids[:3]), answer=tuple(ids[3:])) for ids in made]
    expect = probe(model, rows, 3, Sampling())
    full, cold_draft, warm = accept_lengths(
        model, rows, 3, [TextSampling(), TextSampling(0.0), TextSampling(0.7)], TextSampling(), batch=2
    )
    assert full == pytest.approx(expect.accept.mean(), rel=1e-4)
    # Greedy drafts: the same expectation, without the noise of whether the text holds the draft at the last step.
    assert (
        1 <= cold_draft <= 4 and cold_draft != pytest.approx(full, rel=1e-3) and warm != pytest.approx(full, rel=1e-3)
    )


def test_expected_length_by_hand() -> None:
    assert float(expected(torch.tensor([0.5, 0.2]), torch.tensor([0.8, 0.4]))) == pytest.approx(1 + 0.8 + 0.5 * 0.4)


def test_inside_gain_does_not_reward_noise() -> None:
    grid = [0.0, 0.25, 0.5, 0.75, 1.0]
    bump = np.array([2.0, 2.1, 2.3, 2.1, 2.0])
    assert inside_gain(grid, np.stack([bump, bump + 0.1, bump + 0.2])).low > 0.25
    ends = np.array([2.3, 2.1, 2.0, 2.1, 2.2])
    assert inside_gain(grid, np.stack([ends, ends, ends])).high < 0
    rng = np.random.default_rng(0)
    flat = [np.array([2.0, *rng.normal(2, 0.1, 3), 2.0]) for _ in range(300)]
    honest = [inside_gain(grid, np.stack(flat[i : i + 3])).value for i in range(0, 300, 3)]
    naive = [np.stack(flat[i : i + 3])[:, 1:4].max(1).mean() - 2 for i in range(0, 300, 3)]
    assert abs(np.mean(honest)) < 0.03 < np.mean(naive)


def test_equal_time_gives_the_slower_loss_fewer_steps() -> None:
    assert equal_time((0.2, 0.25), 100) == (100, 80)
    assert equal_time((0.25, 0.2), 100) == (80, 100)


@pytest.mark.slow
def test_ways_of_a_cold_start() -> None:
    assert [cold.objective("ce_then_tv", step) for step in (0, cold.STEPS - 1)] == ["ce", "tv"]
    assert cold.objective("nla", 0) == "nla"
    fresh, trained = cold.fresh().mtp, policy().mtp
    assert fresh is not None and trained is not None
    backbone = policy().backbone.get_decoder().layers[-1]
    assert torch.equal(next(iter(fresh.layer.parameters())), next(iter(backbone.parameters())))
    assert torch.equal(fresh.token_norm.weight, torch.ones_like(fresh.token_norm.weight))
    assert not torch.equal(trained.token_norm.weight, fresh.token_norm.weight)


def test_sums_have_a_number_a_completion() -> None:
    totals = sums(*decoded(100))
    assert all(len(getattr(totals, f.name)) == 10 for f in dataclasses.fields(Sums))
