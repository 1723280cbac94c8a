"""The viewer's page in a real Chromium: what a reader sees, clicks and types."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser import CHROMIUM
from tests.view.made_up import HOSTILE, write_run
from tests.view.serving import served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two runs, the second with prompts, answers and a name that are markup."""
    folder = tmp_path_factory.mktemp("page")
    first = write_run(folder / "first", answers=300, length=40)
    hostile = write_run(folder / "<img src=x onerror=window.hacked=1>", answers=64, seed=1, name_prompts=HOSTILE)
    with served([first, hostile]) as where:
        yield where


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A window whose scripts must run without an error."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    yield page
    assert errors == []
    context.close()


def test_runs_curves_and_alarms_are_on_the_first_page(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator("a.run")).to_have_count(2)
    expect(page.locator("a.alarm")).to_have_count(2)
    expect(page.locator(".plot .main-svg").first).to_be_visible()
    expect(page.locator("[data-metric='reward/mean'] .scatterlayer .trace")).to_have_count(2)


def test_a_list_is_sorted_searched_and_opened(page: Page, address: str) -> None:
    page.goto(f"{address}#/run/0")
    expect(page.locator(".count")).to_have_text("300 answers")
    assert page.locator(".row").count() < 60  # those in sight alone
    page.get_by_role("button", name="length").click()
    page.wait_for_selector("[data-sort=length]:has-text('↓')")
    longest = page.request.get(f"{address}api/runs/0/answers?sort=length&limit=5").json()["rows"]
    for place, row in enumerate(longest):
        expect(page.locator(f".row[data-place='{place}'] > div").nth(4)).to_have_text(str(row["length"]))
    page.keyboard.press("/")
    page.keyboard.type("(17)")
    expect(page.locator(".count")).to_have_text("4 of 300 answers")
    page.locator(".row").nth(1).click()
    expect(page.locator(".turn.prompt")).to_contain_text("(17)")


def test_a_link_to_a_token_opens_there(page: Page, address: str) -> None:
    page.goto(f"{address}#/run/0/answer/5?token=7")
    expect(page.locator(".token.chosen")).to_have_attribute("data-i", "7")
    expect(page.locator("aside")).to_contain_text("7 of")
    expect(page.locator(".bars tbody tr").first).to_be_visible()


def test_texts_are_never_read_as_html(page: Page, address: str) -> None:
    for place in ("", "#/run/1", "#/run/1/answer/1?token=3", "#/compare/1:1/1:2", "#/run/1/alarm/2"):
        page.goto(address + place)
        page.wait_for_selector("main > *")
        page.wait_for_timeout(150)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script").count() == 0
    page.goto(f"{address}#/run/1/answer/1")
    expect(page.locator(".turn.prompt")).to_contain_text(HOSTILE)
