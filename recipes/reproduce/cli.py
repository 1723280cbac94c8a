"""The command line of every recipe: ``--quick`` and ``--help``; any other argument is an error."""

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from bebop.command import Parser, run_main

T = TypeVar("T")


def start(main: Callable[[], None], doc: str | None) -> None:
    """Check the arguments, then run ``main``. ``study.py`` reads ``--quick`` itself, in child processes too."""

    def checked(arguments: list[str]) -> None:
        parser = Parser(description=doc)
        quick = "a smoke run on next to nothing; overwrites no results"
        parser.add_argument("--quick", action="store_true", help=quick)
        parser.parse_args(arguments)
        main()

    run_main(checked)


def share(text: str) -> tuple[int, int]:
    """Parse a share: "2/3" becomes (2, 3).

    Raises:
        argparse.ArgumentTypeError: The text is not "I/N" with 1 <= I <= N.
    """
    parts = text.split("/")
    if len(parts) == 2 and all(part.isdecimal() for part in parts) and 1 <= int(parts[0]) <= int(parts[1]):
        return int(parts[0]), int(parts[1])
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not possible: give two numbers such as 1/2")


def part_of(whole: Sequence[T], part: tuple[int, int]) -> Sequence[T]:
    """Return every N-th item, beginning with the I-th, for a share of I/N."""
    return whole[part[0] - 1 :: part[1]]
