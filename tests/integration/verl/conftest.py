"""Real jobs of verl on the CPU, in their own environment (make test-verl); elsewhere nothing here is collected."""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the example's model, questions and tokenizer."""
    from bebop.verl_job.example import write_example  # torch and verl's own packages

    folder = tmp_path_factory.mktemp("example")
    write_example(folder)
    return folder
