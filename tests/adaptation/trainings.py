"""Trainings of parts that take about a second each: the overrides that ask for them, and one run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config, write_down
from bebop.systems import PARTS

SMALL = ["data.sequences=6", "data.sampling.max_new_tokens=8", "data.slots=16", "evaluation.prompts=2",
         "train.threads=1", "train.save_every=2", "progress=false", "model.check=false"]  # fmt: skip
PIPO = ["part=pipo", "task=gcd", "data.sequences=12", "data.sampling.max_new_tokens=12", "data.slots=32",
        "evaluation.prompts=3", "options.steps=4", "options.rows_per_step=4", "options.samples=2",
        "options.rollouts=12"]  # fmt: skip
TRAININGS = {
    "block": ["part=block", "options.steps=4", "options.rows_per_step=4", "options.width=32"],
    "eagle3": ["part=eagle3", "options.steps=4", "options.rows_per_step=4", "options.width=32",
               "options.draft_vocab=9"],
    "firp": ["part=firp", "task=gcd", "options.steps=2", "options.rows_per_step=4", "options.anchors=4",
             "options.warm=0.5", "options.objective=e2e_tv", "options.calibration=4", "train.save_every=3"],
    "pipo": PIPO,
    "pipo-opd": [*PIPO, "options.stage=opd"],  # goes on with the part of "pipo"
}  # fmt: skip
REWARD = "def of_odd_length(text, item):\n    return float(len(text) % 2)\n"  # random weights solve nothing


def overrides(name: str, model: Path) -> list[str]:
    """Return what asks for a training; about half of the completions get the reward of PIPO's."""
    given = [f"model.path={model}", *SMALL, *TRAININGS[name]]
    if "part=pipo" in given:
        file = model.parent / "pipo_reward.py"
        file.write_text(REWARD)
        given.append(f"task.reward={file}:of_odd_length")
    return given


def config(name: str, model: Path, folder: Path, *more: str) -> AdaptConfig:
    """Return the configuration of a training in a run folder."""
    return adapt_config([*overrides(name, model), *more, f"dir={folder}"])


def train(given: Sequence[str], folder: Path) -> Any:
    """Run a training as ``python -m bebop.adapt`` does; return its job."""
    folder.mkdir(exist_ok=True)
    asked = adapt_config([*given, f"dir={folder}"])
    job = PARTS[asked.part].job()(asked, folder)
    job.prepare()
    write_down(asked, given, folder)
    with patch("bebop.systems.pipo.training.HALVINGS", 5):  # each decodes all questions once more
        job.run()
    return job
