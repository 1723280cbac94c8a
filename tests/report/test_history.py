"""The report on drafts from history: by source, by epoch and by age of what was remembered, worked out by hand."""

from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from bebop.metrics.intervals import ratio
from bebop.report.history import NEVER, Part, read_parts
from bebop.trajectory import Completion, DecodeStats, Group, Prompt, Trajectory
from bebop.trajectory_db.reader import NAME
from bebop.trajectory_db.writer import TrajectoryLog
from tests.report.test_epochs import page
from tests.report.test_report import card, drawn, headings, specs, with_metrics, write_run

QUESTIONS, BATCH, SIZE = 4, 2, 2
TITLES = ["Drafts from history", "Drafts from history by age"]


def group(index: int, begun: int, finite: bool = True, counted: bool = True) -> Group:
    """Answers in 2 and 4 cycles of two drafts each, begun under version ``begun`` and ended under the next.

    History has half of the drafts in epoch 0 and three quarters later; .25 and .5 of its drafts are accepted.
    """
    epoch, number = divmod(index, QUESTIONS) if finite else (0, None)

    def one(member: int) -> Trajectory:
        cycles = 2.0 + 2 * member
        share, kept = (0.5, 0.25) if epoch == 0 else (0.75, 0.5)
        reached, accepted = np.array([cycles, cycles]), np.array([cycles, 0.0])
        history = share * reached
        counts = {"history": history, "history_accepted": kept * history}
        counts |= {"head_overlap": np.array([(0.6 + 0.1 * (index % 2)) * (cycles - 1), 0.0])}
        counts |= {"head_read": np.array([cycles - 1, 0.0])}  # in the last cycle history was sure
        stats = DecodeStats(cycles=int(cycles), tokens=int(2 * cycles), reached=reached, accepted=accepted)
        stats.counts = counts if counted else {}
        tokens = int(2 * cycles)
        completion = Completion(
            token_ids=np.arange(tokens), logprobs=np.zeros(tokens, np.float32),
            versions=np.repeat([begun, begun + 1], [1, tokens - 1]), stats=stats,
        )  # fmt: skip
        return Trajectory.single(completion, reward=0.0)

    prompt = Prompt(index=index, task="t", text="", token_ids=(1,), item={}, question=number, epoch=epoch)
    return Group(prompt=prompt, trajectories=tuple(map(one, range(SIZE))))


def run(folder: Path, steps: int, lag: int = 0, finite: bool = True, counted: bool = True) -> Path:
    """A run of ``BATCH`` groups a step whose answers begin under weights ``lag`` updates old."""
    write_run(folder, steps=steps)
    log = TrajectoryLog(folder / NAME, "all", str, SIZE)
    for step in range(1, steps + 1):
        first, begun = (step - 1) * BATCH, max(0, step - 1 - lag)
        log.write(step, [group(i, begun, finite, counted) for i in range(first, first + BATCH)], begun, "s", {})
    log.close()
    return with_metrics(folder, lambda row: {"rollout/history/1": 0.5})


def values(part: Part) -> tuple[float | None, ...]:
    found = (part.share, part.history, part.rest, part.head, part.length)
    return tuple(None if one is None else pytest.approx(one.value, abs=1e-4) for one in found)


def ages(folder: Path) -> list[tuple[str, float, int]]:
    return [(part.name, part.place, part.answers) for part in read_parts(folder / NAME)[1]]


def test_drafts_by_source_and_epoch(tmp_path: Path) -> None:
    """Of 4 drafts in 2 cycles, 2 are history's in epoch 0, of which .5 stand; of the rest 1.5 of 2."""
    first, second = read_parts(run(tmp_path / "run", steps=4) / NAME)[0]
    assert (first.name, first.answers, second.name) == ("epoch 0", QUESTIONS * SIZE, "epoch 1")
    assert values(first) == (0.5, 0.25, 0.75, 0.65, 2.0)
    assert values(second) == (0.75, 0.5, 0.5, 0.65, 2.0)


def test_intervals_are_over_questions(tmp_path: Path) -> None:
    first = read_parts(run(tmp_path / "run", steps=4) / NAME)[0][0]
    wanted = ratio(6 * np.array([0.6, 0.7, 0.6, 0.7]), [6.0] * QUESTIONS)
    assert first.head is not None and wanted.low < wanted.value
    assert (first.head.low, first.head.high) == pytest.approx((wanted.low, wanted.high), abs=1e-4)


@pytest.mark.parametrize(
    ("steps", "lag", "wanted"),
    [
        # In step, a question comes again after two updates.
        (6, 0, [("nothing", NEVER, 8), ("2 updates", 2.0, 16)]),
        # One behind: batches 1 and 2 begin at version 0, batch 3 at 1, when batch 1 had been trained on.
        (6, 1, [("nothing", NEVER, 8), ("1 update", 1.0, 4), ("2 updates", 2.0, 12)]),
        # Three behind: batches 3 and 4 begin at version 0 as well, before anything was trained on; 5 at 1, which knows
        # batch 1 and not 3; 8 at 4, which knows batch 4.
        (8, 3, [("nothing", NEVER, 16), ("1 update", 1.0, 4), ("2 updates", 2.0, 4), ("3 to 4 updates", 3.5, 8)]),
    ],
)
def test_age_is_counted_in_updates_of_what_had_been_trained_on(
    steps: int, lag: int, wanted: list[tuple[str, float, int]], tmp_path: Path
) -> None:
    assert ages(run(tmp_path / "run", steps, lag)) == wanted


def test_both_cards_are_on_the_page_and_drawn(tmp_path: Path) -> None:
    text = page(run(tmp_path / "<run>", steps=8, lag=3))
    assert [title for title in headings(text) if title in TITLES] == TITLES
    first, second = (card(text, title) for title in TITLES)
    assert first.count("class='plot'") == 5 and second.count("class='plot'") == 3
    assert "<tr><th scope='row'>epoch 1</th><td data-head='Completions'>8</td>" in first
    assert "<tr><th scope='row'>3 to 4 updates</th><td data-head='Completions'>8</td>" in second
    line = drawn(text, TITLES[1])[0]["data"][0]
    assert line["x"] == [1, 2, 3.5], "what nothing was remembered for is at no age"
    assert line["y"] == [0.5, 0.5, 0.5]
    for plot in specs(text):
        go.Figure(plot)


@pytest.mark.slow
def test_runs_are_overlaid_and_old_ones_said_to_lack_it(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", 4), run(tmp_path / "b", 4, lag=1)
    without, old = write_run(tmp_path / "plain"), run(tmp_path / "old", 4, counted=False)
    text = page(a, without, b, old)
    first = card(text, TITLES[0])
    assert "a, epoch 0" in first and "b, epoch 1" in first and "plain, epoch" not in first
    assert "Not recorded in old: what came from history, completion by completion." in first
    assert [trace["name"] for trace in drawn(text, TITLES[0])[0]["data"]] == ["a", "b"]
    assert not set(TITLES) & set(headings(page(without))) and not set(TITLES) & set(headings(page(old)))


def test_questions_that_are_asked_once_have_siblings_alone(tmp_path: Path) -> None:
    epochs, aged = read_parts(run(tmp_path / "endless", 4, finite=False) / NAME)
    assert [part.answers for part in epochs] == [16] and [part.name for part in aged] == ["nothing"]
    assert TITLES[1] not in headings(page(tmp_path / "endless"))
