"""Draft quality of a head on held-out prompts, measured by decoding with it: per position, with intervals."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.adaptation.corpus import run_engine
from bebop.adaptation.probe import Probe
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.config.adapt import DataConfig
from bebop.config.job import DecodingConfig
from bebop.metrics.intervals import Interval, ratio, ratio_difference
from bebop.model.backbone import Policy
from bebop.trainer.chains import TokenRow
from bebop.trajectory import DRAFT_STATS, MEASURED, Completion, Prompt

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Sums per completion, from decoding S prompts with K drafts a cycle; see ``DecodeStats`` for their meaning."""

    tasks: tuple[str, ...]  # [S]
    cycles: Array  # [S]
    tokens: Array  # [S] emitted in those cycles
    reached: Array  # [S, K]
    accepted: Array  # [S, K]
    overlap: Array  # [S, K]
    target_only: Array  # [S, K]
    draft_entropy: Array  # [S, K]
    target_entropy: Array  # [S, K]

    def of(self, task: str) -> "Measured":
        """Return the completions of one task."""
        chosen = np.array([t == task for t in self.tasks])
        arrays = {f.name: getattr(self, f.name)[chosen] for f in dataclasses.fields(self) if f.name != "tasks"}
        return Measured(tasks=tuple(t for t in self.tasks if t == task), **arrays)

    def ratio_of(self, name: str, position: int | None = None) -> tuple[Array, Array]:
        """Return the totals and counts [S] whose ratio is the named number.

        ``accept_length`` is tokens over cycles. Any other name is a sum at ``position`` (from 1; None: all) over
        reached.
        """
        if name == "accept_length":
            return self.tokens, self.cycles
        where = slice(None) if position is None else slice(position - 1, position)
        return getattr(self, name)[:, where].sum(1), self.reached[:, where].sum(1)

    def interval(self, name: str, position: int | None = None) -> Interval:
        """Return a number of ``ratio_of`` with its bootstrap interval over completions."""
        return ratio(*self.ratio_of(name, position))

    def summary(self) -> dict[str, Interval]:
        """Return every number: accept_length, and rates, overlaps and entropies at each position and over all."""
        intervals = {"accept_length": self.interval("accept_length")}
        names = {"accepted": "accept_rate", **{name: name for name in MEASURED}}
        for name, label in names.items():
            intervals[label] = self.interval(name)
            for k in range(1, self.reached.shape[1] + 1):
                intervals[f"{label}/{k}"] = self.interval(name, k)
        return intervals


def change(after: Measured, before: Measured, name: str, position: int | None = None) -> Interval:
    """Return how much a number rose from one head to another on the same prompts, resampled together."""
    return ratio_difference(after.ratio_of(name, position), before.ratio_of(name, position))


def measure(
    policy: Policy,
    prompts: Sequence[Prompt],
    data: DataConfig,
    decoding: DecodingConfig,
    seed: int = 0,
    label: str | None = None,
    ranks: Ranks = ALONE,
) -> Measured:
    """Decode a completion of each prompt. Two heads measured with one seed draw the same random numbers."""
    answers = run_engine(policy, prompts, data, decoding, seed, label, ranks)
    return measured([p.task for p in prompts], answers, decoding.limit)


def measured(tasks: Sequence[str], answers: Sequence[Completion], drafts: int) -> Measured:
    """Return the statistics of completions as arrays.

    A completion of a single cycle may have reached fewer than ``drafts`` positions; zeros fill the rest.
    """

    def table(name: str) -> Array:
        rows = [getattr(a.stats, name) for a in answers]
        return np.stack([np.pad(row, (0, drafts - len(row))) for row in rows])

    sums: dict[str, Any] = {name: table(name) for name in DRAFT_STATS}
    cycles = np.array([a.stats.cycles for a in answers], float)
    return Measured(
        tasks=tuple(tasks), cycles=cycles, tokens=np.array([a.stats.emitted for a in answers], float), **sums
    )


def estimated(probe: Probe, rows: Sequence[TokenRow], greedy: bool) -> Measured:
    """Return decoding statistics estimated from completions of the model: a cycle begins at each of their places.

    A step counts with the probability that the drafts before it are accepted. The estimate of this probability is
    unbiased on completions that the model sampled (SPEC 0.6). ``greedy``: drafts are the head's most likely tokens.
    """
    reached = probe.reached_greedy if greedy else probe.reached
    numbers = {name: np.nan_to_num(probe.numbers[name]) for name in MEASURED}
    accepted = reached * numbers["target_only" if greedy else "overlap"]

    def summed(values: Array) -> Array:
        out = np.zeros((len(rows), *values.shape[1:]))
        np.add.at(out, probe.row, values)
        return out

    sums: dict[str, Any] = {name: summed(reached * values) for name, values in numbers.items()}
    if greedy:
        # A greedy draft's distribution has all its mass at one token.
        sums |= {"overlap": summed(accepted), "draft_entropy": np.zeros_like(sums["draft_entropy"])}
    return Measured(
        tasks=tuple(row.task for row in rows),
        cycles=summed(np.ones(len(probe.row))),
        tokens=summed(1 + accepted.sum(1)),
        reached=summed(reached),
        accepted=summed(accepted),
        **sums,
    )
