"""``python -m recipes.reproduce.drift [--quick]``: see README.md beside this file."""

from recipes.reproduce.cli import start
from recipes.reproduce.drift.analysis import main

if __name__ == "__main__":
    start(main, __doc__)
