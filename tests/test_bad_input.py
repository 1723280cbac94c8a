"""Whatever is wrong in what a command is given ends in one line and exit code 2, and leaves nothing on the disk.

The cases are in ``tests/bad_input/tables``.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bad_input.case import Case
from tests.bad_input.running import faults, run_case
from tests.bad_input.tables import CASES
from tests.bad_input.world import World, world
from tests.commands import on_disk

QUICK = 10  # one in so many belongs to the quick tests
TABLE = [pytest.param(case, id=case.id, marks=[pytest.mark.slow] if i % QUICK else []) for i, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The working folder, and what is wrong in it."""
    with world(tmp_path_factory.mktemp("bad") / "here") as filled:
        yield filled


@pytest.mark.parametrize("case", TABLE)
def test_a_mistake_is_one_line_and_nothing_is_written(case: Case, here: World, tmp_path: Path) -> None:
    filled = case.filled(here.put)
    assert faults(run_case(filled, here.folder, tmp_path), filled.names) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("bebop.run", "rollout.max_length=1000000"),
        ("bebop.adapt", "head.objective=xyz"),
        ("bebop.certify", "engine.name=sglang"),
        ("bebop.bench", "rollout --batches 0"),
        ("bebop.report", "missing"),
        ("bebop.dashboards", "--staleness -1"),
        ("recipes.reproduce", "--fast"),
        ("recipes.reproduce.boundary", "--fast"),
        ("recipes.tiny", "--steps 0"),
    ],
)
def test_as_a_process_of_its_own(module: str, given: str, tmp_path: Path) -> None:
    """With whatever its imports print and leave behind."""
    (tmp_path / "temp").mkdir()
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"TMPDIR": str(tmp_path / "temp"), "PYTHONPATH": root}
    command = [sys.executable, "-m", module, *given.split()]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
    assert list(on_disk(tmp_path)) == [str(tmp_path / "temp")]
