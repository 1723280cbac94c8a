"""The command line of every recipe: ``--quick`` and ``--help``, and nothing that is silently ignored."""

from collections.abc import Callable

from bebop.command import Parser, run_main


def start(main: Callable[[], None], doc: str | None) -> None:
    """Check the arguments, then run ``main``; ``--quick`` itself is read in ``study.py``, by child processes too."""

    def checked(arguments: list[str]) -> None:
        parser = Parser(description=doc)
        quick = "a smoke run on next to nothing; overwrites no results"
        parser.add_argument("--quick", action="store_true", help=quick)
        parser.parse_args(arguments)
        main()

    run_main(checked)
