"""A user's reward function that fails when it is told to."""

import os
import re
import time
from typing import Any

from tests.chaos.control import here

NUMBER = re.compile(r"-?\d+")


def score(text: str, item: dict[str, Any]) -> float:
    """1 where the last number is the answer; else what was ordered."""
    control = here()
    if control.take("reward-raises"):
        raise ZeroDivisionError("as ordered")
    if control.take("reward-is-nan"):
        return float("nan")
    if control.take("reward-exits"):
        os._exit(3)
    if control.take("reward-hangs"):
        time.sleep(3600)
    found = NUMBER.findall(text)
    return float(bool(found) and found[-1] == str(item["answer"]))


def letters(text: str, item: dict[str, Any]) -> float:
    """The part of an answer that is the letter a: for a model whose tokens are letters."""
    return text.count("a") / max(1, len(text))
