"""The split of one change by hand, and whose slope it is made with."""

import numpy as np
import pytest

from bebop.monitor.controller import Controller, ControllerConfig, Signals
from bebop.monitor.drift import decompose, split
from bebop.monitor.drift_monitor import DriftMonitor, MonitorSettings
from bebop.monitor.estimate import Estimate
from bebop.monitor.probe_set import ProbeReading, Sweep, direct
from bebop.monitor.records import from_groups
from bebop.monitor.slope import Slope
from bebop.monitor.window import Measure, Window
from bebop.trajectory import Completion, DecodeStats, Group, Prompt, Trajectory
from tests.monitor.synthetic import Truth, constant, ramp, run, step_records


def window(level: float, entropy: float) -> Window:
    truth = Truth(entropy=constant(entropy), mismatch=constant(0), level=level, slope=0.0, noise=0.001, spread=0.001)
    return Window.of(step_records(truth, 0, np.random.default_rng(0), prompts=60))


def test_the_parts_of_a_change_by_hand() -> None:
    """Acceptance fell by 0.4 tokens while entropy rose by 0.2 nats, of which each costs 0.8 tokens: 0.16 of the 0.4."""
    slope = Slope(source="frozen", value=Estimate(point=-0.8, draws=-0.8 + 0.01 * np.linspace(-1, 1, 400)), spread=0.2)
    before, after = window(2.8, 0.5), window(2.4, 0.7)
    parts = decompose(Measure(), before, after, slope)
    assert parts.change.point == pytest.approx(-0.4, abs=0.06)
    assert parts.entropy_change.point == pytest.approx(0.2, abs=0.02)
    assert parts.entropy.point == pytest.approx(-0.16, abs=0.02)
    assert parts.mismatch.point == pytest.approx(-0.24, abs=0.07)
    assert parts.change.point == pytest.approx(parts.entropy.point + parts.mismatch.point)


def test_a_slope_over_temperatures_goes_before_one_over_answers_or_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others compare what differs in more than its entropy."""
    known = Slope(
        source="temperature", value=Estimate(point=-0.8, draws=-0.8 + 0.01 * np.linspace(-1, 1, 50)), spread=0.2
    )
    monkeypatch.setattr("bebop.monitor.drift_monitor.temperature_slope", lambda *_, **__: known)
    truth = Truth(entropy=ramp(0.5, 0.3), mismatch=constant(0))
    entropies = np.linspace(0.2, 1.1, 7)
    sweep = Sweep(entropy=tuple(entropies), length=tuple(3.2 - 0.8 * entropies), sums=np.ones((7, 3, 4)))
    monitor = DriftMonitor(MonitorSettings(draws=50))
    sources = []
    for number, records in enumerate(run(truth, 0)):
        explanation = monitor.observe(records, sweep=sweep if number == 21 else None)
        assert explanation is not None
        sources.append(explanation.parts["length"].source if explanation.parts else "")
    assert set(explanation.slopes) == {"early", "frozen", "temperature"}
    assert sources[20] == "frozen" and sources[21:] == ["temperature"] * len(sources[21:])


def test_what_a_sweep_explains_wholly_leaves_a_mismatch_of_exactly_nothing() -> None:
    """Each context is where the sweep had it: expectation and present share their draws, and so their difference."""
    rng = np.random.default_rng(3)
    temperature = rng.gamma(2.0, 0.3, size=200)
    unit = np.arange(200) // 4
    first, hot = (
        ProbeReading(overlap=0.8 - 0.3 * h + 0.05 * rng.normal(size=200), entropy=h, unit=unit)
        for h in (temperature, 1.4 * temperature)
    )
    parts = direct(first, hot, [hot])
    assert abs(parts.change.point) > 0.05 and parts.change.error > 1e-3
    assert abs(parts.mismatch.point) < 1e-12 and parts.mismatch.error < 1e-12


@pytest.mark.parametrize(("errors", "state"), [(2.5, "steady"), (4.0, "mismatch-driven")])
def test_the_controller_asks_for_more_than_the_interval_that_is_shown(errors: float, state: str) -> None:
    """A part of 2.5 standard errors is beyond 95 %, and will occur by chance in a run of many steps."""
    draws = np.linspace(-1.0, 1.0, 201)
    lost = Estimate(point=-0.3, draws=-0.3 + 0.3 / errors * draws / draws.std(ddof=1))
    none = Estimate(point=0.0, draws=1e-6 * draws)
    cause = split("bank", "rate", "bank", lost, none, none)
    assert lost.excludes_zero()
    controller, now = Controller(), Estimate(point=2.8, draws=2.8 + 0.01 * draws)
    states = [controller.judge(Signals(step=step, cause=cause, now=now, before=now)).state for step in range(5)]
    assert states[-1] == state


DRAWS = np.linspace(-1.0, 1.0, 201)


def sure(point: float) -> Estimate:
    return Estimate(point=point, draws=point + 0.001 * DRAWS)


def test_two_causes_of_one_size_do_not_take_turns_however_long_each_leads() -> None:
    controller, states = Controller(), []
    for step in range(24):
        lead = 0.02 * (-1) ** (step // 4)  # each is the larger one for four steps, by a seventh
        entropy, mismatch = sure(-0.3 - lead), sure(-0.3 + lead)
        cause = split("bank", "rate", "bank", entropy + mismatch, entropy, entropy)
        states.append(controller.judge(Signals(step=step, cause=cause, now=sure(2.8), before=sure(2.8))).state)
    assert len(set(states[2:])) == 1


@pytest.mark.parametrize(("gain", "kind"), [(0.01, "none"), (0.05, "set_length")])
def test_a_gain_of_no_consequence_changes_no_length_however_certain(gain: float, kind: str) -> None:
    controller = Controller(ControllerConfig(drafts=3, system="bebop"))
    signals = Signals(step=0, cause=None, now=sure(2.8), before=None, drafts=(4, sure(gain)))
    assert controller.judge(signals).action.kind == kind


def test_a_stretch_has_the_version_that_wrote_it() -> None:
    """Not that of the answer up to there."""
    stats = DecodeStats(cycles=10, tokens=20, reached=np.array([10.0]), accepted=np.array([10.0]))
    answer = Completion(
        token_ids=np.arange(100),
        logprobs=np.zeros(100, dtype=np.float32),
        versions=np.repeat([3, 5], [64, 36]),
        stretches=((0, stats), (64, stats)),
    )
    prompt = Prompt(index=0, task="test", text="", token_ids=(1,), item={})
    group = Group(prompt=prompt, trajectories=(Trajectory.single(completion=answer, reward=0.0),))
    records = from_groups([group], step=6, version=6)
    assert records.version.tolist() == [3, 5] and records.lag.tolist() == [3, 1]
