"""Studies as declarations: numbers by hand, texts that follow from rules, and a run that goes on where it stopped."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bebop.errors import UserError
from recipes.reproduce import harness, record, rule_hash, study
from recipes.reproduce.claims import BUILT_IN
from recipes.reproduce.figures import Curve, Panel, draw
from recipes.reproduce.harness import Figure, Results, Study, rows
from recipes.reproduce.measured import over_seeds
from recipes.reproduce.rules import (
    Condition,
    Declared,
    Quantity,
    Stat,
    above,
    below,
    every,
    gain,
    half_of,
    less,
    rise,
    some,
    unmoved,
)
from recipes.reproduce.verdicts import judge

SEEDS = (0, 1, 2)
BASE = {"ce": 1.0, "tv": 1.5, "fresh: ce": 0.2, "fresh: tv": 0.1, "ce, few": 0.5, "tv, few": 0.4}
LENGTH = Stat(name="length", value=lambda head: head["length"])
COST = Stat(name="cost", value=lambda head: head["cost"], arm="{arm}, cost", gains="{a} - {b}, cost")


@dataclass(frozen=True)
class Arm:
    length: float


def measure(arm: Arm, seed: int) -> dict[str, float]:
    return {"length": arm.length + 0.01 * seed, "cost": 2 * arm.length + 0.03 * seed}


def found(**other: float) -> Results[dict[str, float]]:
    arms = BASE | other
    return Results(found={(arm, s): measure(Arm(size), s) for arm, size in arms.items() for s in SEEDS}, seeds=SEEDS)


@pytest.mark.parametrize(
    ("quantity", "name", "values"),
    [
        (LENGTH("ce"), "length ce", [1.0, 1.01, 1.02]),
        (LENGTH("fresh: ce"), "fresh: length ce", [0.2, 0.21, 0.22]),
        (COST("tv"), "tv, cost", [3.0, 3.03, 3.06]),
        (LENGTH.gain("tv", "ce"), "tv - ce", [0.5, 0.5, 0.5]),
        (LENGTH.gain("fresh: tv", "fresh: ce"), "fresh: tv - ce", [-0.1, -0.1, -0.1]),
        (LENGTH.gain("tv, few", "ce, few"), "tv - ce, few", [-0.1, -0.1, -0.1]),
        (COST.gain("tv", "ce"), "tv - ce, cost", [1.0, 1.0, 1.0]),
        (less("rest", half_of(LENGTH.gain("tv", "ce")), COST("ce")), "rest", [-1.75, -1.78, -1.81]),
    ],
)  # fmt: skip
def test_a_quantity_is_a_sum_of_arms_seed_by_seed(quantity: Quantity, name: str, values: Sequence[float]) -> None:
    number = found().number(quantity)
    assert quantity.name == name and number.value == pytest.approx(sum(values) / 3, abs=1e-12)
    wanted = over_seeds(values)
    assert (number.low, number.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_a_gain_is_of_one_place() -> None:
    with pytest.raises(AssertionError, match="not at one place"):
        LENGTH.gain("fresh: tv", "ce")


RISE = gain("C3", LENGTH, "tv", over="ce", says="It rises.", by=0.2, noise=("tv, few",))


def test_texts_follow_from_the_rule() -> None:
    assert RISE.text == (
        "confirmed if the length of tv minus that of ce lies above 0.2 by more than the noise of the arms, refuted if "
        "below by as much"
    )
    assert RISE.evidence == "Length of tv minus that of ce: {tv - ce} (tv {length tv}, ce {length ce})."
    assert RISE.any_of[0][0].arms == ("length tv", "length ce", "length tv, few")
    still = unmoved("C3", LENGTH, "tv", over="ce", within=0.3, says="It does not.")
    assert "lies within 0.3 of 0, refuted if outside by more than the noise of the arms" in still.text
    small = below("C1", LENGTH("ce"), 0.9, says="s", also={"cost": COST("ce"), "best": "best K"})
    assert small.text == "confirmed if the length of ce lies below 0.9, refuted if above"
    assert small.evidence == "Length of ce: {length ce}; cost {ce, cost}; best {best K}."
    fell = Condition(quantity=COST("ce"), side="below", otherwise="it rose")
    assert above("C1", LENGTH("ce"), 0.0, says="s", needs=(fell,)).text.endswith(
        "; tested if the cost of ce lies below 0"
    )
    checks = (rise(LENGTH, "tv", "ce"), rise(LENGTH, "fresh: tv", "fresh: ce"))
    both, one = every("C1", "s", *checks), some("C1", "s", checks[:1], checks[1:])
    place = "above 0 by more than the noise of the arms"
    assert (
        both.text
        == f"confirmed if all 2 numbers lie {place}, refuted if one of them lies below by as much (corrected for 2)"
    )
    assert one.text.startswith(
        f"confirmed if in one of 2 groups all 1 numbers lie {place} (corrected for 2), refuted if all"
    )
    assert both.evidence == one.evidence == "Numbers: tv - ce {tv - ce}; fresh: tv - ce {fresh: tv - ce}."
    down = replace(checks[0], kind="below")
    with pytest.raises(AssertionError, match="against one bound"):
        every("C1", "s", checks[0], down)


@pytest.mark.parametrize(
    ("rule", "side"),
    [
        (RISE, "confirmed"),
        (replace(RISE, any_of=((replace(RISE.any_of[0][0], bound=0.9),),)), "refuted"),
        (gain("C3", LENGTH, "tv, few", over="ce, few", says="s"), "refuted"),
        (unmoved("C3", LENGTH, "tv", over="ce", within=0.3, says="s"), "refuted"),
        (above("C3", COST.gain("tv", "ce"), 0.1, says="s"), "confirmed"),
        (below("C3", LENGTH("ce"), 2.0, says="s"), "confirmed"),
        (every("C3", "s", rise(LENGTH, "tv", "ce"), rise(LENGTH, "tv, few", "ce, few")), "refuted"),
        (some("C3", "s", [rise(LENGTH, "tv", "ce")], [rise(LENGTH, "tv, few", "ce, few")]), "confirmed"),
    ],
)  # fmt: skip
def test_rules_come_out_as_what_was_planted(rule: Declared, side: str) -> None:
    results = found()
    numbers = {one.name: results.number(one) for one in rule.asks}
    (finding,) = judge([rule], numbers)
    assert (finding.side, finding.untested) == (side, None) and finding.p < 0.05
    assert "not measured" not in finding.evidence


@pytest.mark.parametrize("name", [name for name in rule_hash.all_declared()])
def test_a_declaration_computes_what_its_rules_ask_for_and_tell(name: str) -> None:
    """Its arms are there, its names have one meaning each, and so have the statements of its rules."""
    own = harness.of_name(name)
    quantities = [*own.stats, *(one for rule in own.rules for one in rule.asks)]
    assert {term.arm for one in quantities for term in one.terms} <= set(own.arms)
    by_name: dict[str, set[Any]] = {}
    for one in quantities:
        by_name.setdefault(one.name, set()).add(tuple((term.weight, term.arm, term.value) for term in one.terms))
    assert {one: len(meant) for one, meant in by_name.items() if len(meant) > 1} == {}
    assert len({rule.statement for rule in own.rules}) == len(own.rules) and own.rules == record.rules_of(name)
    stored = record.read(Path(rule_hash.__file__).parent / name / "results.json")
    assert stored is not None
    told = {n for rule in own.rules for n in re.findall(r"\{([^}]+)\}", rule.evidence)}
    assert told <= by_name.keys() | stored["facts"].keys()


# ---- a run


def made(**other: Any) -> Study:
    return Study(
        name="made_up", paper="a paper", model=BUILT_IN, arms={arm: Arm(size) for arm, size in BASE.items()},
        measure=other.pop("measure", measure), rules=(RISE,), stats=(COST("ce"),),
        tables=lambda results: {"All": rows(results, {"length": LENGTH.value}, ("ce", "tv"), head="loss")},
        figures=(Figure(file="a.svg", caption="A line.", draw=line),), settings={"steps": 3},
        facts=lambda results: {"best": "tv"},
        **other,
    )  # fmt: skip


def line(results: Results[Any], path: Path) -> None:
    curve = Curve(label="ce", x=(0, 1), y=[results.mean(arm, LENGTH.value) for arm in ("ce", "tv")])
    draw(path, (Panel(curves=(curve,), title="Lengths", ticks=("ce", "tv"), level=1.0, legend=True),))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a study that is made up runs, in one process."""

    def serial(work: Callable[[Any], Any], jobs: Sequence[Any], label: str) -> list[Any]:
        return [work(job) for job in jobs]

    monkeypatch.setattr(study, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr(harness, "everywhere", serial)
    monkeypatch.setattr(harness, "results_folder", lambda _: tmp_path / "made_up")
    monkeypatch.setattr(rule_hash, "of_study", lambda name: rule_hash.RuleCode(hash="f" * 16, files=("a.py",)))
    monkeypatch.setattr(rule_hash, "declared", lambda name: True)
    return tmp_path


def declare(one: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_hash, "module", lambda name: SimpleNamespace(STUDY=one, RULES=one.rules))


@pytest.mark.slow
def test_a_study_leaves_its_results_and_no_page_of_its_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []
    one = made(prepare=(shared.append,))
    declare(one, monkeypatch)
    harness.run(one)
    stored = record.read(place / "made_up" / "results.json")
    assert stored is not None and not (place / "made_up" / "results.md").exists()
    assert set(stored["numbers"]) == {"tv - ce", "length tv", "length ce", "length tv, few", "ce, cost"}
    assert stored["numbers"]["tv - ce"]["value"] == pytest.approx(0.5) and stored["facts"] == {"best": "tv"}
    assert [row["loss"] for row in stored["tables"]["All"]] == ["ce", "tv"]
    assert stored["tables"]["All"][1]["length"]["value"] == pytest.approx(1.51)
    assert stored["settings"] == {"steps": 3, "seeds": [0, 1, 2]} and shared == [*SEEDS]
    assert record.judged(stored)[0].side == "confirmed" and stored["figures"]["a.svg"]["caption"] == "A line."
    record.check("made_up", stored, place / "made_up")


def test_a_stopped_study_goes_on_and_a_changed_one_measures_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def counted(arm: Arm, seed: int) -> dict[str, float]:
        if len(asked) == 5:
            raise RuntimeError("stopped")
        asked.append((arm.length, seed))
        return measure(arm, seed)

    one = made(measure=counted)
    declare(one, monkeypatch)
    with pytest.raises(RuntimeError, match="stopped"):
        harness.measured(one)
    asked.insert(0, (0.0, 0))  # not five any more
    results = harness.measured(one)
    assert len(asked) == 1 + len(BASE) * len(SEEDS) and results["tv", 2] == measure(Arm(1.5), 2)
    declare(replace(one, settings={"steps": 4}), monkeypatch)
    harness.measured(replace(one, settings={"steps": 4}))
    assert len(asked) == 1 + 2 * len(BASE) * len(SEEDS)


def test_a_translation_keeps_verdicts_and_another_rule_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made()
    declare(one, monkeypatch)
    harness.run(one)
    stored = record.read(place / "made_up" / "results.json")
    assert stored is not None
    reworded = replace(RISE, text="other words", evidence="{tv - ce}")
    monkeypatch.setattr(rule_hash, "of_study", lambda name: rule_hash.RuleCode(hash="1" * 16, files=("b.py",)))
    declare(replace(one, rules=(reworded,)), monkeypatch)
    after = record.translate("made_up", stored, "abc")
    newest = after["judgements"][-1]
    rule = {
        "from": "f" * 16,
        "to": "1" * 16,
        "commit": "abc",
        "files": ["recipes/reproduce/made_up/findings.py", "b.py"],
    }
    assert newest["translated"] == rule
    assert record.substance(after) == stored["judgements"][0] and newest["findings"][0]["rule"] == "other words"
    for changed in (
        replace(RISE, any_of=((replace(RISE.any_of[0][0], bound=0.9),),)),
        replace(RISE, statement="It rises a little."),
        replace(RISE, any_of=((replace(RISE.any_of[0][0], arms=()),),)),
    ):
        declare(replace(one, rules=(changed,)), monkeypatch)
        with pytest.raises(UserError, match="would be judged anew"):
            record.translate("made_up", stored, "abc")


def test_a_rule_about_an_arm_that_a_smoke_run_lacks_is_not_tested() -> None:
    one = replace(made(), arms={arm: Arm(size) for arm, size in BASE.items() if arm != "ce"})
    numbers = one.numbers(found())
    assert "length tv" in numbers and not {"tv - ce", "length ce", "ce, cost"} & numbers.keys()
    (finding,) = judge(one.rules, numbers)
    assert str(finding.untested).startswith("not measured: tv - ce")
