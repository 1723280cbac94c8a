"""Numbers that the rules use, and the tables of the study."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bebop.metrics.intervals import across_seeds
from bebop.systems.pad.labels import auc
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.pipo.arms import ABLATIONS, ARMS, DEFAULT, DISTILLED, MORE, SHIPPED_OPD, SHIPPED_SFT
from recipes.reproduce.pipo.decoding import Answers, Array
from recipes.reproduce.pipo.jobs import BY_CHANCE, MAIN, PROBED, SHARES, SWEPT, Measured

WHOLE, PAIRS, TOKENS = "whole answers", "equal pairs", "equal tokens"
BUDGETS = {WHOLE: ("tokens", np.inf), PAIRS: ("pairs", 56), TOKENS: ("tokens", 96)}
BINS = 10


def reward(one: Answers, budget: str = WHOLE) -> float:
    """Return the mean reward of the completions that end within a budget; longer ones count as 0."""
    of, most = BUDGETS[budget]
    return one.within(most, of)


def plain_reward(one: Measured, budget: str) -> float:
    """Return the reward of plain decoding within a budget; there a token costs one pass and fills one pair."""
    rewards, tokens = one.plain
    return float((rewards * (tokens <= BUDGETS[budget][1])).mean())


def area(one: Answers) -> float:
    """Return the AUC of the confidence against acceptance; each draft counts as accepted with its probability."""
    scores = np.concatenate([one.confidence, one.confidence])
    labels = np.repeat([True, False], len(one.confidence))
    return auc(scores, labels, np.concatenate([one.accepted, 1 - one.accepted]))


def numbers(results: Sequence[Measured]) -> dict[str, Number]:
    """Return the numbers that the rules use, over seeds; each seed has its own training runs and questions."""

    def seeds(value: Callable[[Measured], float]) -> Number:
        return over_seeds([value(one) for one in results])

    found: dict[str, Number] = {}
    for budget in BUDGETS:
        found[f"reward plain, {budget}"] = seeds(lambda m, b=budget: plain_reward(m, b))  # type: ignore[misc]
        for arm in ARMS:
            found[f"reward {arm}, {budget}"] = seeds(lambda m, a=arm, b=budget: reward(m.answers[a, MAIN], b))  # type: ignore[misc]
        for arm, base in compared():
            found[f"{arm} - {base}, {budget}"] = seeds(
                lambda m, a=arm, o=base, b=budget: reward(m.answers[a, MAIN], b) - reward(m.answers[o, MAIN], b)  # type: ignore[misc]
            )
    for arm, base in compared():
        found[f"pad ratios apart, {arm} and {base}"] = seeds(
            lambda m, a=arm, o=base: abs(m.answers[a, MAIN].pad_ratio - m.answers[o, MAIN].pad_ratio)  # type: ignore[misc]
        )
    gates: dict[str, Callable[[Answers], float]] = {
        "reward": reward, "pad ratio": lambda a: a.pad_ratio, "variation": lambda a: a.variation,
    }  # fmt: skip
    for name, value in gates.items():
        both = {
            label: [np.mean([value(m.answers[arm, s]) for s in SHARES[1:-1]]) for m in results]
            for label, arm in (("confidence", DISTILLED), ("random", BY_CHANCE))
        }
        found |= {f"{name} of {label}": over_seeds(values) for label, values in both.items()}
        found[f"{name}, confidence - random"] = over_seeds(np.subtract(both["confidence"], both["random"]))
    found["confidence - random"] = found.pop("reward, confidence - random")
    found["shipped tokens"] = seeds(lambda m: m.shipped.tokens_per_pair)
    found["shipped reward"] = seeds(lambda m: reward(m.shipped))
    found["first token"] = seeds(lambda m: float(np.median(m.first[:, 0] / m.first[:, 1])))
    for arm in SWEPT:
        found[f"confidence less acceptance, {arm}"] = seeds(lambda m, a=arm: bias(m.answers[a, MAIN]))  # type: ignore[misc]
        found[f"AUC, {arm}"] = seeds(lambda m, a=arm: area(m.answers[a, MAIN]))  # type: ignore[misc]
    everything = [a for m in results for a in (*m.answers.values(), m.shipped)]
    pads = sum(a.pads for a in everything) + sum(m.short[0] for m in results)
    answers = sum(len(a.reward) for a in everything) + sum(m.short[1] for m in results)
    for name, total in (("pads", pads), ("answers", answers)):
        found[name] = Number(value=total, low=total, high=total)
    return found


def compared() -> list[tuple[str, str]]:
    """Return the pairs of arms whose rewards are compared."""
    ablations = [(DEFAULT, arm) for arm in ABLATIONS]
    return [(DISTILLED, DEFAULT), (DISTILLED, MORE), (SHIPPED_OPD, SHIPPED_SFT), *ablations]


def bias(one: Answers) -> float:
    """Return the mean confidence minus the mean probability of acceptance at the same places."""
    return float(one.confidence.mean() - one.overlap.mean())


def reliability(many: Sequence[Answers]) -> list[tuple[float, float, int]]:
    """Return mean confidence, mean overlap and number of drafts in each bin of confidence."""
    said, true = (np.concatenate([getattr(a, name) for a in many]) for name in ("confidence", "overlap"))
    places = np.minimum((said * BINS).astype(int), BINS - 1)
    held: list[Array] = [places == i for i in range(BINS)]
    return [(float(said[h].mean()), float(true[h].mean()), int(h.sum())) for h in held if h.sum() > BINS]


# ---- tables


def tables(results: Sequence[Measured]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the study."""
    keys = list(results[0].answers)
    return {
        "Reward by budget": [
            budget_row("plain decoding", lambda m, b: plain_reward(m, b), results),
            *(budget_row(arm, lambda m, b, a=arm: reward(m.answers[a, MAIN], b), results) for arm in ARMS),  # type: ignore[misc]
        ],
        "Gates": [gate_row(results, *key) for key in keys if key[0] in (*SWEPT, BY_CHANCE)],
        "Networks, at 35 % of the drafts dropped": [network_row(results, arm) for arm in ARMS],
        "The shipped network": [shipped_row(results)],
        "The compressor": [probe_row(results, arm) for arm in PROBED],
    }


