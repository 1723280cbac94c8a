"""The monitor beside a job, without a job: what it writes, what it asks for, and that a resumed run goes on alike."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.monitor.controller import Health
from bebop.monitor.drift_monitor import DriftMonitor
from bebop.monitor.logs import read_log
from bebop.monitor.probe_set import ProbeReading
from bebop.monitor.watch import JobMonitor, Observation, choose, settings
from tests.cases import peak_memory, slow_but
from tests.monitor import synthetic
from tests.monitor.synthetic import Truth, constant, step_groups

SPOILED = Truth(entropy=constant(0.5), mismatch=lambda step: 0.0 if step <= 8 else -0.5)


def job(mode: str = "off", staleness: int = 0, **monitor: Any) -> JobConfig:
    sections = {"cotrain": {"mode": mode}, "monitor": {"probe_every": 0, **monitor}}
    return from_dict(JobConfig, {**sections, "rollout": {"staleness": staleness}, "trainer": {"steps": 20}})


def watched(watch: JobMonitor, steps: range, truth: Truth = SPOILED, **extra: Any) -> list[Observation]:
    return [watch.observe(step, step_groups(truth, step), step - 1, **extra) for step in steps]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_needs_neither_ray_nor_torch() -> None:
    code = "import sys, bebop.monitor.watch; assert not {'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_spoiled_head_is_told_and_recorded(tmp_path: Path) -> None:
    watch = JobMonitor(job("auto"), tmp_path)
    seen = watched(watch, range(1, 13))
    assert [s.metrics["drift/state"] for s in seen] == [0] * 9 + [2] * 3
    assert [s.action.kind for s in seen] == ["none"] * 9 + ["cotrain_start", "none", "none"]
    assert [s.metrics["drift/cotraining"] for s in seen] == [0] * 9 + [1] * 3 and watch.cotraining
    assert seen[-1].metrics["drift/length/mismatch"] == pytest.approx(-0.5, abs=0.1)
    assert [row["step"] for row in lines(tmp_path / "drift.jsonl")] == list(range(1, 13))
    [concluded] = lines(tmp_path / "controller.jsonl")
    assert concluded["step"] == 10 and concluded["state"] == "mismatch-driven"
    assert concluded["action"]["kind"] == "cotrain_start" and concluded["action"]["carried_out"]
    assert "mismatch -0." in concluded["evidence"]


@pytest.mark.parametrize(("mode", "wanted"), [("off", False), ("always", True), ("auto", False)])
def test_cotraining_is_the_mode_s_before_anything_happens(mode: str, wanted: bool, tmp_path: Path) -> None:
    watch = JobMonitor(job(mode), tmp_path)
    assert watch.cotraining is wanted
    seen = watched(watch, range(1, 13))
    assert watch.cotraining is (mode != "off")
    assert {s.action.kind for s in seen} == ({"none", "cotrain_start"} if mode == "auto" else {"none"})
    assert lines(tmp_path / "controller.jsonl")[0]["action"]["carried_out"] is (mode == "auto")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Observation], Path]:
    """What a run of 13 steps sees, and its logs in ``whole``; in ``parts`` those of one that died after 12 steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    watched(JobMonitor(job("auto"), folder / "parts"), range(1, 13))
    return watched(JobMonitor(job("auto"), folder / "whole"), range(1, 14)), folder


@pytest.mark.parametrize("cut", slow_but([3, 10], [3, 6, 9, 10, 11]))
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    cut: int, uninterrupted: tuple[list[Observation], Path], tmp_path: Path
) -> None:
    whole, logs = uninterrupted
    shutil.copytree(logs / "parts", tmp_path / "parts")  # beyond its last checkpoint
    again = JobMonitor(job("auto"), tmp_path / "parts", resume_from=cut)
    assert watched(again, range(cut + 1, 14)) == whole[cut:]
    for name in ("drift.jsonl", "controller.jsonl"):
        assert (tmp_path / "parts" / name).read_text() == (logs / "whole" / name).read_text()
    # It would not, had the log been lost: there is no reference then.
    (tmp_path / "parts" / "drift.jsonl").write_text("")
    assert watched(JobMonitor(job("auto"), tmp_path / "parts", resume_from=cut), range(cut + 1, 14)) != whole[cut:]


def repeated(folder: Path, steps: int) -> int:
    """Write a log in which each step is the same, and return its size."""
    path = folder / "drift.jsonl"
    if not path.exists():
        watch = JobMonitor(job(), folder)
        watch.observe(1, step_groups(SPOILED, 1, prompts=6, answers=16), 0)
        watch.close()
    row = lines(path)[0]
    path.write_text("".join(json.dumps({**row, "step": step}) + "\n" for step in range(1, steps + 1)))
    return path.stat().st_size


@pytest.mark.slow
def test_a_long_log_takes_no_more_memory_to_resume_than_a_short_one(tmp_path: Path) -> None:
    """The monitor's windows take 1.5 MB, however long the log is."""
    sizes, peaks = [], []
    for steps in (10, 20):
        sizes.append(repeated(tmp_path, steps))
        peaks.append(peak_memory(lambda last=steps: JobMonitor(job(), tmp_path, last).close()))  # type: ignore[misc]
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 4


