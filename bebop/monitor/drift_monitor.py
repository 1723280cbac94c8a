"""The drift monitor: takes the records of each step, explains why acceptance moved, and proposes an action.

It needs only numpy. Records come from the job's loop (``records.from_groups``), from a log (``logs.read_log``) or from
another trainer (``adapters``). The same records and settings give the same numbers, so replaying a log reproduces the
run.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from bebop.config.job import Costs
from bebop.monitor.controller import Action, Controller, ControllerConfig, Health, Signals, State, Verdict
from bebop.monitor.drift import Decomposition, Key, by_key, decompose
from bebop.monitor.estimate import Estimate, Summary
from bebop.monitor.probe_set import ProbeReading, Sweep, direct
from bebop.monitor.records import StepRecords, merge_records
from bebop.monitor.slope import Slope, Source, early_slope, early_window, frozen_slope, temperature_slope
from bebop.monitor.window import Measure, Rate, Window

OWN: tuple[Key, ...] = ("task", "position", "turn")  # held against the same in the first steps
STATES: tuple[State, ...] = ("steady", "entropy-driven", "mismatch-driven", "broken")
Part = TypeVar("Part", "Explanation", Decomposition, Slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSettings:
    """Settings of the drift monitor: windows, bootstrap, acceptance measure, costs and controller."""

    # Acceptance from: counts; overlap (sampled drafts); target_only (greedy drafts). Counts if no overlap is measured.
    rate: Rate = "accepted"
    reference_steps: int = 5  # the first steps, against which changes are taken
    window_steps: int = 3  # the last steps, whose change is explained
    steps: int | None = None  # of the whole run, if known: the early window is 10 % of it, at least 20
    draws: int = 400  # bootstrap replicates
    seed: int = 0
    units: int = 2048  # prompts of a step beyond which a random part is taken
    head_alone: bool = False  # records are of the head's first drafts beside history: see ``_signals``
    costs: Costs | None = None  # needed to propose another draft length
    controller: ControllerConfig = field(default_factory=ControllerConfig)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explanation:
    """Causes of the acceptance at one step, with the controller's verdict."""

    step: int
    verdict: Verdict
    length: Estimate  # accept length of the last steps, weighted by cycles
    length_by_request: Estimate  # the same with equal weight for every completion
    entropy: Estimate  # nats, last steps
    boundary: Estimate | None  # overlap minus p(argmax q); None if they were not measured
    parts: dict[str, Decomposition]  # length, position/1, ..., bank; empty before the reference is complete
    slopes: dict[Source, Slope]  # early, frozen, temperature: of the accept length
    by_slope: dict[Source, Decomposition]  # the accept length's change under each of them

    @property
    def state(self) -> State:
        """Return the state: steady, entropy-driven, mismatch-driven or broken."""
        return self.verdict.state

    @property
    def action(self) -> Action:
        """Return the proposed action."""
        return self.verdict.action

    def metrics(self) -> dict[str, float]:
        """Return the finite numbers as flat metrics for a log."""
        row = {"drift/state": float(STATES.index(self.state)), "drift/length_by_request": self.length_by_request.point}
        if self.boundary is not None:
            row |= dict(zip(_ends("drift/boundary"), self.boundary.triple(), strict=True))
        for part in self.parts.values():
            row |= part.metrics()
        for source, slope in self.slopes.items():
            row |= dict(zip(_ends(f"drift/slope/{source}"), slope.value.triple(), strict=True))
        return {name: value for name, value in row.items() if math.isfinite(value)}

    def to_show(self) -> "Explanation":
        """Return what a report shows of the step, without draws: of thousands of steps those would fill the memory."""
        shown = {name: _summary(part) for name, part in self.parts.items() if name in ("length", "bank")}
        slopes = {source: _summary(slope) for source, slope in self.slopes.items()}
        return replace(_summary(self), parts=shown, slopes=slopes, by_slope={})


def _summary(whole: Part) -> Part:
    """Return a part of an explanation with summaries in place of its own estimates."""
    own = {one.name: getattr(whole, one.name) for one in fields(whole)}
    summaries: dict[str, Any] = {k: Summary.of(v) for k, v in own.items() if isinstance(v, Estimate)}
    return replace(whole, **summaries)


