"""What an adaptation found, as numbers with intervals: what card, page and ``results.json`` are written from."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bebop.adaptation.evaluation import Measured, change
from bebop.adaptation.probe import Probe
from bebop.metrics.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A head as it was measured on the held-out prompts."""

    decoded: dict[str, Measured]  # decoding system -> what its decoding gave
    probe: Probe  # token by token, on the same text for every snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Before and after, and what lies between."""

    before: Snapshot
    after: Snapshot
    rows: int  # sequences to train on
    tokens: int  # completion tokens in them
    repeated: int  # prompts measured on that training has as well: how all trajectories of an environment may begin
    steps: int
    fresh: bool  # whether the head began anew instead of coming with the checkpoint
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
        """Return how many prompts acceptance was measured on."""
        return len(self.after.decoded["bebop"].tasks)

    def held_out(self) -> str:
        """Return what acceptance was measured on, in words."""
        if not self.repeated:
            return f"{self.prompts} held-out prompts"
        return (
            f"{self.prompts} prompts ({self.prompts - self.repeated} held out, {self.repeated} that training has too)"
        )

    def change(self, system: str, name: str) -> Interval:
        """Return how much a number of ``Measured.ratio_of`` rose, on the same prompts."""
        return change(self.after.decoded[system], self.before.decoded[system], name)


def boundary_share(probe: Probe) -> Interval:
    """Share of tokens (step 1) at which a sampled draft is accepted more often than a greedy one (SPEC 1.2)."""
    better = probe.numbers["overlap"][:, 0] > probe.numbers["target_only"][:, 0]
    return probe.mean(better.astype(float))


def _plain(interval: Interval) -> dict[str, float]:
    return dataclasses.asdict(interval)
