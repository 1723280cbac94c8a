"""Numbers of the rules, facts and tables, computed from the runs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bebop.metrics.intervals import Interval
from recipes.reproduce.certificate.clean import share_beyond
from recipes.reproduce.certificate.findings import CASES, HARMLESS, Case
from recipes.reproduce.certificate.jobs import BESIDE, Everything
from recipes.reproduce.certificate.runs import Look
from recipes.reproduce.measured import Number, of


def exactly(count: float) -> Number:
    """Return a number without error: a count, or a share of everything that there was."""
    return Number(value=float(count), low=float(count), high=float(count))


def rule_numbers(results: Everything) -> dict[str, Number]:
    """Return the numbers that the rules test."""
    found = {f"found, {one.name}": exactly(sum(r.found is not None for r in results.faults[one.name])) for one in CASES}
    highest = np.concatenate([one.highest for one in results.simulated])
    found["alarms, simulated"] = exactly(int((highest >= np.log(1e4)).sum()))
    found["share beyond 20, simulated"] = of(Interval(*share_beyond(highest, 20)))
    found["alarms, live"] = exactly(alarms(results, "none"))
    found |= {f"alarms, {kind}": exactly(alarms(results, kind)) for kind in HARMLESS}
    found["named, all"] = exactly(named(results, CASES))
    return found


def facts(results: Everything) -> dict[str, Any]:
    """Return the facts that evidence quotes beside the numbers."""
    told: dict[str, Any] = {}
    for one in CASES:
        looks = results.faults[one.name]
        told[f"runs, {one.name}"] = f"{sum(r.found is not None for r in looks)} of {len(looks)}"
        told[f"tokens, {one.name}"] = round(float(np.median([r.found or one.budget for r in looks])))
        told[f"causes, {one.name}"] = causes(looks) or "none"
    highest = np.concatenate([one.highest for one in results.simulated])
    proved = int((highest >= np.log(1e4)).sum())
    told |= {"runs, simulated": f"{proved} of {len(highest)}", "highest, simulated": f"{highest.max():.1f}"}
    pairs = results.live["none"]
    told["highest, live"] = f"{max(look.highest for pair in pairs for look in pair):.1f}"
    for kind in ("none", *HARMLESS):
        runs = results.live[kind]
        told[f"runs, {kind}"] = f"{alarms(results, kind)} of {len(runs)}"
        told[f"acceptance, {kind}"] = f"{np.mean([look.acceptance for look, _ in runs]):.2f}"
    for box in ("black", "white"):
        told[f"named in, {box}"] = f"{named(results, [one for one in CASES if one.box == box]):.2f}"
    told["named in, all"] = f"{named(results, CASES):.2f}"
    return told


def alarms(results: Everything, kind: str) -> int:
    """Return the number of runs in which either box raised an alarm."""
    return sum(any(look.alarm for look in pair) for pair in results.live[kind])


def named(results: Everything, cases: Sequence[Case]) -> float:
    """Return the share of runs that found a fault and named one of its right causes, among those that found one."""
    right = [r.cause in one.causes for one in cases for r in results.faults[one.name] if r.found is not None]
    return float(np.mean(right)) if right else float("nan")


def causes(looks: Sequence[Look]) -> str:
    """Return the causes named by runs that found something, with counts."""
    counts = Counter(look.cause for look in looks if look.found is not None)
    return ", ".join(f"{name} {count}" if count > 1 else name for name, count in counts.most_common())


def tables(results: Everything) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the study."""
    return {
        "Planted faults: black box": [line(one, results.faults[one.name]) for one in CASES if one.box == "black"],
        "Planted faults: white box": [line(one, results.faults[one.name]) for one in CASES if one.box == "white"],
        "Filtered stops without a bar": [line(one, results.beside[one.name]) for one in BESIDE],
        "Simulated runs without a fault": [
            {
                "T": one.heat,
                "runs": len(one.highest),
                "tokens of each": one.tokens,
                "highest ln E": round(float(one.highest.max()), 2),
                "reached 20": int((one.highest >= np.log(20)).sum()),
                "reached 10,000": int((one.highest >= np.log(1e4)).sum()),
            }
            for one in results.simulated
        ],
        "Live runs that should raise no alarm": [
            harmless(kind, heat, [p for p in results.live[kind] if p[0].planted.heat == heat])
            for kind in ("none", *HARMLESS)
            for heat in (1.0, 2.0)
            if any(p[0].planted.heat == heat for p in results.live[kind])
        ],
    }


def line(one: Case, looks: Sequence[Look]) -> dict[str, Any]:
    """Return the row of a case: how soon each of its runs found it."""
    return {
        "fault": one.kind,
        "size": one.size,
        "T": one.heat,
        "budget": one.budget,
        "found": f"{sum(r.found is not None for r in looks)} of {len(looks)}",
        "tokens": ", ".join(
            "-" if n is None else str(n) for n in sorted((r.found for r in looks), key=lambda n: n or 1e9)
        ),
        "cause": causes(looks),
        "strongest direction": Counter(r.strongest[0][0] for r in looks).most_common(1)[0][0],
    }


def harmless(kind: str, heat: float, pairs: Sequence[tuple[Look, Look]]) -> dict[str, Any]:
    """Return the row of the runs at one temperature, under both boxes."""
    return {
        "planted": kind,
        "T": heat,
        "runs": len(pairs),
        "tokens of each": round(float(np.mean([outside.tokens for outside, _ in pairs]))),
        "highest ln E, black box": round(max(outside.highest for outside, _ in pairs), 2),
        "highest ln E, white box": round(max(inside.highest for _, inside in pairs), 2),
        "accepted drafts": round(float(np.mean([outside.acceptance for outside, _ in pairs])), 3),
    }
