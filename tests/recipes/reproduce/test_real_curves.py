"""Where runs of the real study lowered their learning rate, read from their curves alone; and the figure of them."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from recipes.reproduce.real.curve import Validation
from recipes.reproduce.real.heads import CURVE, DONE, Training
from recipes.reproduce.real.runs import HeadRun, all_runs
from recipes.reproduce.real_losses import curves
from recipes.reproduce.real_losses.charts import draw_curves
from tests.recipes.reproduce.real_builders import head_run, small_study


def curve(*lengths: float, every: int = 50) -> list[Validation]:
    return [
        Validation(step=every * i, seconds=6.0 * i, length=length, loss=1.0, overlaps=(0.5, 0.4))
        for i, length in enumerate(lengths)
    ]


def keep(place: Path, run: HeadRun, lengths: list[Validation], done: bool = True) -> None:
    folder = run.folder(place)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(asdict(run)))
    (folder / CURVE).write_text(json.dumps({"validations": [asdict(one) for one in lengths]}))
    if done:
        told = {"ended": "flat", "flat": True, "best step": 100, "best length": 1.5, "risen": 0.001}
        (folder / DONE).write_text(json.dumps(told))


@pytest.mark.slow
def test_a_rate_is_lowered_where_training_lowered_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = small_study(tmp_path)
    lowered: list[int] = []
    set_rate = Training._set_rate

    def noted(self: Training) -> None:
        lowered.append(self.trainer.version)
        set_rate(self)

    monkeypatch.setattr(Training, "_set_rate", noted)
    run = head_run(drops=2, most_steps=40)
    told = Training(run, tmp_path, model, text).fit()
    kept = json.loads((run.folder(tmp_path) / CURVE).read_text())["validations"]
    found = curves.drops(curves.settings(run.folder(tmp_path) / "run.json"), [Validation(**one) for one in kept])
    assert told["ended"] == "flat" and len(lowered) == 2
    assert [one.step for one in found] == lowered


def test_a_curve_counts_from_the_last_time_that_the_rate_was_lowered() -> None:
    """Broken: steps from the beginning, by which a curve that is flat once is flat at the next validation as well."""
    run = head_run(drops=2, patience=150, rise=0.005)
    level = curve(*[1.2, 1.4, *[1.5] * 12])
    found = [one.step for one in curves.drops(run, level)]
    assert len(found) == 2 and found[1] - found[0] >= 150
    assert curves.drops(head_run(drops=0, patience=150, rise=0.005), level) == []
    assert curves.drops(run, curve(*(1.2 + 0.02 * i for i in range(14)))) == []


def test_a_last_validation_lowers_nothing() -> None:
    run = head_run(drops=1, patience=150, rise=0.005)
    (first,) = curves.drops(run, curve(*[1.5] * 12))
    end = [one for one in curve(*[1.5] * 12) if one.step <= first.step]
    assert curves.drops(run, end) == [] and curves.drops(run, [*end, *curve(*[1.5] * 12)[len(end) : len(end) + 1]]) == [
        first
    ]


def test_runs_are_read_with_the_settings_that_they_ran_with(tmp_path: Path) -> None:
    first, second, *_ = all_runs()
    keep(tmp_path, HeadRun(**asdict(first) | {"patience": 100}), curve(*[1.2, 1.4, *[1.5] * 6]))
    keep(tmp_path, second, curve(1.2, 1.3), done=False)
    one, two = curves.trained(tmp_path)
    assert (one.run.patience, one.run.marks) == (100, first.marks) and one.curve[0].overlaps == (0.5, 0.4)
    line, other = curves.line(one), curves.line(two)
    assert (line["run"], line["flat"], line["steps"], line["minutes of processor time"]) == (
        first.name,
        "yes",
        350,
        0.7,
    )
    assert line["rate lowered at"].split(", ")[0] == str(one.drops[0].step)
    assert (other["ended"], other["flat"], other["best step"]) == ("not yet", "", None)


@pytest.mark.slow
def test_every_run_has_a_line_and_every_loss_a_name(tmp_path: Path) -> None:
    for run in all_runs():
        keep(tmp_path, run, curve(*[1.2, 1.4, *[1.5] * 10]))
    draw_curves(tmp_path / "curves.svg", curves.trained(tmp_path))
    text = (tmp_path / "curves.svg").read_text()
    names = set(re.findall(r">([a-z_0-9 ]+)</text>", text))
    assert {"e2e_tv", "hard_ce", "fresh ce", "shared", "top_4", "kl"} <= names
    draw_curves(tmp_path / "none.svg", [])
    assert "e2e_tv" not in (tmp_path / "none.svg").read_text()
