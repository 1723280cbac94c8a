"""The rules of all studies: each comes out either way, and is not tested where it cannot be. Numbers are synthetic."""

import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from recipes.reproduce import record
from recipes.reproduce.__main__ import STUDIES
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.real.evaluation import SWEPT, TEMPERATURES, TOP_P
from recipes.reproduce.real_drafts import findings as drafts
from recipes.reproduce.real_entropy import findings as entropy
from recipes.reproduce.real_losses import findings as losses
from recipes.reproduce.real_pays import findings as pays
from recipes.reproduce.verdicts import Part, Rule, judge
from tests.recipes.reproduce.synthetic import confirming, fulfilled, number, value

ALL = {name: record.rules_of(name) for name in STUDIES}


def parts_of(rule: Rule) -> list[Part]:
    return [part for group in rule.any_of for part in group]


def of(*studies: str) -> list[Any]:
    return [pytest.param(rule, id=f"{name}, {rule.statement}") for name in studies for rule in ALL[name]]


def judged(rule: Rule, changed: Mapping[str, Number] | None = None) -> tuple[str, float, str]:
    """Return side, p and why nothing was tested, of numbers that confirm a rule but for those that are changed."""
    (finding,) = judge([rule], {**confirming((rule,)), **(changed or {})})
    return finding.side, finding.p, finding.untested or ""


def turned(parts: list[Part]) -> dict[str, Number]:
    return {part.number: number(value(part, -1)) for part in parts}


# ---- what holds for every rule


@pytest.mark.parametrize("study", STUDIES)
def test_every_rule_comes_out_either_way(study: str) -> None:
    """One part that is turned round is enough to refute what all parts have to confirm."""
    for rule in ALL[study]:
        for changed, side in (({}, "confirmed"), (turned(parts_of(rule)), "refuted")):
            found, p, untested = judged(rule, changed)
            assert (found, untested) == (side, "") and p < 1e-3, rule.statement
        for part in rule.any_of[0] if len(rule.any_of) == 1 else ():
            found, p, _ = judged(rule, turned([part]))
            assert found == "refuted" and p < 1e-3, (rule.statement, part)
        unsure = {p.number: number(value(p), 9.0) for p in parts_of(rule)}
        assert judged(rule, unsure)[1] > 0.05, rule.statement


@pytest.mark.parametrize("study", STUDIES)
def test_what_is_about_an_arm_that_is_not_what_it_is_called_is_not_tested(study: str) -> None:
    for rule in ALL[study]:
        for need in rule.needs:
            assert judged(rule, {need.number: number(fulfilled(need, -0.1))})[2].startswith(need.otherwise), need


@pytest.mark.parametrize("study", STUDIES)
def test_differences_within_the_noise_of_the_arms_do_not_count(study: str) -> None:
    for rule in ALL[study]:
        loud = {arm: over_seeds([0.1, 0.5, 0.9]) for part in parts_of(rule) for arm in part.arms}
        beside = {p.number: number(p.bound + 0.2) for p in parts_of(rule) if p.kind == "within"}
        assert not loud or judged(rule, loud | beside)[1] > 0.05, rule.statement


# ---- what holds for rules about the real model


@pytest.mark.parametrize("rule", of("real_entropy", "real_drafts", "real_losses", "real_pays", "real_steps"))
def test_a_head_that_hardly_drafts_tests_nothing(rule: Rule) -> None:
    """A fresh one has an accept length of 1.1 or so."""
    lengths = [n for n in rule.needs if "accept length" in n.number and " - " not in n.number]
    assert lengths or any(need.number.endswith(", flat") for need in rule.needs), "a head that does not draft"
    assert all(need.bound == 1.2 for need in lengths)
    assert not lengths or judged(rule, {need.number: number(1.15) for need in lengths})[2]


@pytest.mark.parametrize("rule", of("real_entropy", "real_drafts", "real_losses"))
def test_differences_have_a_noise_floor(rule: Rule) -> None:
    for part in parts_of(rule):
        assert part.arms or not any(word in part.number for word in (" - ", "advantage", "worth")), part


