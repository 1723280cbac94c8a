"""The certificate in the monitor: when it is read, of which answers, what follows, and that a resume goes on."""

import asyncio
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.monitor.certified import PAIRS, Certificate, Certified, chosen, untestable
from bebop.monitor.controller import Controller, Health
from bebop.monitor.watch import JobMonitor, NullMonitor, Observation
from bebop.trajectory import Completion, Group, Prompt, Trajectory
from tests.cases import slow_but
from tests.monitor.synthetic import Truth, constant, step_groups
from tests.monitor.test_controller import cause, signals

CLEAN = Certified(tokens=500, log_e=-0.7, highest=0.4, limit=9.2, tv=0.2)
FOUND = Certified(tokens=900, log_e=8.0, highest=11.0, limit=9.2, cause="sharpness", sentence="hotter than claimed")
STEADY = Truth(entropy=constant(0.5), mismatch=constant(0))


def job(every: int = 2, staleness: int = 0, **sections: dict[str, Any]) -> JobConfig:
    own = {"monitor": {"certify_every": every, "probe_every": 0}, "rollout": {"staleness": staleness}}
    return from_dict(JobConfig, {**own, **sections})


@dataclass
class Asked:
    """A trainer that says what it is told, and notes what it was asked."""

    says: Certified | None = CLEAN
    calls: list[tuple[tuple[Group, ...], int]] = field(default_factory=list)

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        self.calls.append((tuple(groups), since))
        return self.says


def read(monitor: Any, step: int, trainer: Asked, groups: Sequence[Group] = (), undisturbed: bool = True) -> Any:
    return asyncio.run(monitor.read(step, groups, trainer, undisturbed))


