"""A head beside drafts from history: what comes from history is never taken for a change of the head."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.monitor.logs import read_log
from bebop.monitor.probe_set import Sweep
from bebop.monitor.watch import JobMonitor, Observation, settings
from bebop.report.drift import replay_runs
from bebop.report.runs import load_runs
from bebop.report.verdict import said
from bebop.systems.base import HEAD_OVERLAP, HEAD_READ
from bebop.trajectory import Group, Trajectory
from tests.monitor.synthetic import Truth, constant, step_groups
from tests.report.test_drift import reading, swept
from tests.report.test_report import write_run

STEPS, ENTERS = 16, 8
# The accept length that history brings, from the second epoch on.
MORE = Truth(entropy=constant(0.5), mismatch=lambda step: 0.0 if step <= ENTERS else 0.8)
TEMPERATURES = (0.5, 0.8, 1.25, 1.6)
SWEEP = Sweep(
    entropy=(0.4, 0.45, 0.6, 0.7), length=(2.9, 2.86, 2.71, 2.6), readings=tuple(reading(0.0, t) for t in TEMPERATURES),
    sums=swept((0.4, 0.45, 0.6, 0.7), (2.9, 2.86, 2.71, 2.6)),
)  # fmt: skip


def rate(step: int, prompt: int) -> float:
    """Of the head by itself at first drafts: the same head, but cycles begin elsewhere once there is history."""
    return 0.7 + 0.01 * (prompt % 3) + (0.1 if step > ENTERS else 0.0)


def groups(step: int) -> list[Group]:
    """Answers whose drafts come from a mixture, the head's own overlap counted beside."""

    def counted(trajectory: Trajectory, prompt: int) -> Trajectory:
        completion = trajectory.completion
        first, read = np.zeros((2, len(completion.stats.reached)))
        read[0] = completion.stats.reached[0] - 1  # once history was sure
        first[0] = rate(step, prompt) * read[0]
        stats = replace(completion.stats, counts={HEAD_OVERLAP: first, HEAD_READ: read})
        return Trajectory.single(completion=replace(completion, stats=stats), reward=0.0)

    return [
        replace(group, trajectories=tuple(counted(t, place) for t in group.trajectories))
        for place, group in enumerate(step_groups(MORE, step))
    ]


def watched(folder: Path, loss: float = 0.0, mode: str = "auto") -> list[Observation]:
    """A run whose head loses ``loss`` of its acceptance on the fixed texts, from where history enters."""
    sections: dict[str, Any] = {"decoding": {"system": "bebop_history"}, "cotrain": {"mode": mode}}
    watch = JobMonitor(from_dict(JobConfig, sections | {"monitor": {"probe_every": 5}}), folder)
    seen = []
    for step in range(1, STEPS + 1):
        due = watch.probe_due(step, groups(step)) is not None
        found = reading(-loss if step > ENTERS else 0.0) if due else None
        seen.append(watch.observe(step, groups(step), step - 1, found, SWEEP if step == 1 else None))
    watch.close()
    return seen


def test_what_history_brings_is_no_change_of_the_head(tmp_path: Path) -> None:
    """Accept length and even the head's own first drafts move: the same texts are read as before."""
    seen = watched(tmp_path)
    assert {s.metrics["drift/state"] for s in seen} == {0.0} and {s.action.kind for s in seen} == {"none"}
    names = {name for s in seen for name in s.metrics}
    assert "drift/bank/change" in names and not any("length" in n or "position" in n for n in names)
    for logged in read_log(tmp_path / "drift.jsonl"):
        own = logged.records
        assert own.drafts == 1 and own.emitted == pytest.approx(own.cycles + own.overlap[:, 0], abs=1e-5)
        wanted = [rate(own.step, unit % 12) for unit in own.unit]
        assert own.overlap[:, 0] / own.cycles == pytest.approx(wanted, abs=1e-5), "the mixture's is another"


def test_a_head_that_fits_less_is_told_and_stays_told_between_readings(tmp_path: Path) -> None:
    seen = watched(tmp_path, loss=0.15)
    states = [s.metrics["drift/state"] for s in seen]
    start = states.index(2.0)
    assert ENTERS < start <= ENTERS + 4 and set(states[start:]) == {2.0} and set(states[:start]) == {0.0}
    assert [s.action.kind for s in seen if s.action.kind != "none"] == ["cotrain_start"]


def test_what_a_reading_said_holds_until_the_next(tmp_path: Path) -> None:
    """So nothing is unsettled meanwhile, and the texts are not read more often than asked."""
    seen = watched(tmp_path, loss=0.15, mode="off")
    read = [step for step, s in enumerate(seen, 1) if "drift/bank/change" in s.metrics]
    assert read == [5, 10, 11, 15]
    assert [step for step, s in enumerate(seen, 1) if s.metrics["drift/state"] == 2.0] == [*range(11, STEPS + 1)]


def test_the_report_says_it_of_the_head_by_itself(tmp_path: Path) -> None:
    for name, loss, words in (("held", 0.0, "the head by itself held"), ("lost", 0.15, "no longer fits the policy")):
        folder = write_run(tmp_path / name, steps=STEPS)
        (folder / "config.yaml").write_text("decoding:\n  system: bebop_history\n")
        watched(folder, loss)
        runs = load_runs([folder])
        [replay] = replay_runs([folder], runs)
        assert words in said(runs[0], replay.explanations).verdict.lower()
        assert not any(replay.breakdown.values()), "accept lengths say nothing of it"


def test_a_collapse_of_the_head_is_told(tmp_path: Path) -> None:
    """Drafts of the head as good as chance, while history hides it from the accept length."""
    watch = JobMonitor(from_dict(JobConfig, {"decoding": {"system": "bebop_history"}}), tmp_path)
    for step in range(1, 9):
        now = groups(step)
        for t in (t for group in now for t in group.trajectories if step == 8):
            t.completion.stats.counts[HEAD_OVERLAP] *= 0.02
        last = watch.observe(step, now, step - 1)
    assert last.metrics["drift/state"] == 3.0 and last.action.kind == "resync"


def test_no_number_of_drafts_is_proposed_beside_history() -> None:
    config = from_dict(JobConfig, {"decoding": {"system": "bebop_history"}, "monitor": {"actions": True}})
    found = settings(config.decoding, config.monitor)
    assert found.head_alone and found.controller.drafts is None and found.controller.system is None
    assert not settings(JobConfig().decoding, JobConfig().monitor).head_alone
