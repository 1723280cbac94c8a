"""From numbers to verdicts, for all studies; each study contributes its ``RULES``.

Verdicts are *confirmed*, *refuted*, *undecided* (the numbers do not suffice) and *not tested* (the arms were not what
the claim is about). Every finding has a two-sided p-value for the side that the numbers are on. Within each claim
Holm's method corrects these. Compared arms must differ by more than two runs of one arm do (``floor``).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from recipes.reproduce.measured import Number

Verdict = Literal["confirmed", "refuted", "undecided", "not tested"]
Kind = Literal["above", "below", "within", "differs"]
LEVEL = 0.05  # per claim: the chance of a wrong verdict among its findings if none of them has an effect
Numbers = Mapping[str, Number]
Facts = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One number and the side where it must lie.

    ``above`` and ``below``: of ``bound``. ``within``: -bound .. bound. ``differs``: from 0; it is refuted if the number
    is within +-``bound``. ``arms`` names one number per compared arm, whose spread over seeds is the noise floor.
    ``relative``: the number is a ratio or a relative gain, so the spread is divided by the arm's value.
    """

    number: str
    kind: Kind = "above"
    bound: float = 0.0
    arms: tuple[str, ...] = ()
    relative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Precondition on an arm: the whole interval of its number lies (or does not lie) above or below a bound."""

    number: str
    kind: Literal["above", "below", "not above", "not below"]
    bound: float = 0.0
    otherwise: str  # the reason why the rule is not tested, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A claim in words, and what decides it. ``any_of`` holds groups of parts; all parts of one group must hold."""

    claim: str  # of SPEC 1.1: C1..C5, "Fig 14b", or "beyond"
    statement: str
    text: str  # the criterion, in words
    evidence: str  # {name} is replaced by that number or fact
    any_of: tuple[tuple[Part, ...], ...]
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of one rule on the numbers, before the correction for the other findings of its claim."""

    claim: str
    statement: str
    rule: str
    evidence: str
    side: Literal["confirmed", "refuted"] = "confirmed"  # the side that the numbers are on
    p: float = 1.0  # two-sided, uncorrected
    floor: float | None = None  # the largest noise floor of its comparisons; None: no arms are compared
    untested: str | None = None  # why it was not tested


def judge(rules: Sequence[Rule], numbers: Numbers, facts: Facts | None = None) -> list[Finding]:
    """Return a finding per rule, in order. A rule whose numbers were not measured is not tested."""
    return [_finding(rule, numbers, facts or {}) for rule in rules]


def _finding(rule: Rule, numbers: Numbers, facts: Facts) -> Finding:
    words: dict[str, Any] = {"claim": rule.claim, "statement": rule.statement, "rule": rule.text}
    asked = [name for group in rule.any_of for part in group for name in (part.number, *part.arms)]
    missing = [name for name in dict.fromkeys([*asked, *(need.number for need in rule.needs)]) if name not in numbers]
    if missing:
        return Finding(**words, evidence="", untested=f"not measured: {', '.join(missing)}")
    evidence = re.sub(r"\{([^}]+)\}", lambda found: _told(found[1], numbers, facts), rule.evidence)
    unmet = [need for need in rule.needs if not met(need, numbers[need.number])]
    sides = [[p_values(part, numbers) for part in group] for group in rule.any_of]
    confirmed = min(1.0, len(sides) * min(max(p for p, _ in group) for group in sides))
    # One refuted part refutes a conjunction, so its smallest p is corrected for the number of parts. A disjunction is
    # refuted if all of its parts are.
    refutations = [[p for _, p in group] for group in sides]
    refuted = (
        min(1.0, len(refutations[0]) * min(refutations[0]))
        if len(refutations) == 1
        else max(p for group in refutations for p in group)
    )
    floors = [floor(part, numbers) for group in rule.any_of for part in group if part.arms]
    return Finding(
        **words,
        evidence=evidence,
        side="confirmed" if confirmed <= refuted else "refuted",
        p=min(confirmed, refuted),
        floor=max(floors) if floors else None,
        untested=f"{unmet[0].otherwise}: {numbers[unmet[0].number]}" if unmet else None,
    )


def p_values(part: Part, numbers: Numbers) -> tuple[float, float]:
    """Return the two-sided p-values of confirming and of refuting a part.

    Noise of the arms counts against both for ``above`` and ``below``, against refuting ``within``, and against
    confirming ``differs``.
    """
    number, bound, noise = numbers[part.number], part.bound, floor(part, numbers)
    if part.kind == "above":
        confirm, refute = number.above(bound + noise), number.below(bound - noise)
    elif part.kind == "below":
        confirm, refute = number.below(bound - noise), number.above(bound + noise)
    elif part.kind == "within":
        confirm = max(number.below(bound), number.above(-bound))
        refute = min(number.above(bound + noise), number.below(-bound - noise))
    else:
        confirm = min(number.above(noise), number.below(-noise))
        refute = max(number.below(bound), number.above(-bound))
    return min(1.0, 2 * confirm), min(1.0, 2 * refute)


def floor(part: Part, numbers: Numbers) -> float:
    """Return the noise floor: the root mean square distance of two seeds of one arm, for the noisiest arm."""
    spreads = [numbers[arm].spread / (abs(numbers[arm].value) if part.relative else 1.0) for arm in part.arms]
    return math.sqrt(2) * max(spreads, default=0.0)


def met(need: Need, number: Number) -> bool:
    """Return whether an arm meets a precondition."""
    found = number.low > need.bound if need.kind.endswith("above") else number.high < need.bound
    return not found if need.kind.startswith("not") else found


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given.

    The k-th smallest of m values is multiplied by m - k + 1, and is never less than the one before.
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def corrected(findings: Sequence[Finding]) -> list[tuple[Verdict, float | None]]:
    """Return verdict and adjusted p of each finding of *one* claim; the correction ignores untested findings."""
    tested = [finding for finding in findings if finding.untested is None]
    adjusted = iter(holm([finding.p for finding in tested]))
    found: list[tuple[Verdict, float | None]] = []
    for finding in findings:
        if finding.untested is not None:
            found.append(("not tested", None))
            continue
        p = next(adjusted)
        found.append((finding.side if p <= LEVEL else "undecided", p))
    return found


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict on a claim from the verdicts on its parts, all of which it claims."""
    found = set(verdicts)
    if not found - {"not tested"}:
        return "not tested"
    if found == {"confirmed"}:
        return "confirmed"
    if "refuted" in found:
        return "refuted in part" if "confirmed" in found else "refuted"
    return "confirmed in part" if "confirmed" in found else "undecided"


def _told(name: str, numbers: Numbers, facts: Facts) -> str:
    return str(numbers[name] if name in numbers else facts.get(name, "not measured"))
