"""Cases of a parametrised test, of which ``make test`` has some and ``make test-slow`` the others; memory of a call."""

import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], cases: Iterable[Any], several: bool = False) -> list[Any]:
    """``cases`` of one argument (or ``several``, in tuples), those that are not in ``quick`` marked slow.

    Raises:
        ValueError: One of ``quick`` is no case.
    """
    kept, listed = list(quick), list(cases)
    if missing := [case for case in kept if case not in listed]:
        raise ValueError(f"no cases: {missing}; there are {listed}")
    return [
        case if case in kept else pytest.param(*(case if several else (case,)), marks=pytest.mark.slow)
        for case in listed
    ]


def peak_memory(act: Callable[[], object]) -> int:
    """Return the most bytes that Python's objects and arrays take while ``act`` runs, beyond those before it."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
