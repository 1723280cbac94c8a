"""Weights in this process, by number: what a transfer engine in vLLM's worker is told to take. No vllm needed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count

from torch import Tensor

TABLES: dict[int, Mapping[str, Tensor]] = {}
_numbers = count()


@contextmanager
def table(weights: Mapping[str, Tensor]) -> Iterator[int]:
    """The number of ``weights`` while the block lasts."""
    number = next(_numbers)
    TABLES[number] = weights
    try:
        yield number
    finally:
        del TABLES[number]
