"""Tables of the study of losses, and the whole of it from an evaluation to its pages."""

import json
from pathlib import Path

import numpy as np
import pytest

from bebop.errors import UserError
from recipes.reproduce import record
from recipes.reproduce.real.arms import Measured
from recipes.reproduce.real.runs import BRIEF, CONVERGED, FRESH, SHARED
from recipes.reproduce.real_losses import tables
from recipes.reproduce.real_losses.__main__ import study
from recipes.reproduce.real_losses.comparison import NAMES, measure
from recipes.reproduce.real_losses.findings import MARKS, RULES
from tests.recipes.reproduce.real_losses_builders import SEEDS, chains, write_study

LAST = MARKS["steps"][-1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    write_study(folder)
    return folder


@pytest.fixture(scope="module")
def told(place: Path) -> Measured:
    return measure(place)


def test_tables_have_a_line_for_every_arm(place: Path, told: Measured) -> None:
    best = {line["loss"]: line for line in tables.best_lines(place)}
    assert set(best) == set(NAMES) and len(NAMES) == 2 + len(CONVERGED) + len(BRIEF) + len(FRESH)
    one = chains(place, "tv-0").numbers["overlap"]
    wanted = np.mean([np.nanmean(chains(place, f"tv-{s}").numbers["overlap"][:, 1]) for s in SEEDS])
    assert one.shape[1] == 3 and best["tv"]["overlap 2"].value == pytest.approx(wanted)
    assert str(best["ce"]["accept length"]) == str(told.numbers["ce, accept length"])
    assert best[SHARED]["seeds"] == 1 and best[SHARED]["accept length"].low < best[SHARED]["accept length"].high
    gains = {line["loss"]: line for line in tables.gain_lines(place)}
    assert str(gains["e2e_tv"]["best"]) == str(told.numbers["e2e_tv - ce, accept length"])
    assert str(gains["e2e_tv"][LAST]) == str(told.numbers[f"e2e_tv - ce, accept length at {LAST}"])
    fresh = told.numbers[f"fresh e2e_tv - fresh ce, accept length at {LAST}"]
    assert str(gains["fresh e2e_tv"][LAST]) == str(fresh)
    slopes = {line["loss"]: line for line in tables.slope_lines(place)}
    assert str(slopes["e2e_tv"]["tokens, minus ce"]) == str(told.numbers["e2e_tv - ce, slope over tokens"])


def test_kinds_are_looked_at_one_by_one(place: Path) -> None:
    lines = {line["kind"]: line for line in tables.kind_lines(place)}
    wanted = [one.accept[one.task == "story"].mean() for s in SEEDS for one in [chains(place, f"ce-{s}")]]
    assert lines["story"]["ce"].value == pytest.approx(np.mean(wanted))
    assert {"story", "story (unseen)"} < set(lines) and lines["story"]["ce"] != lines["story (unseen)"]["ce"]


def test_fused_losses_are_told_beside_plain_autograd(tmp_path: Path) -> None:
    assert tables.fused(tmp_path) == ([], {})
    lines = [
        {"loss": "tv", "arm": arm, "CPU seconds": seconds, "MB": size}
        for arm, seconds, size in (("fused", 2.0, 50.0), ("eager", 3.0, 400.0))
    ]
    (tmp_path / "fused.json").write_text(json.dumps(lines))
    found, facts = tables.fused(tmp_path)
    assert found == lines
    assert facts == {"fused tv, CPU seconds of plain autograd": 2 / 3, "fused tv, MB of plain autograd": 0.125}


def test_the_study_writes_what_it_found(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "real_losses"
    study(place, folder)
    stored = record.read(folder / "results.json")
    assert stored is not None and len(stored["judgements"][0]["findings"]) == len(RULES)
    assert all((folder / "figures" / name).is_file() for name in stored["figures"]) and len(stored["figures"]) == 4
    page = (folder / "results.md").read_text()
    assert (
        "nan" not in page and "| e2e_tv | 3 | 3 of 3 |" in page and "NaN" not in (folder / "results.json").read_text()
    )


def test_one_seed_of_one_loss_is_a_study_too(tmp_path: Path) -> None:
    write_study(tmp_path, seeds=(0,), only="ce")
    study(tmp_path, tmp_path / "real_losses")
    stored = record.read(tmp_path / "real_losses" / "results.json")
    assert stored is not None and {name for name in stored["numbers"]} == {"ce, flat"}
    assert "| ce | 1 | 1 of 1 |" in (tmp_path / "real_losses" / "results.md").read_text()


def test_a_study_without_heads_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no head of the study: run first .* --stage heads evaluation"):
        study(tmp_path, tmp_path / "real_losses")
    assert not (tmp_path / "real_losses").exists()
