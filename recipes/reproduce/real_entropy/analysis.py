"""Numbers of the rules about entropy, from the chains of the evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bebop.adaptation.probe import Probe
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real.arms import Arm, Measured, each, heads, looked_at
from recipes.reproduce.real.effects import Statistic, accept_length, mean_of
from recipes.reproduce.real.evaluation import TEMPERATURES
from recipes.reproduce.real.slopes import (
    ENTROPY,
    bend,
    between_prompts,
    between_tokens,
    correlation,
    over_points,
    over_temperatures,
    r_squared,
    temperature_points,
    tenth_points,
    told_by,
)

HEADS = ("hard_ce", "ce", "e2e_tv")
DRAFTS = {"greedy": "target_only", "sampled": "overlap"}  # probability that accepts each kind of draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Evaluations of the heads of one loss: their chains at temperature 1, and at every temperature.

    ``swept`` has only the seeds that were evaluated at all temperatures.
    """

    plain: Arm[Probe]
    swept: Arm[Sequence[Probe]]


Results = Mapping[str, Looks]


def read(place: Path) -> Results:
    """Read the evaluations of all heads that the rules need.

    Raises:
        UserError: No head was evaluated, or not all on the same chains.
    """
    found = {name: looks(place, name) for name in HEADS}
    every = [
        one for each in found.values() for one in (*each.plain.values(), *(p for s in each.swept.values() for p in s))
    ]
    looked_at(place, every, HEADS)
    return found


def looks(place: Path, name: str) -> Looks:
    """Read the chains of one loss's heads."""
    by_temperature = [heads(place, name, sampling=Sampling(temperature=t)) for t in TEMPERATURES]
    seeds = sorted(set.intersection(*(set(arm) for arm in by_temperature)))
    return Looks(plain=heads(place, name), swept={seed: [arm[seed] for arm in by_temperature] for seed in seeds})


def slopes(looks: Looks, drafts: str) -> dict[str, Arm[Statistic]]:
    """Return the slopes of acceptance of one kind of draft on the target's entropy, over each kind of points."""
    name = DRAFTS[drafts]
    return {
        "temperatures": each(looks.swept, lambda sweep: over_temperatures(sweep, name)),
        "prompts": each(looks.plain, lambda chains: between_prompts(chains, name)),
        "tokens": each(looks.plain, lambda chains: between_tokens(chains, name)),
    }


def straightness(looks: Looks, drafts: str) -> dict[str, Arm[Statistic]]:
    """Return R squared and bend of the points over temperatures and over tenths of tokens, by name."""
    name, found = DRAFTS[drafts], {}
    for label, number in {"R squared": r_squared, "bend": bend}.items():
        found[f"{label}, {drafts}, temperatures"] = {
            seed: over_points(temperature_points(sweep, name), number) for seed, sweep in looks.swept.items()
        }
        found[f"{label}, {drafts}, tokens"] = {
            seed: over_points(tenth_points(chains, name), number) for seed, chains in looks.plain.items()
        }
    return found


def entropy(looks: Looks, side: str) -> Arm[Statistic]:
    """Return the mean entropy of draft or target at temperature 1, nats, over all contexts and positions."""
    return each(looks.plain, lambda chains: mean_of(chains, chains.numbers[f"{side}_entropy"]))


def measure(results: Results, place: Path) -> Measured:
    """Return the numbers and facts that the rules of ``findings.py`` need."""
    told = Measured()
    for head, looks in results.items():
        told.curves(place, head)
        told.arm(f"{head}, accept length", each(looks.plain, accept_length))
        for drafts in DRAFTS:
            for way, statistics in slopes(looks, drafts).items():
                told.arm(f"{head}, {drafts}, {way}", statistics)
        told.arm(f"{head}, draft entropy", entropy(looks, "draft"))
        told.difference(f"{head}, draft - target entropy", entropy(looks, "draft"), entropy(looks, "target"))
        told.arm(
            f"{head}, correlation of entropies", each(looks.plain, lambda c: correlation(c, ENTROPY, "draft_entropy"))
        )
        by = {side: each(looks.plain, partial(told_by, x=f"{side}_entropy")) for side in ("draft", "target")}
        for side, statistics in by.items():
            told.arm(f"{head}, told by {side}", statistics)
        told.difference(f"{head}, told by draft - target", by["draft"], by["target"])
    for drafts in DRAFTS:
        for name, statistics in straightness(results["ce"], drafts).items():
            told.arm(name, statistics)
    told.difference("e2e_tv - ce, draft entropy", entropy(results["e2e_tv"], "draft"), entropy(results["ce"], "draft"))
    return told
