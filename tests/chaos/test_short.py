"""The short form of ``make chaos``: a synchronous and an asynchronous job, and what befalls jobs most."""

import json
from pathlib import Path

import pytest

from tests.chaos.__main__ import main
from tests.chaos.faults import FAULTS
from tests.chaos.plan import AT_ONCE, JOBS, SHARES, Plan, Planned, plans
from tests.chaos.runner import groups

SEEDED = 7


def test_a_schedule_has_as_many_faults_as_asked_for_and_comes_again_by_its_seed() -> None:
    one = plans(SEEDED, 216)
    assert sum(len(plan.faults) for plan in one) == 216 and one == plans(SEEDED, 216) != plans(SEEDED + 1, 216)
    kinds = {fault.kind for plan in one for fault in plan.faults}
    assert kinds == {kind for kind, fault in FAULTS.items() if set(fault.jobs) & set(SHARES)}
    assert {plan.job for plan in one} == set(SHARES) < set(JOBS)
    assert all(plan.job in FAULTS[fault.kind].jobs for plan in one for fault in plan.faults)
    upon = sum(fault.steps < 0 for plan in one for fault in plan.faults)
    assert 0 < upon < 3 * AT_ONCE * 216


def test_a_schedule_for_some_jobs_has_as_many_faults_as_asked_for() -> None:
    (plan,) = plans(SEEDED, 9, jobs=("sglang",))
    assert plan.job == "sglang" and len(plan.faults) == 9
    assert {fault.kind for fault in plan.faults} == {kind for kind, f in FAULTS.items() if "sglang" in f.jobs}


def test_faults_upon_each_other_are_done_together() -> None:
    faults = [Planned(kind="worker killed", steps=steps, seconds=0.0, seed=0) for steps in (0, -1, -1, 1)]
    assert [[number for number, _ in group] for group in groups(faults)] == [[0, 1, 2], [3]]


@pytest.mark.slow
def test_jobs_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {
        "sync": ("driver killed", "rank killed"),
        "pull": ("report lost", "worker stopped", "report told twice", "worker killed", "weights changed"),
    }
    short = [
        Plan(
            name=job, job=job, overrides=JOBS[job],
            faults=tuple(Planned(kind=kind, steps=0, seconds=0.2, seed=SEEDED) for kind in kinds),
        )
        for job, kinds in chosen.items()
    ]  # fmt: skip
    monkeypatch.setattr("tests.chaos.__main__.plans", lambda *_: short)
    assert main(["--folder", str(tmp_path), "--steps", "8"]) == 0
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert found["summary"]["faults"] == 7 == found["rows"][-1]["survived"] and not found["summary"]["findings"]
    assert found["summary"]["synchronous jobs, bit for bit"] == 1
