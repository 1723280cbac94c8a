"""``python -m recipes.reproduce.top_k [--quick]``: see README.md beside this file."""

from recipes.reproduce.harness import start_study
from recipes.reproduce.top_k.study import STUDY

if __name__ == "__main__":
    start_study(STUDY)
