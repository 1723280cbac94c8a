"""States and actions: what is sudden, what is slow, what is noise; and that nothing flaps."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from bebop.config.job import Costs
from bebop.monitor.controller import Action, Controller, ControllerConfig, Health, Signals, State
from bebop.monitor.drift import Decomposition, split
from bebop.monitor.drift_monitor import DriftMonitor, Explanation, MonitorSettings, boundary, length_gain
from bebop.monitor.estimate import Estimate
from bebop.monitor.window import Window
from tests.cases import slow_but
from tests.monitor.synthetic import Truth, constant, step_records


def estimate(point: float, error: float = 0.01) -> Estimate:
    draws = np.linspace(-1.0, 1.0, 201)
    return Estimate(point=point, draws=point + error * draws / draws.std(ddof=1))


def cause(entropy: float, mismatch: float, error: float = 0.01, reason: str = "") -> Decomposition:
    part = estimate(entropy, error)
    change = part + estimate(mismatch, error)
    return split("length", "tokens", "frozen", change, Estimate.unknown(201) if reason else part, part, reason)


def signals(step: int, part: Decomposition | None, now: float = 2.8, **others: object) -> Signals:
    return Signals(step=step, cause=part, now=estimate(now), before=estimate(2.8), **others)  # type: ignore[arg-type]


def states(*parts: Decomposition, config: ControllerConfig | None = None) -> list[State]:
    controller = Controller(config)
    return [controller.judge(signals(step, part)).state for step, part in enumerate(parts)]


def observed(level: "list[tuple[float, float]]", seed: int = 0) -> list[Explanation]:
    """A run with (mean entropy, mismatch) per step."""
    rng = np.random.default_rng([21, seed])
    monitor = DriftMonitor(MonitorSettings(draws=200))
    explanations = []
    for step, (entropy, mismatch) in enumerate(level):
        truth = Truth(entropy=constant(entropy), mismatch=constant(mismatch))
        explanation = monitor.observe(step_records(truth, step, rng))
        assert explanation is not None
        explanations.append(explanation)
    return explanations


@pytest.mark.parametrize("seed", slow_but([0], range(10)))
def test_a_spoiled_head_is_noticed_within_three_steps(seed: int) -> None:
    steps = observed([(0.5, 0.0)] * 10 + [(0.5, -0.5)] * 3, seed)
    assert {e.state for e in steps[:10]} == {"steady"}
    assert steps[12].state == "mismatch-driven"
    assert sum(e.action.kind == "cotrain_start" for e in steps) == 1
    assert "mismatch -0." in steps[12].verdict.evidence


@pytest.mark.parametrize("seed", slow_but([0], range(10)))
def test_a_higher_temperature_is_entropy(seed: int) -> None:
    steps = observed([(0.5, 0.0)] * 10 + [(1.0, 0.0)] * 6, seed)
    assert steps[12].state == "entropy-driven" and steps[15].state == "entropy-driven"
    assert all(e.action.kind == "none" for e in steps)


@pytest.mark.parametrize("seed", slow_but([0], range(10)))
def test_a_stale_head_is_broken_at_once_and_recovers(seed: int) -> None:
    steps = observed([(0.5, 0.0)] * 8 + [(0.5, -1.75)] * 3 + [(0.5, 0.0)] * 6, seed)
    assert [e.state for e in steps[8:11]] == ["broken"] * 3
    assert "2.8" in steps[8].verdict.evidence and "weight sync" in steps[8].action.why
    assert [e.action.kind for e in steps[8:11]] == ["resync", "none", "none"]
    assert steps[-1].state == "steady"


def test_noise_changes_nothing() -> None:
    small = [cause(0.0, 0.04), cause(0.03, -0.04)] * 5  # beyond doubt, but of no consequence
    vague = [cause(0.0, -0.4, error=0.2)] * 5  # large, but the interval includes zero
    assert set(states(*small)) == {"steady"} and set(states(*vague)) == {"steady"}


def named(part: Decomposition, *others: Decomposition) -> State:
    controller = Controller()
    return [controller.judge(signals(i, part, others=others)).state for i in range(3)][-1]


def test_a_slope_over_answers_is_believed_only_where_acceptance_moved_along() -> None:
    """Acceptance rose; a slope that is too steep says that it should have risen more."""
    masked = cause(0.3, -0.15)
    assert named(masked) == "entropy-driven"
    assert named(cause(0.15, -0.15)) == "steady"  # nothing moved
    assert named(dataclasses.replace(cause(0.1, -0.15), source="temperature")) == "mismatch-driven"
    assert named(cause(-0.1, -0.15)) == "mismatch-driven"
    assert named(cause(-0.1, -0.15), cause(-0.4, 0.15)) == "entropy-driven"  # another slope says the opposite
    assert named(cause(-0.1, -0.15), cause(-0.25, 0.0)) == "mismatch-driven"  # another slope says nothing


def test_a_state_is_seen_twice_before_it_counts() -> None:
    bad, good = cause(0.0, -0.3), cause(0.0, 0.0)
    assert states(bad, good, bad, good, bad, bad)[-2:] == ["steady", "mismatch-driven"]
    assert set(states(bad, good, bad, good)) == {"steady"}


def flips(*, relief: float) -> int:
    """How often the state changes while mismatch hovers around what is of consequence."""
    rng = np.random.default_rng(5)
    hovering = [cause(0.0, -0.05 + 0.012 * float(z), error=0.004) for z in rng.normal(size=200)]
    seen = states(*hovering, config=ControllerConfig(relief=relief, patience=2 if relief < 1 else 1))
    return sum(a != b for a, b in pairwise(seen))


def test_hysteresis_keeps_it_from_flapping() -> None:
    assert flips(relief=0.5) <= 3
    assert flips(relief=1.0) > 40  # the broken variant: one threshold, no patience


def test_two_causes_of_one_size_do_not_take_turns() -> None:
    parts = [cause(-0.3 - 0.02 * (-1) ** i, -0.3 + 0.02 * (-1) ** i) for i in range(20)]
    assert len(set(states(*parts)[1:])) == 1


def test_cotraining_starts_once_and_stops_when_the_mismatch_is_gone() -> None:
    controller = Controller()
    parts = [cause(0, 0)] * 3 + [cause(0, -0.3)] * 5 + [cause(0, -0.04)] * 4 + [cause(0, -0.005)] * 4
    kinds = [controller.judge(signals(i, part)).action.kind for i, part in enumerate(parts)]
    assert [(i, kind) for i, kind in enumerate(kinds) if kind != "none"] == [(4, "cotrain_start"), (13, "cotrain_stop")]


@pytest.mark.parametrize("cotrains", [True, False])
def test_cotraining_under_way_goes_on_until_it_has_helped(cotrains: bool) -> None:
    """Other decoding, which begins a new reference, is proposed later; a reference that begins is no evidence."""
    controller = Controller(ControllerConfig(system="bebop", cotrains=cotrains))
    edges = [estimate(-0.05, 0.005) if step >= 3 else None for step in range(7)]
    parts = [cause(0, -0.3)] * 5 + [None] * 2
    verdicts = [
        controller.judge(signals(i, part, boundary=edge))
        for i, (part, edge) in enumerate(zip(parts, edges, strict=True))
    ]
    kinds = [verdict.action.kind for verdict in verdicts if verdict.action.kind != "none"]
    assert kinds == (["cotrain_start"] if cotrains else ["cotrain_start", "set_system"])
    assert verdicts[-1].state == "mismatch-driven"


def test_a_better_head_is_not_cotrained() -> None:
    controller = Controller()
    verdicts = [controller.judge(signals(i, cause(0, 0.3))) for i in range(4)]
    assert verdicts[-1].state == "mismatch-driven" and {v.action.kind for v in verdicts} == {"none"}


def test_an_unidentified_cause_is_said_and_not_acted_on() -> None:
    controller = Controller()
    verdicts = [controller.judge(signals(i, cause(-0.3, 0, reason="entropy was not measured"))) for i in range(4)]
    assert {v.state for v in verdicts} == {"steady"} and {v.action.kind for v in verdicts} == {"none"}
    assert "unidentified: entropy was not measured" in verdicts[-1].evidence and "-0.3" in verdicts[-1].evidence


def test_wrong_weights_are_broken_whatever_the_acceptance() -> None:
    controller = Controller()
    health = Health(version=3, expected_version=4, head_checksum="ab", expected_head_checksum="ab")
    verdict = controller.judge(signals(0, None, health=health))
    assert verdict.state == "broken" and verdict.changed and "weight version is 3, not 4" in verdict.evidence
    assert Health(version=4, expected_version=4).diagnosis() == Health(version=4).diagnosis() == ""
    assert "checksum" in Health(head_checksum="a", expected_head_checksum="b").diagnosis()


def test_chance_may_be_measured() -> None:
    """Unrelated distributions of a small vocabulary overlap a lot: 1.5 tokens a cycle may be all that is left."""
    assert Controller().judge(signals(0, None, now=1.5)).state == "steady"
    assert Controller().judge(signals(0, None, now=1.5, chance=0.5)).state == "broken"


def switches(controller: Controller, points: list[float], error: float) -> list[Action]:
    verdicts = [
        controller.judge(signals(i, cause(0, 0), boundary=estimate(point, error))) for i, point in enumerate(points)
    ]
    return [v.action for v in verdicts if v.action.kind != "none"]


def test_the_system_follows_the_decision_boundary() -> None:
    sampled = ControllerConfig(system="bebop")
    [action] = switches(Controller(sampled), [-0.05] * 5, error=0.005)
    assert action.kind == "set_system" and action.value == "target_only" and "-0.05" in action.why
    assert switches(Controller(sampled), [0.05] * 5, error=0.005) == []  # it runs already
    assert switches(Controller(sampled), [-0.05] * 5, error=0.05) == []  # the interval includes zero
    assert switches(Controller(), [-0.05] * 5, error=0.005) == []  # what runs is not known
    turning = switches(Controller(sampled), [-0.05, 0.05] * 10, error=0.005)
    assert [a.value for a in turning] == ["target_only", "bebop"]  # 20 steps, one action in ten at most


def window(rate: float) -> Window:
    rng = np.random.default_rng(0)
    steady = Truth(entropy=constant(0.5), mismatch=constant(0), level=rate, rates=True, slope=0, noise=0.01)
    return Window.of(step_records(steady, 0, rng, prompts=40))


def test_the_length_follows_costs() -> None:
    assert length_gain(window(0.95), 3, Costs(draft=0.05))[0] == 4  # nearly free: one more than there are
    fewer, gain = length_gain(window(0.3), 3, Costs(draft=0.3, verify=0.05))
    assert fewer == 1 and gain.low > 0.2
    by_hand = (1 + 0.3) / 1.35 / ((1 + 0.3 + 0.09 + 0.027) / 2.05) - 1
    assert gain.point == pytest.approx(by_hand, abs=0.05)
    controller = Controller(ControllerConfig(drafts=3))
    actions = [controller.judge(signals(i, cause(0, 0), drafts=(fewer, gain))).action for i in range(3)]
    assert [(a.kind, a.value) for a in actions if a.kind != "none"] == [("set_length", 1)]


def test_boundary_by_hand() -> None:
    edge = boundary(window(0.8))
    assert edge.point == pytest.approx(0.1 * 0.8, abs=0.01) and edge.low > 0
