"""The rules about speed on a real model: each comes out either way, none is tested where a head hardly drafts."""

import pytest

from recipes.reproduce import rule_hash
from recipes.reproduce.measured import Number
from recipes.reproduce.real_pays.findings import BATCHES, RULES
from recipes.reproduce.verdicts import Rule, judge

ALL = [pytest.param(rule, id=rule.statement) for rule in RULES]


def number(value: float, half: float = 0.002) -> Number:
    return Number(value=value, low=value - half, high=value + half, seeds=4)


def numbers(rule: Rule, confirming: bool, accept_length: float = 1.5) -> dict[str, Number]:
    ((part,),) = rule.any_of
    inside = part.kind == "within"
    far = 0.0 if inside and confirming else part.bound + (0.3 if confirming or inside else -0.3)
    return {part.number: number(far)} | {need.number: number(accept_length) for need in rule.needs}


@pytest.mark.parametrize("rule", ALL)
def test_every_rule_comes_out_either_way(rule: Rule) -> None:
    for confirming, side in ((True, "confirmed"), (False, "refuted")):
        (finding,) = judge([rule], numbers(rule, confirming))
        assert (finding.side, finding.untested) == (side, None) and finding.p < 1e-3
    (wide,) = judge([rule], {name: number(n.value, 9.0) for name, n in numbers(rule, True).items()})
    assert wide.p > 0.05


@pytest.mark.parametrize("rule", ALL)
def test_a_head_that_hardly_drafts_tests_nothing(rule: Rule) -> None:
    (finding,) = judge([rule], numbers(rule, True, accept_length=1.1))
    assert finding.untested is not None and finding.untested.startswith("the head hardly drafts")


def test_each_batch_is_judged_by_its_own_numbers() -> None:
    assert len(RULES) == 3 * len(BATCHES)
    for rule in RULES:
        ((part,),) = rule.any_of
        assert part.number.split(":")[0] == rule.statement.rpartition(", ")[2].rstrip(".")


def test_a_changed_bound_changes_the_hash_of_the_rules() -> None:
    code = rule_hash.of_study("real_pays")
    sources = [(rule_hash.ROOT / file).read_text() for file in code.files]
    assert rule_hash.of_sources(sources, rule_hash.ENTRIES) == code.hash
    for bound, other in (("DRAFTS = 1.2", "DRAFTS = 1.1"), ("TENTH = 0.1", "TENTH = 0.2"), ("bound=1.0", "bound=0.9")):
        changed = [source.replace(bound, other) for source in sources]
        assert changed != sources and rule_hash.of_sources(changed, rule_hash.ENTRIES) != code.hash
