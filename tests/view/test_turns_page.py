"""The viewer's page on a trajectory of several turns: what was read is grey, and is said not to be the policy's."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from bebop.trajectories import NAME
from bebop.trajectory_log import TrajectoryLog
from tests.several_turns import group, trajectory
from tests.view.serving import served

pytestmark = pytest.mark.slow  # a Chromium of its own; test_page.py has what is quick


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run with one group: three turns, and two."""
    folder = tmp_path_factory.mktemp("turns") / "agents"
    folder.mkdir()
    (folder / "config.yaml").write_text("monitor:\n  trace: all\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    log = TrajectoryLog(folder / NAME, "all", lambda number: f" {number}", 2)
    trainer = np.linspace(-1, 0, 9).astype(np.float32)
    log.write(1, [group(0, trajectory(traced=True, ended="turns"), trajectory(turns=2))], 2, "bebop", {0: trainer})
    log.close()
    with served([folder]) as where:
        yield where


def test_what_was_read_is_marked_and_has_no_probability(page: Page, address: str) -> None:
    page.goto(f"{address}#/run/0/answer/0")
    tokens = page.locator(".tokens .token")
    expect(tokens).to_have_count(17)
    read = page.locator(".tokens .token.is-observed")
    assert read.all_text_contents() == [f" {i}" for i in (150, 151, 152, 250, 251, 252, 253, 254)]
    assert page.locator(".heading").all_text_contents() == [
        "read, not written by the policy", "turn 1", "read, not written by the policy", "turn 2",
    ]  # fmt: skip
    # A change of weights is marked where the policy writes again, not where it reads.
    assert page.locator(".tokens .version").all_text_contents() == ["v0", "v1", "v2"]
    for mode in ("verdict", "overlap", "surprise", "difference", "entropy", "version"):
        page.get_by_label("colour").select_option(mode)
        shades = read.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
        assert len(set(shades)) == 1, mode
        assert shades[0] != tokens.nth(0).evaluate("one => getComputedStyle(one).backgroundColor"), mode
    tokens.nth(5).click()
    side = page.locator(".side")
    expect(side).to_contain_text("read between two turns, not written by the policy")
    expect(side).to_contain_text("The policy did not draw it")
    tokens.nth(7).click()
    expect(side).not_to_contain_text("not written")
    facts = page.locator(".summary .facts").inner_text()
    assert "turns\n3" in facts and "9 tokens" in facts and "ended\nturns" in facts


def test_lists_can_be_filtered_by_turns(page: Page, address: str) -> None:
    page.goto(f"{address}#/run/0")
    expect(page.locator(".count")).to_have_text("2 answers")
    page.get_by_role("button", name="Filters").click()
    page.get_by_label("ended").select_option("turns")
    expect(page.locator(".count")).to_have_text("1 of 2 answers")
    assert "ended=turns" in page.url
