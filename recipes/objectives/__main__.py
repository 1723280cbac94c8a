"""``python -m recipes.objectives [--quick]``: see README.md beside this file."""

from recipes.objectives.comparison import main

if __name__ == "__main__":
    main()
