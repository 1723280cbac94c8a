"""What the study on entropy makes of synthetic heads: every number that its rules ask for, on the side that was put in;
and nothing of what is not there."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bebop.adaptation.probe import Probe
from bebop.errors import UserError
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real.evaluation import TEMPERATURES
from recipes.reproduce.real_entropy.analysis import measure, read
from recipes.reproduce.real_entropy.charts import draw, prompt_points
from recipes.reproduce.real_entropy.findings import RULES
from recipes.reproduce.real_entropy.tables import tables
from recipes.reproduce.verdicts import Finding, judge
from tests.recipes.reproduce.synthetic import check_names, synthetic, write_arm, write_head

SWEEP = tuple(Sampling(temperature=t) for t in TEMPERATURES)
SEEDS = {"hard_ce": 20, "ce": 0, "e2e_tv": 10}


def made(name: str, sharper: float = 0.0) -> object:
    def make(seed: int, sampling: Sampling) -> Probe:
        found = synthetic(SEEDS[name] + seed, sampling)
        found.numbers["draft_entropy"] = found.numbers["draft_entropy"] + 0.3 - sharper
        return found

    return make


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    for name, sharper in {"hard_ce": 0.0, "ce": 0.0, "e2e_tv": 0.2}.items():
        write_arm(folder, name, made(name, sharper), SWEEP)  # type: ignore[arg-type]
    return folder


def by_statement(findings: list[Finding], words: str) -> list[Finding]:
    return [finding for finding in findings if words in finding.statement]


@pytest.mark.slow
def test_every_number_and_fact_that_the_rules_ask_for_is_measured(place: Path) -> None:
    told = measure(read(place), place)
    check_names("real_entropy", {*told.numbers, *told.facts})
    findings = judge(RULES, told.numbers, told.facts)
    assert not any(finding.untested or "not measured" in finding.evidence for finding in findings)


@pytest.mark.slow
def test_what_was_put_in_is_found(place: Path) -> None:
    told = measure(read(place), place)
    findings = judge(RULES, told.numbers, told.facts)
    for words in ("falls with the target's entropy", "more entropy than the target has", "less entropy than those",
                  "follows the target's"):  # fmt: skip
        some = by_statement(findings, words)
        assert some and all(f.side == "confirmed" and f.p < 0.05 for f in some), some
    for way in ("temperatures", "prompts"):  # between tokens of all kinds it is less
        assert told.numbers[f"ce, sampled, {way}"].value == pytest.approx(-0.1, abs=0.03)
    assert told.numbers["e2e_tv - ce, draft entropy"].value == pytest.approx(-0.2, abs=0.02)
    assert told.numbers["ce, draft - target entropy"].value == pytest.approx(0.28, abs=0.06)
    # Acceptance follows the target's entropy here, and the draft's only by way of it.
    assert told.numbers["ce, told by draft - target"].value < -0.005
    assert told.numbers["R squared, sampled, tokens"].value > 0.5


@pytest.mark.slow
def test_means_are_those_of_all_contexts_and_positions(place: Path) -> None:
    told = measure(read(place), place)
    every = [made("ce")(seed, Sampling()) for seed in range(3)]  # type: ignore[operator]
    draft, target = (np.mean([np.nanmean(c.numbers[f"{s}_entropy"]) for c in every]) for s in ("draft", "target"))
    assert told.numbers["ce, draft entropy"].value == pytest.approx(draft, abs=1e-5)
    assert told.numbers["ce, draft - target entropy"].value == pytest.approx(draft - target, abs=1e-5)
    assert told.numbers["ce, accept length"].value == pytest.approx(np.mean([c.accept.mean() for c in every]))
    known = np.isfinite(every[0].numbers["overlap"])
    one, other = (
        np.mean([np.corrcoef(c.numbers[name][known], c.numbers["overlap"][known])[0, 1] ** 2 for c in every])
        for name in ("draft_entropy", "target_entropy")
    )
    assert told.numbers["ce, told by draft - target"].value == pytest.approx(one - other, abs=1e-5)


@pytest.mark.slow
def test_losses_and_temperatures_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no head of hard_ce, ce, e2e_tv: run first .* --stage heads evaluation"):
        read(tmp_path)
    write_arm(tmp_path, "ce", made("ce"), SWEEP[1:], seeds=(0, 2), flat=False)  # type: ignore[arg-type]
    told = measure(read(tmp_path), tmp_path)
    assert not [name for name in told.numbers if "temperatures" in name or "e2e_tv" in name]
    findings = judge(RULES, told.numbers, told.facts)
    (missing, *_) = by_statement(findings, "over temperatures")
    assert missing.untested == "not measured: ce, greedy, temperatures"
    (not_flat,) = by_statement(findings, "more entropy than the target has")
    assert str(not_flat.untested).startswith("not all validation curves of ce are flat")
    (tested, *_) = by_statement(findings, "from token to token")
    assert tested.untested is None and "0 of 2 validation curves of ce flat" in tested.evidence
    assert set(draw(read(tmp_path), tmp_path / "figures")) == {"prompts.svg", "tokens.svg", "entropies.svg"}


@pytest.mark.slow
def test_heads_of_other_chains_are_refused(place: Path, tmp_path: Path) -> None:
    write_arm(tmp_path, "ce", made("ce"))  # type: ignore[arg-type]
    write_head(tmp_path, "ce-2", synthetic(2, prompts=20))
    with pytest.raises(UserError, match="not all looked at on the same chains"):
        read(tmp_path)


@pytest.mark.slow
def test_tables_and_figures_hold_what_the_numbers_hold(place: Path, tmp_path: Path) -> None:
    began = time.process_time()
    results = read(place)
    slopes, by_temperature, tenths, entropies = tables(results).values()
    told = measure(results, place)
    (line,) = [line for line in slopes if line["head"] == "ce" and line["drafts"] == "greedy"]
    assert line["prompts"].value == told.numbers["ce, greedy, prompts"].value
    rows = [line for line in by_temperature if line["head"] == "ce"]
    fit = np.polyfit([row["entropy"].value for row in rows], [row["sampled"].value for row in rows], 1)[0]
    assert fit == pytest.approx(told.numbers["ce, sampled, temperatures"].value, abs=0.01)
    some = [line["entropy"].value for line in tenths if line["head"] == "ce"]
    assert all(a < b for a, b in pairwise(some)) and len(some) == 10
    assert entropies[0]["seeds"] == 3 and entropies[0]["prompts"] == 24
    x, y = prompt_points(results["ce"]).T
    assert (x * y).sum() / (x * x).sum() == pytest.approx(told.numbers["ce, sampled, prompts"].value, rel=0.01)
    captions = draw(results, tmp_path)
    assert sorted(captions) == sorted(path.name for path in tmp_path.iterdir()) and len(captions) == 4
    assert time.process_time() - began < 60
