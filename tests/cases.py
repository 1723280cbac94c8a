"""Cases of a parametrised test, of which ``make test`` has some and ``make test-slow`` the others."""

from collections.abc import Iterable
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
