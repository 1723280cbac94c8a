"""The rules of the studies on a real model: each comes out either way, and is not tested where it cannot be."""

import re
from dataclasses import replace

import pytest

from recipes.reproduce import rule_hash
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.real.evaluation import SWEPT, TEMPERATURES, TOP_P
from recipes.reproduce.real_drafts import findings as drafts
from recipes.reproduce.real_entropy import findings as entropy
from recipes.reproduce.verdicts import Part, Rule, judge

STUDIES = {"real_entropy": entropy, "real_drafts": drafts}
ALL = [pytest.param(rule, id=f"{name}, {rule.statement}") for name, m in STUDIES.items() for rule in m.RULES]


def number(value: float, half: float = 0.002) -> Number:
    return Number(value=value, low=value - half, high=value + half, seeds=40)


def beyond_bound(part: Part, side: int) -> Number:
    """A number well on the side that confirms a part (1), or on the other (-1)."""
    return number(part.bound + (0.3 if part.kind == "above" else -0.3) * side)


def numbers(rule: Rule, side: int, **changed: Number) -> dict[str, Number]:
    """All that a rule asks for, arms of little noise."""
    found = {}
    for part in (part for group in rule.any_of for part in group):
        found |= {arm: over_seeds([0.5, 0.501, 0.499]) for arm in part.arms} | {part.number: beyond_bound(part, side)}
    for need in rule.needs:
        found[need.number] = number(need.bound + 0.4)
    return found | changed


@pytest.mark.parametrize("rule", ALL)
def test_every_rule_comes_out_either_way(rule: Rule) -> None:
    (confirmed,), (refuted,) = judge([rule], numbers(rule, 1)), judge([rule], numbers(rule, -1))
    assert (confirmed.side, refuted.side) == ("confirmed", "refuted") and confirmed.untested is None
    assert max(confirmed.p, refuted.p) < 1e-6
    unsure = {name: replace(n, low=-9.0, high=9.0) if n.seeds == 40 else n for name, n in numbers(rule, 1).items()}
    unsure |= {need.number: number(need.bound + 0.4) for need in rule.needs}
    assert judge([rule], unsure)[0].p > 0.05


@pytest.mark.parametrize("rule", ALL)
def test_what_is_about_an_arm_that_is_not_there_is_not_tested(rule: Rule) -> None:
    assert rule.needs, "a head that does not draft says nothing"
    for need in rule.needs:
        (finding,) = judge([rule], numbers(rule, 1) | {need.number: number(need.bound - 0.1)})
        assert finding.untested is not None and finding.untested.startswith(need.otherwise)


@pytest.mark.parametrize("rule", [p for p in ALL if any(part.arms for g in p.values[0].any_of for part in g)])
def test_differences_within_the_noise_of_the_arms_do_not_count(rule: Rule) -> None:
    quiet, parts = numbers(rule, 1), [part for group in rule.any_of for part in group]
    loud = quiet | {arm: over_seeds([0.1, 0.5, 0.9]) for part in parts for arm in part.arms}
    assert judge([rule], quiet)[0].p < 1e-6 and judge([rule], loud)[0].p > 0.05


@pytest.mark.parametrize("rule", ALL)
def test_differences_have_a_noise_floor(rule: Rule) -> None:
    for part in (part for group in rule.any_of for part in group):
        assert part.arms or not any(word in part.number for word in (" - ", "advantage", "worth")), part


@pytest.mark.parametrize("rule", ALL)
def test_heads_accepted_little_more_often_than_fresh_ones_are_not_judged(rule: Rule) -> None:
    lengths = {need.number: number(1.15) for need in rule.needs if need.number.endswith("accept length")}
    assert not lengths or judge([rule], numbers(rule, 1) | lengths)[0].untested


def test_a_head_whose_curve_is_not_flat_says_nothing_of_what_its_loss_leads_to() -> None:
    rules = [rule for rule in entropy.RULES if any("flat" in need.number for need in rule.needs)]
    assert [rule.statement.split("heads of ")[1].split(" draft")[0] for rule in rules] == [
        "soft cross-entropy", "end-to-end TV",
    ]  # fmt: skip
    for rule in rules:
        two_of_three = numbers(rule, 1) | {"ce, flat": Number(value=2 / 3, low=2 / 3, high=2 / 3)}
        assert "not all validation curves of ce are flat" in str(judge([rule], two_of_three)[0].untested)
        three = numbers(rule, 1) | {"ce, flat": Number(value=1.0, low=1.0, high=1.0)}
        assert judge([rule], three)[0].untested is None


def test_a_draft_temperature_that_beats_one_end_alone_is_no_gain() -> None:
    (rule, *_) = [rule for rule in drafts.RULES if "draft temperature" in rule.statement]
    lost = numbers(rule, -1)
    one_end = lost | {"ce, draft at 0.4 - at 0.0": number(0.3)}
    both_ends = one_end | {"ce, draft at 0.4 - at 1.0": number(0.3)}
    assert judge([rule], one_end)[0].p > 0.05
    assert (judge([rule], both_ends)[0].side, judge([rule], both_ends)[0].p < 1e-6) == ("confirmed", True)


def test_one_temperature_at_which_greedy_wins_refutes_every_temperature() -> None:
    rule = drafts.everywhere("ce")
    found = numbers(rule, 1) | {"ce, advantage at 0.4": number(-0.3)}
    assert judge([rule], found)[0].side == "refuted" and judge([rule], found)[0].p < 1e-6


def test_rules_ask_for_what_is_evaluated() -> None:
    assert drafts.TEMPERATURES == TEMPERATURES and TOP_P == 0.9
    asked = {n for m in STUDIES.values() for r in m.RULES for g in r.any_of for part in g for n in (part.number,)}
    heads = {name for text in asked for name in re.findall(r"hard_ce|e2e_tv|\bce\b", text)}
    assert heads <= set(SWEPT)


@pytest.mark.parametrize("name", STUDIES)
def test_a_changed_bound_changes_the_hash_of_a_rule(name: str) -> None:
    code = rule_hash.of_study(name)
    assert code.files[0] == f"recipes/reproduce/{name}/findings.py"
    sources = [(rule_hash.ROOT / file).read_text() for file in code.files]
    assert rule_hash.of_sources(sources, rule_hash.ENTRIES) == code.hash
    changed = [source.replace("DRAFTS = 1.2", "DRAFTS = 1.1") for source in sources]
    assert changed != sources and rule_hash.of_sources(changed, rule_hash.ENTRIES) != code.hash