def groups(count: int, size: int = 4, length: int = 3) -> list[Group]:
    def one(index: int, member: int) -> Trajectory:
        tokens = np.full(length + index, member, dtype=np.int64)
        completion = Completion(token_ids=tokens, logprobs=tokens.astype(np.float32), versions=tokens)
        return Trajectory.single(completion=completion, reward=float(member))

    return [
        Group(
            prompt=Prompt(index=i, task="t", text="", token_ids=(1,), item={}),
            trajectories=tuple(one(i, member) for member in range(size)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(("count", "wanted"), [(16, range(0, 16, 4)), (18, (0, 4, 9, 13)), (3, (0, 1, 2))])
def test_the_first_two_answers_of_prompts_spaced_evenly(count: int, wanted: Sequence[int]) -> None:
    """By their numbers alone: the same for answers of any length, worth and order of ending."""
    for length in (0, 50):
        picked = chosen(groups(count, length=length))
        assert [group.prompt.index for group in picked] == list(wanted) and len(picked) == min(PAIRS, count)
        members = [[int(t.reward) for t in group.trajectories] for group in picked]
        assert members == [[0, 1]] * len(picked)


def test_it_is_read_every_few_steps_before_the_update() -> None:
    for monitor in (NullMonitor(job(3)), Certificate(job(3))):
        trainer = Asked()
        said = [read(monitor, step, trainer) for step in range(1, 8)]
        last = [one[2] if isinstance(one, tuple) else one for one in said]
        assert last == [None, None, CLEAN, None, None, CLEAN, None]
    never = Asked()
    assert [read(Certificate(job(0)), step, never) for step in range(1, 8)] == [None] * 7 and not never.calls


def test_answers_that_a_death_may_have_chosen_are_left_out() -> None:
    trainer = Asked()
    assert read(Certificate(job(1)), 1, trainer, undisturbed=False) is None and not trainer.calls


def test_what_cannot_be_tested_is_not_and_the_reason_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for config, reason in (
        (job(1, decoding={"system": "pad"}), "decoding.system=pad does not claim"),
        (job(1, algorithm={"rescore": True}), "algorithm.rescore=true"),
    ):
        caplog.clear()
        trainer = Asked()
        with caplog.at_level(logging.INFO):
            assert read(Certificate(config), 1, trainer) is None
        assert reason in untestable(config) and reason in caplog.text and not trainer.calls
    assert untestable(job(1)) == ""


def test_metrics_and_the_log_s_row() -> None:
    assert CLEAN.metrics() == {
        "certify/log_e": -0.7, "certify/tokens": 500.0, "certify/failed": 0.0, "certify/tv_bound": 0.2
    }  # fmt: skip
    assert "certify/tv_bound" not in FOUND.metrics() and FOUND.metrics()["certify/failed"] == 1.0
    assert not CLEAN.diagnosis() and "sharpness: hotter than claimed" in FOUND.diagnosis()
    assert "ln E 11.0 of 9.2 after 900 tokens" in FOUND.diagnosis(), "what was reached counts"
    for one in (CLEAN, FOUND):
        assert Certified.from_row(one.to_row()) == one


def test_a_failed_certificate_is_broken_and_the_weights_are_sent_again_once() -> None:
    controller = Controller()
    first = controller.judge(signals(0, cause(0, 0), uncertified="hotter"))
    assert first.state == "broken" and "hotter" in first.evidence and first.action.kind == "resync"
    assert "hotter" in first.action.why
    after = [controller.judge(signals(i, cause(0, 0))) for i in (1, 2)]
    assert [v.state for v in after] == ["broken", "steady"] and {v.action.kind for v in after} == {"none"}
    again = [controller.judge(signals(3, cause(0, 0), uncertified="hotter"))]
    again += [controller.judge(signals(i, cause(0, 0))) for i in range(4, 12)]
    assert {v.state for v in again} == {"broken"}, "it stands although later steps bring no reading"
    assert {v.action.kind for v in again} == {"none"} and all("hotter" in v.action.why for v in again)
    assert not controller.unsettled and not controller.cotraining, "drafts are not what is wrong"


def test_wrong_weights_come_first_and_begin_the_evidence_again() -> None:
    controller = Controller()
    wrong = Health(version=3, expected_version=4)
    verdict = controller.judge(signals(0, cause(0, 0), health=wrong, uncertified="hotter"))
    assert verdict.action.kind == "resync" and "weight version" in verdict.evidence
    assert [controller.judge(signals(i, cause(0, 0))).state for i in (1, 2)] == ["broken", "steady"]


def watched(watch: JobMonitor, trainer: Asked, steps: range, found: range = range(0)) -> list[Observation]:
    seen = []
    for step in steps:
        trainer.says = FOUND if step in found else CLEAN
        own = step_groups(STEADY, step)
        seen.append(watch.observe(step, own, step - 1, *read(watch, step, trainer, own)))
    return seen


@pytest.mark.parametrize("staleness", [0, 2])
def test_evidence_begins_again_with_answers_of_the_weights_that_were_sent(staleness: int, tmp_path: Path) -> None:
    watch, trainer = JobMonitor(job(2, staleness), tmp_path), Asked()
    seen = watched(watch, trainer, range(1, 13), range(6, 7))
    assert [s.metrics["drift/state"] for s in seen] == [0] * 5 + [3, 3] + [0] * 5
    assert [s.metrics.get("certify/failed") for s in seen][3:6] == [0.0, None, 1.0]
    assert [s.action.kind for s in seen][5:] == ["resync"] + ["none"] * 6
    asked = [(step, since) for step, (_, since) in zip((2, 4, 6), trainer.calls, strict=False)]
    assert asked == [(2, 1), (4, 1), (6, 1)]
    first = 7 + staleness  # the first step whose answers were wholly drawn after step 6
    later = [since for _, since in trainer.calls[3:]]
    assert later == [first] * len(later) and len(later) == len([s for s in (8, 10, 12) if s >= first])
    row = (tmp_path / "controller.jsonl").read_text().splitlines()[0]
    assert "sharpness" in row and "hotter than claimed" in row and '"resync"' in row


def test_a_change_of_the_decoding_system_begins_the_evidence_again(tmp_path: Path) -> None:
    config = job(1, monitor={"certify_every": 1, "probe_every": 0, "actions": True, "decode_stats": True})
    greedy = Truth(entropy=constant(0.5), mismatch=constant(0), level=1.6, greedy=1.3)
    watch, trainer, seen = JobMonitor(config, tmp_path), Asked(), []
    for step in range(1, 9):
        own = step_groups(greedy, step)
        seen.append(watch.observe(step, own, step - 1, *read(watch, step, trainer, own)))
    switched = next(i for i, s in enumerate(seen, 1) if s.action.kind == "set_system")
    assert [since for _, since in trainer.calls] == [1] * switched + [switched + 1] * (8 - switched)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Observation], Asked, Path]:
    """What a run of 12 steps sees and asks, and a folder: its logs in ``whole``, those of one that died after 11 in
    ``parts``."""
    folder, asked = tmp_path_factory.mktemp("uninterrupted"), Asked()
    watched(JobMonitor(job(2), folder / "parts"), Asked(), range(1, 12), range(6, 7))
    return watched(JobMonitor(job(2), folder / "whole"), asked, range(1, 13), range(6, 7)), asked, folder


@pytest.mark.parametrize("cut", slow_but([3, 6], [3, 5, 6, 7, 9]))
def test_a_resumed_monitor_goes_on_as_if_it_had_never_stopped(
    cut: int, uninterrupted: tuple[list[Observation], Asked, Path], tmp_path: Path
) -> None:
    (whole, asked, logs), again = uninterrupted, Asked()
    shutil.copytree(logs / "parts", tmp_path / "parts")
    resumed = JobMonitor(job(2), tmp_path / "parts", resume_from=cut)
    assert watched(resumed, again, range(cut + 1, 13), range(6, 7)) == whole[cut:]
    assert [since for _, since in again.calls] == [since for _, since in asked.calls][cut // 2 :]
    for name in ("drift.jsonl", "controller.jsonl"):
        assert (tmp_path / "parts" / name).read_text() == (logs / "whole" / name).read_text()


def test_it_is_said_once_in_the_job_s_log(caplog: pytest.LogCaptureFixture) -> None:
    certificate, trainer = Certificate(job(1)), Asked(FOUND)
    for step in (1, 2, 3):
        read(certificate, step, trainer)
    assert caplog.text.count("sharpness: hotter than claimed") == 1 and "step 1" in caplog.text
