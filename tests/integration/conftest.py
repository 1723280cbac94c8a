"""The small model that engines of other programs serve."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of one layer. It is made late: Transformers reads its settings on import."""
    from tests.served_models import checkpoint

    return checkpoint(tmp_path_factory.mktemp("model"))
