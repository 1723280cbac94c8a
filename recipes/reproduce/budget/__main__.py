"""``python -m recipes.reproduce.budget [--quick]``: see README.md beside this file."""

from recipes.reproduce.budget.bar import main
from recipes.reproduce.cli import start

if __name__ == "__main__":
    start(main, __doc__)
