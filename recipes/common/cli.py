"""The command line of every recipe: ``--quick`` and ``--help``, and nothing that is silently ignored."""

import argparse
from collections.abc import Callable


def start(main: Callable[[], None], doc: str | None) -> None:
    """Check the arguments, then run ``main``; ``--quick`` itself is read in ``study.py``, by child processes too."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--quick", action="store_true", help="a smoke run on next to nothing; overwrites no results")
    parser.parse_args()
    main()
