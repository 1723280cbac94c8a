"""Three clicks in a real Chromium, from the alarm of a real job to the token that its head forgot."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from bebop.trajectories import NAME, Trajectories
from tests.view.serving import served
from tests.view.test_planted_drift import planted  # noqa: F401 - the job is run by the fixture

pytestmark = pytest.mark.slow


def test_three_clicks_lead_to_the_token_that_was_forgotten(planted: tuple[Path, int], page: Page) -> None:  # noqa: F811
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
