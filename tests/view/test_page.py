"""The viewer's page in a real Chromium: what a reader sees, clicks and types."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from bebop.trajectory_db.reader import NAME as STORE
from bebop.trajectory_db.writer import TrajectoryLog
from tests.several_turns import group, trajectory
from tests.view.made_up import HOSTILE, write_run
from tests.view.serving import served

NAME = "<img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two runs: in the first the head forgets a token, of the second name, prompts and answers are markup."""
    folder = tmp_path_factory.mktemp("page")
    first = write_run(folder / "first", answers=300, length=40, forgets=(14, 17))
    hostile = write_run(folder / NAME, answers=64, seed=1, prompts=HOSTILE)
    with served([first, hostile]) as where:
        yield where


def opened(page: Page, address: str) -> None:
    """Another address in the same window is a new page."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("main > *")


@pytest.mark.slow
def test_runs_curves_and_alarms_are_on_the_first_page(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator("a.run")).to_have_count(2)
    expect(page.locator("a.alarm")).to_have_count(2)
    expect(page.locator("[data-metric='reward/mean'] .scatterlayer .trace")).to_have_count(2)
    page.locator("[data-metric='reward/mean'] .plot").scroll_into_view_if_needed()
    plots = page.locator(".plot").evaluate_all(
        "all => all.map(p => [p.clientWidth, p.querySelector('svg').clientWidth])"
    )
    assert len(plots) == 4 and all(abs(place - drawn) <= 1 for place, drawn in plots)


@pytest.mark.slow
def test_a_list_is_sorted_searched_filtered_and_opened(page: Page, address: str) -> None:
    page.goto(f"{address}#/run/0")
    expect(page.locator(".count")).to_have_text("300 completions")
    assert page.locator(".row").count() < 60  # those in sight alone
    page.get_by_role("button", name="length").click()
    page.wait_for_selector("[data-sort=length]:has-text('↓')")
    longest = page.request.get(f"{address}api/runs/0/answers?sort=length&limit=5").json()["rows"]
    for place, row in enumerate(longest):
        expect(page.locator(f".row[data-place='{place}'] > div").nth(4)).to_have_text(str(row["length"]))
    page.keyboard.press("/")
    page.keyboard.type("(17)")
    expect(page.locator(".count")).to_have_text("4 of 300 completions")
    page.get_by_role("button", name="Filters").click()
    page.get_by_label("traced").select_option("0")
    expect(page.locator(".count")).to_have_text("1 of 300 completions")
    assert "q=%2817%29" in page.url and "max_traced=0" in page.url and "sort=length" in page.url
    page.reload()  # what was asked for is in the address
    expect(page.locator(".count")).to_have_text("1 of 300 completions")
    page.get_by_role("button", name="Filters").click()
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".count")).to_have_text("300 completions")
    assert "q=" not in page.url and "traced" not in page.url


@pytest.mark.slow
def test_the_keyboard_goes_from_the_runs_to_a_token_and_back(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("a.run")
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    expect(page.locator(".row").first).to_be_visible()
    for key in ("j", "j", "j", "k", "Enter"):
        page.keyboard.press(key)
    expect(page.locator(".tokens")).to_be_visible()
    second = page.request.get(f"{address}api/runs/0/answers?limit=2").json()["rows"][1]["id"]
    assert page.url.endswith(f"#/run/0/answer/{second}")
    for key in ("ArrowRight", "ArrowRight", "j", "k"):
        page.keyboard.press(key)
    expect(page.locator(".token.chosen")).to_have_attribute("data-i", "1")
    page.keyboard.press("End")
    last = page.locator(".token[data-i]").count() - 1
    expect(page.locator(".token.chosen")).to_have_attribute("data-i", str(last))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next and previous token")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.locator(".row.chosen")).to_have_attribute("data-id", str(second))  # where one was
    page.keyboard.press("Escape")
    expect(page.locator("a.run")).to_have_count(2)


@pytest.mark.slow
def test_a_link_to_a_token_opens_there_and_its_numbers_are_the_stored_ones(page: Page, address: str) -> None:
    stored = page.request.get(f"{address}api/runs/0/answers/5").json()["tokens"]
    place = stored["verdicts"].index(2)  # the first recovered one
    opened(page, f"{address}#/run/0/answer/5?token={place}")
    expect(page.locator(".token.chosen")).to_have_attribute("data-i", str(place))
    panel = page.locator("aside")
    for number in (f"{stored['logprobs'][place]:.4f}", f"{stored['overlap'][place]:.3f}", "mtp", "was rejected"):
        expect(panel).to_contain_text(number)
    bars = panel.locator(".bars tbody tr")
    assert bars.count() >= 8 and bars.locator("[title=emitted]").count() == bars.locator("[title=drafted]").count() == 1
    first = bars.first.locator(".value").first.text_content()
    assert first is not None and float(first) == pytest.approx(stored["target_top"][place][0], abs=6e-4)
    page.keyboard.press("n")
    expect(page.locator(".token.chosen.is-recovered")).to_have_attribute(
        "data-i", str(stored["verdicts"].index(2, place + 1))
    )
    page.keyboard.press("p")
    assert f"token={place}" in page.url


@pytest.mark.slow
def test_an_answer_that_was_not_traced_says_so_and_leads_to_those_that_were(page: Page, address: str) -> None:
    rows = page.request.get(f"{address}api/runs/0/answers?max_traced=0&limit=1").json()["rows"]
    opened(page, f"{address}#/run/0/answer/{rows[0]['id']}")
    expect(page.locator(".legend")).to_contain_text("untraced")
    expect(page.locator("main")).not_to_contain_text("the engine does not say")
    expect(page.locator(".turn.gold")).to_contain_text(str(rows[0]["prompt"] + 2))
    page.get_by_role("link", name="Traced completions").click()
    expect(page.locator(".count")).to_contain_text("225 of 300")  # all but the last of each group


@pytest.mark.slow
def test_the_text_is_the_answer_and_blanks_can_be_seen(page: Page, address: str) -> None:
    found = page.request.get(f"{address}api/runs/0/answers/6").json()
    opened(page, f"{address}#/run/0/answer/6")
    spans = page.locator(".tokens .token")
    assert "".join(spans.all_text_contents()) == found["turns"][1]["text"]
    pieces = [found["pieces"][str(i)] for i in found["tokens"]["ids"]]
    for piece, kind in {"": "empty", "\n": "newline", " ": "space"}.items():
        mark = page.locator(f".token[data-i='{pieces.index(piece)}'] .{kind}").first if piece in pieces else None
        assert mark is None or mark.evaluate("e => getComputedStyle(e, '::before').content") not in ("none", '""')
    assert page.locator(".tokens del").count() == found["tokens"]["verdicts"].count(2)
    begun = sum(a != b for a, b in zip(found["tokens"]["cycles"], found["tokens"]["cycles"][1:], strict=False))
    assert page.locator(".token.began").count() == begun


@pytest.mark.slow
def test_versions_are_marked_where_they_change(page: Page, address: str) -> None:
    opened(page, f"{address}#/run/0/answer/100")
    expect(page.locator(".tokens .version")).to_have_text(["v5", "v6"])
    row = page.request.get(f"{address}api/runs/0/answers/100").json()["tokens"]["versions"]
    after = page.locator(".tokens .version").nth(1).evaluate("mark => mark.nextElementSibling.dataset.i")
    assert int(after) == row.index(6)


@pytest.mark.slow
def test_the_legend_hides_colours_and_drafts(page: Page, address: str) -> None:
    opened(page, f"{address}#/run/0/answer/5")
    colour = "e => getComputedStyle(e).backgroundColor"
    token = page.locator(".tokens .is-accepted").first
    assert token.evaluate(colour) != "rgba(0, 0, 0, 0)"
    page.get_by_role("button", name="accepted").click()
    assert token.evaluate(colour) == "rgba(0, 0, 0, 0)"
    expect(page.locator(".tokens del").first).to_be_visible()
    page.get_by_role("button", name="rejected drafts").click()
    expect(page.locator(".tokens del").first).to_be_hidden()
    expect(page.get_by_role("button", name="rejected drafts")).to_have_attribute("aria-pressed", "false")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "column"),
    [("overlap", "overlap"), ("surprise", "logprobs"), ("difference", None), ("entropy", "target_entropy")],
)
def test_a_stronger_colour_is_a_larger_number(page: Page, address: str, mode: str, column: str | None) -> None:
    tokens = page.request.get(f"{address}api/runs/0/answers/5").json()["tokens"]
    opened(page, f"{address}#/run/0/answer/5?mode={mode}")
    levels = page.locator(".token[data-i]").evaluate_all("all => all.map(e => +e.style.getPropertyValue('--level'))")
    pairs = zip(tokens["logprobs"], tokens["trainer_logprobs"], strict=True)
    values = tokens[column] if column else [abs(a - b) for a, b in pairs]
    falling = mode in ("overlap", "surprise")
    known = sorted((-v if falling else v, level) for v, level in zip(values, levels, strict=True) if v is not None)
    assert [level for _, level in known] == sorted(level for _, level in known) and known[-1][1] > known[0][1]
    unmeasured = page.locator(".token.unmeasured").count()
    assert unmeasured == sum(v is None for v in values)


@pytest.mark.slow
def test_a_token_and_an_answer_are_copied_as_json(page: Page, address: str) -> None:
    opened(page, f"{address}#/run/0/answer/5?token=3")
    page.wait_for_selector(".token.chosen")
    read = "navigator.clipboard.readText()"
    page.keyboard.press("c")
    expect(page.locator("#toast")).to_contain_text("token copied")
    token = json.loads(page.evaluate(read))
    assert token["place"] == 3 and token["answer"] == 5 and token["run"] == "first" and len(token["p"]) == 8
    page.keyboard.press("Shift+C")
    expect(page.locator("#toast")).to_contain_text("completion copied")
    answer = json.loads(page.evaluate(read))
    assert answer["tokens"][3] == {k: v for k, v in token.items() if k not in ("run", "answer")}


@pytest.mark.slow
def test_two_answers_are_compared_from_the_first_token_that_differs(page: Page, address: str) -> None:
    opened(page, f"{address}#/run/0/answer/4")
    page.get_by_role("link", name="Compare").click()
    expect(page.locator(".picker tbody tr")).to_have_count(8)  # the second run has another prompt of that number
    expect(page.get_by_text("another text under this number")).to_have_count(4)
    page.get_by_role("link", name="right: completion 5 of first").click()
    expect(page.locator(".pair .tokens")).to_have_count(2)
    a, b = (page.request.get(f"{address}api/runs/0/answers/{i}").json()["tokens"]["ids"] for i in (4, 5))
    first = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    expect(page.locator(".token.differs")).to_have_count(2)
    assert page.locator(".token.differs").first.get_attribute("data-i") == str(first)
    expect(page.locator(".token.chosen")).to_have_count(2)
    opened(page, f"{address}#/compare/0:4/0:4")
    expect(page.locator("main")).to_contain_text("The two are equal in all of their")


@pytest.mark.slow
def test_three_clicks_lead_from_an_alarm_to_the_tokens_that_explain_it(page: Page, address: str) -> None:
    page.goto(address)
    page.locator("a.alarm").first.click()
    page.locator("[data-table=tokens] button.go").first.click()
    example = page.locator("a.example").first
    where = example.get_attribute("href")
    example.click()
    chosen = page.locator(".token.chosen")
    expect(chosen).to_have_count(1)
    assert where is not None and where.endswith(f"token={chosen.get_attribute('data-i')}")
    # It is the token that was forgotten which the target expects there.
    expect(page.locator("aside .bars tbody tr").first.locator("th")).to_have_attribute("title", "id 14")


@pytest.mark.slow
def test_dark_and_light_follow_the_system_until_one_is_chosen(page: Page, address: str) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    page.goto(address)
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colour)
    assert light != dark
    page.keyboard.press("d")
    assert page.evaluate(colour) == light
    page.reload()  # remembered, whatever the system says
    expect(page.get_by_role("button", name="Dark")).to_be_visible()
    assert page.evaluate(colour) == light


@pytest.mark.slow  # four seconds of a browser
def test_texts_are_never_read_as_html(page: Page, address: str) -> None:
    for place in ("", "#/run/1", "#/run/1/answer/1?token=3", "#/compare/1:1/1:2", "#/run/1/alarm/4"):
        opened(page, address + place)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script, header img").count() == 0
    opened(page, f"{address}#/run/1/answer/1")
    expect(page.locator(".turn.prompt")).to_contain_text(HOSTILE)
    expect(page.locator("#path")).to_contain_text(NAME)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_has_all_of_it_in_readable_letters(page: Page, address: str, scheme: str) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    page.emulate_media(color_scheme=scheme)
    smallest = """() => Math.min(...[...document.querySelectorAll('body *')]
        .filter(e => e.offsetParent && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
        .map(e => parseFloat(getComputedStyle(e).fontSize)))"""
    for place in ("", "#/run/0", "#/run/0/answer/5?token=3", "#/compare/0:4/0:5", "#/run/0/alarm/19"):
        opened(page, address + place)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, place
        assert page.evaluate(smallest) >= 12, place


@pytest.mark.slow
def test_an_address_that_leads_nowhere_says_so(page: Page, address: str) -> None:
    page.goto(f"{address}#/run/7/answer/1")
    expect(page.get_by_role("alert")).to_have_text("there is no page #/run/7/answer/1")


# ---- questions that are asked again


@pytest.fixture(scope="module")
def epochs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Ten prompts of four answers: endless questions, and four of them over and over."""
    folder = tmp_path_factory.mktemp("epochs")
    with served([write_run(folder / "endless"), write_run(folder / "again", questions=4)]) as where:
        yield where


@pytest.mark.slow
def test_a_list_is_filtered_by_epoch_and_question(page: Page, epochs: str) -> None:
    page.goto(f"{epochs}#/run/1")
    expect(page.locator(".count")).to_have_text("40 completions")
    page.get_by_role("button", name="Filters").click()
    page.get_by_label("question, at least").fill("3")
    expect(page.locator(".count")).to_have_text("8 of 40 completions")
    page.get_by_label("epoch, at least").fill("1")
    expect(page.locator(".count")).to_have_text("4 of 40 completions")
    place = page.locator(".row[data-place='0'] > div").nth(1)
    assert place.inner_text().startswith("7.") and "question 3, epoch 1" in str(place.get_attribute("title"))
    page.goto(f"{epochs}#/run/1/answer/28")
    expect(page.locator(".summary .facts")).to_contain_text("question")
    facts = page.locator(".summary .facts").inner_text()
    assert "question\n3\nepoch\n1" in facts and "reward: right\n0.50\nreward: code\ndoes not apply" in facts


@pytest.mark.slow
def test_endless_questions_have_neither(page: Page, epochs: str) -> None:
    page.goto(f"{epochs}#/run/0")
    page.get_by_role("button", name="Filters").click()
    expect(page.get_by_label("reward, at least")).to_be_visible()
    assert page.get_by_label("epoch, at least").count() == 0 == page.get_by_label("question, at least").count()
    assert "epoch" not in str(page.locator(".row[data-place='0'] > div").nth(1).get_attribute("title"))
    page.goto(f"{epochs}#/run/0/answer/28")
    expect(page.locator(".summary .facts")).to_contain_text("staleness")
    assert "question" not in page.locator(".summary .facts").inner_text()


# ---- trajectories of several turns


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run with one group: three turns, and two."""
    folder = tmp_path_factory.mktemp("turns") / "agents"
    folder.mkdir()
    (folder / "config.yaml").write_text("monitor:\n  trace: all\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    log = TrajectoryLog(folder / STORE, "all", lambda number: f" {number}", 2)
    trainer = np.linspace(-1, 0, 9).astype(np.float32)
    log.write(1, [group(0, trajectory(traced=True, ended="turns"), trajectory(turns=2))], 2, "bebop", {0: trainer})
    log.close()
    with served([folder]) as where:
        yield where


@pytest.mark.slow
def test_what_was_read_is_marked_and_has_no_probability(page: Page, turns: str) -> None:
    page.goto(f"{turns}#/run/0/answer/0")
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


@pytest.mark.slow
def test_lists_can_be_filtered_by_turns(page: Page, turns: str) -> None:
    page.goto(f"{turns}#/run/0")
    expect(page.locator(".count")).to_have_text("2 completions")
    page.get_by_role("button", name="Filters").click()
    page.get_by_label("ended").select_option("turns")
    expect(page.locator(".count")).to_have_text("1 of 2 completions")
    assert "ended=turns" in page.url
