"""What the benchmark of dispatch compares: the bound by hand, who is seen to do worse, and what its rule says."""

from dataclasses import replace

import pytest

from bebop.bench import dispatch
from bebop.bench.dispatch import Plan
from bebop.config.simulate import CompletionsConfig
from bebop.driver.pool import PullDispatch
from bebop.metrics.intervals import Interval

UNEVEN = Plan(workers=2, staleness=2, sigma=1.0, slow=True)


def test_the_bound_is_work_over_what_full_engines_do() -> None:
    config = replace(UNEVEN.config("pull", 0), completions=CompletionsConfig(lengths=(50,), draft_tokens=0))
    cycle = 0.004 + 7 * 0.0004  # of eight rows
    assert dispatch.bound(config, UNEVEN.speeds) == pytest.approx(1.5 / (50 * cycle / 8 + 0.002))


@pytest.mark.slow
def test_pulling_uses_a_slow_worker_as_it_can_and_who_uses_one_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "STEPS", {2: 16})
    found = dispatch.row(UNEVEN, range(2))
    assert found["pull / static"] > 1.2 and not found["misses"]
    assert found["static of bound"] < 0.75 < 0.85 < found["pull of bound"] < 1.15
    monkeypatch.setattr(PullDispatch, "_least_busy", lambda self: 1 if self._queue else None)
    hoarded = dispatch.row(replace(UNEVEN, slow=False), range(2))
    assert hoarded["misses"] == "worse than static" and hoarded["pull of bound"] < 0.6


@pytest.mark.parametrize(
    ("workers", "staleness", "gain", "reached", "wanted"),
    [
        (8, 2, (0.98, 1.02), (0.91, 0.99), []),
        (2, 1, (0.9, 0.99), (0.2, 0.3), ["worse than static"]),
        (8, 2, (0.98, 1.02), (0.89, 0.99), ["below the bar"]),
        (8, 1, (0.98, 1.02), (0.2, 0.3), []),
    ],
)
def test_the_rule(
    workers: int, staleness: int, gain: tuple[float, float], reached: tuple[float, float], wanted: list[str]
) -> None:
    plan = Plan(workers=workers, staleness=staleness, sigma=1.0, slow=False)
    assert dispatch.misses(plan, Interval(1.0, *gain), Interval(1.0, *reached)) == wanted