@pytest.mark.parametrize("rule", of("real_losses"))
def test_what_supposes_convergence_needs_three_flat_curves_of_each_arm(rule: Rule) -> None:
    assert all(len(part.arms) == 2 for part in parts_of(rule)), "every number here compares two arms"
    marked = any(" at step " in part.number or " at second " in part.number for part in parts_of(rule))
    flat = [need.number for need in rule.needs if need.number.endswith(", flat")]
    assert bool(flat) is not marked, "of heads that still learn nobody asks whether they have converged"
    for name in flat:
        assert "not all validation curves" in judged(rule, {name: Number(value=2 / 3, low=2 / 3, high=2 / 3)})[2]
    compared = {arm.split(",")[0] for part in parts_of(rule) for arm in part.arms}
    assert not flat or {name.split(",")[0] for name in flat} == compared


# ---- single rules


def test_one_mark_at_which_a_loss_loses_refutes_small_budgets() -> None:
    early = [rule for rule in losses.RULES if "little training" in rule.statement]
    assert len(early) == 4
    for rule in early:
        first, last = (part.number for part in rule.any_of[0])
        assert first.split(" at ")[0] == last.split(" at ")[0] and first != last


def test_what_confirms_is_what_the_statement_says() -> None:
    below = {part.number for rule in losses.RULES for part in parts_of(rule) if part.kind == "below"}
    last = [marks[-1] for marks in losses.MARKS.values()]
    slow = {f"fresh e2e_tv - fresh {base}, accept length at {mark}" for base, mark in product(losses.BASES, last)}
    assert below == slow | {f"e2e_tv - {base}, overlap lost along a chain" for base in losses.BASES}
    assert {part.kind for rule in losses.RULES for part in parts_of(rule)} == {"above", "below"}


def test_every_truncated_loss_is_judged_once() -> None:
    found = [part.number for size in (4, 64) for part in losses.whole(size).any_of[0]]
    assert found == [f"tv - {cut}, accept length at step 200" for cut in losses.CUT]


def test_a_head_whose_curve_is_not_flat_says_nothing_of_what_its_loss_leads_to() -> None:
    rules = [rule for rule in entropy.RULES if any("flat" in need.number for need in rule.needs)]
    assert [rule.statement.split("heads of ")[1].split(" draft")[0] for rule in rules] == [
        "soft cross-entropy", "end-to-end TV",
    ]  # fmt: skip
    for rule in rules:
        two_of_three, three = (Number(value=share, low=share, high=share) for share in (2 / 3, 1.0))
        assert "not all validation curves of ce are flat" in judged(rule, {"ce, flat": two_of_three})[2]
        assert not judged(rule, {"ce, flat": three})[2]


def test_a_draft_temperature_that_beats_one_end_alone_is_no_gain() -> None:
    (rule, *_) = [rule for rule in drafts.RULES if "draft temperature" in rule.statement]
    one_end = turned(parts_of(rule)) | {"ce, draft at 0.4 - at 0.0": number(0.3)}
    side, p, _ = judged(rule, one_end | {"ce, draft at 0.4 - at 1.0": number(0.3)})
    assert judged(rule, one_end)[1] > 0.05 and side == "confirmed" and p < 1e-6


def test_rules_ask_for_what_is_evaluated() -> None:
    assert drafts.TEMPERATURES == TEMPERATURES and TOP_P == 0.9
    asked = {part.number for rule in (*drafts.RULES, *entropy.RULES) for part in parts_of(rule)}
    assert {name for text in asked for name in re.findall(r"hard_ce|e2e_tv|\bce\b", text)} <= set(SWEPT)


def test_each_batch_is_judged_by_its_own_numbers() -> None:
    assert len(pays.RULES) == 3 * len(pays.BATCHES)
    for rule in pays.RULES:
        (part,) = parts_of(rule)
        assert part.number.split(":")[0] == rule.statement.rpartition(", ")[2].rstrip(".")
