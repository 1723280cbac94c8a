"""Metrics of a job as Ray gauges, for Prometheus."""

import threading
from collections.abc import Mapping

from ray.util.metrics import Gauge

REPEAT = 5.0  # seconds; Ray's agent drops a gauge that was not set for about 20 s, and a step may take minutes


class RaySink:
    """Metrics sink that exports each metric as a Ray gauge ``bebop_<name>``, with / as _, which Prometheus can read.

    Gauges of the last step are set again and again until ``close``, so that they last as long as the run, and longer
    than a hang. A metric that the last step lacks disappears.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._row: dict[str, float] = {}  # of the last step
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._repeat, name="bebop-gauges", daemon=True).start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Set one gauge per metric, and that of the step."""
        with self._lock:
            self._row = {"step": float(step), **values}
            self._set()

    def close(self) -> None:
        """Set no gauge any more."""
        with self._lock:
            self._closed.set()

    def _repeat(self) -> None:
        while not self._closed.wait(REPEAT):
            with self._lock:
                self._set()

    def _set(self) -> None:
        if self._closed.is_set():
            return
        for name, value in self._row.items():
            key = "bebop_" + name.replace("/", "_")
            if key not in self._gauges:
                self._gauges[key] = Gauge(key, description=name)
            self._gauges[key].set(value)
