"""The report on runs with environments: drafting by turn, how trajectories end, where drift is; others have none."""

import re
from pathlib import Path

import plotly.graph_objects as go
import pytest

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.metrics.metrics import values
from bebop.monitor.estimators import rollout_metrics
from bebop.monitor.watch import JobMonitor
from bebop.report.__main__ import main
from tests.monitor.test_turns import played
from tests.report.test_report import card, drawn, headings, specs, with_metrics, write_run
from tests.several_turns import group, trajectory

CARDS = ["Draft 1 by turn", "Draft 2 by turn", "How trajectories end", "Turns of a trajectory", "Environments"]


def agents(folder: Path, steps: int = 9) -> Path:
    """A run whose trajectories have up to five turns, and whose third turns drift from step 7 on."""
    members = trajectory(turns=5, first=0.3, seconds=2.0), trajectory(turns=2, ended="length", restarts=1)
    run = with_metrics(
        write_run(folder, steps=steps),
        lambda row: values(rollout_metrics([group(0, *members, lost=row["step"])], version=1)),
    )
    watch = JobMonitor(from_dict(JobConfig, {"monitor": {"probe_every": 0}}), run)
    for step in range(1, steps + 1):
        watch.observe(step, played(step, 0.7 if step < 7 else 0.5), step - 1)
    watch.close()
    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = agents(tmp_path_factory.mktemp("turns") / "agents")
    assert main([str(run)]) == 0
    return (run / "report.html").read_text()


def test_turns_have_their_cards(page: str) -> None:
    titles = headings(page)
    assert [title for title in titles if title in CARDS] == CARDS
    for plot in specs(page):
        go.Figure(plot)
    [first] = drawn(page, CARDS[0])
    lines = {trace["name"]: trace["y"][-1] for trace in first["data"]}
    assert lines == {
        "turn 0": 0.675, "turn 1": 0.525, "turn 2-3": 0.35, "turn 4-7": 0.35, "first cycle after an observation": 0.3,
    }  # fmt: skip
    [endings] = drawn(page, CARDS[2])
    assert {trace["name"]: trace["y"][0] for trace in endings["data"]} == {"done": 0.5, "length": 0.5}
    [lost] = [plot["data"][0] for plot in drawn(page, CARDS[4]) if plot["data"][0]["name"] == "lost"]
    assert lost["y"] == list(range(1, 10))


def test_drift_is_shown_by_turn(page: str) -> None:
    rows = re.findall(r"<th scope='row'>(.*?)</th><td[^>]*>(.*?)</td>", card(page, "Drift by turn"))
    found = {name: float(change.split()[0]) for name, change in rows}
    assert list(found) == ["Turn 0", "Turn 1", "Turn 2-3"]
    assert found["Turn 2-3"] == pytest.approx(-0.2, abs=0.04) and abs(found["Turn 0"]) < 0.03 > abs(found["Turn 1"])


def test_runs_of_single_answers_have_none_of_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "single")
    assert main([str(run)]) == 0
    assert "turn" not in " ".join(headings((run / "report.html").read_text())).lower()
