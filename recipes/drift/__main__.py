"""``python -m recipes.drift [--quick]``: see README.md beside this file."""

from recipes.common.cli import start
from recipes.drift.analysis import main

if __name__ == "__main__":
    start(main, __doc__)
