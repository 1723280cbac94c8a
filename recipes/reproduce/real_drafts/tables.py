"""Tables of the study on drafts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bebop.adaptation.probe import Probe
from recipes.reproduce.real.arms import Arm, each, interval, of_arm, of_difference
from recipes.reproduce.real_drafts.analysis import ENDS, LENGTHS, Looks, Results, accepted_at
from recipes.reproduce.real_drafts.findings import INSIDE
from recipes.reproduce.real_drafts.sides import DRAFTS, SHARES, WORTHS, acceptance, kinds_won

Line = dict[str, Any]
PLACES = (ENDS[0], *INSIDE, ENDS[1])  # temperatures of the draft alone


def tables(results: Results) -> Mapping[str, list[Line]]:
    """Return all tables by title."""
    there = {head: looks for head, looks in results.items() if looks.plain}
    found = {
        "Sampled and greedy drafts": [
            {"head": head, "at": name(which), **both(arm)}
            for head, looks in there.items()
            for which, arm in looks.by.items()
            if arm
        ],
        "Positions, kinds of prompts and choices, temperature 1": [
            {"head": head, **positions(looks)} for head, looks in there.items()
        ],
        "By position in the chain, temperature 1": [
            {"head": head, "position": k + 1, **both(at_step(looks.plain, k))}
            for head, looks in there.items()
            for k in range(depth(looks))
        ],
        "By kind of prompt, temperature 1: sampled minus greedy": [
            {"kind": kind} | {head: by_kind(looks.plain, kind)["sampled - greedy"] for head, looks in there.items()}
            for kind in kinds(there)
        ],
        "Accept length by the draft's own temperature": [
            {"head": head} | {f"{t:g}": interval(of_arm(accepted_at(looks.cold, t))) for t in PLACES}
            for head, looks in there.items()
            if looks.cold
        ],
    }  # fmt: skip
    return {title: lines for title, lines in found.items() if lines}


def name(which: str) -> str:
    """Return the table's name of a temperature or truncation."""
    return which.removeprefix(" at ").strip() or "1.0"


def depth(looks: Looks) -> int:
    """Return the number of steps of a chain."""
    return int(next(iter(looks.plain.values())).numbers["overlap"].shape[1])


def kinds(results: Results) -> list[str]:
    """Return the kinds of all prompts, sorted."""
    return sorted({str(kind) for looks in results.values() for one in looks.plain.values() for kind in one.task})


def both(arm: Arm[Probe]) -> Line:
    """Return acceptance of both kinds of draft, and their difference."""
    sampled, greedy = (each(arm, acceptance(drafts)) for drafts in DRAFTS)
    return {
        "sampled": interval(of_arm(sampled)), "greedy": interval(of_arm(greedy)),
        "sampled - greedy": interval(of_difference(sampled, greedy)),
    }  # fmt: skip


def positions(looks: Looks) -> Line:
    """Return shares of positions and kinds, the gains of choices, and the accept length with either kind of draft."""
    line: Line = {}
    for label, what in {**SHARES, "kinds": kinds_won, **WORTHS}.items():
        line[label] = interval(of_arm(each(looks.plain, what)))
    for drafts, length in LENGTHS.items():
        line[f"accept length, {drafts}"] = interval(of_arm(each(looks.plain, length)))
    return line


def at_step(arm: Arm[Probe], k: int) -> Arm[Probe]:
    """Return the chains with one of their steps alone."""
    return {seed: only(one, np.arange(one.numbers["overlap"].shape[1]) == k) for seed, one in arm.items()}


def by_kind(arm: Arm[Probe], kind: str) -> Line:
    """Return acceptance of both kinds of draft, and their difference, for the prompts of a kind."""
    return both({seed: only(one, (one.task == kind)[:, None]) for seed, one in arm.items()})


def only(chains: Probe, chosen: Any) -> Probe:
    """Return the chains with NaN at all steps but the chosen ones, which removes these steps."""
    rows = np.broadcast_to(chosen, chains.numbers["overlap"].shape)
    kept = rows.any(1)
    numbers = {of: np.where(rows, values, np.nan)[kept] for of, values in chains.numbers.items()}
    return Probe(
        row=chains.row[kept], place=chains.place[kept], task=chains.task[kept], numbers=numbers,
        accept=chains.accept[kept], accept_greedy=chains.accept_greedy[kept],
    )  # fmt: skip
