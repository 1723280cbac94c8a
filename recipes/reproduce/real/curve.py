"""Validation curve of a head's training, and the rule that decides when it is flat.

*The rule.* The watched number is the accept length on validation text: 1 plus the summed products of the overlaps along
a chain, averaged over chains. The chains belong to prompts that no head is trained on. They are always the same, so two
validations differ only by what the head has learned. Each number is smoothed with the two before it. A curve is *flat*
once the best smoothed number of the last ``patience`` steps exceeds the best one before them by less than ``rise``
tokens. A run stops there, or at its limits; then its curve counts as *not* flat. The head that counts is that of the
best single validation at the last learning rate. Earlier heads, at the start or at a higher rate, do not show what the
loss leads to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHED = 3  # validations


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One validation of a run: Validation(step=200, seconds=812.0, length=1.41, loss=3.2, ...)."""

    step: int  # updates before it
    seconds: float  # of processor time in updates before it
    length: float  # accept length along text, tokens; the watched number
    loss: float  # mean training loss since the last one; NaN at the start
    overlaps: tuple[float, ...]  # [K] mean at each step of a chain


def smoothed(curve: Sequence[Validation]) -> list[float]:
    """Return the watched number of each validation, averaged with the two before it."""
    values = [one.length for one in curve]
    return [
        sum(some) / len(some) for end in range(1, len(values) + 1) if (some := values[max(0, end - SMOOTHED) : end])
    ]


def rise(curve: Sequence[Validation], patience: int) -> float:
    """Return how far the best smoothed number of the last ``patience`` steps exceeds the best one before them.

    It is infinite while the curve is shorter than ``patience`` steps.
    """
    if not curve or curve[-1].step < patience:
        return math.inf
    values, since = smoothed(curve), curve[-1].step - patience
    before = [value for one, value in zip(curve, values, strict=True) if one.step <= since]
    after = [value for one, value in zip(curve, values, strict=True) if one.step > since]
    return max(after, default=-math.inf) - max(before)


def flat(curve: Sequence[Validation], patience: int, least: float) -> bool:
    """Return whether the curve counts as flat."""
    return rise(curve, patience) < least


def best(curve: Sequence[Validation], since: int = 0) -> Validation:
    """Return the validation whose head counts: the best one after step ``since``, the first among equals.

    While there is none after that step, it is the last validation.
    """
    return max([one for one in curve if one.step > since] or curve[-1:], key=lambda one: one.length)
