"""The page of an adaptation and its model card: figures and numbers are those of the results, and name no folder."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import yaml

from bebop.adaptation.results import Results, boundary_share
from bebop.config.adapt import AdaptConfig
from bebop.config.fields import from_dict
from bebop.report.adapted import _summary, judge, render_card, write_card, write_page
from tests.adaptation.builders import config, results
from tests.report.test_report import headings, specs

TITLES = ["Before and after", "Accept length", "Acceptance per draft position", "Training", "On the way"]
TITLES += ["Acceptance against entropy", "Decision boundary", "Acceptance by place in the completion"]


def page(folder: Path, measured: Results, steps: int = 30, warm: int | None = None, evaluated: bool = True) -> str:
    lines = []
    for step in range(1, steps + 1):
        line: dict[str, Any] = {"step": step, "head/loss": 1 / step, "head/grad_norm": None if step == 5 else 0.5}
        if evaluated and step % 10 == 0:
            line |= {"eval/accept_length": 2.5, "eval/accept_length_greedy": 2.2, "eval/draft_entropy": 0.4}
            line |= {f"eval/overlap/{k}": 0.6 for k in (1, 2, 3)}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    write_page(folder, config(train={"warm_steps": warm, "steps": steps}), measured)
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the usual results."""
    return page(tmp_path_factory.mktemp("page"), results())


def test_the_page_has_every_figure_and_needs_no_network(usual: str) -> None:
    text = usual
    assert headings(text) == TITLES
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text) and "default-src 'none'" in text
    plots = specs(text)
    assert len(plots) == 2 + 2 + 2 + 3 + 3 + 2 + 2 == text.count("class='plot'")
    for plot in plots:
        go.Figure(plot)  # raises on a property that plotly does not know
        assert all(any(v is not None for v in trace["y"]) for trace in plot["data"])
    sentences = re.findall(r"</h2>.*?<p>(.*?)</p></section>", text, re.S)
    assert len(sentences) == len(TITLES) and min(map(len, sentences)) > 120, "each is explained"


def test_numbers_are_those_of_the_results(usual: str) -> None:
    measured, text = results(), usual
    lengths = specs(text)[0]["data"]
    assert [trace["name"] for trace in lengths] == ["before", "after"]
    wanted = measured.after.decoded["bebop"].interval("accept_length")
    assert lengths[1]["y"][0] == pytest.approx(wanted.value, rel=1e-5)
    assert lengths[1]["error_y"]["array"][0] == pytest.approx(wanted.high - wanted.value, rel=1e-4)
    assert lengths[1]["error_y"]["arrayminus"][0] == pytest.approx(wanted.value - wanted.low, rel=1e-4)
    assert len(lengths[1]["y"]) == 3, "over all, and by task"
    greedy = specs(text)[3]["data"][0]
    rates = [measured.before.decoded["target_only"].interval("accepted", k).value for k in (1, 2, 3)]
    assert greedy["y"] == pytest.approx(rates, rel=1e-5)
    for number in (wanted, measured.change("bebop", "accept_length"), boundary_share(measured.after.probe)):
        assert str(number) in text


@pytest.mark.parametrize(
    ("repeated", "words"), [(0, "40 held-out prompts"), (3, "40 prompts (37 held out, 3 that training has too)")]
)
def test_card_and_page_say_how_many_prompts_were_held_out(repeated: int, words: str) -> None:
    measured = dataclasses.replace(results(), repeated=repeated)
    assert words in render_card(config(), measured) and measured.as_dict()["held_out"] == 40 - repeated
    assert words in _summary(config(), measured).text


def test_the_decision_boundary_counts_each_side(usual: str) -> None:
    cells = specs(usual)[12]["data"][0]
    assert sum(map(sum, cells["customdata"])) == 600
    rows = zip(cells["customdata"], cells["y"], strict=True)
    below = sum(n for row, y in rows for n, x in zip(row, cells["x"], strict=True) if x > y)
    assert 0.2 < below / 600 < 0.3, "one token in four favours a greedy draft"
    line = re.search(r"after, all</th>(.*?)</tr>", usual)
    assert line and re.search(r"600</td>.*75\.0 % \[.*75\.0 % \[.*25\.0 % \[", line[1])


def test_bins_with_few_tokens_are_left_out(usual: str) -> None:
    shown = specs(usual)
    places = shown[14]["layout"]["xaxis"]["ticktext"]
    assert places == ["0", "1-3", "4-7", "8-15", "16-31"], "answers have 30 tokens"
    entropies = shown[9]["layout"]["xaxis"]["ticktext"]
    assert entropies == [".01-.03", ".03-.1", ".1-.3", ".3-1", ">1"], "no token of this text is that certain"
    shares = shown[11]["data"][0]["y"]
    assert shares[0] == 0 and sum(shares) == pytest.approx(1, abs=1e-3)


