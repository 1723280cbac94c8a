"""The model that the trainings of parts run on, and the trainings that were not interrupted."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from bebop.model.checkpoint import save_policy
from tests.adaptation.builders import random_policy
from tests.adaptation.trainings import overrides, train


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of five layers: the fewest at which a block drafter has two of them to read."""
    folder: Path = tmp_path_factory.mktemp("model")
    save_policy(random_policy(layers=5), folder)
    return folder


@pytest.fixture(scope="session")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a training that was not interrupted, by its name in ``TRAININGS``."""

    @cache
    def folder(name: str) -> Path:
        made: Path = tmp_path_factory.mktemp(name)
        more = [f"model.parts.pipo={folder('pipo') / 'pipo.safetensors'}"] if name == "pipo-opd" else []
        train([*overrides(name, model), *more], made)
        return made

    return folder