class DriftMonitor:
    """Monitor of acceptance: call ``observe`` once a step; it returns the explanation of that step."""

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        self.settings = settings or MonitorSettings()
        self.controller = Controller(self.settings.controller)
        self.restart()

    def restart(self) -> None:
        """Start a new reference after decoding was changed on purpose. The controller keeps its state."""
        self._rate: Rate = self.settings.rate  # as far as the first step of the reference has it
        self._first: list[tuple[StepRecords, Window]] = []
        self._recent: deque[tuple[StepRecords, Window]] = deque(maxlen=self.settings.window_steps + 1)
        self._reference: Window | None = None
        self._series: dict[Measure, list[tuple[float, float]]] = {}  # (entropy, value) of the early steps
        self._slopes: dict[tuple[Source, Measure], Slope] = {}
        self._first_reading: ProbeReading | None = None
        self._sweep: Sweep | None = None
        self._drift: Decomposition | None = None  # on the probe set, at a step that has a reading
        self._newest: Decomposition | None = None  # the same at the last step that had one

    @property
    def has_reading(self) -> bool:
        """Return whether a first reading of the probe set exists, against which later readings are compared."""
        return self._first_reading is not None

    def observe(
        self,
        records: StepRecords,
        reading: ProbeReading | None = None,
        sweep: Sweep | None = None,
        health: Health | None = None,
        uncertified: str = "",
    ) -> Explanation | None:
        """Add one step and return its explanation, or None if the step drafted nothing. Steps come in order, each once.

        ``reading``: the probe set under the current distributions; later readings are compared with the first one.
        ``sweep``: the first weights at several temperatures, passed once, as early as it exists. ``uncertified``: why
        completions do not follow their distribution, if the certificate found that.
        """
        if not len(records):
            return None
        s = self.settings
        records = records.sample(s.units, s.seed)
        if not self._first:
            self._rate = s.rate if np.isfinite(records.overlap).any() else "accepted"
        window = Window.of(records, s.draws, s.seed)
        self._recent.append((records, window))
        self._remember(records, window)
        if sweep is not None:
            self._sweep = sweep
            if sweep.entropy and not s.head_alone:
                slope = temperature_slope(sweep.entropy, sweep.length, sweep.sums, s.draws, s.seed)
                self._slopes["temperature", self._length] = slope
        if reading is not None:
            first, known = self._first_reading, () if self._sweep is None else self._sweep.readings
            self._drift = None if first is None else direct(first, reading, known, s.draws, s.seed)
            self._newest = self._drift
            self._first_reading = first or reading
        else:
            self._drift = None  # what an earlier reading said is no evidence about this step
        return self._explain(records.step, health, uncertified)

    def breakdown(self, key: Key) -> dict[str, Decomposition]:
        """Return the accept length's change by task, position in the completion, weight version or lag.

        A task or position is compared with the same label in the reference; a version or lag with the whole reference.
        For ``turn`` the result is the acceptance rate of the first draft, compared with the same kind of turn. Turns of
        different length have accept lengths that cannot be compared.
        """
        if self._reference is None or self.settings.head_alone:
            return {}
        measure = Measure(position=1, rate=self._rate) if key == "turn" else self._length
        if measure.position is not None and not self._reference.drafts:
            return {}
        now = by_key(key, merge_records([records for records, _ in self._now()]))
        own = by_key(key, merge_records([records for records, _ in self._first])) if key in OWN else {}
        by_label = {}
        for label, rows in now.items():
            reference = self._window(own[label]) if label in own else None if own else self._reference
            if reference is not None:
                by_label[label] = decompose(measure, reference, self._window(rows), self._slope(measure))
        return by_label

    @property
    def _length(self) -> Measure:
        return Measure(rate=self._rate)

    def _window(self, records: StepRecords) -> Window:
        return Window.of(records, self.settings.draws, self.settings.seed + 1)

    def _now(self) -> list[tuple[StepRecords, Window]]:
        return list(self._recent)[-self.settings.window_steps :]

    def _pool(self, steps: Sequence[tuple[StepRecords, Window]]) -> Window:
        """Merge the windows of some steps; steps with a single row (logs of averages) become the resampled units."""
        if any(window.units < 2 for _, window in steps):
            return self._window(merge_records([records for records, _ in steps]))
        total = steps[0][1]
        for _, window in steps[1:]:
            total = total + window
        return total

    def _remember(self, records: StepRecords, window: Window) -> None:
        """Store the data of the reference and the slopes, and compute both once their steps are complete."""
        s = self.settings
        if self._reference is None:
            self._first.append((records, window))
            if len(self._first) == s.reference_steps:
                self._reference = self._pool(self._first)
                for measure in self._measures(self._reference):
                    steps = [first for first, _ in self._first]
                    self._slopes["frozen", measure] = frozen_slope(steps, measure, s.draws, s.seed)
        need = early_window(s.steps)
        for measure in self._measures(window):
            series = self._series.setdefault(measure, [])
            if len(series) < need:
                series.append((window.entropy(measure).point, window.value(measure).point))
                entropies, values = zip(*series, strict=True)
                self._slopes["early", measure] = early_slope(entropies, values, s.draws, s.seed, need)

    def _measures(self, window: Window) -> list[Measure]:
        """Return the accept length, then each draft position; empty if only the probe set may explain acceptance."""
        if self.settings.head_alone:
            return []
        return [self._length, *(Measure(position=k, rate=self._rate) for k in range(1, window.drafts + 1))]

    def _slope(self, measure: Measure) -> Slope:
        """Return the most trustworthy slope: over temperatures, else over completions, else over early steps."""
        order: tuple[Source, ...] = ("temperature", "frozen", "early")
        slopes = [slope for source in order if (slope := self._slopes.get((source, measure))) is not None]
        return next((slope for slope in slopes if not slope.unidentified), slopes[0])

    def _explain(self, step: int, health: Health | None, uncertified: str) -> Explanation:
        now = self._pool(self._now())
        parts: dict[str, Decomposition] = {}
        by_slope: dict[Source, Decomposition] = {}
        slopes = {source: slope for (source, measure), slope in self._slopes.items() if measure == self._length}
        if self._reference is not None:
            for measure in self._measures(self._reference):
                parts[measure.name] = decompose(measure, self._reference, now, self._slope(measure))
            for name, slope in slopes.items():
                length = parts["length"]
                other = length.source != name
                by_slope[name] = decompose(self._length, self._reference, now, slope) if other else length
            if self._drift is not None:
                parts["bank"] = self._drift
        edge = boundary(now)
        # Greedy drafts have a one-hot distribution: its overlap is p(argmax q), so their difference is always 0.
        compared = edge if edge.known and edge.point != 0 else None
        signals = self._signals(step, now, parts, tuple(by_slope.values()), compared)
        return Explanation(
            step=step,
            verdict=self.controller.judge(replace(signals, health=health, uncertified=uncertified)),
            length=now.value(self._length),
            length_by_request=Estimate.unknown(s.draws) if (s := self.settings).head_alone else now.by_request()[0],
            entropy=now.entropy(self._length),
            boundary=compared,
            parts=parts,
            slopes=slopes,
            by_slope=by_slope,
        )

    def _signals(
        self,
        step: int,
        now: Window,
        parts: dict[str, Decomposition],
        others: tuple[Decomposition, ...],
        edge: Estimate | None,
    ) -> Signals:
        """Return the controller's input; the probe set takes precedence over a slope.

        Beside history only the probe set counts, and its last reading holds until the next one. Cycles begin where
        drafts from history end, so more history changes the acceptance of the same head's first drafts.
        """
        s, controller = self.settings, self.controller
        earlier = list(self._recent)[:-1][-s.window_steps :]
        drafts = None
        if s.costs is not None and controller.drafts is not None:
            drafts = length_gain(now, controller.drafts, s.costs, self._rate)
        before = self._pool(earlier).value(self._length) if earlier else None
        return Signals(
            step=step,
            cause=self._newest if s.head_alone else parts.get("bank", parts.get("length")),
            now=_alone(self._recent[-1][1].value(self._length), before, len(earlier)),
            before=before,
            others=others,
            boundary=edge,
            drafts=drafts,
            chance=None if self._first_reading is None else self._first_reading.chance,
        )


