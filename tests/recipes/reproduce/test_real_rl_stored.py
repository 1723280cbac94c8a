"""Runs beside GRPO that are stored with the results: read as they were made, held to their plan, not made twice."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bebop.errors import UserError
from bebop.monitor.probe_set import ProbeReading, Sweep
from recipes.reproduce.real.rl import __main__ as study
from recipes.reproduce.real.rl import analysis, stored
from recipes.reproduce.real.rl.plan import ARMS, FROZEN, SMOKE

CURVES = {name: {"ended": "flat", "flat": name != "tv"} for name in ("ce", "tv", "e2e_tv")}
METRICS = ("reward/mean", "policy/entropy", "response/length")


def fixed(overlap: float) -> ProbeReading:
    """Of six texts with one context each."""
    return ProbeReading(overlap=np.full(6, overlap), entropy=np.linspace(1, 3, 6), unit=np.arange(6))


def look(step: int, overlap: float) -> dict[str, Any]:
    records = {"cycles": [4, 4], "overlap": [4 * overlap, 4 * overlap], "entropy_sum": [8.0, 8.0]}
    own = {"accept": [4 + 4 * overlap], "greedy": [4.0], "anchors": [4.0], "records": records}
    return {"step": step, "reward": 0.5, "arms": {arm: {**own, "fixed": fixed(overlap).to_row()} for arm in ARMS}}


def leave(place: Path, overlap: float) -> None:
    """A run of two steps that has ended, as its stages leave it."""
    for folder in ("run", "looks"):
        (place / folder).mkdir(parents=True)
    lines = [json.dumps({"step": step, **dict.fromkeys(METRICS, float(step))}) for step in (1, 2)]
    (place / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step, value in ((1, 0.5), (2, overlap)):
        (place / "looks" / f"step-{step:04d}.json").write_text(json.dumps(look(step, value)))
    sweep = Sweep(entropy=(1.0, 2.0), length=(0.4, 0.5), readings=(fixed(0.4),), sums=np.ones((2, 3, 4)))
    (place / "sweep.json").write_text(json.dumps({arm: sweep.to_row() for arm in FROZEN}))
    (place / study.DONE).write_text("{}")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> study.Work:
    """Runs in ``made``, results in ``results``; falling-0 and the streams of seed 0 have ended."""
    monkeypatch.setattr(study, "PLACE", tmp_path / "made")
    monkeypatch.setattr(study, "HERE", tmp_path / "results")
    monkeypatch.setattr(study, "QUICK", False)
    monkeypatch.setattr(study.adapted, "curves", lambda place: CURVES)
    monkeypatch.setattr(study.adapted, "trained", lambda place, origins: {"ce": "ce", "other": "other"})
    leave(study.place_of("falling", 0), 0.25)
    study.place_of("rising", 0).mkdir()
    study.rows_file(0).write_text(json.dumps([{"case": "nothing", "truth": "steady", "steady": 8}]))
    return study.Work(plan=SMOKE, origins={})


def test_what_has_ended_is_stored_and_read_as_it_was(work: study.Work) -> None:
    study.store(work)
    files = sorted(path.name for path in (work.folder / stored.FOLDER).iterdir())
    assert files == ["falling-0.json.gz", "planted-0.json.gz"]
    (run,) = stored.runs(work.folder, SMOKE, [("falling", 0)])
    assert [analysis.accept(each, "ce") for each in run.looks] == [1.5, 1.25]
    assert analysis.moved(run, "policy/entropy") == 1.0 and run.device
    entropy, mismatch = analysis.parts(run, "ce")
    assert entropy + mismatch == pytest.approx(-0.25)
    assert [row["flat"] for row in analysis.head_rows([run, run])] == [True, False, True]
    planted = stored.get(stored.planted_file(work.folder, 0), SMOKE)
    assert planted["rows"] == [{"case": "nothing", "truth": "steady", "steady": 8}]


def test_the_same_run_is_stored_in_the_same_bytes(work: study.Work) -> None:
    path = stored.run_file(work.folder, "falling", 0)
    study.store(work)
    before = path.read_bytes()
    study.store(work)
    assert path.read_bytes() == before and [p.suffix for p in path.parent.iterdir()] == [".gz", ".gz"]


def test_runs_of_another_plan_or_of_none_are_not_judged(work: study.Work) -> None:
    with pytest.raises(UserError, match=r"falling-0\.json\.gz is not there: run --stage runs planted keep first"):
        study.judge(work)
    study.store(work)
    assert stored.runs(work.folder, replace(SMOKE, seeds=7), [("falling", 0)]), "more seeds are no other plan"
    with pytest.raises(UserError, match=r"falling-0\.json\.gz is of another plan \(lr, steps\)"):
        stored.runs(work.folder, replace(SMOKE, lr=1.0, steps=2), [("falling", 0)])
    assert not (work.folder / "results.json").exists()


def test_only_runs_with_rising_entropy_depend_on_the_bonus(work: study.Work) -> None:
    leave(study.place_of("rising", 1), 0.3)
    study.store(work)
    other = replace(SMOKE, bonus=2.0)
    assert stored.runs(work.folder, other, [("falling", 0)]) and stored.get(stored.planted_file(work.folder, 0), other)
    with pytest.raises(UserError, match=r"rising-1\.json\.gz is of another plan \(bonus\)"):
        stored.runs(work.folder, other, [("rising", 1)])


@pytest.mark.parametrize("skip", [True, False])
def test_what_is_stored_is_made_again_unless_it_is_left_out(
    skip: bool, work: study.Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    study.store(work)
    (study.place_of("falling", 0) / study.DONE).unlink()
    study.rows_file(0).unlink()
    begun: list[str] = []

    def beside(plan: Any, place: Path, *_: Any) -> SimpleNamespace:
        begun.append(place.name)
        return SimpleNamespace(done=plan.steps)

    monkeypatch.setattr(study, "Beside", beside)
    monkeypatch.setattr(study, "first_policy", lambda plan: None)
    monkeypatch.setattr(study.texts, "fixed_texts", lambda *_: [])
    monkeypatch.setattr(study.texts, "planted_texts", lambda *_: [])
    monkeypatch.setattr(study, "with_head", lambda *_: None)
    monkeypatch.setattr(study, "Streams", lambda *_: None)
    monkeypatch.setattr(study, "confusion", lambda *_: [])
    again = replace(work, skip_stored=skip)
    study.carry_out(again)
    study.plant(again)
    assert ("falling-0" in begun) == (not skip) and {"rising-0", "falling-1", "rising-1"} <= set(begun)
    assert [study.rows_file(seed).is_file() for seed in (0, 1)] == [not skip, True]
