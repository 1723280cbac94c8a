"""Streams with known truth for the monitor: how often it names the cause of a change rightly.

The weights are those of the first policy throughout. After five steps one of three things happens: nothing changes, the
temperature of target and draft changes, or another head drafts. The temperature changes entropy alone: the head fits as
before. The other head changes mismatch alone: completions and entropy are the same. The steps of a stream hold
different completions; another order of the completions is another stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from bebop.adaptation.corpus import backbone_states
from bebop.adaptation.probe import Probe, probe
from bebop.model.backbone import Policy
from bebop.monitor.drift_monitor import STATES, DriftMonitor, MonitorSettings
from bebop.monitor.probe_set import ProbeReading, Sweep
from bebop.monitor.records import StepRecords
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling
from bebop.trainer.probe_set import TEMPERATURES
from recipes.reproduce.real.rl.beside import BATCH
from recipes.reproduce.real.rl.plan import RLPlan
from recipes.reproduce.real.rl.readings import reading, records_of, sweep_of

BEFORE, AFTER = 5, 6  # steps before and after the change
COOLER, WARMER = 0.7, 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Planted change of a stream: Case(name="cooler", truth="entropy-driven", temperature=0.7)."""

    name: str
    truth: str  # of ``STATES``
    temperature: float = 1.0  # of target and draft, after the change
    other: bool = False  # whether another head drafts after the change


CASES = (
    Case(name="nothing", truth="steady"),
    Case(name="cooler", truth="entropy-driven", temperature=COOLER),
    Case(name="warmer", truth="entropy-driven", temperature=WARMER),
    Case(name="another head", truth="mismatch-driven", other=True),
)


class Streams:
    """Heads, completions and states of all streams of one seed."""

    def __init__(
        self,
        plan: RLPlan,
        heads: Mapping[bool, Policy],
        answers: Mapping[float, Sequence[TokenRow]],
        fixed: Sequence[TokenRow],
    ) -> None:
        """Compute the states of all completions.

        ``heads``: the one before the change (False) and the other one (True), of one backbone.

        ``answers``: temperature -> completions of the first policy at it, each to a prompt of its own, at least
        ``wanted(plan)`` of them.
        """
        self.plan, self.heads, self.fixed = plan, heads, fixed
        self.answers = answers
        self.states = {temperature: self._states(rows) for temperature, rows in answers.items()}
        self._known: dict[tuple[bool, float], tuple[StepRecords, ProbeReading]] = {}

    @cached_property
    def _fixed_states(self) -> list[Tensor]:
        return self._states(self.fixed)

    def _states(self, rows: Sequence[TokenRow]) -> list[Tensor]:
        return backbone_states(self.heads[False], rows, BATCH)

    def verdict(self, case: Case, order: int) -> str:
        """Return the state that the monitor reports at the end of a stream."""
        monitor = DriftMonitor(MonitorSettings(rate="overlap", steps=BEFORE + AFTER))
        rng = np.random.default_rng([order, STATES.index(case.truth), round(10 * case.temperature)])
        orders = {t: rng.permutation(len(rows)) for t, rows in self.answers.items()}
        said = "steady"
        for step in range(BEFORE + AFTER):
            changed = step >= BEFORE
            temperature, other = (case.temperature, case.other) if changed else (1.0, False)
            first = step - BEFORE if changed and temperature != 1.0 else step
            size = self.plan.planted_answers
            chosen = orders[temperature][first * size : (first + 1) * size]
            records, fixed = self._seen(other, temperature)
            part = replace(records.select(np.isin(records.answer, chosen)), step=step + 1)
            seen = monitor.observe(part, fixed, self._sweep if step == 0 else None)
            said = said if seen is None else seen.state
        return said

    def _seen(self, other: bool, temperature: float) -> tuple[StepRecords, ProbeReading]:
        """Return the records of all completions at a temperature, and the fixed texts, with one of the heads."""
        if (other, temperature) not in self._known:
            rows = self.answers[temperature]
            own = self._probe(other, rows, self.states[temperature], temperature)
            fixed = self._probe(other, self.fixed, self._fixed_states, temperature)
            self._known[other, temperature] = records_of(own, range(len(rows)), 0), reading(fixed)
        return self._known[other, temperature]

    @cached_property
    def _sweep(self) -> Sweep:
        return sweep_of([self._probe(False, self.fixed, self._fixed_states, t) for t in TEMPERATURES])

    def _probe(self, other: bool, rows: Sequence[TokenRow], states: Sequence[Tensor], temperature: float) -> Probe:
        sampling = Sampling(temperature=temperature)
        return probe(self.heads[other], rows, 1, sampling, BATCH, states=states, every=self.plan.every)


def wanted(plan: RLPlan) -> dict[float, int]:
    """Return the number of completions that the streams take, by temperature."""
    return {
        1.0: (BEFORE + AFTER) * plan.planted_answers,
        **dict.fromkeys((COOLER, WARMER), AFTER * plan.planted_answers),
    }


def confusion(streams: Streams, plan: RLPlan) -> list[dict[str, str | int]]:
    """Return one row per case: its truth, and the number of streams that got each verdict."""
    rows = []
    for case in CASES:
        said = [streams.verdict(case, order) for order in range(plan.planted_orders)]
        rows.append({"case": case.name, "truth": case.truth, **{state: said.count(state) for state in STATES}})
    return rows


def share_right(rows: Sequence[Mapping[str, str | int]], truth: str) -> float:
    """Return the share of rightly named streams among those of one truth, over all its cases."""
    own = [row for row in rows if row["truth"] == truth]
    return sum(int(row[truth]) for row in own) / sum(int(row[state]) for row in own for state in STATES)