def test_the_log_replays_what_was_said(tmp_path: Path) -> None:
    config = job("auto")
    seen = watched(JobMonitor(config, tmp_path), range(1, 13))
    monitor = DriftMonitor(settings(config.decoding, config.monitor, 20))
    told = [step.feed(monitor) for step in read_log(tmp_path / "drift.jsonl")]
    for one, other in zip(seen, told, strict=True):
        assert other is not None
        assert {k: v for k, v in one.metrics.items() if k != "drift/cotraining"} == other.metrics()


def test_wrong_weights_are_broken_and_sent_again_with_the_worker_named(tmp_path: Path) -> None:
    watch = JobMonitor(job(), tmp_path)
    watched(watch, range(1, 4))
    wrong = Health(worker=1, version=3, expected_version=3, head_checksum="aa", expected_head_checksum="bb")
    [seen] = watched(watch, range(4, 5), health=wrong)
    assert seen.metrics["drift/state"] == 3 and seen.action.kind == "resync"
    [concluded] = lines(tmp_path / "controller.jsonl")
    assert "rollout worker 1's checksum of the head is aa, not bb" in concluded["evidence"]
    assert lines(tmp_path / "drift.jsonl")[-1]["health"]["worker"] == 1
    well = Health(worker=1, version=3, expected_version=3, head_checksum="bb", expected_head_checksum="bb")
    seen_next = watched(watch, range(5, 7), health=well)
    assert [s.metrics["drift/state"] for s in seen_next] == [3, 0] and {s.action.kind for s in seen_next} == {"none"}


def test_a_head_that_new_weights_do_not_help_is_trained(tmp_path: Path) -> None:
    collapse = Truth(entropy=constant(0.5), mismatch=lambda step: 0.0 if step <= 8 else -1.75)
    seen = watched(JobMonitor(job("auto"), tmp_path), range(1, 14), collapse)
    assert [s.action.kind for s in seen[8:]] == ["resync", "none", "none", "cotrain_start", "none"]


GREEDY = Truth(entropy=constant(0.5), mismatch=constant(0), level=1.6, greedy=1.3)


@pytest.mark.parametrize("actions", [False, True])
def test_decoding_changes_only_if_actions_are_on(actions: bool, tmp_path: Path) -> None:
    config = job(actions=actions, staleness=1)
    watch = JobMonitor(config, tmp_path)
    seen = watched(watch, range(1, 10), GREEDY)
    proposed = [row["action"] for row in lines(tmp_path / "controller.jsonl")]
    assert [p["kind"] for p in proposed] == ["set_system"] and proposed[0]["carried_out"] is actions
    assert watch.decoding.system == ("target_only" if actions else "bebop")
    assert [s.action.kind for s in seen if s.action.kind != "none"] == (["set_system"] if actions else [])
    # A new way of drafting is held against a reference of its own, from the first step that it made alone.
    restarts = [row["step"] for row in lines(tmp_path / "drift.jsonl") if row.get("restart")]
    changed = next(row["step"] for row in lines(tmp_path / "controller.jsonl"))
    assert restarts == ([changed + 2] if actions else [])
    again = JobMonitor(config, tmp_path, resume_from=changed)
    assert again.decoding == watch.decoding
    watched(again, range(changed + 1, changed + 4), GREEDY)
    assert [row["step"] for row in lines(tmp_path / "drift.jsonl") if row.get("restart")] == restarts


def drafting(drafts: int, staleness: int = 0, **monitor: Any) -> JobConfig:
    config = job(staleness=staleness, **monitor)
    return dataclasses.replace(config, decoding=dataclasses.replace(config.decoding, draft_tokens=drafts))


def restarts(folder: Path) -> list[int]:
    return [row["step"] for row in lines(folder / "drift.jsonl") if row.get("restart")]


STILL = Truth(entropy=constant(0.5), mismatch=constant(0))


