"""The report's cards on drift, from a run's own log and from those of others."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from bebop.config import JobConfig, from_dict
from bebop.monitor.bank import BankReading, Sweep
from bebop.monitor.watch import Watch
from bebop.report import main
from tests.monitor.synthetic import Truth, step_groups
from tests.test_report import headings, specs, write_run

CARDS = ["Why the accept length moved", "Accept length against entropy", "The same texts, then and now"]
CARDS += ["The controller's log", "Where it moved"]
TRUTH = Truth(entropy=lambda step: 0.5 + 0.01 * step, mismatch=lambda step: 0.0 if step <= 8 else -0.5)


def reading(shift: float, heat: float = 1.0) -> BankReading:
    entropy = heat * np.random.default_rng(0).gamma(2.0, 0.2, 64)
    return BankReading(overlap=0.8 - 0.2 * entropy + shift, entropy=entropy, unit=np.arange(64) // 4, chance=0.1)


def watched_run(folder: Path, steps: int = 14) -> Path:
    run = write_run(folder, steps=steps)
    config = from_dict(JobConfig, {"cotrain": {"mode": "auto"}, "monitor": {"bank_every": 5}})
    watch = Watch(config, run)
    heats = (0.5, 0.8, 1.25, 1.6)
    sweep = Sweep(
        entropy=(0.4, 0.45, 0.6, 0.7), length=(2.9, 2.86, 2.71, 2.6), bank=tuple(reading(0.0, heat) for heat in heats)
    )
    for step in range(1, steps + 1):
        due = watch.bank_due(step, step_groups(TRUTH, step))
        bank = None if due is None else reading(-0.1 if step > 8 else 0.0, 1 + 0.01 * step)
        watch.observe(step, step_groups(TRUTH, step), step - 1, bank=bank, sweep=sweep if step == 1 else None)
    watch.close()
    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = watched_run(tmp_path_factory.mktemp("one") / "spoiled")
    assert main([str(run)]) == 0
    return (run / "report.html").read_text()


def drawn(page: str, title: str) -> list[dict[str, Any]]:
    """The plots of one card."""
    card = next(part for part in page.split("<section")[1:] if f"<h2>{title}</h2>" in part)
    numbers = [int(n) for n in re.findall(r"id='plot-(\d+)'", card)]
    return [specs(page)[n] for n in numbers]


def test_every_card_is_there_and_explained(page: str) -> None:
    assert headings(page)[-5:] == [*CARDS[:3], "The controller&#x27;s log", CARDS[4]]
    for plot in specs(page):
        go.Figure(plot)
    texts = re.findall(r"</h2>.*?<p>(.*?)</p></section>", page)
    assert all(len(text) > 60 for text in texts[-5:])


@pytest.mark.parametrize("title", [CARDS[0], CARDS[2]])
def test_bars_add_up_to_the_line(page: str, title: str) -> None:
    [plot] = drawn(page, title)
    traces = {trace["name"]: trace for trace in plot["data"]}
    summed = np.array(traces["entropy"]["y"]) + np.array(traces["mismatch"]["y"])
    np.testing.assert_allclose(summed, traces["whole change"]["y"], atol=2e-6)
    low, high = (np.array(traces[end]["y"]) for end in ("low", "high"))
    assert (low < traces["whole change"]["y"]).all() and (high > traces["whole change"]["y"]).all()
    assert traces["mismatch"]["y"][-1] < -0.08 and max(traces["mismatch"]["error_y"]["array"]) > 0
    assert plot["layout"]["barmode"] == "relative"


def test_slopes_go_through_the_first_steps(page: str) -> None:
    [plot] = drawn(page, CARDS[1])
    points, *lines = plot["data"]
    assert len(points["x"]) == 14 and {line["name"] for line in lines} <= {
        "over temperatures",
        "between answers",
        "early",
    }
    line = next(line for line in lines if line["name"] == "over temperatures")
    slope = (line["y"][1] - line["y"][0]) / (line["x"][1] - line["x"][0])
    assert slope == pytest.approx(-1.03, abs=0.1) and "per nat" in line["hovertemplate"]


def test_the_controller_and_the_breakdown_are_tables(page: str) -> None:
    log = page.split("The controller&#x27;s log")[1].split("</section>")[0]
    assert "mismatch-driven" in log and "start co-training" in log and "mismatch -0." in log
    where = page.split("Where it moved")[1].split("</section>")[0]
    assert "Task even" in where and "Task odd" in where and "[" in where


def test_runs_side_by_side(tmp_path: Path) -> None:
    a, b, unwatched = watched_run(tmp_path / "a"), watched_run(tmp_path / "b", 8), write_run(tmp_path / "c")
    out = tmp_path / "both.html"
    assert main([str(a), str(b), str(unwatched), "--out", str(out)]) == 0
    page = out.read_text()
    assert len(drawn(page, CARDS[0])) == 2 == len(drawn(page, CARDS[1]))
    one, other = (plot["layout"]["yaxis"]["range"] for plot in drawn(page, CARDS[0]))
    assert one == other, "heights compare"
    assert "a, step 10" in page and "a: Task even" in page


def test_a_log_of_another_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"global_step": s, "my/len": 2.8 - 0.5 * (s > 20) + 0.02 * rng.normal(), "heat": 0.5 + 0.05 * rng.normal()}
        for s in range(30)
    ]
    log = tmp_path / "theirs.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--from", str(log), "--map", "accept_length=my/len", "entropy=heat"]) == 0
    page = (tmp_path / "theirs.html").read_text()
    assert capsys.readouterr().out.strip().endswith("theirs.html")
    assert headings(page) == [CARDS[0], CARDS[1], "The controller&#x27;s log"] and "mismatch-driven" in page
    assert main(["--from", str(tmp_path / "no.jsonl")]) == 2
    assert main(["--from", str(log), "--map", "nonsense"]) == 2
    assert main(["--from", str(log)]) == 2  # its names are not known
    errors = capsys.readouterr().err
    assert errors.count("\n") == 3 and "OURS=THEIRS" in errors and "accept_length=NAME" in errors
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--from", str(log)])
