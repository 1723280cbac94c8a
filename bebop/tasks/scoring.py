"""The verifiers of reasoning-gym, as module-level functions that a child process can run.

A score of reasoning-gym passes through as the data set's author meant it. That is not always 0 or 1: many data sets
give the share of the answer that the right one makes up when it stands inside a longer one (gcd 2, answer "12": 0.5),
a few give 0.01 to 0.25 to anything at all, number_sorting forgives an error of 1 in each number, and
game_of_life_halting (0.1.25) takes every answer. What is put right here: a verifier that raises counts as 0
(prime_factorization on text, game_of_life on ``{}``), and so does an answer with NaN in it, which number_sorting and
complex_arithmetic take for correct, since no comparison with NaN is true. Those that would evaluate the answer read it
instead, see ``guarded``: what is no literal or formula counts as 0.
"""

import functools
import json
import math
import re
from typing import Any

from bebop.tasks.procedural import make_dataset

# Verifiers known to be done at once whatever they are given. Others may not: "9**9**9" for countdown, "1e999999999"
# for coin_flip, "R999999999" for rubiks_cube. So the rest runs in a child process.
QUICK = frozenset({"basic_arithmetic", "chain_sum", "decimal_arithmetic", "lcm", "number_sorting", "products"})

# What verifiers were seen to raise on text that is no answer.
VERIFIER_ERRORS = (ValueError, TypeError, AttributeError, ArithmeticError, LookupError, SyntaxError, RecursionError)
NOT_A_NUMBER = re.compile(r"\bnanj?\b", re.IGNORECASE)


@functools.cache
def _dataset(name: str, args: str) -> Any:
    """The verifier lives in the data set object; one per process is enough, whatever its seed."""
    from bebop.tasks.guarded import guard  # sympy takes a second of processor time

    return guard(make_dataset(name, json.loads(args)))


def score_entry(name: str, args: str, answer: str, entry: dict[str, Any]) -> float:
    """The data set's own score of ``answer``; ``args`` are its arguments as JSON, ``entry`` the item asked about."""
    if NOT_A_NUMBER.search(answer) and not NOT_A_NUMBER.search(str(entry["answer"])):
        return 0.0
    from bebop.tasks.guarded import Refused

    try:
        score = float(_dataset(name, args).score_answer(answer, entry))
    except (*VERIFIER_ERRORS, Refused):
        return 0.0
    return score if math.isfinite(score) else 0.0


def is_quick(name: str) -> bool:
    """Whether the data set's verifier may run in this process: it compares texts, or it is known to be quick."""
    if name in QUICK:
        return True
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    return bool(DATASETS[name][0].score_answer is ProceduralDataset.score_answer)
