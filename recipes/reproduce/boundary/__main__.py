"""``python -m recipes.reproduce.boundary [--quick]``: see README.md beside this file."""

from recipes.reproduce.boundary.study import STUDY
from recipes.reproduce.harness import start_study

if __name__ == "__main__":
    start_study(STUDY)
