"""Decomposition of an acceptance change: change = entropy part + mismatch part (SPEC 1.2, Eq. 16 with the signed
slope).

The entropy part is slope x (H now - H then). The mismatch part is the rest: the head's misfit to the policy, and
everything else that is not entropy. As the rest is a definition, the split is only as good as its slope. Slopes differ:
for the built-in model a nat costs 2.1 tokens a cycle between completions (hard questions have both entropy and
rejections). Over temperatures, which change entropy alone, it costs 0.6. ``bebop.monitor.probe_set`` needs no slope.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bebop.monitor.estimate import Estimate
from bebop.monitor.records import StepRecords, by_turn
from bebop.monitor.slope import Slope
from bebop.monitor.window import Measure, Window
from bebop.trajectory import STRETCH

IDENTITY = 1e-12  # change = entropy part + mismatch part, up to rounding
SMALL = {"tokens": 0.05, "rate": 0.01}  # changes below these are negligible, whatever their interval
Unit = Literal["tokens", "rate"]
Key = Literal["task", "position", "version", "lag", "turn"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decomposition:
    """Change against the reference in two parts, each with its interval; the parts are NaN if ``unidentified``.

    ``change.point == entropy.point + mismatch.point`` up to rounding.
    """

    name: str  # length, position/k, bank
    unit: Unit
    source: str  # of the slope: early, frozen, temperature; or bank, reweighted bank: measured directly
    change: Estimate  # acceptance now minus then
    entropy: Estimate  # part explained by the entropy's change
    mismatch: Estimate  # the rest
    entropy_change: Estimate  # nats
    unidentified: str = ""  # why there are no parts; empty if there are

    @property
    def small(self) -> float:
        """Return the size, in ``unit``, below which a change is negligible."""
        return SMALL[self.unit]

    def metrics(self) -> dict[str, float]:
        """Return flat numbers for a log: ``drift/<name>/<part>`` with ``_low`` and ``_high``."""
        row: dict[str, float] = {}
        for part in ("change", "entropy", "mismatch", "entropy_change"):
            values = getattr(self, part).triple()
            row |= {f"drift/{self.name}/{part}{end}": v for end, v in zip(("", "_low", "_high"), values, strict=True)}
        return row


def decompose(measure: Measure, reference: Window, now: Window, slope: Slope) -> Decomposition:
    """Split the change of ``measure`` from ``reference`` to ``now`` into entropy and mismatch, by ``slope``."""
    change = now.value(measure) - reference.value(measure)
    entropy_change = now.entropy(measure) - reference.entropy(measure)
    unit: Unit = "tokens" if measure.position is None else "rate"
    reason = slope.unidentified or _unusable(slope, entropy_change, change, SMALL[unit])
    entropy = slope.value * entropy_change
    if reason:
        entropy = Estimate.unknown(len(change.draws))
    return split(measure.name, unit, slope.source, change, entropy, entropy_change, reason)


def split(
    name: str, unit: Unit, source: str, change: Estimate, entropy: Estimate, entropy_change: Estimate, reason: str = ""
) -> Decomposition:
    """Return the decomposition of ``change``, given its entropy part; the mismatch part is the rest."""
    mismatch = change - entropy
    gap = abs(change.point - (entropy.point + mismatch.point))
    assert not gap > IDENTITY * max(1.0, abs(entropy.point), abs(change.point)), "parts do not add up to the change"
    return Decomposition(
        name=name,
        unit=unit,
        source=source,
        change=change,
        entropy=entropy,
        mismatch=mismatch,
        entropy_change=entropy_change,
        unidentified=reason,
    )


def by_key(key: Key, records: StepRecords) -> dict[str, StepRecords]:
    """Return the rows of each task, stretch of the completion, weight version, lag or kind of turn, by label.

    Kinds of turns overlap: the first cycles after observations (``records.AFTER``) also count with their turns.
    """
    if key == "turn":
        return by_turn(records)
    labels = _stretch(records) if key == "position" else getattr(records, key).astype(np.str_)
    distinct = sorted(
        set(labels.tolist()), key=lambda label: label if key == "task" else int(label.split("-")[0] or -1)
    )
    return {label: records.select(labels == label) for label in distinct}


def _stretch(records: StepRecords) -> "np.ndarray[tuple[int], np.dtype[np.str_]]":
    """Return the stretch in which each row begins: ``0-63``, ``64-127``, ``128-255``, ..."""
    edges = STRETCH * 2.0 ** np.arange(-1, 24)
    edges[0] = 0
    place = np.searchsorted(edges, records.position.clip(0), side="right") - 1
    return np.array([f"{int(edges[i])}-{int(edges[i + 1]) - 1}" for i in place], dtype=np.str_)


def _unusable(slope: Slope, entropy_change: Estimate, change: Estimate, small: float) -> str:
    """Return why the slope is useless: its interval may blur the parts by more than the change; empty if usable."""
    if not slope.value.known:
        return f"the {slope.source} slope has no interval"
    if not entropy_change.known:
        measured = np.isfinite(entropy_change.point)
        return "too few completions for an interval" if measured else "entropy was not measured"
    low, high = slope.value.interval()
    blur = (high - low) / 2 * abs(entropy_change.point)
    if blur > max(abs(change.point), small):
        known = f"the {slope.source} slope {slope.value.text()} per nat"
        return f"{known} over {entropy_change.point:.2g} nats blurs the parts by {blur:.2g}"
    return ""