@pytest.mark.parametrize(("drafts", "staleness"), [(2, 0), (2, 2), (4, 0)])
def test_other_decoding_of_a_resumed_run_gets_a_reference_of_its_own(
    drafts: int, staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = JobMonitor(drafting(3, staleness), tmp_path)
    watched(before, range(1, 11), STILL)
    again = JobMonitor(drafting(drafts, staleness), tmp_path, resume_from=10)
    again.restore(before.state())
    monkeypatch.setattr(synthetic, "DRAFTS", drafts)
    watched(again, range(11, 12), STILL)
    later = JobMonitor(drafting(drafts, staleness), tmp_path, resume_from=11)  # soon after the first resume
    later.restore(again.state())
    first = 11 + staleness
    seen = watched(later, range(12, first + 8), STILL)
    assert restarts(tmp_path) == [first] and later.certificate.since == (first if staleness else 1)
    assert [s.metrics["drift/state"] for s in seen][staleness:] == [0.0] * 7
    assert abs(seen[-1].metrics["drift/length/change"]) < 0.1


def test_fewer_drafts_than_in_the_reference_end_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint of an older version resumes, which does not hold how it decoded."""
    watched(JobMonitor(drafting(3), tmp_path), range(1, 11), STILL)
    again = JobMonitor(drafting(2), tmp_path, resume_from=10)
    again.restore({"bank": ()})
    monkeypatch.setattr(synthetic, "DRAFTS", 2)
    last = watched(again, range(11, 16), STILL)[-1].metrics
    assert "drift/position/2/change" in last and "drift/position/3/change" not in last and not restarts(tmp_path)


@pytest.mark.parametrize("wanted", [3, 2])
def test_decoding_that_an_action_changed_goes_on_unless_a_resume_asks_for_another(wanted: int, tmp_path: Path) -> None:
    config = drafting(3, actions=True)
    before = JobMonitor(config, tmp_path)
    watched(before, range(1, 10), GREEDY)
    [restart] = restarts(tmp_path)
    assert before.decoding.system == "target_only"
    again = JobMonitor(drafting(wanted, actions=True), tmp_path, resume_from=9)
    again.restore(before.state())
    asked = again.config.decoding
    assert again.decoding == (before.decoding if wanted == 3 else asked)
    assert again.monitor.controller.system == again.decoding.system
    assert again.monitor.controller.drafts == again.decoding.draft_tokens
    watched(again, range(10, 11), GREEDY)
    assert restarts(tmp_path) == ([restart] if wanted == 3 else [restart, 10])


def test_drafts_stay_within_the_room_that_there_is() -> None:
    config = from_dict(JobConfig, {"monitor": {"actions": True}, "decoding": {"draft_tokens": 5}})
    assert settings(config.decoding, config.monitor).controller.most_drafts == 6
    adaptive = from_dict(JobConfig, {"decoding": {"system": "bebop_adaptive"}})
    assert settings(adaptive.decoding, adaptive.monitor).controller.system is None
    told = {}
    for name in ("bebop", "target_only", "bebop_tree", "pad", "bebop_block"):
        config = from_dict(JobConfig, {"decoding": {"system": name}})
        own = settings(config.decoding, config.monitor)
        told[name] = (own.rate, own.controller.drafts)
    counted = {"bebop_tree": ("accepted", None), "pad": ("accepted", 3), "bebop_block": ("accepted", 3)}
    assert told == {"bebop": ("overlap", 3), "target_only": ("overlap", 3), **counted}


def reading(shift: float, size: int = 64) -> ProbeReading:
    rng = np.random.default_rng(0)
    entropy = rng.gamma(2.0, 0.2, size)
    return ProbeReading(overlap=0.8 - 0.2 * entropy + shift, entropy=entropy, unit=np.arange(size) // 4, chance=0.1)


def test_the_probe_set_is_read_first_then_regularly_then_at_every_unsettled_step(tmp_path: Path) -> None:
    watch = JobMonitor(job("auto", probe_every=5, probe_completions=6), tmp_path)
    asked = []
    for step in range(1, 17):
        groups = step_groups(Truth(entropy=constant(0.5), mismatch=constant(0)), step)
        due = watch.probe_due(step, groups)
        asked.append(due)
        spoiled = -0.1 if 9 <= step <= 12 else 0.0
        watch.observe(step, groups, step - 1, reading=None if due is None else reading(spoiled))
    assert [step for step, due in enumerate(asked, 1) if due] == [1, 5, 10, 11, 12, 13, 14, 15]
    first = asked[0]
    assert first is not None and first[1] and all(due is None or not due[1] for due in asked[1:])
    assert all(due is None or due[0] == first[0] for due in asked), "the texts are those of the first batch"
    kinds = [row["action"]["kind"] for row in lines(tmp_path / "controller.jsonl")]
    assert kinds == ["cotrain_start", "cotrain_stop"]
    other = JobMonitor(job("auto", probe_every=5, probe_completions=6), tmp_path, resume_from=7)
    other.restore(watch.state())
    assert other.probe_due(8, step_groups(SPOILED, 8)) is None and other.probe_due(10, ()) == (first[0], False)


def test_the_first_reading_after_a_restart_comes_with_a_sweep(tmp_path: Path) -> None:
    watch = JobMonitor(job(actions=True, staleness=1, probe_every=3), tmp_path)
    asked = {}
    for step in range(1, 9):
        groups = step_groups(GREEDY, step)
        asked[step] = due = watch.probe_due(step, groups)
        watch.observe(step, groups, step - 1, reading=None if due is None else reading(0.0))
    [restart] = restarts(tmp_path)
    assert [step for step, due in asked.items() if due is not None and due[1]] == [1, restart]


def test_texts_come_from_as_many_prompts_as_there_are() -> None:
    groups = step_groups(SPOILED, 1, prompts=3, answers=2)
    texts = choose(groups, 4)
    assert [(text.prompt[0], text.answer[1]) for text in texts] == [(3, 0), (4, 0), (5, 0), (3, 1)]
    assert len(choose(groups, 99)) == 6 and choose((), 3) == ()
