"""``python -m recipes.reproduce.objectives [--quick]``: see README.md beside this file."""

from recipes.reproduce.cli import start
from recipes.reproduce.objectives.comparison import main

if __name__ == "__main__":
    start(main, __doc__)
