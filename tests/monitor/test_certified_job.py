"""The certificate in a real job, intact and with a fault: engine, trainer and loop in one process, built-in model."""

import dataclasses
from pathlib import Path

import pytest

from bebop.metrics.sinks import JsonlSink
from bebop.report.page import write_report
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from tests.monitor.test_watch_job import Job
from tests.rollout.broken import BonusFromTheLastDraftRow

pytestmark = pytest.mark.slow
EVERY = ("monitor.certify_every=1", "monitor.probe_every=0", "trainer.lr=1e-5")
STEPS = 9


def job(folder: Path, *overrides: str) -> Job:
    return Job(folder, STEPS, *EVERY, *overrides)


@pytest.mark.exhaustive("a whole job of half a minute; the other test of this file is one of the kind")
def test_an_intact_engine_passes(tmp_path: Path) -> None:
    rows = job(tmp_path, "decoding=bebop").run()
    assert [row["certify/failed"] for row in rows] == [0.0] * STEPS
    assert rows[-1]["certify/tokens"] > 400 * STEPS and max(row["certify/log_e"] for row in rows) < 5
    assert 0 < rows[-1]["certify/tv_bound"] < rows[0]["certify/tv_bound"] <= 1
    assert {row["drift/state"] for row in rows} == {0.0}


def alarmed(job: Job, cause: str) -> None:
    """It is broken at once when the evidence is there, weights are sent again once, and then a person is told."""
    rows = job.run()
    found = [i for i, row in enumerate(rows) if row["certify/failed"]]
    assert found and rows[found[0]]["drift/state"] == 3.0
    concluded = job.concluded()
    assert next(line["action"]["kind"] for line in concluded if cause in line["evidence"]) == "resync"
    page = write_report([written(job, rows)])
    assert "Certificate of the completions" in page.read_text() and "do not follow the policy" in page.read_text()


def written(job: Job, rows: list[dict[str, float]]) -> Path:
    sink = JsonlSink(job.folder / "metrics.jsonl")
    for step, row in enumerate(rows, 1):
        sink.write(step, row)
    sink.close()
    return job.folder


def test_a_bonus_token_from_the_wrong_row_is_found(tmp_path: Path) -> None:
    faulty = job(tmp_path)
    assert isinstance(faulty.rollouts.engine.decoder, DraftVerify)
    faulty.rollouts.engine.decoder.rule = BonusFromTheLastDraftRow()
    alarmed(faulty, "wrong_row")


@pytest.mark.exhaustive("a whole job of half a minute; the other test of this file is one of the kind")
def test_a_temperature_that_is_off_is_found(tmp_path: Path) -> None:
    """By 5 %, with the log-probs that belong to it, as of an engine that was asked for the wrong one."""
    faulty = job(tmp_path)
    engine, add = faulty.rollouts.engine, faulty.rollouts.engine.add

    def hotter(request: Request) -> None:
        params = dataclasses.replace(request.params, temperature=1.05 * request.params.temperature)
        add(dataclasses.replace(request, params=params))

    engine.add = hotter  # type: ignore[method-assign]
    alarmed(faulty, "sharpness")
