"""A head that forgets one token in the middle of a real job: the alarm leads to that token, also in a real Chromium."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Page, expect

from bebop.model.backbone import Policy
from bebop.trajectory_db.reader import NAME, Trajectories
from bebop.view.drift_tokens import explain
from bebop.view.folders import alarms
from tests.monitor.test_watch_job import SPOILED, Job
from tests.view.serving import served

pytestmark = pytest.mark.slow


@torch.no_grad()
def forget(policy: Policy, token: int) -> None:
    """Have the head's states say nothing about a token: their part along its output row is taken away."""
    row = policy.backbone.get_output_embeddings().weight[token].detach()

    def without(_module: Any, _inputs: Any, states: torch.Tensor) -> torch.Tensor:
        return states - 2 * (states @ row)[..., None] * row / (row @ row)

    assert policy.mtp is not None
    policy.mtp.final_norm.register_forward_hook(without)


def commonest(folder: Path) -> int:
    """The token that the target expects most often in the first steps, where a draft is tested."""
    with Trajectories(folder / NAME) as stored:
        traces = [answer.trace for answer in stored.traced_tokens(range(1, SPOILED)) if answer.trace is not None]
    expected = np.concatenate([trace.target_ids[np.isfinite(trace.overlap), 0] for trace in traces])
    return int(np.bincount(expected).argmax())


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run folder, and the token that was forgotten after update SPOILED."""
    folder, token = tmp_path_factory.mktemp("planted"), list[int]()
    job = Job(folder, SPOILED + 4, "monitor.trace=all")

    def plant() -> None:
        token.append(commonest(folder))
        for policy in (job.rollouts.engine.policy, job.learner.worker.trainer.policy):
            forget(policy, token[0])

    job.learner.after[SPOILED] = plant
    job.run()
    return folder, token[0]


def test_an_alarm_leads_to_the_token_that_was_forgotten(planted: tuple[Path, int]) -> None:
    folder, token = planted
    raised = [row for row in alarms(folder) if row["state"] in ("mismatch-driven", "broken")]
    assert raised and raised[0]["step"] > SPOILED
    told = explain(folder, raised[0]["step"])
    first = told["tokens"][0]
    assert first["id"] == token and first["piece"]
    assert first["share"] > 0.5 and first["loss"][1] > 0
    assert first["overlap_after"] < first["expected"] - 0.2
    assert told["loss"][0] > 0 and told["change"] == pytest.approx(told["explained"] - told["loss"][0])


def test_its_examples_are_places_where_the_head_was_wrong_about_it(planted: tuple[Path, int]) -> None:
    folder, token = planted
    step = next(row["step"] for row in alarms(folder) if row["state"] in ("mismatch-driven", "broken"))
    examples = explain(folder, step)["tokens"][0]["examples"]
    assert len(examples) == 5
    with Trajectories(folder / NAME) as stored:
        for example in examples:
            trace = stored.answer(example["answer"]).trace
            assert trace is not None and trace.target_ids[example["place"], 0] == token
            assert trace.overlap[example["place"]] == pytest.approx(example["overlap"]) and example["overlap"] < 0.3
            assert step - 2 <= example["step"] <= step


def test_three_clicks_lead_to_the_token_that_was_forgotten(planted: tuple[Path, int], page: Page) -> None:
    folder, token = planted
    with Trajectories(folder / NAME) as stored:
        piece = stored.pieces([token])[token]
    with served([folder]) as address:
        page.goto(address)
        page.locator("a.alarm").last.click()
        row = page.locator("[data-table=tokens] button.go").first
        expect(row).to_have_text(piece)
        row.click()
        page.locator("a.example").first.click()
        expect(page.locator(".token.chosen")).to_have_count(1)
        likeliest = page.locator("aside .bars tbody tr").first.locator("th")
        expect(likeliest).to_have_attribute("title", f"id {token}")
