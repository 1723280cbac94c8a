"""The real loop in virtual time: its invariants, known times, and what the command says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop import simulate as command
from bebop.bench.simulation import Size, medians
from bebop.config.compose import simulate_config
from bebop.config.fields import from_dict
from bebop.config.simulate import CompletionsConfig, CostsConfig, SimulateConfig
from bebop.errors import UserError
from bebop.simulation.costs import Costs, cycles, emitted
from bebop.simulation.run import simulate
from bebop.simulation.search import best_splits, speculation, splits
from tests.cases import slow_but
from tests.commands import error_of

FREE = dict.fromkeys(
    ("position", "draft", "draft_row", "prefill", "update_token", "weights", "fetch", "load", "report", "step"), 0.0
)


def config(
    costs: dict[str, float] | None = None, answers: dict[str, Any] | None = None, **fleet: int
) -> SimulateConfig:
    sections: dict[str, Any] = {"fleet": {"steps": 8, "groups_per_step": 4, "group_size": 4, "slots": 8, **fleet}}
    sections |= {"costs": costs or {}, "completions": answers or {}}
    return from_dict(SimulateConfig, sections)


def test_constant_lengths_take_the_time_that_arithmetic_says() -> None:
    """16 answers of 10 tokens on 2 workers of 8 slots, one cycle a token and row-free: 10 cycles, then the update."""
    costs = {**FREE, "cycle": 0.5, "row": 0.0, "update": 3.0}
    found = simulate(config(costs, {"lengths": [10], "draft_tokens": 0}, workers=2, staleness=0))
    assert found.step_seconds == pytest.approx(10 * 0.5 + 3.0, abs=1e-6)
    assert found.trainer_idle == pytest.approx(5 / 8, abs=1e-6) and found.rollout_idle == pytest.approx(3 / 8, abs=1e-6)
    # With one update of slack the longer of both sides is all that counts, if a group in reserve fills all slots.
    both = simulate(
        config(costs, {"lengths": [10], "draft_tokens": 0}, workers=2, staleness=1, groups_per_step=2, group_size=8)
    )
    assert both.step_seconds == pytest.approx(5.0, abs=1e-6) and both.rollout_idle == pytest.approx(0, abs=1e-6)
    assert both.staleness_max == 1 and found.staleness_max == 0


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_loop_keeps_its_bound_and_trains_everything(staleness: int) -> None:
    found = simulate(config(answers={"sigma": 1.0}, workers=3, staleness=staleness))
    assert len(found.rows) == 8 and found.staleness_max <= staleness
    assert [row["version"] for row in found.rows] == list(range(1, 9))
    assert found.rows[-1]["samples/trained"] == 8 * 16 == found.trajectories
    assert found.seconds == pytest.approx(sum(row["time/step"] for row in found.rows), rel=0.05)


def test_the_same_seed_gives_the_same_job_and_another_another() -> None:
    one, same, other = (simulate(replace(config(workers=2), seed=seed)) for seed in (0, 0, 1))
    assert one.rows == same.rows and one.rows != other.rows


def test_cycles_have_the_mean_that_acceptance_rates_give() -> None:
    answers, rng = CompletionsConfig(accept_rates=(0.7, 0.5), draft_tokens=2), np.random.default_rng(0)
    mean, variance = emitted(answers)
    assert mean == pytest.approx(1 + 0.7 + 0.35)
    drawn = np.array([cycles(1000, answers, rng) for _ in range(400)])
    off = (drawn.mean() - 1000 / mean) / (drawn.std() / 20)
    assert abs(off) < 4, "1000 tokens take that many cycles; one more for the last, cut one"
    assert drawn.std() == pytest.approx(np.sqrt(variance * 1000 / mean**3), rel=0.15)
    assert cycles(7, replace(answers, draft_tokens=0), rng) == 7


def test_grain_changes_the_memory_and_hardly_the_answer() -> None:
    fine = config(answers={"median": 1000.0, "longest": 2000, "sigma": 0.5}, workers=2, steps=10)
    coarse = replace(fine, grain=20)
    a, b = simulate(fine), simulate(coarse)
    assert b.step_seconds == pytest.approx(a.step_seconds, rel=0.05)
    assert b.tokens_per_second == pytest.approx(a.tokens_per_second, rel=0.05)


def test_a_slow_worker_slows_a_static_fleet() -> None:
    even, uneven = simulate(config(workers=2, staleness=0)), simulate(config(workers=2, staleness=0), speeds=[0.5])
    assert uneven.step_seconds > 1.2 * even.step_seconds


def test_speculation_pays_where_arithmetic_says() -> None:
    one = config(answers={"accept_rates": [1.0, 0.0, 0.0]}, costs={**FREE, "cycle": 1.0, "row": 0.0, "draft": 0.5})
    gains = {(s.draft_tokens, s.batch): s.gain for s in speculation(one)}
    assert gains[0, 1] == 1.0 and gains[1, 8] == pytest.approx(2 / 1.5) and gains[2, 8] == pytest.approx(2 / 2)
    assert Costs.of(one).cycle(1) == pytest.approx(1.0 + 3 * 0.5)


@pytest.mark.slow
def test_the_best_split_balances_both_sides() -> None:
    """Updates cost about as much as decoding: of 8 GPUs neither side should have nearly all."""
    costs = {**FREE, "update": 0.0, "update_token": 2e-5}
    one = config(costs, workers=4, groups_per_step=4, staleness=1, steps=5)
    wide = replace(one, fleet=replace(one.fleet, trainer_gpus=4))
    found = best_splits(wide)
    assert {s.trainer_gpus + s.workers for s in found} == {8}
    best = max(found, key=lambda s: s.result.trajectories_per_second)
    worst = min(found, key=lambda s: s.result.trajectories_per_second)
    assert 2 < best.trainer_gpus < 6 and worst.trainer_gpus in (1, 7)


def test_all_of_an_update_is_as_much_faster_as_there_are_gpus_for_it() -> None:
    one = config({**FREE, "update": 8.0, "update_token": 2e-5}, workers=4, groups_per_step=4, staleness=1, steps=5)
    wide = replace(one, fleet=replace(one.fleet, trainer_gpus=4))
    for trainer, split in splits(wide):
        assert split.costs.update * trainer == pytest.approx(32)
        assert split.costs.update_token * trainer == pytest.approx(8e-5)


def test_the_command_prints_and_writes_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["fleet.steps=5", "fleet.groups_per_step=4", "fleet.group_size=2", f"dir={tmp_path / 'out'}"]
    assert command.main(small) == 0
    said = capsys.readouterr().out
    assert said.startswith("Predicted by python -m bebop.simulate, not measured.") and "best split" in said
    content = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert content["predicted"] is True and len(content["result"]["rows"]) == 5
    page = (tmp_path / "out" / "simulation.html").read_text()
    assert "not measured" in page and "How to share the GPUs" in page


BAD = [
    ("fleet.workers=0", "fleet.workers=0"), ("fleet.steps=2", "fleet.skip=3"), ("fleet.nope=1", "fleet.nope"),
    ("--nope", "--nope"), ("completions.draft_tokens=9", "completions.draft_tokens=9"),
    ("costs.cycle=nan", "costs.cycle=nan"),
    ("completions.accept_rates=[2]", "completions.accept_rates"), ("--help nope", "nope"),
    ("completions.lengths=[0]", "completions.lengths"), ("costs.bandwidth=0", "costs.bandwidth=0"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "named"), slow_but(BAD[:4], BAD, several=True))
def test_bad_input_is_one_line(arguments: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in error_of(command.main, arguments.split(), capsys)


def test_the_file_in_conf_has_the_defaults_of_the_dataclasses() -> None:
    assert simulate_config([]) == SimulateConfig()


def test_measured_cycles_take_the_place_of_the_law_where_their_drafts_are_asked_for() -> None:
    """On a straight line between the measured sizes; beyond the largest each row costs what one of it costs."""
    measured = CostsConfig(cycles=((1, 2, 0.1), (1, 10, 0.5), (0, 1, 7.0)))
    drafting, other = Costs(measured, 1), Costs(measured, 2)
    assert [drafting.cycle(rows) for rows in (1, 2, 6, 10, 20)] == pytest.approx([0.1, 0.1, 0.3, 0.5, 1.0])
    assert Costs(measured, 1, grain=4).cycle(6) == pytest.approx(1.2)
    assert other.cycle(6) == Costs(CostsConfig(), 2).cycle(6)
    with pytest.raises(UserError, match=r"costs\.cycles.*above 0"):
        CostsConfig(cycles=((1, 2, 0.0),))


def test_costs_of_cycles_and_admissions_are_told_apart() -> None:
    seen = [(Size(1, 4, 0), 0.2)] * 4 + [(Size(1, 4, 0), 9.0), (Size(1, 4, 2), 0.5), (Size(1, 3, 0), 0.1)]
    assert medians(seen) == ([(1, 4, 0.2)], pytest.approx(0.15))  # one of 3 rows: seen too rarely
    with pytest.raises(ValueError, match="no size"):
        medians(seen[:3])
