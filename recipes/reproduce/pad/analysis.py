"""Numbers and tables of the study, computed from decoded arms and tested classifiers.

Decoding intervals are bootstraps over the prompts of all three seeds; two arms are compared on the same prompts.
Intervals of AUC and kappa are bootstraps over the labelled prompts. A table of its own shows each seed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bebop.metrics.intervals import Array, Interval, across_seeds, ratio, ratio_difference, resampled
from recipes.reproduce.measured import Number, of
from recipes.reproduce.pad.classifiers import HeldOut, agreement, difference, mean_score_bins
from recipes.reproduce.pad.controls import CONTROLS
from recipes.reproduce.pad.decoding import DRAFTERS, TAUS, Decoded, Run
from recipes.reproduce.pad.labels import TOL, Labelled, labelled, stored
from recipes.reproduce.study import SEEDS

Runs = Mapping[tuple[str, int], Run]
ARMS = ("plain", *(f"tau {tau}" for tau in TAUS), "classifier", "compared", *CONTROLS)
LABELS = {"classifier": "classifier, chosen tau", "compared": "classifier, compared tau"}


def arm(runs: Runs, drafter: str, name: str) -> list[Decoded]:
    """Return an arm's decoded prompts, seed by seed.

    ``classifier`` is at the tau that the seed chose, ``compared`` at the tau of the comparison with the controls.
    """
    chosen = [runs[drafter, seed] for seed in SEEDS]
    at = {"classifier": "tau", "compared": "compared"}
    return [run.arms[f"tau {getattr(run, at[name])}" if name in at else name] for run in chosen]


def every(decoded: Sequence[Decoded], field: str) -> Array:
    """Concatenate one field of the completions of all seeds."""
    return np.concatenate([getattr(d, field) for d in decoded])


def mean(values: Array) -> Interval:
    """Return the mean over completions, with a bootstrap interval."""
    return resampled(lambda w: (w @ values) / w.sum(1), len(values))


def accept_length(decoded: Sequence[Decoded]) -> Interval:
    """Return the tokens per cycle."""
    return ratio(every(decoded, "tokens"), every(decoded, "cycles"))


def utility_less(one: Sequence[Decoded], other: Sequence[Decoded]) -> Interval:
    """Return the difference ``one - other`` in the share of completions that succeed, prompt by prompt."""
    return mean(every(one, "success") - every(other, "success"))


def length_less(one: Sequence[Decoded], other: Sequence[Decoded]) -> Interval:
    """Return the difference ``one - other`` in accept length, on the same prompts."""
    a, b = ((every(d, "tokens"), every(d, "cycles")) for d in (one, other))
    return ratio_difference(a, b)


def share_lost(one: Sequence[Decoded], plain: Sequence[Decoded]) -> Interval:
    """Return 1 - the utility of ``one`` over the utility of plain rejection sampling."""
    a, b = every(one, "success"), every(plain, "success")
    with np.errstate(divide="ignore", invalid="ignore"):
        return resampled(lambda w: 1 - (w @ a) / (w @ b), len(a))


def rate_ratio(one: Sequence[Decoded], other: Sequence[Decoded]) -> Interval:
    """Return the override rate of one arm over that of another, with one pair per seed."""
    return across_seeds([a.rate / max(b.rate, 1e-9) for a, b in zip(one, other, strict=True)])


def numbers(runs: Runs, tests: Mapping[str, HeldOut]) -> dict[str, Number]:
    """Return the numbers that the rules use, by name."""
    found = {f"AUC {name}": of(tests[name].area()) for name in ("head", "skewed")}
    found["AUC all - scalars"] = of(difference(tests["head"], tests["head, scalars"]))
    for drafter in DRAFTERS:
        plain, classifier = arm(runs, drafter, "plain"), arm(runs, drafter, "classifier")
        found[f"{drafter}, utility plain"] = of(mean(every(plain, "success")))
        found[f"{drafter}, utility change"] = of(utility_less(classifier, plain))
        found[f"{drafter}, length change"] = of(length_less(classifier, plain))
        compared = arm(runs, drafter, "compared")
        found[f"{drafter}, compared, change"] = of(utility_less(compared, plain))
        found[f"{drafter}, compared, length change"] = of(length_less(compared, plain))
        for name in CONTROLS:
            other = arm(runs, drafter, name)
            found[f"{drafter}, classifier - {name}"] = of(utility_less(compared, other))
            found[f"{drafter}, {name}, change"] = of(utility_less(other, plain))
            found[f"{drafter}, {name}, length change"] = of(length_less(other, plain))
            found[f"{drafter}, {name}, share lost"] = of(share_lost(other, plain))
            found[f"{drafter}, {name}, rate ratio"] = of(rate_ratio(other, compared), len(SEEDS))
    return found


def decoding_table(runs: Runs, drafter: str) -> list[dict[str, Any]]:
    """Return one row per arm, with all seeds together."""
    plain, rows = arm(runs, drafter, "plain"), []
    for name in ARMS:
        own = arm(runs, drafter, name)
        totals = {f: sum(getattr(d, f) for d in own) for f in ("offered", "overridden", "next_tested", "next_accepted")}
        rows.append(
            {
                "arm": LABELS.get(name, name),
                "utility": mean(every(own, "success")),
                "change": "" if name == "plain" else utility_less(own, plain),
                "accept length": accept_length(own),
                "(change)": "" if name == "plain" else length_less(own, plain),
                "overridden, of those on offer": round(totals["overridden"] / max(1, totals["offered"]), 3),
                "accepted after an override": round(totals["next_accepted"] / max(1, totals["next_tested"]), 3),
                "R_N a draft tested": ratio(every(own, "bias").sum(1), every(own, "reached").sum(1)),
                "answer length": mean(every(own, "tokens")),
                "truncated": mean(every(own, "truncated")),
            }
        )
    return rows


def seed_table(runs: Runs, tests: Mapping[str, HeldOut]) -> list[dict[str, Any]]:
    """Return, for each drafter and seed, the tau that validation chose and its results on the test prompts."""
    rows = []
    for (drafter, seed), run in runs.items():
        plain, own = run.arms["plain"], run.arms[f"tau {run.tau}"]
        rows.append(
            {
                "drafter": drafter,
                "seed": seed,
                "tau": run.tau,
                "on validation: utility, length": "{:+.3f}, {:+.3f}".format(*run.validation[run.tau]),
                "on test: utility": utility_less([own], [plain]),
                "accept length": length_less([own], [plain]),
                "override rate": round(own.rate, 3),
                "compared at tau": run.compared,
                "rates: classifier, random": f"{run.arms[f'tau {run.compared}'].rate:.3f}, "
                f"{run.arms['random'].rate:.3f}",
                "AUC": round(tests[drafter].seed_area(seed), 3),
            }
        )
    return rows


def classifier_table(tests: Mapping[str, HeldOut]) -> list[dict[str, Any]]:
    """Return one row per classifier: its AUC and its share of pivots."""
    return [
        {
            "classifier": name,
            "AUC": test.area(),
            **{f"seed {s}": round(test.seed_area(s), 3) for s in SEEDS},
            "pivots": round(float(np.mean(np.concatenate([test.labels[s] for s in SEEDS]))), 3),
        }
        for name, test in tests.items()
    ]


def label_table() -> list[dict[str, Any]]:
    """Compare two independent label sets, and labels by other definitions, numbers of continuations and tolerances."""
    first, second = labelled("head"), stored("head_again")
    again = Labelled(rows=second, states=first.states[: len(second)])
    both = Labelled(rows=first.rows[: len(second)], states=again.states)
    rows = []
    for definition in ("paper", "residual"):
        for k, tol in ((4, TOL), (8, TOL), (12, 0.0), (12, TOL), (12, 0.2), (12, 0.3)):
            a, b = (own.losses(definition, k) > tol for own in (both, again))  # type: ignore[arg-type]
            whole = first.losses(definition, k) > tol  # type: ignore[arg-type]
            rows.append(
                {
                    "definition": definition,
                    "continuations": k,
                    "tol": tol,
                    "pivots": round(float(whole.mean()), 3),
                    "kappa of two sets": agreement(a, b, both.prompts),
                    "mean loss of a candidate": mean(first.losses(definition, k)),
                }
            )
    return rows


def calibration_table(tests: Mapping[str, HeldOut]) -> list[dict[str, Any]]:
    """Return the mean score and the share of pivots in five bins of the score."""
    return [
        {"drafts": name, "mean score": round(score, 3), "pivots": share, "candidates": count}
        for name in ("head", "skewed")
        for score, share, count in mean_score_bins(tests[name])
    ]


def facts(runs: Runs) -> dict[str, object]:
    """Return the chosen and the compared taus as text, for the evidence of the rules."""
    chosen = {f"{drafter}, taus": ", ".join(str(runs[drafter, s].tau) for s in SEEDS) for drafter in DRAFTERS}
    compared = {f"{d}, compared taus": ", ".join(str(runs[d, s].compared) for s in SEEDS) for d in DRAFTERS}
    return {**chosen, **compared}