def _alone(now: Estimate, before: Estimate | None, steps: int) -> Estimate:
    """Return a step's estimate; an average has no interval, so it gets one from the scatter of earlier steps."""
    if now.known or before is None or not before.known:
        return now
    # The sign is opposite to that of ``before``, so that the difference of both is wide rather than narrow.
    return Estimate(point=now.point, draws=now.point - math.sqrt(steps) * (before.draws - before.point))


def _ends(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def boundary(window: Window) -> Estimate:
    """Return mean overlap - mean p(argmax q); above 0, rejection sampling accepts more (TV < 1 - p(argmax q))."""
    return window.gap("overlap", "target_only")


def length_gain(window: Window, current: int, costs: Costs, rate: Rate = "accepted") -> tuple[int, Estimate]:
    """Return the number of drafts with the best expected speed, and its relative gain over ``current`` drafts.

    The speed of K drafts is (1 + sum of P_k) / (1 + K (draft + verify)), where P_k is the chance that position k is
    accepted. One position beyond the drafted ones is considered, at the rate of the last.
    """
    rates = [window.value(Measure(position=k, rate=rate)) for k in range(1, min(current, window.drafts) + 1)]
    rates = [r for r in rates if r.known]
    if not rates:
        return current, Estimate.unknown(len(window.replicates))
    rates.append(rates[-1])
    reach = [rates[0]]
    for r in rates[1:]:
        reach.append(reach[-1] * r)
    points = np.cumsum([r.point for r in reach]) + 1
    draws = np.cumsum([r.draws for r in reach], axis=0) + 1  # [K + 1, B]
    spent = 1 + np.arange(1, len(reach) + 1) * (costs.draft + costs.verify)
    now = min(current, len(reach)) - 1
    best = int(np.argmax(points / spent))
    scale = spent[now] / spent[best]
    return best + 1, Estimate(
        point=float(points[best] / points[now] * scale - 1), draws=draws[best] / draws[now] * scale - 1
    )
