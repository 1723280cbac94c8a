"""The report's cards on drift, from a run's own log and from those of others."""

import json
import re
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.monitor.estimate import Array
from bebop.monitor.probe_set import ProbeReading, Sweep, TokenProbs
from bebop.monitor.watch import JobMonitor
from bebop.report.__main__ import main
from bebop.report.drift import replay_log
from tests.browser import CHROMIUM, browse
from tests.cases import peak_memory
from tests.commands import error_of
from tests.monitor.synthetic import Truth, step_groups
from tests.monitor.test_watch import repeated
from tests.report.test_report import drawn, headings, specs, write_run

CARDS = ["Why the accept length moved", "Accept length against entropy", "The same texts, then and now"]
CARDS += ["Where the distributions moved", "The controller's log", "Where it moved"]
TRUTH = Truth(entropy=lambda step: 0.5 + 0.01 * step, mismatch=lambda step: 0.0 if step <= 8 else -0.5)


def reading(shift: float, temperature: float = 1.0) -> ProbeReading:
    entropy = temperature * np.random.default_rng(0).gamma(2.0, 0.2, 64)
    overlap, unit = 0.8 - 0.2 * entropy + shift, np.arange(64) // 4
    return ProbeReading(overlap=overlap, entropy=entropy, unit=unit, chance=0.1, token_probs=tuple(token_probs(shift)))


def token_probs(shift: float) -> list[TokenProbs]:
    """Eight contexts of which the last moves most; q stays, p moves."""
    names = ("7", "", " ", "7", "-", "8", "9")  # two tokens look the same
    moved = [shift * i / 8 for i in range(8)]
    moved.append(moved[-1])  # another answer that begins like the last
    return [
        TokenProbs(
            text=i, context=f"{min(i, 7)} + 1 =\n", ids=tuple(range(10, 17)), tokens=names, overlap=0.7 + move,
            target=(0.5 + move, 0.2 - move, 0.1, 0.1, 0.06, 0.03, 0.01),
            draft=(0.6, 0.2, 0.1, 0.06, 0.03, 0.006, 0.004),
        )
        for i, move in enumerate(moved)
    ]  # fmt: skip


def swept(entropy: tuple[float, ...], length: tuple[float, ...], prompts: int = 6) -> Array:
    """Sums of a sweep whose prompts differ in how entropy moves their accept length."""
    steep = 1 + np.linspace(-0.2, 0.2, prompts)
    sums = np.ones((len(entropy), prompts, 4))
    sums[..., 0] = length[0] + np.outer(np.subtract(length, length[0]), steep)
    sums[..., 2] = np.array(entropy)[:, None]
    return sums


def watched_run(folder: Path, steps: int = 14) -> Path:
    run = write_run(folder, steps=steps)
    config = from_dict(JobConfig, {"cotrain": {"mode": "auto"}, "monitor": {"probe_every": 5}})
    watch = JobMonitor(config, run)
    temperatures = (0.5, 0.8, 1.25, 1.6)
    sweep = Sweep(
        entropy=(0.4, 0.45, 0.6, 0.7), length=(2.9, 2.86, 2.71, 2.6),
        readings=tuple(reading(0.0, t) for t in temperatures),
        sums=swept((0.4, 0.45, 0.6, 0.7), (2.9, 2.86, 2.71, 2.6)),
    )  # fmt: skip
    for step in range(1, steps + 1):
        due = watch.probe_due(step, step_groups(TRUTH, step))
        read = None if due is None else reading(-0.1 if step > 8 else 0.0, 1 + 0.01 * step)
        watch.observe(step, step_groups(TRUTH, step), step - 1, reading=read, sweep=sweep if step == 1 else None)
    watch.close()
    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = watched_run(tmp_path_factory.mktemp("one") / "spoiled")
    assert main([str(run)]) == 0
    return (run / "report.html").read_text()


def test_every_card_is_there_and_explained(page: str) -> None:
    assert headings(page)[-7:] == [*CARDS[:4], "The controller&#39;s log", CARDS[5], "How it was made"]
    for plot in specs(page):
        go.Figure(plot)
    texts = re.findall(r"</h2>.*?<p>(.*?)</p></section>", page)
    assert all(len(text) > 60 for text in texts[-6:])


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
    names = {"over temperatures", "between completions", "early"}
    assert len(points["x"]) == 14 and {line["name"] for line in lines} <= names
    line = next(line for line in lines if line["name"] == "over temperatures")
    slope = (line["y"][1] - line["y"][0]) / (line["x"][1] - line["x"][0])
    assert slope == pytest.approx(-1.03, abs=0.1) and "per nat" in line["hovertemplate"]


