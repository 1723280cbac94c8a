"""JSON and YAML from files of others: whatever is wrong with a text is a ``ValueError``, and nothing else is raised.

So are the headers of safetensors files, which hold names, types and shapes.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

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


def header(folder: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Name, type (``BF16``) and shape of every weight in a folder's safetensors files."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for key in opened.keys():  # safe_open is no mapping: it cannot be iterated
                part = opened.get_slice(key)
                yield key, (part.get_dtype(), tuple(part.get_shape()))


def main_type(folder: Path) -> str:
    """The type of most elements of a folder's weights, ``BF16`` for instance; empty where they cannot be read."""
    counts: Counter[str] = Counter()
    try:
        for _, (kind, shape) in header(folder):
            counts[kind] += math.prod(shape)
    except (SafetensorError, OSError):
        return ""  # whoever loads them says what is wrong
    return max(counts, key=counts.__getitem__, default="")
