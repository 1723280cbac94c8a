"""When a head has learned what it can: the validation curve of a run, and the rule by which it counts as flat.

*The rule.* The number that is watched is the accept length on validation text: 1 plus the overlaps of a chain's steps,
multiplied up and summed, averaged over the chains of prompts that no head is trained on; always the same chains, so two
validations differ by what the head has learned. Each is smoothed with the two before it. A curve is *flat* once the
best smoothed number of the last ``patience`` steps is not above the best one before them by ``rise`` tokens or more.
A run stops there, or at its limits; then its curve is *not* flat and says so. The head that counts is that of the best
single validation at the last learning rate: what a run began with, or had at a higher rate, is not what its loss leads
to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHED = 3  # validations


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A validation: Validation(step=200, seconds=812.0, length=1.41, loss=3.2, ...)."""

    step: int  # updates before it
    seconds: float  # of processor time in updates before it
    length: float  # accept length along text, tokens; what is watched
    loss: float  # mean training loss since the last one; NaN at the start
    overlaps: tuple[float, ...]  # [K] mean at each step of a chain


def smoothed(curve: Sequence[Validation]) -> list[float]:
    """The watched number of each validation, averaged with the two before it."""
    values = [one.length for one in curve]
    return [
        sum(some) / len(some) for end in range(1, len(values) + 1) if (some := values[max(0, end - SMOOTHED) : end])
    ]


def rise(curve: Sequence[Validation], patience: int) -> float:
    """How much the best smoothed number of the last ``patience`` steps is above the best one before them; infinite
    while there were not so many steps."""
    if not curve or curve[-1].step < patience:
        return math.inf
    values, since = smoothed(curve), curve[-1].step - patience
    before = [value for one, value in zip(curve, values, strict=True) if one.step <= since]
    after = [value for one, value in zip(curve, values, strict=True) if one.step > since]
    return max(after, default=-math.inf) - max(before)


def flat(curve: Sequence[Validation], patience: int, least: float) -> bool:
    """Whether the curve counts as flat."""
    return rise(curve, patience) < least


def best(curve: Sequence[Validation], since: int = 0) -> Validation:
    """The validation whose head counts, of those after step ``since``, and while there is none of that one; the first
    of equal ones."""
    return max([one for one in curve if one.step > since] or curve[-1:], key=lambda one: one.length)
