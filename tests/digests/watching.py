"""The monitor on a stored log of a real run: what it said at every step."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bebop.monitor.drift_monitor import DriftMonitor, MonitorSettings
from bebop.monitor.logs import read_log
from bebop.monitor.window import Rate
from tests.digests.numbers import Numbers

LOG = Path(__file__).with_name("drift.jsonl")


def explanations(rate: Rate) -> Numbers:
    """Every number of every step, the controller's state and what it proposes."""
    monitor, numbers = DriftMonitor(MonitorSettings(rate=rate, draws=100)), Numbers()
    for step in read_log(LOG):
        told = step.feed(monitor)
        if told is None:
            continue
        numbers.add(step=[told.step], said=[ord(c) for c in f"{told.state} {told.action.kind} {told.verdict.evidence}"])
        for name, value in sorted(_flat(told.metrics()).items()):
            numbers.add(**{name: [value]})
    return numbers


def _flat(row: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if math.isfinite(value)}


SCENARIOS: dict[str, Callable[[], Numbers]] = {
    f"monitor by {rate}": functools.partial(explanations, rate) for rate in ("accepted", "overlap")
}
