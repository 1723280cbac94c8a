"""The model that the trainings of parts run on."""

from pathlib import Path

import pytest

from bebop.model.checkpoint import save_policy
from tests.adaptation.builders import random_policy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of five layers: the fewest at which a block drafter has two of them to read."""
    folder: Path = tmp_path_factory.mktemp("model")
    save_policy(random_policy(layers=5), folder)
    return folder
