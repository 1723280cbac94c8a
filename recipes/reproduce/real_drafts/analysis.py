"""Numbers of the rules about drafts, from the chains of the evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bebop.adaptation.probe import Probe
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real.arms import Arm, Measured, each, evaluated, heads, looked_at
from recipes.reproduce.real.effects import Statistic, mean_of
from recipes.reproduce.real.evaluation import TOP_P, drafts_path, read_drafts
from recipes.reproduce.real.looks import Drafts
from recipes.reproduce.real_drafts.findings import HEADS, INSIDE, TEMPERATURES, at
from recipes.reproduce.real_drafts.sides import DRAFTS, SHARES, WORTHS, acceptance, kinds_won

TRUNCATED = " under top-p"  # suffix of the numbers of truncated distributions
ENDS = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Evaluations of the heads of one loss.

    ``by`` has their chains by the suffix of the numbers' names, "" at temperature 1. ``cold`` has those at draft
    temperatures.
    """

    by: Mapping[str, Arm[Probe]]
    cold: Arm[Drafts]

    @property
    def plain(self) -> Arm[Probe]:
        """Return the chains at temperature 1."""
        return self.by[""]


Results = Mapping[str, Looks]


def read(place: Path) -> Results:
    """Read the evaluations of all heads that the rules need.

    Raises:
        UserError: No head was evaluated, or not all on the same chains.
    """
    found = {name: looks(place, name) for name in HEADS}
    every = [one for each in found.values() for arm in each.by.values() for one in arm.values()]
    looked_at(place, every, HEADS)
    return found


def looks(place: Path, name: str) -> Looks:
    """Read the chains of one loss's heads."""
    samplings = {at(t): Sampling(temperature=t) for t in TEMPERATURES} | {TRUNCATED: Sampling(target_top_p=TOP_P)}
    by = {which: heads(place, name, sampling=sampling) for which, sampling in samplings.items()}
    paths = {seed: drafts_path(place, f"{name}-{seed}") for seed in evaluated(place, name)}
    return Looks(by=by, cold={seed: read_drafts(path) for seed, path in paths.items() if path.is_file()})


def accepted_at(cold: Arm[Drafts], temperature: float) -> Arm[Statistic]:
    """Return the accept length with drafts at a temperature of their own."""

    def length(drafts: Drafts) -> Statistic:
        place = np.unique(drafts.row, return_inverse=True)[1]
        accept = drafts.accept[:, drafts.temperatures.index(temperature)]
        sums = np.stack([np.bincount(place, accept), np.bincount(place).astype(float)], 1)
        return Statistic(sums, lambda s: s[:, 0] / s[:, 1])

    return each({seed: one for seed, one in cold.items() if temperature in one.temperatures}, length)


def measure(results: Results, place: Path) -> Measured:
    """Return the numbers and facts that the rules of ``findings.py`` need."""
    told = Measured()
    for head, looks in results.items():
        told.curves(place, head)
        by_acceptance(told, head, looks)
        by_position(told, head, looks)
        by_draft_temperature(told, head, looks)
    every = [one for looks in results.values() for one in looks.plain.values()]
    if every:
        told.facts["kinds"] = f"{len(np.unique(every[0].task))} kinds"
    return told


def by_acceptance(told: Measured, head: str, looks: Looks) -> None:
    """Add acceptance of both kinds of draft at every temperature and under top-p, and their accept lengths."""
    for which, arm in looks.by.items():
        sampled, greedy = (each(arm, acceptance(drafts)) for drafts in DRAFTS)
        told.arm(f"{head}, sampled{which}", sampled)
        told.arm(f"{head}, greedy{which}", greedy)
        told.difference(f"{head}, advantage{which}", sampled, greedy)
    for drafts in DRAFTS:
        cut, whole = (each(arm, acceptance(drafts)) for arm in (looks.by[TRUNCATED], looks.plain))
        told.difference(f"{head}, {drafts}, top-p - full", cut, whole)
    lengths = [each(looks.plain, what) for what in LENGTHS.values()]
    told.arm(f"{head}, accept length", lengths[0])
    told.difference(f"{head}, tokens", *lengths)


LENGTHS = {
    "sampled": lambda chains: mean_of(chains, chains.accept),
    "greedy": lambda chains: mean_of(chains, chains.accept_greedy),
}


def by_position(told: Measured, head: str, looks: Looks) -> None:
    """Add the shares of positions and of kinds of prompts on each side, and the gain of choosing by position."""
    for name, what in {**SHARES, "kinds": kinds_won, **WORTHS}.items():
        told.arm(f"{head}, {name}", each(looks.plain, what))


def by_draft_temperature(told: Measured, head: str, looks: Looks) -> None:
    """Add the accept length at every draft temperature, and its difference to both ends."""
    arms = {t: accepted_at(looks.cold, t) for t in (*INSIDE, *ENDS)}
    for t, arm in arms.items():
        told.arm(f"{head}, draft at {t}", arm)
    for t in INSIDE:
        for end in ENDS:
            told.difference(f"{head}, draft at {t} - at {end}", arms[t], arms[end])
