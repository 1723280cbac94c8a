"""The rules about losses on a real model: each comes out either way, and is not tested where it cannot be."""

from dataclasses import replace
from itertools import product

import pytest

from recipes.reproduce import rule_hash
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.real_losses.findings import BASES, CONVERGED, CUT, MARKS, RULES, whole
from recipes.reproduce.verdicts import Need, Rule, judge

ALL = [pytest.param(rule, id=rule.statement) for rule in RULES]
LAST = [marks[-1] for marks in MARKS.values()]


def number(value: float, half: float = 0.002) -> Number:
    return Number(value=value, low=value - half, high=value + half, seeds=40)


def fulfilled(need: Need, by: float = 0.4) -> Number:
    """What an arm has that does what its name says; not, if ``by`` is negative."""
    return number(need.bound + (by if need.kind == "above" else -by))


def numbers(rule: Rule, side: int) -> dict[str, Number]:
    """All that a rule asks for, on the side that confirms it (1) or on the other (-1); arms of little noise."""
    found = {need.number: fulfilled(need) for need in rule.needs}
    for part in (part for group in rule.any_of for part in group):
        found |= {arm: over_seeds([0.5, 0.501, 0.499]) for arm in part.arms}
        found[part.number] = number(part.bound + (0.3 if part.kind == "above" else -0.3) * side)
    return found


@pytest.mark.parametrize("rule", ALL)
def test_every_rule_comes_out_either_way(rule: Rule) -> None:
    (confirmed,), (refuted,) = judge([rule], numbers(rule, 1)), judge([rule], numbers(rule, -1))
    assert (confirmed.side, refuted.side) == ("confirmed", "refuted") and confirmed.untested is None
    assert max(confirmed.p, refuted.p) < 1e-6
    parts = {part.number for group in rule.any_of for part in group}
    unsure = {name: replace(n, low=-9.0, high=9.0) if name in parts else n for name, n in numbers(rule, 1).items()}
    assert judge([rule], unsure)[0].p > 0.05


@pytest.mark.parametrize("rule", ALL)
def test_differences_within_the_noise_of_the_arms_do_not_count(rule: Rule) -> None:
    parts = [part for group in rule.any_of for part in group]
    assert all(len(part.arms) == 2 for part in parts), "every number here compares two arms"
    loud = numbers(rule, 1) | {arm: over_seeds([0.1, 0.5, 0.9]) for part in parts for arm in part.arms}
    assert judge([rule], loud)[0].p > 0.05


@pytest.mark.parametrize("rule", ALL)
def test_what_is_about_an_arm_that_is_not_there_is_not_tested(rule: Rule) -> None:
    assert any("accept length" in need.number and need.bound == 1.2 for need in rule.needs), "of heads that draft"
    for need in rule.needs:
        (finding,) = judge([rule], numbers(rule, 1) | {need.number: fulfilled(need, -0.1)})
        assert finding.untested is not None and finding.untested.startswith(need.otherwise)


@pytest.mark.parametrize("rule", ALL)
def test_what_supposes_convergence_needs_three_flat_curves_of_each_arm(rule: Rule) -> None:
    marked = any(" at step " in part.number or " at second " in part.number for g in rule.any_of for part in g)
    flat = [need.number for need in rule.needs if need.number.endswith(", flat")]
    assert bool(flat) is not marked, "of heads that still learn nobody asks whether they have converged"
    for name in flat:
        two_of_three = numbers(rule, 1) | {name: Number(value=2 / 3, low=2 / 3, high=2 / 3)}
        assert "not all validation curves" in str(judge([rule], two_of_three)[0].untested) and CONVERGED > 2 / 3
    sides = {name.split(",")[0] for name in flat}
    compared = {arm.split(",")[0] for group in rule.any_of for part in group for arm in part.arms}
    assert not flat or sides == compared


def test_one_mark_at_which_it_loses_refutes_small_budgets() -> None:
    early = [rule for rule in RULES if "little training" in rule.statement]
    assert len(early) == 4
    for rule in early:
        first, last = (part.number for part in rule.any_of[0])
        assert first.split(" at ")[0] == last.split(" at ")[0] and first != last
        (finding,) = judge([rule], numbers(rule, 1) | {first: number(-0.3)})
        assert finding.side == "refuted" and finding.p < 1e-6


def test_what_confirms_is_what_the_statement_says() -> None:
    below = {part.number for rule in RULES for group in rule.any_of for part in group if part.kind == "below"}
    slow = {f"fresh e2e_tv - fresh {base}, accept length at {mark}" for base, mark in product(BASES, LAST)}
    assert below == slow | {f"e2e_tv - {base}, overlap lost along a chain" for base in BASES}
    assert {part.kind for rule in RULES for group in rule.any_of for part in group} == {"above", "below"}


def test_every_truncated_loss_is_judged_once() -> None:
    judged = [part.number for size in (4, 64) for part in whole(size).any_of[0]]
    assert judged == [f"tv - {cut}, accept length at step 200" for cut in CUT]


def test_a_changed_bound_changes_the_hash_of_the_rules() -> None:
    code = rule_hash.of_study("real_losses")
    sources = [(rule_hash.ROOT / file).read_text() for file in code.files]
    assert rule_hash.of_sources(sources, rule_hash.ENTRIES) == code.hash
    for bound, other in (("DRAFTS = 1.2", "DRAFTS = 1.1"), ('"step 200"', '"step 800"')):
        changed = [source.replace(bound, other) for source in sources]
        assert changed != sources and rule_hash.of_sources(changed, rule_hash.ENTRIES) != code.hash
