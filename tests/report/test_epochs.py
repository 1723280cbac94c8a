"""The report on runs whose questions are asked again: reward, acceptance, speed by epoch; others have none of it."""

import re
from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from bebop.metrics.intervals import ratio
from bebop.metrics.metrics import values
from bebop.monitor.estimators import rollout_metrics
from bebop.report.__main__ import main
from bebop.report.epochs import ENDS, read_epochs
from bebop.report.runs import load_runs
from bebop.trajectory import MEASURED, Completion, DecodeStats, Group, Prompt, Trajectory
from bebop.trajectory_db.reader import NAME
from bebop.trajectory_db.writer import TrajectoryLog
from tests.browser import CHROMIUM, browse
from tests.report.test_report import card, drawn, headings, specs, with_metrics, write_run

TITLE = "By epoch"
QUESTIONS, BATCH, SIZE = 5, 3, 2  # every other batch lies across two epochs


def group(index: int, endless: bool = False, measured: bool = True) -> Group:
    """The longer answers of a group have the fewer cycles a token, and each epoch is better than the one before."""
    epoch, number = (0, None) if endless else divmod(index, QUESTIONS)

    def one(member: int) -> Trajectory:
        cycles, tokens = 2 + 8 * member, (epoch + 2) * (2 + 8 * member) - 4 * member
        stats = DecodeStats.with_drafts(
            1, cycles=cycles, tokens=tokens, reached=np.array([float(cycles)]), accepted=np.array([1.0])
        )
        stats.overlap = np.array([(0.9 - 0.6 * member) * cycles if measured else 0.0])
        completion = Completion(
            token_ids=np.arange(tokens), logprobs=np.zeros(tokens, np.float32), versions=np.zeros(tokens, np.int64),
            stats=stats,
        )  # fmt: skip
        return Trajectory.single(completion, reward=float(epoch > 0) * member + index % QUESTIONS)

    prompt = Prompt(index=index, task="t", text="", token_ids=(1,), item={}, question=number, epoch=epoch)
    return Group(prompt=prompt, trajectories=tuple(map(one, range(SIZE))))


def run(folder: Path, steps: int = 5, kept: bool = True, endless: bool = False, measured: bool = True) -> Path:
    """A run folder as a job leaves it, of ``BATCH`` groups a step."""
    write_run(folder, steps=steps)
    log = TrajectoryLog(folder / NAME, "all", str, SIZE) if kept else None

    def more(row: dict[str, Any]) -> dict[str, Any]:
        step = row["step"]
        groups = [group(i, endless, measured) for i in range((step - 1) * BATCH, step * BATCH)]
        if log is not None:
            log.write(step, groups, step - 1, "bebop", {})
        found = values(rollout_metrics(groups))
        seconds = {"rollout/tokens_per_s": 100.0 * step, "time/step": 10.0, "time/rollout": 5.0, "time/idle": 4.0}
        return seconds | {name: value for name, value in found.items() if name == "samples/epoch"}

    with_metrics(folder, more)
    if log is not None:
        log.close()
    return folder


def page(*folders: Path) -> str:
    assert main([str(folder) for folder in folders]) == 0
    return (folders[0] / "report.html").read_text()


def cells(text: str) -> list[tuple[str, ...]]:
    rows = re.findall(r"<tr><th scope='row'>(.*?)</th>(.*?)</tr>", card(text, TITLE))
    return [(name, *re.findall(r"<td[^>]*>(.*?)</td>", rest)) for name, rest in rows]


def plots(text: str) -> list[dict[str, Any]]:
    return drawn(text, TITLE)


def test_reward_and_acceptance_by_epoch(tmp_path: Path) -> None:
    text = page(run(tmp_path / "finite"))
    # Over cycles: of epoch 0 (2 * 2 + 16) / 12, not the mean of 2 and 1.6 over answers; likewise the overlap.
    assert [(*row[:3], *(cell.split(" [")[0] for cell in row[3:])) for row in cells(text)] == [
        ("epoch 0", "5", "10", "2.000", "1.667", "0.400", "280", "60%"),
        ("epoch 1", "5", "10", "2.500", "2.667", "0.400", "600", "60%"),
        ("epoch 2", "5", "10", "2.500", "3.667", "0.400", "920", "60%"),
    ]
    reward, length, overlap, speed = plots(text)
    # Of three groups each, step 2 has two of epoch 0 and one of epoch 1: (3 * 200 + 2 * 400) / 5 tokens a second.
    assert speed["data"][0]["y"] == [280.0, 600.0, 920.0]
    assert all(plot["data"][0]["x"] == [0, 1, 2] for plot in (reward, length, overlap))
    assert reward["data"][0]["y"] == [2.0, 2.5, 2.5] and length["data"][0]["y"] == [1.66667, 2.66667, 3.66667]
    assert overlap["layout"]["yaxis"]["range"] == [pytest.approx(0.3), pytest.approx(0.5)]  # a flat line at mid-height
    for plot in plots(text):
        go.Figure(plot)


def test_an_epoch_that_is_not_over_says_how_much_of_it_there_is(tmp_path: Path) -> None:
    text = page(run(tmp_path / "cut", steps=3))
    assert [row[:3] for row in cells(text)] == [("epoch 0", "5", "10"), ("epoch 1", "4", "8")]
    assert all(plot["data"][0]["marker"]["symbol"] == ["circle", "circle-open"] for plot in plots(text))


def test_what_is_not_measured_has_no_panel(tmp_path: Path) -> None:
    text = page(run(tmp_path / "plain", measured=False))
    assert len(plots(text)) == 3 and {row[5] for row in cells(text)} == {"–"}  # noqa: RUF001


