"""``python -m recipes.budget [--quick]``: see README.md beside this file."""

from recipes.budget.bar import main
from recipes.common.cli import start

if __name__ == "__main__":
    start(main, __doc__)