def test_distributions_are_shown_where_they_moved_most(page: str) -> None:
    plots = drawn(page, CARDS[3])
    assert len(plots) == 6 and "after “7 + 1 =⏎”: overlap 0.70 → 0.61" in page and "after “1 + 1" not in page
    assert page.count("after “7 + 1") == 1
    bars = {trace["name"]: trace for trace in plots[0]["data"]}
    assert bars["policy, first"]["x"] == ["7 #10", "(nothing)", "␣", "7 #13", "-", "8"]
    assert bars["policy, first"]["y"][:2] == [0.5, 0.2]
    assert bars["policy, last"]["y"][:2] == pytest.approx([0.4125, 0.2875])
    assert bars["head, first"]["y"] == bars["head, last"]["y"]


def test_the_controller_and_the_breakdown_are_tables(page: str) -> None:
    log = page.split("The controller&#39;s log")[1].split("</section>")[0]
    assert "mismatch-driven" in log and "start co-training" in log and "mismatch -0." in log
    where = page.split("Where it moved")[1].split("</section>")[0]
    assert "Task even" in where and "Task odd" in where and "[" in where


@pytest.mark.slow
def test_runs_side_by_side(tmp_path: Path) -> None:
    a, b, unwatched = watched_run(tmp_path / "a"), watched_run(tmp_path / "b", 8), write_run(tmp_path / "c")
    out = tmp_path / "both.html"
    assert main([str(a), str(b), str(unwatched), "--out", str(out)]) == 0
    page = out.read_text()
    assert len(drawn(page, CARDS[0])) == 2 == len(drawn(page, CARDS[1]))
    first, other = (plot["layout"]["yaxis"]["range"] for plot in drawn(page, CARDS[0]))
    assert first == other, "heights compare"
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
    assert headings(page) == [CARDS[0], CARDS[1], "The controller&#39;s log"] and "mismatch-driven" in page
    assert "no.jsonl" in error_of(main, ["--from", str(tmp_path / "no.jsonl")], capsys)
    assert "OURS=THEIRS" in error_of(main, ["--from", str(log), "--map", "nonsense"], capsys)
    assert "accept_length=NAME" in error_of(main, ["--from", str(log)], capsys)  # its names are not known
    assert "--from LOG" in error_of(main, [str(tmp_path), "--from", str(log)], capsys)


@pytest.mark.slow
def test_of_each_step_of_a_long_log_a_report_keeps_only_what_it_shows(tmp_path: Path) -> None:
    sizes, peaks = [], []
    for steps in (10, 20):
        sizes.append(repeated(tmp_path, steps))
        peaks.append(peak_memory(lambda: replay_log(tmp_path / "drift.jsonl", "run")))
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 4


def test_a_log_whose_steps_are_out_of_order_gives_the_same_page(tmp_path: Path) -> None:
    rng, log = np.random.default_rng(0), tmp_path / "log.jsonl"
    rows = [json.dumps({"step": s, "accept_length": 2.8 + 0.02 * rng.normal(), "entropy": 0.5}) for s in range(12)]
    pages = []
    for order in (rows, [*rows[6:], *rows[:6]], [*rows[:6], *rows[3:]]):  # the last went back to a checkpoint
        log.write_text("\n".join(order) + "\n")
        assert main(["--from", str(log)]) == 0
        pages.append((tmp_path / "log.html").read_text())
    assert pages[0] == pages[1] == pages[2] and headings(pages[0])[0] == CARDS[0]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_everything(page: str, tmp_path: Path, width: int) -> None:
    (tmp_path / "page.html").write_text(page)
    seen = browse(tmp_path / "page.html", tmp_path, width)
    assert seen.width == width and seen.drawn == len(specs(page)) > 8 and seen.errors == []
    assert seen.overflow <= width and seen.smallest >= 10 and seen.narrowest > 200
    broken = page.replace("Plotly.newPlot", "Plotly.newPlat")
    (tmp_path / "page.html").write_text(broken)
    assert browse(tmp_path / "page.html", tmp_path, width).errors
