"""JSON and YAML from files of others: whatever is wrong with a text is a ``ValueError``, and nothing else is raised."""

import json
import math
from typing import Any

import yaml

DEEP = "it is nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ``ValueError``, also for nesting and numbers beyond what Python reads."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(DEEP) from None


def parse_yaml(text: str | bytes) -> Any:
    """The value of a YAML text; ``ValueError`` in one line."""
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError(DEEP) from None
    except Exception as error:  # YAML's own, and what becomes of dates, numbers and keys that are none
        raise ValueError(" ".join(str(error).split())) from None


def finite(value: object) -> float | None:
    """A number as float; None for what is none, NaN, infinite, or larger than a float."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
