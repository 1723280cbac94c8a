"""Tables and numbers of the rules, computed from timed rounds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce.measured import Number, of
from recipes.reproduce.real_pays.rounds import ARMS, DRAFTING, LENGTHS, PLAIN, Arm, Round, Rounds
from recipes.reproduce.throughput.analysis import minus_one


def over_rounds(rounds: Sequence[Round], number: Callable[[Round], float]) -> Interval:
    """Return the mean of a number over rounds, with the interval of Student's t."""
    return across_seeds([number(one) for one in rounds])


def best_length(rounds: Sequence[Round], system: str) -> int:
    """Return the number of drafts with the highest mean speed-up."""
    return max(DRAFTING[system], key=lambda k: float(np.mean([one.ratio((system, k)) for one in rounds])))


def chosen(rounds: Sequence[Round], system: str) -> list[Arm]:
    """Return for each round the arm whose number of drafts was best in the other rounds."""
    return [(system, best_length([*rounds[:i], *rounds[i + 1 :]], system)) for i in range(len(rounds))]


def at_best(rounds: Sequence[Round], system: str, base: str | None = None) -> Interval:
    """Return the speed-up at the number of drafts of ``chosen``.

    It is over plain decoding, or over another system with its own choice.
    """
    others = chosen(rounds, base) if base else [PLAIN] * len(rounds)
    pairs = zip(rounds, chosen(rounds, system), others, strict=True)
    return across_seeds([one.ratio(arm, other) for one, arm, other in pairs])


def break_even(one: Round, drafts: int) -> float:
    """Return the accept length that pays for a cycle: the cost of its passes in plain steps."""
    return drafts * one.costs.draft + one.costs.verify[drafts]


def modelled(one: Round, arm: Arm) -> float:
    """Return the speed-up predicted from the accept length and the costs of single passes."""
    return one.timed[arm].accept_length / break_even(one, arm[1])


def decoding_ratio(one: Round, arm: Arm) -> float:
    """Return the speed-up over plain decoding with prefill left out of both."""

    def alone(which: Arm) -> float:
        return one.timed[which].speed / (1 - one.timed[which].shares.get("prefill", 0.0))

    return alone(arm) / alone(PLAIN)


def beside_model(one: Round) -> float:
    """Return measured over modelled speed-up - 1, averaged over the arms that draft."""
    return float(np.mean([decoding_ratio(one, arm) / modelled(one, arm) for arm in ARMS[1:]])) - 1


def accept_length(rounds: Sequence[Round], arm: Arm) -> Interval:
    """Return the accepted drafts per cycle + 1."""
    return over_rounds(rounds, lambda one: one.timed[arm].accept_length)


def numbers(found: Rounds) -> dict[str, Number]:
    """Return the numbers of the rules by name."""
    largest = found[max(found)]
    by_name = {"accept length": of(accept_length(largest, ("bebop", max(LENGTHS))), len(largest))}
    for batch, rounds in found.items():
        length = best_length(rounds, "bebop")
        intervals = {
            "faster": at_best(rounds, "bebop"),
            "sampled / greedy - 1": minus_one(at_best(rounds, "bebop", "target_only")),
            "beside model": over_rounds(rounds, beside_model),
            "accept length at best K": accept_length(rounds, ("bebop", length)),
            "break-even": over_rounds(rounds, lambda one, length=length: break_even(one, length)),  # type: ignore[misc]
        }
        by_name |= {f"batch {batch}: {name}": of(interval, len(rounds)) for name, interval in intervals.items()}
    return by_name


def facts(found: Rounds) -> dict[str, object]:
    """Return the facts that the evidence of the rules states: the best K of each batch size."""
    return {f"batch {batch}: best K": best_length(rounds, "bebop") for batch, rounds in found.items()}


def speeds_table(found: Rounds, unit: str = "tokens per CPU second") -> list[dict[str, Any]]:
    """Return one line per batch size and arm: speed, measured and modelled speed-up, and shares of the time."""
    return [_speed(batch, rounds, arm, unit) for batch, rounds in found.items() for arm in ARMS]


def _speed(batch: int, rounds: Sequence[Round], arm: Arm, unit: str) -> dict[str, Any]:
    row: dict[str, Any] = {"batch": batch, "system": arm[0], "K": arm[1]}
    row |= {unit: float(np.mean([one.timed[arm].speed for one in rounds]))}
    row |= {"x plain": over_rounds(rounds, lambda one: one.ratio(arm))}
    row |= {"x plain, prefill left out": over_rounds(rounds, lambda one: decoding_ratio(one, arm))}
    row |= {"x modelled": over_rounds(rounds, lambda one: modelled(one, arm)) if arm != PLAIN else None}
    row |= {"accept length": accept_length(rounds, arm)}
    shares = {
        f"{part} %": 100 * float(np.mean([one.timed[arm].shares.get(part, 0.0) for one in rounds]))
        for part in ("prefill", "verify", "draft")
    }
    return row | shares | {"other %": 100 - sum(shares.values())}


def costs_table(found: Rounds) -> list[dict[str, Any]]:
    """Return one line per batch size and number of drafts: costs in plain steps beside the measured accept length.

    ``cycle``: the cost of a whole cycle, from the speed of decoding; an accept length of this size would have paid for
    it.
    """
    return [_costs(batch, rounds, k) for batch, rounds in found.items() for k in LENGTHS]


def _costs(batch: int, rounds: Sequence[Round], k: int) -> dict[str, Any]:
    arm: Arm = ("bebop", k)
    return {
        "batch": batch,
        "K": k,
        "a draft step": over_rounds(rounds, lambda one: one.costs.draft),
        "verification": over_rounds(rounds, lambda one: one.costs.verify[k]),
        "break-even": over_rounds(rounds, lambda one: break_even(one, k)),
        "cycle": over_rounds(rounds, lambda one: cycle(one, arm)),
        "accept length": accept_length(rounds, arm),
        "of break-even": over_rounds(rounds, lambda one: modelled(one, arm)),
        "pays": "yes" if over_rounds(rounds, lambda one: one.ratio(arm)).low > 1 else "not shown",
    }


def cycle(one: Round, arm: Arm) -> float:
    """Return the cost of a whole cycle in plain steps, prefill left out."""
    return one.timed[arm].accept_length / decoding_ratio(one, arm)


def best_table(found: Rounds) -> list[dict[str, Any]]:
    """Return one line per batch size: the speed-up at the number of drafts that was best in the other rounds."""
    return [
        {"batch": batch}
        | {f"{system}, x plain": at_best(rounds, system) for system in DRAFTING}
        | {f"{system}, K": best_length(rounds, system) for system in DRAFTING}
        for batch, rounds in found.items()
    ]
