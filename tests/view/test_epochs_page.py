"""The viewer's page on questions that are asked again: they are found by number and epoch, where there are several."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.view.made_up import write_run
from tests.view.serving import served

pytestmark = pytest.mark.slow  # a Chromium of its own; test_page.py has what is quick


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Ten prompts of four answers: endless questions, and four of them over and over."""
    folder = tmp_path_factory.mktemp("epochs")
    runs = [write_run(folder / "endless"), write_run(folder / "again", questions=4)]
    with served(runs) as where:
        yield where


def test_a_list_is_filtered_by_epoch_and_question(page: Page, address: str) -> None:
    page.goto(f"{address}#/run/1")
    expect(page.locator(".count")).to_have_text("40 answers")
    page.get_by_role("button", name="Filters").click()
    page.get_by_label("question, at least").fill("3")
    expect(page.locator(".count")).to_have_text("8 of 40 answers")
    page.get_by_label("epoch, at least").fill("1")
    expect(page.locator(".count")).to_have_text("4 of 40 answers")
    place = page.locator(".row[data-place='0'] > div").nth(1)
    assert place.inner_text().startswith("7.") and "question 3, epoch 1" in str(place.get_attribute("title"))
    page.goto(f"{address}#/run/1/answer/28")
    expect(page.locator(".summary .facts")).to_contain_text("question")
    assert "question\n3\nepoch\n1" in page.locator(".summary .facts").inner_text()


def test_endless_questions_have_neither(page: Page, address: str) -> None:
    page.goto(f"{address}#/run/0")
    page.get_by_role("button", name="Filters").click()
    expect(page.get_by_label("reward, at least")).to_be_visible()
    assert page.get_by_label("epoch, at least").count() == 0 == page.get_by_label("question, at least").count()
    assert "epoch" not in str(page.locator(".row[data-place='0'] > div").nth(1).get_attribute("title"))
    page.goto(f"{address}#/run/0/answer/28")
    expect(page.locator(".summary .facts")).to_contain_text("staleness")
    assert "question" not in page.locator(".summary .facts").inner_text()
