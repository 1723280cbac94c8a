"""Jobs for clusters: ``python -m recipes.cluster`` lists them; with a NAME it starts one or prints its prediction.

Run it where a Ray cluster has been started (ray start --head); the job joins it. Nothing here has run on a cluster.
"""

import sys

from bebop import run
from bebop.command import Parser, run_main, writing
from bebop.errors import UserError
from bebop.run_dir.checkpoints import write_text
from recipes.cluster.prediction import STORED, format_prediction, predict, table
from recipes.cluster.recipe import Recipe, load, names
from recipes.cluster.start import arguments as job_arguments

MODEL = {"own": "model.path=", "verl": "actor_rollout_ref.model.path="}  # what a user has to bring


def main(arguments: list[str]) -> int:
    """List the recipes, or predict, show or start one."""
    parser = Parser(prog="python -m recipes.cluster", description=__doc__)
    parser.add_argument("name", nargs="?", help="a recipe")
    parser.add_argument("settings", nargs="*", help="NAME=VALUE: further settings of the job, verl's for a job of verl")
    parser.add_argument("--predict", action="store_true", help="predicted numbers, and nothing is started")
    parser.add_argument("--show", action="store_true", help="the command that would be started")
    parser.add_argument("--store", action="store_true", help="predict all, and write predictions.json")
    # argparse accepts no settings after an option between them and the name, so options go first.
    options = parser.parse_args(sorted(arguments, key=lambda word: not word.startswith("-")))
    if options.store:
        _alone("--store", options.name is None and not options.predict and not options.show)
        rows = {name: predict(load(name)) for name in names()}
        with writing(STORED):
            write_text(STORED, table(rows))
        return 0
    if options.name is None:
        _alone("--predict" if options.predict else "--show", not options.predict and not options.show)
        sys.stdout.write(list_recipes())
        return 0
    recipe = load(options.name)
    if unknown := [word for word in options.settings if "=" not in word or word.startswith("-")]:
        raise UserError(f"{unknown[0]!r} is no setting: write NAME=VALUE")
    if options.predict:
        if options.settings or options.show:
            word = options.settings[0] if options.settings else "--show"
            raise UserError(f"--predict is of the recipe as it stands: {word!r} is not wanted")
        sys.stdout.write(format_prediction(recipe, predict(recipe)))
        return 0
    command = [*job_arguments(recipe), *options.settings]
    if options.show:
        sys.stdout.write(f"python -m bebop.run {' '.join(command)}\n")
        return 0
    _require_model(recipe, options.settings)
    return run.main(command)


def list_recipes() -> str:
    """Return a line for each recipe."""
    recipes = [load(name) for name in names()]
    return "".join(f"{one.name:24} {one.file.trainer:6} {one.file.about}\n" for one in recipes)


def _alone(option: str, alone: bool) -> None:
    if not alone:
        word = "takes no recipe and no other option" if option == "--store" else "wants the name of a recipe"
        raise UserError(f"{option} {word}; there are {', '.join(names())}")


def _require_model(recipe: Recipe, settings: list[str]) -> None:
    """Raise ``UserError`` unless the settings name the folder of the model."""
    wanted = MODEL[recipe.file.trainer]
    if not any(word.lstrip("+").startswith(wanted) for word in settings):
        raise UserError(f"{recipe.name} needs {wanted}DIR: the folder of a checkpoint with MTP weights")


if __name__ == "__main__":
    run_main(main)
