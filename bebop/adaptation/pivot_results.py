"""What the training of a pivot classifier found: how well it tells pivots, and how far its labels can be trusted."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bebop.intervals import Array, Interval, ratio, resampled
from bebop.trainer.pivot_labels import (
    SPLITS,
    Bools,
    Floats,
    Rollouts,
    auc,
    calibration,
    expected_calibration_error,
    kappa,
    loss_of_value,
    pivots,
)

TAUS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def auc_interval(scores: Floats, labels: Bools, prompts: Array) -> Interval:
    """AUC with its bootstrap interval over prompts."""
    names, place = np.unique(prompts, return_inverse=True)

    def statistic(weights: Array) -> Array:
        return np.array([auc(scores, labels, row[place]) for row in weights])

    return resampled(statistic, len(names))


def gained(scores: Floats, losses: Floats, prompts: Array, tau: float) -> dict[str, Any]:
    """Overriding every candidate with a score below tau: the share of them, and what each costs in utility.

    Against the recovered token, which comes otherwise; negative is a loss. Totals are resampled by prompt.
    """
    names, place = np.unique(prompts, return_inverse=True)

    def by_prompt(values: Floats) -> Floats:
        return np.asarray(np.bincount(place, weights=values, minlength=len(names)), dtype=np.float64)

    chosen = (scores < tau).astype(float)
    share, change = by_prompt(chosen), by_prompt(chosen * -losses)
    return {
        "tau": tau,
        "share": dataclasses.asdict(ratio(share, by_prompt(np.ones_like(scores)))),
        "change": dataclasses.asdict(ratio(change, share)),
    }


def rules_at(rate: float, scores: Floats, losses: Floats, p: Floats, entropy: Floats) -> dict[str, float]:
    """Mean change in utility of one override by several rules that override the same share of the candidates."""
    count = max(1, round(rate * len(scores)))
    orders = {"classifier": scores, "inverted": -scores, "probability": -p, "entropy": -entropy, "oracle": losses}
    means = {name: float(-losses[np.argsort(order, kind="stable")[:count]].mean()) for name, order in orders.items()}
    return {**means, "random": float(-losses.mean())}


def reliability(first: Sequence[Rollouts], second: Sequence[Rollouts], tol: float) -> dict[str, Any]:
    """Agreement of two independent label sets of the same candidates, by either definition; without the judge."""
    none = np.zeros(len(first), dtype=bool)
    found: dict[str, Any] = {"candidates": len(first)}
    for definition in ("paper", "residual"):
        a, b = (pivots(loss_of_value(rows, definition), tol, none) for rows in (first, second))
        found[definition] = {"kappa": kappa(a, b), "agreed": float((a == b).mean()), "pivots": float(a.mean())}
    return found


def split_results(rows: Sequence[Rollouts], scores: Floats, labels: Bools) -> dict[str, Any]:
    """Numbers of one split."""
    prompts = np.array([row.prompt for row in rows], dtype=float)
    losses = loss_of_value(rows, "residual")
    p, entropy = np.array([row.p for row in rows]), np.array([row.entropy for row in rows])
    return {
        "candidates": len(rows),
        "prompts": len(np.unique(prompts)),
        "pivots": float(labels.mean()),
        "judged": float(np.mean([row.judged for row in rows])),
        "auc": dataclasses.asdict(auc_interval(scores, labels, prompts)),
        "calibration_error": expected_calibration_error(scores, labels),
        "calibration": calibration(scores, labels),
        "taus": [gained(scores, losses, prompts, tau) for tau in TAUS],
        "rules": {str(rate): rules_at(rate, scores, losses, p, entropy) for rate in (0.1, 0.25, 0.5)},
    }


def as_text(results: dict[str, Any]) -> str:
    """What a person reads at the end."""
    lines = []
    for name in SPLITS:
        one = results["splits"][name]
        area = one["auc"]
        lines.append(
            f"{name}: {one['candidates']} candidates of {one['prompts']} prompts, {one['pivots']:.0%} pivots, "
            f"AUC {area['value']:.3f} [{area['low']:.3f}, {area['high']:.3f}], "
            f"calibration error {one['calibration_error']:.3f}"
        )
    agreed = results["reliability"]
    if agreed:
        kappas = ", ".join(f"{name} {agreed[name]['kappa']:.2f}" for name in ("paper", "residual"))
        lines.append(f"two label sets of {agreed['candidates']} candidates: kappa {kappas}")
    return "\n".join(lines) + "\n"
