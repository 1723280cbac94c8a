"""Time accounting of a step, and the row of its metrics."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from bebop.driver.protocols import WorkerReport
from bebop.metrics.metrics import Metrics, Sum, merge, values
from bebop.monitor.estimators import rollout_metrics
from bebop.trajectory import Batch, Group


class StepTimer:
    """Seconds of the current step: the trainer's side as they pass, the workers' as they report them."""

    def __init__(self, workers: int, now: Callable[[], float] = time.perf_counter) -> None:
        """Time a job with ``workers`` workers by the clock ``now``, of which only differences count."""
        self.workers, self.now = workers, now
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self._started = self.now()
        self._spent = {"idle": 0.0, "update": 0.0, "sync": 0.0, "monitor": 0.0, "eval": 0.0, "save": 0.0}
        self._rollout = self._swap = 0.0  # seconds of decoding and of loading weights, summed over workers
        self._tokens = 0

    def end_wait(self) -> None:
        """Count the step so far as time in which the trainer waited for completions, except for a checkpoint."""
        self._spent["idle"] = self.now() - self._started - self._spent["save"]

    @contextlib.contextmanager
    def measure(self, part: Literal["update", "sync", "monitor", "eval", "save"]) -> Iterator[None]:
        """Add the seconds within the block to a part of the step."""
        started = self.now()
        yield
        self._spent[part] += self.now() - started

    def evaluation(self) -> dict[str, float]:
        """Return the metric of the seconds in which the step waited for an evaluation."""
        return {"time/eval": self._spent["eval"]}

    def add(self, report: WorkerReport) -> None:
        """Add the seconds and tokens of a worker's report."""
        self._tokens += report.tokens
        self._rollout += report.busy
        self._swap += report.swap

    def row(
        self,
        batch: Batch,
        version: int,
        learned: Metrics,
        drift: Mapping[str, float],
        restarts: int,
        filtered: Sequence[Group] | None = None,
    ) -> dict[str, float]:
        """Return the metrics of the step that ends now.

        Args:
            batch: the batch of the step; all batches of a job have its size.
            version: version of the weights that the step updated.
            learned: metrics of the update.
            drift: metrics of the monitor.
            restarts: deaths of workers so far.
            filtered: groups that were skipped, if ``algorithm.dynamic_sampling`` is set.
        """
        step, spent = self.now() - self._started, self._spent
        count: Metrics = {"response/tokens": Sum(float(sum(t.written for t in batch.trajectories)))}
        return {
            **values(merge(rollout_metrics(batch.groups, version), learned, count)),
            **drift,
            "time/step": step,
            "time/rollout": self._rollout / self.workers,
            "time/update": spent["update"],
            "time/sync": spent["sync"] + self._swap / self.workers,
            "time/monitor": spent["monitor"],
            "time/idle": spent["idle"],
            "time/save": spent["save"],
            "time/rollout_idle": max(0.0, step - (self._rollout + self._swap) / self.workers),
            "rollout/tokens_per_s": self._tokens / step,
            "rollout/restarts": float(restarts),
            "samples/trained": float(
                (version + 1) * sum(len(group.trajectories) + group.lost for group in batch.groups)
            ),
            "samples/prompts": float((version + 1) * len(batch.groups)),
            "version": float(version + 1),
            **({} if filtered is None else {"rollout/filtered_groups": float(len(filtered))}),
        }
