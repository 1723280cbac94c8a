"""The command line of every recipe: ``--quick`` and ``--help``, and nothing that is silently ignored."""

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from bebop.command import Parser, run_main

T = TypeVar("T")


def start(main: Callable[[], None], doc: str | None) -> None:
    """Check the arguments, then run ``main``; ``--quick`` itself is read in ``study.py``, by child processes too."""

    def checked(arguments: list[str]) -> None:
        parser = Parser(description=doc)
        quick = "a smoke run on next to nothing; overwrites no results"
        parser.add_argument("--quick", action="store_true", help=quick)
        parser.parse_args(arguments)
        main()

    run_main(checked)


def share(text: str) -> tuple[int, int]:
    """2/3 as (2, 3)."""
    parts = text.split("/")
    if len(parts) == 2 and all(part.isdecimal() for part in parts) and 1 <= int(parts[0]) <= int(parts[1]):
        return int(parts[0]), int(parts[1])
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not possible: give two numbers such as 1/2")


def part_of(whole: Sequence[T], part: tuple[int, int]) -> Sequence[T]:
    """Every N-th from the I-th, for a share of I/N."""
    return whole[part[0] - 1 :: part[1]]
