"""Metrics as Ray gauges, which Ray exports to Prometheus."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from ray.util.metrics import Gauge

PREFIXES = ("rollout/", "turn/", "draft/", "drift/", "head/", "staleness/")


class Gauges:
    """``bebop_<name>`` with / as _, as ``bebop.run`` names them; only what the plug-in itself measures."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Set the gauges."""
        own = {name: value for name, value in metrics.items() if name.startswith(PREFIXES)}
        for name, value in {"step": step, **own}.items():
            if not isinstance(value, Real):
                continue
            key = "bebop_" + name.replace("/", "_")
            if key not in self._gauges:
                self._gauges[key] = Gauge(key, description=name)
            self._gauges[key].set(float(value))
