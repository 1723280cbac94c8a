"""Comparison of timed rounds on a GPU with their prediction."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recipes.reproduce.measured import Number, of
from recipes.reproduce.real_pays import analysis
from recipes.reproduce.real_pays.analysis import accept_length, break_even, cycle, over_rounds
from recipes.reproduce.real_pays.rounds import LENGTHS, Round, Rounds

Predicted = Mapping[int, Mapping[int, float]]  # seconds of a cycle by batch size and number of drafts; 0: a plain step


def beside_prediction(one: Round, seconds: Mapping[int, float]) -> float:
    """Return measured over predicted speed-up - 1, averaged over K.

    Both speed-ups use the measured accept length.
    """
    costs = {k: seconds[k] / seconds[0] for k in LENGTHS}
    return float(np.mean([costs[k] / cycle(one, ("bebop", k)) for k in LENGTHS])) - 1


def numbers(found: Rounds, predicted: Predicted) -> dict[str, Number]:
    """Return the numbers of the rules by name."""
    by_name = analysis.numbers(found)
    for batch, rounds in found.items():
        beside = over_rounds(rounds, lambda one, seconds=predicted[batch]: beside_prediction(one, seconds))  # type: ignore[misc]
        step = over_rounds(rounds, lambda one: 1e3 * one.costs.step)
        by_name |= {
            f"batch {batch}: beside prediction": of(beside, len(rounds)),
            f"batch {batch}: plain step, ms": of(step, len(rounds)),
        }
    return by_name


def facts(found: Rounds, predicted: Predicted) -> dict[str, object]:
    """Return the facts that the evidence of the rules states: best K and predicted step of each batch size."""
    steps = {f"batch {batch}: predicted step, ms": f"{1e3 * predicted[batch][0]:.2f}" for batch in found}
    return analysis.facts(found) | steps


def prediction_table(found: Rounds, predicted: Predicted) -> list[dict[str, Any]]:
    """Return one line per batch size and number of drafts: predicted and measured costs of passes."""
    return [_line(batch, rounds, predicted[batch], k) for batch, rounds in found.items() for k in LENGTHS]


def _line(batch: int, rounds: Sequence[Round], seconds: Mapping[int, float], k: int) -> dict[str, Any]:
    arm = ("bebop", k)
    return {
        "batch": batch,
        "K": k,
        "plain step, ms": over_rounds(rounds, lambda one: 1e3 * one.costs.step),
        "predicted, ms": 1e3 * seconds[0],
        "passes of a cycle, plain steps": over_rounds(rounds, lambda one: break_even(one, k)),
        "whole cycle": over_rounds(rounds, lambda one: cycle(one, arm)),
        "predicted": seconds[k] / seconds[0],
        "accept length": accept_length(rounds, arm),
        "x plain, prefill left out": over_rounds(rounds, lambda one: analysis.decoding_ratio(one, arm)),
        "x predicted": over_rounds(rounds, lambda one: one.timed[arm].accept_length * seconds[0] / seconds[k]),
    }
