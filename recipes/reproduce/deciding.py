"""The number that decides a finding: what a table shows of it, with its interval and its size against the noise.

A rule may ask for several numbers at once. The one that the verdict hangs on is shown: the weakest of those that have
to hold together, the strongest of those that may stand for one another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from recipes.reproduce.measured import Number
from recipes.reproduce.record import Content, numbers_of, rules_of
from recipes.reproduce.verdicts import Finding, Part, Rule, floor, p_values


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidingNumber:
    """DecidingNumber(name="e2e_tv - ce, accept length", number=0.041 [0.018, 0.064], bound=0.0, noise=0.035)."""

    name: str
    number: Number
    bound: float  # that it is held against
    noise: float | None  # how far two runs of one arm lie apart; None: no arms are compared

    @property
    def size(self) -> float | None:
        """How far it lies from its bound, in units of the noise, signed."""
        return (self.number.value - self.bound) / self.noise if self.noise else None


def effect_of(study: str, finding: Finding, content: Content) -> DecidingNumber | None:
    """What decides a finding; None where its numbers were not measured."""
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
    """The part of a rule whose p is that of the finding, on the side that the numbers are on (``verdicts.judge``)."""

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
