"""Declarative rules: a rule names numbers of arms and their bounds; its text and evidence are generated from that.

A ``Stat`` is one number of one arm with one seed. ``LENGTH("ce")`` is that number of an arm, and
``LENGTH.gain("tv", "ce")`` is the number of one arm minus that of another. Both are quantities, which a study computes
because its rules ask for them. So a rule cannot ask for a number that its study does not measure.

    LENGTH = Stat(name="accept length", value=lambda head: head.accept_length, arm="length {arm}")
    RULES = (gain("C3", LENGTH, "e2e_tv", over="ce", says="End-to-end TV is accepted for longer."),)

A gain counts if it exceeds the noise of its arms: the distance between two seeds of one arm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from recipes.reproduce.verdicts import Need, Part, Rule

Also = Mapping[str, "Quantity | str"] | None  # label -> further evidence: a quantity, or the name of a fact
Side = Literal["above", "below", "not above", "not below"]
AT = ": "  # separates the place of an arm from its name: "fresh: K = 4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A weighted number of an arm: Term(weight=-1.0, arm="ce", value=...)."""

    weight: float
    arm: str
    value: Callable[[Any], Any]  # the measurement of one arm with one seed -> a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A sum of weighted numbers of arms, computed per seed; a study stores it under ``name``."""

    name: str
    words: str  # accept length of e2e_tv minus that of ce
    terms: tuple[Term, ...] = ()
    parts: tuple["Quantity", ...] = ()  # operands of a difference, quoted as evidence
    labels: tuple[str, ...] = ()  # labels of the parts; empty: the evidence reads "... against ..."

    @property
    def told(self) -> str:
        """Return the evidence text: words, the number and its parts, with numbers as {name} placeholders."""
        shown = [f"{{{one.name}}}" for one in self.parts]
        labelled = ", ".join(f"{label} {one}" for label, one in zip(self.labels, shown, strict=False))
        parts = labelled or " against ".join(shown)
        return f"{self.words}: {{{self.name}}}" + (f" ({parts})" if parts else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """A number of an arm with one seed.

    ``arm`` and ``gains`` are templates of its name in ``results.json``: {at} is the place of an arm with its colon;
    {arm}, {a} and {b} are arms. A common ending of both arms of a gain moves to the end of the name: "e2e_tv - ce,
    few".
    """

    name: str
    value: Callable[[Any], Any]
    arm: str = "{at}{name} {arm}"
    gains: str = "{at}{a} - {b}"

    def __call__(self, arm: str) -> Quantity:
        """Return the number of an arm as a quantity."""
        at, own = _placed(arm)
        name = self.arm.format(at=at, name=self.name, arm=own)
        terms = (Term(weight=1.0, arm=arm, value=self.value),)
        return Quantity(name=name, words=f"{self.name} of {arm}", terms=terms)

    def gain(self, a: str, b: str) -> Quantity:
        """Return the number of arm ``a`` minus that of arm ``b``; both arms must be at one place."""
        (at, first), (other, second) = _placed(a), _placed(b)
        assert at == other, f"{a} and {b} are not at one place"
        end = _end(first, second)
        names = {"a": first.removesuffix(end), "b": second.removesuffix(end)}
        found = less(self.gains.format(at=at, name=self.name, **names) + end, self(a), self(b))
        return replace(found, words=f"{self.name} of {a} minus that of {second}", labels=(first, second))


def less(name: str, first: Quantity, second: Quantity) -> Quantity:
    """Return one quantity minus another, seed by seed: two numbers of one arm, or two gains."""
    words = f"{first.words} minus {second.words}"
    terms = (*first.terms, *_times(-1.0, second.terms))
    return Quantity(name=name, words=words, terms=terms, parts=(first, second))


def half_of(quantity: Quantity) -> Quantity:
    """Return half of a quantity, as a reference for another one."""
    return replace(quantity, words=f"half of {quantity.words}", terms=_times(0.5, quantity.terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A quantity and the side of a bound where it must lie, by more than the noise of the arms in ``noise``."""

    quantity: Quantity
    kind: Literal["above", "below", "within"] = "above"
    bound: float = 0.0
    noise: tuple[Quantity, ...] = ()
    relative: bool = False  # the quantity is a ratio or a relative gain

    @property
    def part(self) -> Part:
        """Return the check as a ``Part`` for ``verdicts``."""
        arms = tuple(one.name for one in self.noise)
        return Part(number=self.quantity.name, kind=self.kind, bound=self.bound, arms=arms, relative=self.relative)

    @property
    def place(self) -> str:
        """Return the range where the number must lie, in words."""
        place = f"within {self.bound:g} of 0" if self.kind == "within" else f"{self.kind} {self.bound:g}"
        return place + (" by more than the noise of the arms" if self.noise and self.kind != "within" else "")

    @property
    def refuted(self) -> str:
        """Return the range that refutes the check, in words."""
        other = {"above": "below", "below": "above", "within": "outside"}[self.kind]
        noise = " by more than the noise of the arms" if self.kind == "within" else " by as much"
        return f"{other}{noise}" if self.noise else other


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Precondition of a rule on an arm: the rule is tested only if a number of the arm lies on one side of a bound."""

    quantity: Quantity
    side: Side
    bound: float = 0.0
    otherwise: str  # the reason why the rule is not tested, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared(Rule):
    """A rule with all quantities that it tests or quotes."""

    asks: tuple[Quantity, ...] = field(default=())


def rise(stat: Stat, a: str, over: str, by: float = 0.0, noise: Sequence[str] = ()) -> Check:
    """Return a check that ``a`` exceeds ``over`` by ``by`` and the noise of both arms and of the arms in ``noise``."""
    return Check(quantity=stat.gain(a, over), bound=by, noise=tuple(stat(arm) for arm in (a, over, *noise)))


def gain(
    claim: str, stat: Stat, a: str, *, over: str, says: str, by: float = 0.0, noise: Sequence[str] = (),
    also: Also = None, needs: Sequence[Condition] = (),
) -> Declared:  # fmt: skip
    """Return a rule: ``a`` exceeds ``over`` in a stat, by more than ``by`` and the noise of the arms."""
    return every(claim, says, rise(stat, a, over, by, noise), also=also, needs=needs)


def unmoved(
    claim: str, stat: Stat, a: str, *, over: str, within: float, says: str, noise: Sequence[str] = (),
    also: Also = None, needs: Sequence[Condition] = (),
) -> Declared:  # fmt: skip
    """Return a rule: a stat of ``a`` differs from that of ``over`` by less than ``within``."""
    check = replace(rise(stat, a, over, within, noise), kind="within")
    return every(claim, says, check, also=also, needs=needs)


def above(
    claim: str, quantity: Quantity, bound: float, *, says: str, noise: Sequence[Quantity] = (), relative: bool = False,
    also: Also = None, needs: Sequence[Condition] = (),
) -> Declared:  # fmt: skip
    """Return a rule: a quantity lies above a bound by more than the noise of the arms; ``relative``: it is a ratio."""
    check = Check(quantity=quantity, bound=bound, noise=tuple(noise), relative=relative)
    return every(claim, says, check, also=also, needs=needs)


def below(
    claim: str, quantity: Quantity, bound: float, *, says: str, noise: Sequence[Quantity] = (),
    also: Also = None, needs: Sequence[Condition] = (),
) -> Declared:  # fmt: skip
    """Return a rule: a quantity lies below a bound by more than the noise of the given arms."""
    check = Check(quantity=quantity, kind="below", bound=bound, noise=tuple(noise))
    return every(claim, says, check, also=also, needs=needs)


def every(claim: str, says: str, *checks: Check, also: Also = None, needs: Sequence[Condition] = ()) -> Declared:
    """Return a rule that all checks must pass; one check on the other side refutes it."""
    first = checks[0]
    text = f"confirmed if the {first.quantity.words} lies {first.place}, refuted if {first.refuted}"
    if checks[1:]:
        text = (
            f"confirmed if all {len(checks)} numbers lie {_common(checks)}, refuted if one of them lies "
            f"{first.refuted} (corrected for {len(checks)})"
        )
    return _declared(claim, says, (checks,), text, also, needs)


def some(claim: str, says: str, *groups: Sequence[Check], also: Also = None) -> Declared:
    """Return a rule that all checks of one group must pass.

    It is refuted if every check of every group lies on the other side.
    """
    place = _common([check for group in groups for check in group])
    text = (
        f"confirmed if in one of {len(groups)} groups all {len(groups[0])} numbers lie {place} (corrected for "
        f"{len(groups)}), refuted if all numbers of all groups lie {groups[0][0].refuted}"
    )
    return _declared(claim, says, tuple(map(tuple, groups)), text, also, ())


def _common(checks: Sequence[Check]) -> str:
    """Return the range where the numbers of several checks must lie, which must be the same for all of them."""
    places = list(dict.fromkeys(check.place for check in checks))
    assert len(places) == 1, "checks of one rule hold their numbers against one bound"
    return places[0]


def _declared(
    claim: str,
    says: str,
    groups: tuple[tuple[Check, ...], ...],
    text: str,
    also: Also,
    needs: Sequence[Condition],
) -> Declared:
    beside = {label: one.name if isinstance(one, Quantity) else one for label, one in (also or {}).items()}
    checks = [check for group in groups for check in group]
    tested = "".join(f"; tested if the {one.quantity.words} lies {one.side} {one.bound:g}" for one in needs)
    numbers = [f"{one.quantity.name} {{{one.quantity.name}}}" for one in checks]
    parts = [
        *([checks[0].quantity.told] if not checks[1:] else numbers),
        *(f"{label} {{{name}}}" for label, name in beside.items()),
    ]
    told = "; ".join(part.strip() for part in parts)
    conditions = [one.quantity for one in needs]
    quoted = [one for check in checks for one in (check.quantity, *check.quantity.parts, *check.noise)]
    return Declared(
        claim=claim,
        statement=says,
        text=text + tested,
        evidence=f"Numbers: {told}." if checks[1:] else f"{told[0].upper()}{told[1:]}.",
        any_of=tuple(tuple(check.part for check in group) for group in groups),
        needs=tuple(
            Need(number=one.quantity.name, kind=one.side, bound=one.bound, otherwise=one.otherwise) for one in needs
        ),
        asks=(*quoted, *(one for one in (also or {}).values() if isinstance(one, Quantity)), *conditions),
    )


def _times(weight: float, terms: Sequence[Term]) -> tuple[Term, ...]:
    return tuple(replace(term, weight=weight * term.weight) for term in terms)


def _placed(arm: str) -> tuple[str, str]:
    """Split an arm into its place with the colon and its name there: "fresh: " and "K = 4". The place may be ""."""
    at, colon, own = arm.rpartition(AT)
    return at + colon, own


def _end(a: str, b: str) -> str:
    """Return the ending of two arms from their last comma if both have the same, such as ", few"; otherwise ""."""
    ends = [comma + end for _, comma, end in (arm.rpartition(", ") for arm in (a, b))]
    return ends[0] if ends[0] == ends[1] and ends[0].startswith(", ") else ""
