"""The number that decides a finding, with its interval and its size relative to the noise, for tables.

A rule may ask for several numbers at once. Tables show the one that the verdict depends on. It is the weakest of the
numbers that must hold together, or the strongest of alternatives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from recipes.reproduce.measured import Number
from recipes.reproduce.record import Content, numbers_of, rules_of
from recipes.reproduce.verdicts import Finding, Part, Rule, floor, p_values


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidingNumber:
    """The number that decides a finding, with its bound and its noise.

    Example: DecidingNumber(name="e2e_tv - ce, accept length", number=0.041 [0.018, 0.064], bound=0.0, noise=0.035).
    """

    name: str
    number: Number
    bound: float  # the bound that ``number`` is compared with
    noise: float | None  # how far two runs of one arm lie apart; None: no arms are compared

    @property
    def size(self) -> float | None:
        """Return the signed distance of the number from its bound, in units of the noise."""
        return (self.number.value - self.bound) / self.noise if self.noise else None


def effect_of(study: str, finding: Finding, content: Content) -> DecidingNumber | None:
    """Return the number that decides a finding; None where its numbers were not measured."""
    rule = _rules(study).get(finding.statement)
    numbers = numbers_of(content)
    if rule is None or any(n not in numbers for g in rule.any_of for part in g for n in (part.number, *part.arms)):
        return None
    part = deciding(rule, numbers, finding.side)
    return DecidingNumber(
        name=part.number,
        number=numbers[part.number],
        bound=part.bound if part.kind in ("above", "below") else 0.0,
        noise=floor(part, numbers) if part.arms else None,
    )


def deciding(rule: Rule, numbers: Mapping[str, Number], side: str) -> Part:
    """Return the part of a rule whose p-value decides the finding, for the ``side`` from ``verdicts.judge``."""

    def p(part: Part) -> float:
        return p_values(part, numbers)[0 if side == "confirmed" else 1]

    if side == "confirmed":
        group = min(rule.any_of, key=lambda parts: max(map(p, parts)))
        return max(group, key=p)
    parts = [part for group in rule.any_of for part in group]
    return min(parts, key=p) if len(rule.any_of) == 1 else max(parts, key=p)


@cache
def _rules(study: str) -> Mapping[str, Rule]:
    return {rule.statement: rule for rule in rules_of(study)}
