"""``python -m recipes.reproduce.pad_training [--quick]``: see README.md beside this file."""

from recipes.reproduce.cli import start
from recipes.reproduce.pad_training.analysis import main

if __name__ == "__main__":
    start(main, __doc__)
