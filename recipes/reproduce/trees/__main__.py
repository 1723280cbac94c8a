"""``python -m recipes.reproduce.trees [--quick]``: see README.md beside this file."""

from recipes.reproduce.harness import start_study
from recipes.reproduce.trees.study import STUDY

if __name__ == "__main__":
    start_study(STUDY)
