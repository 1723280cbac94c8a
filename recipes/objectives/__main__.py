"""``python -m recipes.objectives [--quick]``: see README.md beside this file."""

from recipes.common.cli import start
from recipes.objectives.comparison import main

if __name__ == "__main__":
    start(main, __doc__)
