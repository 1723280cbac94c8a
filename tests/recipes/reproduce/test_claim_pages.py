"""The page of each claim: both models, effects around their bounds, rules and figures, and nothing from elsewhere."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bebop.errors import UserError
from recipes.reproduce import __main__ as reproduce
from recipes.reproduce import record
from recipes.reproduce.claim_pages import INDEX, WIDTH, file_of, interval, rendered, study_file, write_pages
from recipes.reproduce.claims import PAPERS
from recipes.reproduce.deciding import DecidingNumber
from recipes.reproduce.measured import Number
from recipes.reproduce.pages import within
from tests.recipes.reproduce.synthetic import keep

VOID = {"meta", "img", "rect", "line", "circle", "br"}
CLAIMS = {claim.name: claim for paper in PAPERS for claim in paper.claims}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two studies of the real model, and places for the rest."""
    root = tmp_path_factory.mktemp("studies")
    for study in ("real_losses", "real.rl"):
        keep(root, study)
    return {name: within(root, name) for name in reproduce.STUDIES}


@pytest.fixture(scope="module")
def made(folders: dict[str, Path]) -> dict[str, str]:
    return rendered(contents(folders), folders)


def contents(folders: dict[str, Path]) -> dict[str, record.Content | None]:
    return {name: record.read(folder / "results.json") for name, folder in folders.items()}


class Balance(HTMLParser):
    """Elements that are open, and those that were closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def faults(text: str) -> list[str]:
    """What keeps a page from being one whole file of HTML."""
    parser = Balance()
    parser.feed(text)
    found = [f"<{tag}> is not closed" for tag in parser.open] + [f"</{tag}> closes nothing" for tag in parser.wrong]
    if re.search(r"<script|(src|href)=['\"](?!data:|[\w-]+\.html['\"])", text):
        found.append("it loads something, or runs a script")
    return found


def test_every_claim_has_a_page_and_the_first_leads_to_all(made: dict[str, str]) -> None:
    pages = [
        *(file_of(claim) for claim in CLAIMS.values()),
        *(study_file(study) for study in ("real_losses", "real.rl")),
    ]
    assert set(made) == {INDEX, *pages} and "PAD-1.html" in made and "study-real-rl.html" in made
    assert re.findall(r"href='([^']+)'", made[INDEX]) == pages
    assert {name: faults(text) for name, text in made.items() if faults(text)} == {}


def test_a_page_that_loads_something_or_is_torn_is_caught(made: dict[str, str]) -> None:
    page = made["C3.html"]
    for broken in (
        page.replace("</svg>", "", 1),
        page.replace("<main>", "<main><script src='plotly.js'></script>"),
        page.replace("src='data:", "src='figures/a.svg;"),
        page.replace("some &lt;processor&gt;", "some <processor>"),
    ):
        assert broken != page and faults(broken)


def test_a_page_has_verdicts_effects_rules_and_figures(made: dict[str, str]) -> None:
    page = made["C3.html"]
    assert "<h1>C3: confirmed in part, so far on SmolLM2, no results yet on the built-in model</h1>" in page
    assert "SmolLM2-135M-Instruct:</b> confirmed in part" in page and "Findings on SmolLM2-135M-Instruct" in page
    assert "0.400 [0.398, 0.402]" in page and "confirmed if the gain in accept length lies above 0" in page
    assert page.count("data:image/svg+xml;base64,") == 1 and "A &lt;figure&gt;." in page
    assert "recipes/reproduce/real_losses/results.json" in page
    fourth = made["C4.html"]
    assert "recipes/reproduce/real/rl/results.json" in fourth and "Figures of real.rl" in fourth
    assert "Findings on" not in made["C1.html"] and "no results yet" in made["C1.html"]


def test_a_study_has_a_page_with_its_findings_tables_and_figures(folders: dict[str, Path]) -> None:
    own = contents(folders)
    stored = own["real_losses"]
    assert stored is not None
    stored["tables"] = {"Means": [{"arm": "a<b", "gain": {"value": 0.5, "low": 0.4, "high": 0.6}, "share": 0.25}]}
    page = rendered(own, folders)["study-real_losses.html"]
    assert faults(page) == [] and "a&lt;b" in page and "0.500 [0.400, 0.600]" in page and "0.250" in page
    assert "Evidence and rules" in page and page.count("data:image/svg+xml;base64,") == 1


def test_a_bar_of_ours_says_so_beside_its_rule(tmp_path: Path) -> None:
    """RESULTS.md lists it apart and leads to this page for the reason."""
    folders = {"real_drafts": keep(tmp_path, "real_drafts")}
    page = rendered(contents(folders), folders)["study-real_drafts.html"]
    assert "; a bar of ours: the paper compares means of tasks, not the share of positions" in page


def drawn(effect: DecidingNumber) -> tuple[list[float], list[float], float]:
    """Ends of the noise and of the interval, and the dot, in pixels from the bound."""
    text = interval(effect, "#000")
    x, width = (float(found) for found in re.findall(r"<rect x='([\d.]+)' y='0' width='([\d.]+)'", text)[0])
    low, high = (float(found) for found in re.findall(r"<line x1='([\d.]+)' x2='([\d.]+)'", text)[1])
    [at] = re.findall(r"<circle cx='([\d.]+)'", text)
    middle = WIDTH / 2
    return [x - middle, x + width - middle], [low - middle, high - middle], float(at) - middle


def test_an_effect_is_drawn_around_its_bound() -> None:
    """0.6 [0.55, 0.70] against 0.5 with a noise of 0.05: the interval begins where the noise ends."""
    effect = DecidingNumber(name="x", number=Number(value=0.6, low=0.55, high=0.7), bound=0.5, noise=0.05)
    scale = WIDTH / 2 * 0.95 / 0.2
    noise, ends, at = drawn(effect)
    assert noise == pytest.approx([-0.05 * scale, 0.05 * scale], abs=0.15)
    assert ends == pytest.approx([0.05 * scale, 0.2 * scale], abs=0.15) and at == pytest.approx(0.1 * scale, abs=0.1)
    forgotten = drawn(replace(effect, bound=0.0))  # what takes the bound for 0
    assert forgotten[1] != pytest.approx(ends, abs=1)
    below = drawn(DecidingNumber(name="x", number=Number(value=-1.0, low=-2.0, high=0.0), bound=0.0, noise=None))
    assert below[0] == [0, 0] and below[1] == pytest.approx([-0.95 * WIDTH / 2, 0], abs=0.1) and below[2] < 0


def test_pages_are_written_where_they_are_asked_for(folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    assert write_pages(contents(folders), folders, out) == out / INDEX
    assert len(list(out.glob("*.html"))) == len(CLAIMS) + 3
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--html"):
        write_pages(contents(folders), folders, tmp_path / "file")


def test_the_command_writes_pages_and_nothing_else(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "folder_of", folders.__getitem__)
    monkeypatch.setattr(reproduce, "run", lambda *_: pytest.fail("it runs a study"))
    monkeypatch.setattr(reproduce, "rebuild", lambda *_: pytest.fail("it rebuilds pages"))
    assert reproduce.main(["--html", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.endswith("out/index.html written\n") and (tmp_path / "out" / "C3.html").is_file()
