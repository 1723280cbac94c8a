"""The report's entry point: one page that needs nothing else, and one clear line for what cannot be done."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import yaml

from bebop.report.__main__ import main
from bebop.report.document import Card, document, opened
from bebop.report.figures import Panel
from tests.commands import error_of


def write_run(folder: Path, steps: int = 30, drafts: int = 3, drop: tuple[str, ...] = ()) -> Path:
    """A run folder with every metric of the report, except those that start with a name in ``drop``."""
    rng = np.random.default_rng(steps + drafts)
    names = ["reward/mean", "response/length", "policy/entropy", "rollout/accept_length", "rollout/tokens_per_s"]
    names += ["staleness/mean", "staleness/max"]
    names += [f"time/{x}" for x in ("step", "rollout", "update", "sync", "idle", "monitor")]
    names += [f"train/{x}" for x in ("loss", "grad_norm", "ratio_mean", "clip_frac")]
    names += ["draft/entropy", "rollout/target_entropy"] if drafts else []
    names += [f"rollout/{x}/{k}" for x in ("accept_rate", "overlap") for k in range(1, drafts + 1)]
    names = [name for name in names if not name.startswith(drop)] if drop else names
    folder.mkdir(parents=True)
    rows = [
        {"step": s, "version": s, **dict(zip(names, rng.random(len(names)), strict=True))} for s in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {"model": {"path": "tiny"}, "task": {"name": "chain_sum"}}
    config["decoding"] = {"system": "bebop", "draft_tokens": 3}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def specs(page: str) -> list[dict[str, Any]]:
    """The plots in a page."""
    match = re.search(r"^<script>const FIGURES = (.*);$", page, re.M)
    assert match
    return json.loads(match[1])


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def card(page: str, title: str) -> str:
    """The HTML of one card."""
    return next(part for part in page.split("<section")[1:] if f"<h2>{title}</h2>" in part)


def drawn(page: str, title: str) -> list[dict[str, Any]]:
    """The plots of one card."""
    return [specs(page)[int(number)] for number in re.findall(r"id='plot-(\d+)'", card(page, title))]


def with_metrics(folder: Path, more: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A run folder with further metrics in each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | more(row)) + "\n" for row in rows))
    return folder


ALL = ["Summary", "Reward", "Response length", "Accept length", "Acceptance per draft position", "Entropy", "Staleness"]
ALL += ["Where the time goes", "Rollout speed", "Update", "How it was made"]


def test_the_page_has_every_figure_and_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "default")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    assert headings(page) == ALL
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page)
    assert "default-src 'none'" in page and "plotly.js v" in page
    plots = specs(page)
    assert len(plots) == 8 + 4 == page.count("class='plot'")
    for plot in plots:
        go.Figure(plot)  # raises on a property that plotly does not know
        assert all(any(v is not None for v in trace["y"]) for trace in plot["data"])


def test_the_page_says_how_it_was_made_without_folders_of_the_machine(tmp_path: Path) -> None:
    run = write_run(tmp_path / "default")
    main([str(run)])
    assert "none given" not in (run / "report.html").read_text()  # nothing is known of it
    (run / "overrides.json").write_text('["task=gcd", "model.path=/srv/somebody/m1"]')
    (run / "config.yaml").write_text("model:\n  path: /srv/somebody/m1\ntrainer:\n  lr: 0.5\n")
    made = {"commit": "3f2c" * 10, "dirty": True, "processor": "Epyc, 2 cores", "torch": "2.13.0", "python": "3.11.9"}
    (run / "machine.json").write_text(json.dumps(made))
    main([str(run)])
    page = (run / "report.html").read_text().split("How it was made")[1].split("</main>")[0]
    said = ("task=gcd model.path=m1<", "commit 3f2c3f2c3f2c, with changes", "Epyc, 2 cores", "torch 2.13.0", "lr: 0.5")
    assert all(words in page for words in said) and "somebody" not in page
    (run / "overrides.json").write_text("[]"), (run / "machine.json").write_text('["torn')
    main([str(run)])
    assert "none given: the defaults" in (run / "report.html").read_text()


@pytest.mark.parametrize(("panels", "across"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 3), (7, 3)])
def test_rows_of_plots_are_about_equally_full(panels: int, across: int) -> None:
    plots = [Panel(caption="", traces=[], layout={})] * panels
    assert f"--across:{across}'" in document("", "", [Card(title="", text="", panels=plots)])


def test_what_stands_in_backticks_is_code() -> None:
    page = document("", "", [Card(title="", text="spent `a.b` <i>", notes=["`c`"])], opened([("", "`d`", "do `e f`")]))
    assert [*re.findall("<code>(.*?)</code>", page)] == ["d", "e f", "a.b", "c"] and "`" not in page.split("<body>")[1]
    assert "&lt;i&gt;" in page


def test_acceptance_has_counts_solid_and_overlap_dashed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", drafts=2)
    main([str(run)])
    traces = specs((run / "report.html").read_text())[3]["data"]
    lines = [("draft 1", "solid"), ("draft 1, overlap", "dash"), ("draft 2", "solid"), ("draft 2, overlap", "dash")]
    assert [(t["name"], t["line"].get("dash", "solid")) for t in traces] == lines


def test_several_runs_are_overlaid_under_one_legend(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=12, drafts=0)
    out = tmp_path / "both.html"
    assert main([str(a), str(b), "--out", str(out)]) == 0
    page = out.read_text()
    assert not (a / "report.html").exists()
    response = specs(page)[1]["data"]
    assert [(t["name"], len(t["x"])) for t in response] == [("a", 30), ("b", 12)]
    assert response[0]["line"]["color"] != response[1]["line"]["color"]
    assert page.count("data-group='run 1'") == 8  # every figure but the time split, which has a panel for each run
    assert "Not recorded in b: draft/entropy, rollout/target_entropy." in page


def test_missing_series_are_left_out_with_a_note(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", drop=("staleness", "policy"))
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Staleness" not in headings(page)
    assert "Nothing was recorded for: Staleness (staleness/mean, staleness/max)." in page
    assert "Not recorded: policy/entropy." in page


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "<b>&'x"), write_run(tmp_path / "y")
    out = tmp_path / "out.html"
    assert main([str(a), str(b), "--out", str(out)]) == 0
    page = out.read_text()
    assert "<b>" not in page.split("const FIGURES")[1] and "&lt;b&gt;&amp;" in page
    assert specs(page)[1]["data"][0]["name"] == "<b>&'x"


def test_a_run_without_config_or_with_a_torn_last_line_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps=4)
    (run / "config.yaml").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert main([str(run)]) == 0
    assert len(specs((run / "report.html").read_text())[0]["data"][0]["x"]) == 4


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda run: shutil.rmtree(run), "is not a folder"),
        (lambda run: (run / "metrics.jsonl").unlink(), "has no steps yet"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "has no steps yet"),
        (lambda run: (run / "metrics.jsonl").write_text("{\n{}\n"), "line 1 is not JSON"),
        (lambda run: (run / "config.yaml").write_text("a: ["), "is not YAML"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Any, message: str
) -> None:
    run = write_run(tmp_path / "r", steps=2)
    prepare(run)
    assert message in error_of(main, [str(run)], capsys)


def test_out_must_be_a_file_in_a_folder_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "r", steps=2)
    for out in (tmp_path / "no" / "x.html", tmp_path):
        assert error_of(main, [str(run), "--out", str(out)], capsys).startswith(f"--out {out} cannot be written")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "usage: python -m bebop.report" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_every_plot_is_drawn_and_a_key_hides_its_run(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    out = tmp_path / "both.html"
    main([str(a), str(b), "--out", str(out)])
    traces = [trace for plot in specs(out.read_text()) for trace in plot["data"]]
    lines = sum(trace["type"] == "scatter" for trace in traces)
    of_first = sum(trace["legendgroup"] == "run 0" for trace in traces)
    shown = drawn_body(out, tmp_path)
    assert len(re.findall(r'class="plot[ "][^>]*><div class="plot-container', shown)) == len(specs(out.read_text()))
    assert shown.count('class="trace scatter') == lines
    click = "<script>document.querySelector('button[data-group=\"run 0\"]').click()</script></body>"
    out.write_text(out.read_text().replace("</body>", click))
    hidden = drawn_body(out, tmp_path)
    assert hidden.count('aria-pressed="false"') == 8
    assert hidden.count('class="trace scatter') == lines - of_first


def drawn_body(page: Path, scratch: Path) -> str:
    """The content of the page, without its scripts, as Chromium has it after running them."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000"]
    command = ["chromium", *flags, f"--user-data-dir={scratch / 'profile'}", "--dump-dom", page.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return dumped.split("</main>")[0].split("<main>")[1]
