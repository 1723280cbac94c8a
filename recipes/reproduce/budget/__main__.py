"""``python -m recipes.reproduce.budget [--quick]``: see README.md beside this file."""

from recipes.reproduce.budget.study import STUDY
from recipes.reproduce.harness import start_study

if __name__ == "__main__":
    start_study(STUDY)
