"""A reward that differs from answer to answer: the share of even characters."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **settings: Any) -> float:
    return sum(ord(letter) % 2 == 0 for letter in solution_str) / max(1, len(solution_str))