def test_intervals_are_over_questions_and_those_of_speed_over_steps(tmp_path: Path) -> None:
    """Not over answers, which depend on one another: the same sums by question, resampled by ``ratio`` here."""
    folder = run(tmp_path / "finite", steps=10)
    [loaded] = load_runs([folder])
    for epoch in read_epochs(folder / NAME, loaded):
        groups = [group(i) for i in range(QUESTIONS * epoch.epoch, QUESTIONS * (epoch.epoch + 1))]
        groups.sort(key=lambda one: one.prompt.number)
        reward = ratio([sum(t.reward for t in one.trajectories) for one in groups], [SIZE] * QUESTIONS)
        assert reward.low < epoch.reward.value < reward.high and epoch.reward == reward
        stats = [[t.completion.stats for t in one.trajectories] for one in groups]
        length = ratio(*([sum(getattr(s, name) for s in one) for one in stats] for name in ("tokens", "cycles")))
        assert epoch.accept_length is not None
        assert astuple(epoch.accept_length) == pytest.approx(astuple(length))
        shares = Counter(i // BATCH + 1 for i in range(QUESTIONS * epoch.epoch, QUESTIONS * (epoch.epoch + 1)))
        weights = np.array([shares[step] / BATCH for step in sorted(shares)])
        speed = ratio(1000.0 * np.array(sorted(shares)) * weights, 5.0 * weights)
        assert epoch.speed is not None and astuple(epoch.speed) == pytest.approx(astuple(speed))
    line = plots(page(folder))[0]["data"][0]["error_y"]
    assert line["array"][0] == pytest.approx(reward.high - reward.value, rel=1e-5) and min(line["arrayminus"]) > 0


def test_a_run_without_its_seconds_says_nothing_of_speed(tmp_path: Path) -> None:
    folder = run(tmp_path / "old")
    text = page(with_metrics(folder, lambda row: {"time/rollout": None}))
    assert len(plots(text)) == 3 and {row[6:] for row in cells(text)} == {("–", "–")}  # noqa: RUF001


@pytest.mark.parametrize("missing", ["a second epoch", "epochs", "answers"])
def test_other_runs_have_nothing_of_it(missing: str, tmp_path: Path) -> None:
    steps, endless, kept = 1 if missing == "a second epoch" else 5, missing == "epochs", missing != "answers"
    assert TITLE not in headings(page(run(tmp_path / "other", steps, kept, endless)))


@pytest.mark.slow
def test_several_runs_are_overlaid(tmp_path: Path) -> None:
    without = write_run(tmp_path / "without")
    text = page(without, run(tmp_path / "one"), run(tmp_path / "two", kept=False), run(tmp_path / "three", steps=4))
    assert [row[0] for row in cells(text)] == [
        f"{name}, epoch {number}" for name in ("one", "three") for number in range(3)
    ]
    assert [trace["name"] for trace in plots(text)[0]["data"]] == ["one", "three"]
    assert [trace["legendgroup"] for trace in plots(text)[0]["data"]] == ["run 1", "run 3"]
    assert f"Not recorded in two: {NAME}." in card(text, TITLE)


@pytest.mark.slow
def test_of_many_epochs_the_table_has_the_ends(tmp_path: Path) -> None:
    text = page(run(tmp_path / "long", steps=2 * ENDS * QUESTIONS // BATCH + 7))
    count = len(plots(text)[0]["data"][0]["x"])
    assert count > 2 * ENDS and len(cells(text)) == 2 * ENDS and cells(text)[-1][0] == f"epoch {count - 1}"
    assert f"epochs {ENDS} to {count - ENDS - 1} are in the figure alone" in card(text, TITLE)


def test_an_overlap_of_some_cycles_counts_for_those_that_they_represent(tmp_path: Path) -> None:
    """One cycle of four is measured: in half of the completions of 2 cycles one at 0.5, in those of 10 two at 0.2."""
    groups = [group(i, measured=False) for i in range(4)]
    for i, one in enumerate(groups):
        short, long = (t.completion.stats for t in one.trajectories)
        for _ in range(i % 2):
            short.add_measured({name: [0.5] for name in MEASURED}, 1, 4)
        for _ in range(2):
            long.add_measured({name: [0.2] for name in MEASURED}, 1, 4)
    log = TrajectoryLog(tmp_path / NAME, "all", str, SIZE)
    log.write(1, groups, 0, "bebop", {})
    log.close()
    [epoch] = read_epochs(tmp_path / NAME)
    assert epoch.overlap is not None and epoch.overlap.value == pytest.approx((8 * 0.5 + 32 * 0.2) / 40)


def test_questions_that_are_asked_once_are_in_no_epoch(tmp_path: Path) -> None:
    """A run of before, gone on with by a version that knows epochs."""
    log = TrajectoryLog(tmp_path / NAME, "all", str, SIZE)
    log.write(1, [group(0, endless=True), group(1, endless=True)], 0, "bebop", {})
    log.write(2, [replace(group(7), prompt=replace(group(7).prompt, index=7))], 1, "bebop", {})
    log.close()
    assert [(one.epoch, one.questions, one.answers) for one in read_epochs(tmp_path / NAME)] == [(1, 1, SIZE)]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_draws_it(width: int, tmp_path: Path) -> None:
    folder = run(tmp_path / "finite")
    seen = browse(folder / "report.html" if page(folder) else folder, tmp_path, width)
    assert seen.errors == [] and seen.overflow <= seen.width and seen.drawn == len(specs(page(folder)))
