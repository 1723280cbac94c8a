"""Worked solutions of reasoning-gym tasks, the text that the built-in model is trained on.

Every solution reasons step by step and gives its answer between ``<answer>`` tags; the answer alone is never shown, so
the steps cannot be skipped. A step *slips* with a fixed probability and the rest goes on from the wrong value: the
model learns the correct arithmetic as the mode of its distribution and the slips as its tail. Reinforcement learning
then has something to mend, and the distribution has entropy (slips, wordings, separators) for drafting to cope with.
"""

import random
import re
from collections.abc import Callable
from typing import Any

SEPARATORS = ("\n", "; ", ", then ", " and ")


def slip(value: int, rng: random.Random) -> int:
    """A wrong result near ``value``: off by one, by two, by ten, or with its sign lost."""
    off = rng.choice((1, -1, 1, -1, 2, -2, 10, -10))
    return -value if value and rng.random() < 0.15 else value + off


def solve_chain_sum(metadata: dict[str, Any], rng: random.Random, slips: float) -> str:
    """Running totals from left to right: ``4+1=5\\n5-7=-2 ...``."""
    first, *rest = re.findall(r"[+-]?\s*\d+", metadata["expression"])
    total = int(first)
    steps = []
    for term in rest:
        sign, number = term[0], int(term[1:])
        result = total + number if sign == "+" else total - number
        if rng.random() < slips:
            result = slip(result, rng)
        steps.append(f"{total}{sign}{number}={result}")
        total = result
    opening = rng.choice(("Step by step: ", "From left to right: ", "Running total: "))
    return opening + _join(steps, rng) + _closing(str(total), rng)


def solve_gcd(metadata: dict[str, Any], rng: random.Random, slips: float) -> str:
    """Euclid by subtraction: the larger minus the smaller until both are equal."""
    a, b = sorted(metadata["numbers"], reverse=True)
    steps = []
    while a != b and len(steps) < 18:
        difference = a - b
        if rng.random() < slips:
            difference = max(1, slip(difference, rng))
        steps.append(f"{a}-{b}={difference}")
        a, b = max(b, difference), min(b, difference)
    opening = rng.choice(("Subtract: ", "By Euclid: "))
    return opening + _join([*steps, f"{a}={b}"], rng) + _closing(str(b), rng)


def solve_number_sorting(metadata: dict[str, Any], rng: random.Random, slips: float) -> str:
    """Selection sort: name the next number, list those left."""
    left = [int(float(x)) for x in metadata["original_numbers"]]
    ascending = metadata["direction"] == "ascending"
    word = "least" if ascending else "most"
    taken, steps = [], []
    while left:
        ranked = sorted(left, reverse=not ascending)
        pick = ranked[1] if len(ranked) > 1 and rng.random() < slips else ranked[0]
        left.remove(pick)
        taken.append(str(pick))
        steps.append(f"{word} {pick}" + (" left " + " ".join(map(str, left)) if left else ""))
    return _join(steps, rng) + _closing(str(taken), rng)


SOLVERS: dict[str, Callable[[dict[str, Any], random.Random, float], str]] = {
    "chain_sum": solve_chain_sum,
    "gcd": solve_gcd,
    "number_sorting": solve_number_sorting,
}


def _join(steps: list[str], rng: random.Random) -> str:
    """Steps with a separator drawn afresh each time: equally good wordings are entropy without error."""
    return "".join(step + (rng.choice(SEPARATORS) if i + 1 < len(steps) else "") for i, step in enumerate(steps))


def _closing(answer: str, rng: random.Random) -> str:
    words = rng.choice(("\nSo it is ", "\nThe answer is ", "\nResult: "))
    return f"{words}<answer>{answer}</answer>"