def budget_row(arm: str, value: Callable[[Measured, str], float], results: Sequence[Measured]) -> dict[str, Any]:
    """Return the reward of one arm by budget; at equal pairs, plain decoding has one token per pair."""
    return {"arm": arm, **{budget: across_seeds([value(m, budget) for m in results]) for budget in BUDGETS}}


def gate_row(results: Sequence[Measured], arm: str, share: float) -> dict[str, Any]:
    """Return the row of one network with one gate."""
    own = [m.answers[arm, share] for m in results]

    def mean(value: Callable[[Answers], float]) -> Any:
        return across_seeds([value(one) for one in own])

    return {
        "arm": arm, "drafts dropped": share, "tau": mean(lambda a: a.tau) if arm != BY_CHANCE else "",
        "pad ratio": mean(lambda a: a.pad_ratio), "tokens a pair": mean(lambda a: a.tokens_per_pair),
        "reward": mean(reward), "pairs of an answer": mean(lambda a: a.pairs.mean()),
        "TV to the teacher": mean(lambda a: a.variation),
    }  # fmt: skip


def network_row(results: Sequence[Measured], arm: str) -> dict[str, Any]:
    """Return the row of one network: its quality of prediction, and the quality of its confidence."""
    own = [m.answers[arm, MAIN] for m in results]

    def mean(value: Callable[[Answers], float]) -> Any:
        return across_seeds([value(one) for one in own])

    return {
        "arm": arm, "reward": mean(reward), "pad ratio": mean(lambda a: a.pad_ratio),
        "KL to the teacher": mean(lambda a: a.divergence), "TV": mean(lambda a: a.variation),
        "entropy, first": mean(lambda a: a.entropies[0]), "entropy, second": mean(lambda a: a.entropies[1]),
        "confidence": mean(lambda a: a.confidence.mean()), "1 - TV of drafts": mean(lambda a: a.overlap.mean()),
        "AUC": mean(area),
    }  # fmt: skip


def shipped_row(results: Sequence[Measured]) -> dict[str, Any]:
    """Return the row of the shipped network, at its own threshold, on the questions of all seeds."""
    own = [m.shipped for m in results]
    milliseconds = [1e3 * np.median(m.first, 0) for m in results]
    return {
        "reward": across_seeds([reward(a) for a in own]),
        "tokens a pair": across_seeds([a.tokens_per_pair for a in own]),
        "TV to the teacher": across_seeds([a.variation for a in own]),
        "AUC": across_seeds([area(a) for a in own]),
        "plain, ms to the first token": across_seeds([m[0] for m in milliseconds]),
        "in pairs, ms": across_seeds([m[1] for m in milliseconds]),
    }


def probe_row(results: Sequence[Measured], arm: str) -> dict[str, Any]:
    """Return the compressor measurements of an arm."""
    names = results[0].probes[arm]
    return {"arm": arm, **{name: across_seeds([m.probes[arm][name] for m in results]) for name in names}}
