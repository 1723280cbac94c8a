"""Inputs of the monitor, from probes of text: records of the first draft, readings of fixed texts, and their sweep.

Every anchor of a probe stands for a cycle of one draft. Its overlap is the exact probability that the draft is
accepted. So nothing has to be decoded, and the text is the same for every head.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bebop.adaptation.probe import Probe
from bebop.monitor.probe_set import ProbeReading, Sweep
from bebop.monitor.records import StepRecords
from bebop.monitor.window import per_unit

Array = NDArray[np.float64]


def records_of(found: Probe, units: Sequence[int], step: int) -> StepRecords:
    """Return one row of records per completion that has an anchor.

    ``units``: the prompt of each probed completion.
    """
    count = len(units)

    def total(values: Array) -> Array:
        return np.bincount(found.row, values, count).astype(np.float64)

    first = {name: total(found.numbers[name][:, 0])[:, None] for name in ("overlap", "target_only", "draft_entropy")}
    cycles, entropy = total(np.ones(len(found.row))), total(found.numbers["target_entropy"][:, 0])
    numbers, none = np.arange(count), np.full(count, -1)
    whole = StepRecords(
        step=step, unit=np.asarray(units, dtype=np.int64), answer=numbers, position=numbers * 0, turn=numbers * 0,
        version=none, lag=none, task=np.array([""] * count), cycles=cycles, emitted=cycles + first["overlap"][:, 0],
        entropy_sum=entropy, entropy_count=cycles, reached=cycles[:, None], accepted=first["overlap"],
        target_entropy=entropy[:, None], **first,
    )  # fmt: skip
    return whole.select(cycles > 0)


def reading(found: Probe) -> ProbeReading:
    """Return the reading of the first draft at every anchor; the unit of resampling is the text."""
    return ProbeReading(
        overlap=found.numbers["overlap"][:, 0], entropy=found.numbers["target_entropy"][:, 0], unit=found.row
    )


def sweep_of(probes: Sequence[Probe]) -> Sweep:
    """Return the sweep of the same texts at several temperatures; the first one is the run's own."""
    readings = [reading(found) for found in probes]
    sums = [per_unit(probes[0].row, _columns(one)) for one in readings]
    return Sweep(
        entropy=tuple(float(one.entropy.mean()) for one in readings),
        length=tuple(1 + float(one.overlap.mean()) for one in readings),
        readings=tuple(readings[1:]),
        sums=np.stack(sums),
    )


def _columns(one: ProbeReading) -> Array:
    """Return columns for ``Sweep.sums`` of each context [N, 4]: accept length and 1, entropy and 1."""
    ones = np.ones(len(one.overlap))
    return np.stack([1 + one.overlap, ones, one.entropy, ones], 1)