def test_warm_up_has_a_colour_of_its_own(tmp_path: Path, usual: str) -> None:
    text = page(tmp_path, results(), warm=10)
    loss = specs(text)[4]["data"]
    assert [(t["name"], len(t["x"])) for t in loss] == [("ce loss", 10), ("e2e_tv loss", 20)]
    assert "after 10 steps of ce" in text and "e2e_tv</span>" in text
    assert len(specs(usual)[4]["data"]) == 1


def test_without_evaluations_there_is_no_figure_of_them(tmp_path: Path) -> None:
    assert "On the way" not in headings(page(tmp_path, results(), evaluated=False))


# ---- the model card


def card(folder: Path, settings: AdaptConfig | None = None, fresh: bool = False) -> str:
    write_card(folder, settings or config(), results(fresh=fresh))
    return (folder / "README.md").read_text()


def test_the_card_has_what_a_reader_needs(tmp_path: Path) -> None:
    text = card(tmp_path)
    front = yaml.safe_load(text.split("---")[1])
    assert (
        front["library_name"] == "transformers" and "speculative-decoding" in front["tags"] and "mtp" in front["tags"]
    )
    measured = results()
    for expected in (
        "# tiny with an adapted MTP head", "| Objective | `e2e_tv` |", "| Depth | 5 recursive steps |",
        "2,000 sequences with 163,840 completion tokens", "temperature 1", "| Tasks | chain_sum, gcd |", "| Seed | 0 |",
        "AdamW, learning rate 0.001", "came with the checkpoint",
        "--speculative-algorithm NEXTN", "--speculative-num-steps 3", "--speculative-eagle-topk 1",
        "--speculative-num-draft-tokens 4", "--speculative-use-rejection-sampling", "0.5.14",
        "python -m bebop.run model=folder model.path=DIR",
        f"| {measured.before.decoded['bebop'].interval('accept_length')} |",
        f"| {measured.after.decoded['target_only'].interval('accepted', 2)} |",
        f"| {measured.change('bebop', 'accept_length')} |",
        "bebop-rl 0", "torch 2", "transformers ", "Python 3",
    ):  # fmt: skip
        assert expected in text, expected


def test_a_fresh_head_and_its_warm_up_are_named(tmp_path: Path) -> None:
    text = card(tmp_path, fresh=True)
    warm = AdaptConfig().train.steps // 3
    assert f"`e2e_tv`, after {warm} steps of `ce`" in text and "a fresh one, made from the last layer" in text


def test_the_configuration_in_it_can_be_run_again(tmp_path: Path) -> None:
    text = card(tmp_path, config(head={"objective": "kl", "betas": [0.9, 0.99]}, seed=7))
    values = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    again = from_dict(AdaptConfig, values)
    wanted = config(head={"objective": "kl", "betas": [0.9, 0.99]}, seed=7)
    assert dataclasses.replace(again, model=wanted.model) == wanted


def test_no_folder_of_the_machine_is_in_it(tmp_path: Path) -> None:
    model, text_file, out = tmp_path / "secret" / "my-model", tmp_path / "secret" / "text.jsonl", tmp_path / "out"
    model.mkdir(parents=True)
    text_file.write_text("{}\n")
    out.mkdir()
    settings = config(
        model={"path": str(model)}, dir=str(out), out=str(out / "model"),
        data={"source": "file", "path": str(text_file)},
        task={"source": "file", "path": str(text_file), "reward": f"{tmp_path}/secret/reward.py:score"},
    )  # fmt: skip
    text = card(out, settings)
    assert "my-model" in text and "text.jsonl" in text and "reward.py:score" in text
    assert "secret" not in text and str(tmp_path) not in text


@pytest.mark.parametrize(
    ("sampling", "words"), [({"top_p": 0.9}, "top_p 0.9"), ({"temperature": 0.6}, "temperature 0.6")]
)
def test_the_sampling_distribution_is_named(tmp_path: Path, sampling: dict[str, float], words: str) -> None:
    assert words in card(tmp_path, config(data={"sampling": sampling})).split("## Acceptance")[0]


def test_the_page_opens_with_a_verdict_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/a b").mkdir(parents=True)
    (tmp_path / "runs/a b/overrides.json").write_text(json.dumps(["dir=runs/a b", "task=gcd", "task.size=9"]))
    measured = results()
    rise = measured.change("bebop", "accept_length")
    assert rise.low > 0
    opening = page(tmp_path / "runs/a b", measured).split("<main>")[0]
    assert f"The accept length rose by {rise} to" in opening and "Train the policy with this head." in opening
    command = "python -m bebop.run &#39;model.path=runs/a b/model&#39; task=gcd task.size=9"
    assert f"<code>{command}</code>" in opening
    same = dataclasses.replace(measured, after=measured.before)
    said = judge(tmp_path, config(), same)
    assert said.verdict.startswith("The accept length did not move clearly (0.000 [") and not said.command
    worse = dataclasses.replace(measured, after=measured.before, before=measured.after)
    said = judge(tmp_path, config(), worse)
    assert re.match(r"The accept length fell by 0\.\d+ to", said.verdict) and said.advice.startswith("Keep the head")
