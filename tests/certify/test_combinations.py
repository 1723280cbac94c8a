"""The covering array holds every pair; what it switches on happens; faults of combinations are found."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bebop.rollout.kv_retention import KvRetention
from bebop.rollout.torch_engine import TorchEngine
from recipes.certify import combinations
from recipes.certify.combinations import FACTORS, SERVED, Row, covering, possible, run_row

USUAL = {name: levels[0] for name, levels in FACTORS.items()}
UPDATED: Row = {**USUAL, "system": "bebop", "weights": "in flight", "turns": "two"}
BUSIEST: Row = {
    **USUAL,
    "system": "bebop",
    "drafts": "changed",
    "weights": "in flight",
    "requests": "in a new engine",
    "turns": "two",
    "arrivals": "one by one",
    "past": "remembered",
    "truncation": "top-p",
    "penalty": "1.2",
    "temperature": "1.6",
    "cache": "few pages",
}


def missing_pairs(rows: list[Row], factors: dict[str, tuple[str, ...]]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Possible pairs of levels, by enumeration, that no row holds."""
    for a, b in itertools.combinations(factors, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            if possible({a: x, b: y}) and not any(row[a] == x and row[b] == y for row in rows):
                yield (a, x), (b, y)


@pytest.mark.slow
@pytest.mark.parametrize("factors", [FACTORS, SERVED], ids=["embedded", "served"])
def test_every_possible_pair_is_in_a_row(factors: dict[str, tuple[str, ...]]) -> None:
    rows = covering(factors, possible)
    assert all(possible(row) and [*row] == [*factors] for row in rows)
    assert not [*missing_pairs(rows, factors)] and rows == covering(factors, possible)
    assert [*missing_pairs(rows[:-1], factors)], "the last row is needed, too"


@pytest.mark.slow
def test_everything_that_a_row_switches_on_happens_and_nothing_is_found() -> None:
    stored = run_row(BUSIEST, tokens=1500, progress=False).stored(BUSIEST)
    assert stored["missing"] == [] and stored["looked inside"]
    assert stored["structure"] == [] and stored["ln_e"] < 2 and stored["verdict"] != "fail"
    assert stored["happened"]["preempted"] and stored["happened"]["reused entries"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name"),
    [(TorchEngine, "_recompute"), (KvRetention, "clear")],
    ids=["running requests keep their old caches", "a next turn finds caches of old weights"],
)
def test_caches_of_old_weights_are_found(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, lambda self: None)
    assert run_row(UPDATED, tokens=2000, progress=False).certificate.verdict == "fail"


@pytest.mark.slow
def test_stored_rows_are_not_run_again_and_the_page_says_what_was_not(tmp_path: Path) -> None:
    rows = covering(FACTORS, possible)
    arguments = ["--rows", "1", "--tokens", "100", "--threads", "1", "--out", str(tmp_path)]
    combinations.main(arguments)
    combinations.main(arguments)
    stored = json.loads((tmp_path / "combinations.json").read_text())
    assert [one["row"] for one in stored["rows"]] == rows[:2]
    page = (tmp_path / "certified.md").read_text()
    assert f"{len(rows)} rows, 2 of them run, 0 passed." in page and "inconclusive" in page and "not run" in page


@pytest.mark.slow
def test_it_says_that_no_row_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "combinations.json"
    path.write_bytes(Path(combinations.__file__).with_name("combinations.json").read_bytes())
    one = ["--engine", "sglang", "--threads", str(torch.get_num_threads())]  # of the whole process, also of other tests
    assert combinations.main([*one, "--rows", "1", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no row is missing in {path}; nothing was run\n"
    combinations.main([*one, "--page", "--out", str(tmp_path / "runs" / "combinations")])
    assert "0 of them run" in (tmp_path / "runs" / "combinations" / "certified.md").read_text()
    assert capsys.readouterr().out == ""


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        combinations.main(["--rows", "0"])
    assert "--rows=0 is not possible: give 1 or more" in capsys.readouterr().err
