"""Results of an adaptation as numbers with intervals: the source of the card, the page and ``results.json``."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bebop.adaptation.evaluation import Measured, change
from bebop.adaptation.probe import Probe
from bebop.metrics.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Measurements of one head on the held-out prompts."""

    decoded: dict[str, Measured]  # decoding system -> statistics of its decoding
    probe: Probe  # token by token, on the same text for every snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Measurements before and after training, and the sizes and times of the training."""

    before: Snapshot
    after: Snapshot
    rows: int  # sequences to train on
    tokens: int  # completion tokens in them
    repeated: int  # evaluation prompts that training has too: trajectories of an environment may begin alike
    steps: int
    fresh: bool  # whether the head was newly initialized, not loaded from the checkpoint
    estimated: bool = False  # whether acceptance was computed on completions, not measured by decoding
    seconds: dict[str, float]  # phase -> duration

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: every interval as value, low, high."""
        snapshots = {"before": self.before, "after": self.after}
        systems = {
            name: {
                when: {key: _plain(i) for key, i in snapshot.decoded[name].summary().items()}
                for when, snapshot in snapshots.items()
            }
            | {"change": {key: _plain(self.change(name, key)) for key in ("accept_length", "accepted", "overlap")}}
            for name in self.after.decoded
        }
        tasks = {
            task: {when: _plain(s.decoded["bebop"].of(task).interval("accept_length")) for when, s in snapshots.items()}
            for task in dict.fromkeys(self.after.decoded["bebop"].tasks)
        }
        boundary = {when: _plain(boundary_share(s.probe)) for when, s in snapshots.items()}
        sizes = {"rows": self.rows, "tokens": self.tokens, "steps": self.steps, "fresh": self.fresh}
        sizes |= {"held_out": self.prompts - self.repeated, "repeated": self.repeated}
        return {
            "systems": systems,
            "accept_length_by_task": tasks,
            "sampled_beats_greedy": boundary,
            **sizes,
            "estimated": self.estimated,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        """Return a table for the terminal: accept length and acceptance before and after."""
        lines = [f"{'':32}{'before':>22} {'after':>22} {'change':>22}"]
        for system in self.after.decoded:
            for name, label in (("accept_length", "accept length"), ("accepted", "acceptance per draft")):
                pair = (s.decoded[system].interval(name) for s in (self.before, self.after))
                cells = (*pair, self.change(system, name))
                lines.append(f"{system + ' ' + label:32}" + " ".join(f"{cell!s:>22}" for cell in cells))
        return "\n".join(lines) + "\n"

    @property
    def prompts(self) -> int:
        """Return the number of prompts that acceptance was measured on."""
        return len(self.after.decoded["bebop"].tasks)

    def held_out(self) -> str:
        """Return a description of the prompts that acceptance was measured on."""
        if not self.repeated:
            return f"{self.prompts} held-out prompts"
        return (
            f"{self.prompts} prompts ({self.prompts - self.repeated} held out, {self.repeated} that training has too)"
        )

    def change(self, system: str, name: str) -> Interval:
        """Return how much a number of ``Measured.ratio_of`` rose, on the same prompts."""
        return change(self.after.decoded[system], self.before.decoded[system], name)


def boundary_share(probe: Probe) -> Interval:
    """Return the share of tokens (step 1) where a sampled draft is accepted more often than a greedy one (SPEC 1.2)."""
    better = probe.numbers["overlap"][:, 0] > probe.numbers["target_only"][:, 0]
    return probe.mean(better.astype(float))


def _plain(interval: Interval) -> dict[str, float]:
    return dataclasses.asdict(interval)
