from types import SimpleNamespace

import numpy as np
import pytest

from bebop.metrics.metrics import values
from bebop.monitor.estimators import decode_metrics
from bebop.trajectory import DecodeStats
from bebop.verl_job.metrics import Reporter, acceptance, speculates
from bebop.verl_job.settings import VerlConfig
from bebop.verl_job.stats import TURNS, encode


def answer(rng: np.random.Generator, rate: float) -> DecodeStats:
    """One answer of 20 cycles with two drafts each; the more uncertain, the less is accepted."""
    rate = float(np.clip(rate + rng.uniform(-0.2, 0.2), 0.0, 1.0))
    first = int(rng.binomial(20, rate))
    second = int(rng.binomial(first, rate))
    reached = np.array([20.0, first])
    return DecodeStats(
        cycles=20,
        tokens=20 + first + second,
        reached=reached,
        accepted=np.array([first, second], dtype=float),
        overlap=reached * rate,
        target_only=reached * rate * 0.8,
        draft_entropy=reached * 0.5,
        target_entropy=reached * (1.2 - rate),
    )


def batch(seed: int, rate: float = 0.8) -> list[DecodeStats]:
    rng = np.random.default_rng(seed)
    return [answer(rng, rate) for _ in range(32)]


def test_the_numbers_are_those_of_the_sum_over_answers() -> None:
    stats = batch(0)
    found, whole = values(acceptance(stats)), values(decode_metrics(sum(stats, DecodeStats())))
    assert found == pytest.approx(whole)
    assert found["rollout/accept_rate/1"] == pytest.approx(sum(s.accepted[0] for s in stats) / 640)


def test_an_engine_without_positions_still_has_an_accept_length() -> None:
    plain = [DecodeStats(cycles=10, tokens=25), DecodeStats(cycles=30, tokens=35)]
    assert values(acceptance(plain)) == {"rollout/accept_length": pytest.approx(60 / 40)}


def report(reporter: Reporter, step: int, stats: list[DecodeStats], **metrics: float) -> dict[str, float]:
    answers = [(f"prompt{i // 4}", step - 1, encode(each)) for i, each in enumerate(stats)]
    reporter.report(step, [*answers, ("padding", 0, None)], metrics)
    return metrics


def test_the_monitor_splits_a_change_once_it_has_a_reference() -> None:
    reporter = Reporter(VerlConfig(metrics=True, monitor=True), steps=20)
    rows = [report(reporter, step, batch(step, 0.8 if step < 8 else 0.5)) for step in range(1, 13)]
    assert "drift/length_by_request" in rows[0] and not any("entropy" in name for name in rows[0] if "drift" in name)
    names = [name for name in rows[-1] if name.startswith("drift/length/")]
    assert any("mismatch" in name for name in names) and any("entropy" in name for name in names)
    assert rows[-1]["rollout/accept_length"] < rows[0]["rollout/accept_length"] - 0.3


@pytest.mark.parametrize(("rule", "rate"), [("rejection", "overlap"), ("block", "accepted"), ("tree_walk", "accepted")])
def test_acceptance_is_the_overlap_under_rejection_sampling_alone(rule: str, rate: str) -> None:
    reporter = Reporter(VerlConfig(metrics=True, monitor=True, rollout_rule=rule))
    report(reporter, 1, batch(0))
    assert reporter.monitor is not None and reporter.monitor.settings.rate == rate


def test_the_heads_metrics_get_their_own_names() -> None:
    found = report(Reporter(VerlConfig(metrics=True)), 1, batch(0), **{"actor/head/loss": 0.5, "actor/loss": 1.0})
    assert found["head/loss"] == 0.5 and found["actor/loss"] == 1.0 and "actor/head/loss" not in found


def test_a_batch_without_drafts_adds_nothing() -> None:
    metrics: dict[str, float] = {}
    Reporter(VerlConfig(metrics=True, monitor=True)).report(
        1, [("a", 0, None), ("b", 0, encode(DecodeStats()))], metrics
    )
    assert metrics == {}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("drafts", [True, False])
def test_servers_with_a_head_owe_statistics(engine: str, drafts: bool) -> None:
    model = SimpleNamespace(mtp=SimpleNamespace(enable=True, enable_rollout=drafts))
    job = SimpleNamespace(model=model, rollout=SimpleNamespace(name=engine))
    assert speculates(SimpleNamespace(actor_rollout_ref=job)) == drafts


def test_acceptance_by_turn_where_answers_have_several() -> None:
    one, other = batch(0, 0.9)[0], batch(1, 0.3)[0]
    field = encode(one + other) | {TURNS: [encode(one), encode(other)]}
    metrics: dict[str, float] = {}
    Reporter(VerlConfig(metrics=True)).report(1, [("a", 0, field), ("b", 0, encode(one))], metrics)
    assert metrics["turn/overlap/0/1"] == pytest.approx(one.overlap[0] / 20)
    assert metrics["turn/overlap/1/1"] == pytest.approx(other.overlap[0] / 20)
    assert metrics["rollout/overlap/1"] == pytest.approx((2 * one.overlap[0] + other.overlap[0]) / 60)
    single = report(Reporter(VerlConfig(metrics=True)), 1, batch(0))
    assert not any(name.startswith("turn/") for name in single)


def test_the_monitor_knows_the_turns_of_verls_answers() -> None:
    reporter = Reporter(VerlConfig(metrics=True, monitor=True), steps=20)
    for step in range(1, 13):
        pairs = zip(batch(step), batch(100 + step, 0.8 if step < 8 else 0.5), strict=True)
        fields = [encode(a + b) | {TURNS: [encode(a), encode(b)]} for a, b in pairs]
        reporter.report(step, [(f"prompt{i // 4}", step - 1, field) for i, field in enumerate(fields)], {})
    assert reporter.monitor is not None
    found = reporter.monitor.breakdown("turn")
    assert list(found) == ["0", "1"]
    assert found["1"].change.high < -0.1 and abs(found["0"].change.point) < 0.05
