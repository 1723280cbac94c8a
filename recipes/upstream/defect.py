"""Class of a defect with its reproduction."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """Defect found in ``version`` of ``program``; ``there`` reproduces it with only that program and torch."""

    name: str  # as docs/upstream.md has it
    program: str  # the package that is imported
    version: str
    there: Callable[[], bool]
