"""Streams whose truth is known, shown to the monitor: how often it names the cause of a change rightly.

The weights are those of the first policy throughout. After five steps either nothing changes, or the temperature of
target and draft does (entropy alone: the head fits as before), or another head drafts (mismatch alone: answers and
entropy are the same). A stream's steps hold different answers; another order of the answers is another stream.
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

BEFORE, AFTER = 5, 6  # steps until something changes, and from then on
COOLER, WARMER = 0.7, 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is planted: Case(name="cooler", truth="entropy-driven", temperature=0.7)."""

    name: str
    truth: str  # of ``STATES``
    temperature: float = 1.0  # of target and draft, after the change
    other: bool = False  # whether another head drafts after it


CASES = (
    Case(name="nothing", truth="steady"),
    Case(name="cooler", truth="entropy-driven", temperature=COOLER),
    Case(name="warmer", truth="entropy-driven", temperature=WARMER),
    Case(name="another head", truth="mismatch-driven", other=True),
)


class Streams:
    """Everything that the streams of a seed are made of."""

    def __init__(
        self,
        plan: RLPlan,
        heads: Mapping[bool, Policy],
        answers: Mapping[float, Sequence[TokenRow]],
        fixed: Sequence[TokenRow],
    ) -> None:
        """``heads``: the one before the change (False) and the other one (True), of one backbone.

        ``answers``: temperature -> answers of the first policy at it, each to a prompt of its own, at least
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
        """What the monitor says at the end of a stream."""
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
        """Records of all answers at a temperature, and the fixed texts, with one of the heads."""
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
    """Answers that the streams take, by temperature."""
    return {
        1.0: (BEFORE + AFTER) * plan.planted_answers,
        **dict.fromkeys((COOLER, WARMER), AFTER * plan.planted_answers),
    }


def confusion(streams: Streams, plan: RLPlan) -> list[dict[str, str | int]]:
    """A row a case: what is true, and how many streams were called what."""
    rows = []
    for case in CASES:
        said = [streams.verdict(case, order) for order in range(plan.planted_orders)]
        rows.append({"case": case.name, "truth": case.truth, **{state: said.count(state) for state in STATES}})
    return rows


def share_right(rows: Sequence[Mapping[str, str | int]], truth: str) -> float:
    """Of the streams of one truth, over all its cases."""
    own = [row for row in rows if row["truth"] == truth]
    return sum(int(row[truth]) for row in own) / sum(int(row[state]) for row in own for state in STATES)
