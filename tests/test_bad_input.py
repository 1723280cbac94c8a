"""Whatever is wrong in what a command is given ends in one line and exit code 2, and leaves nothing on the disk.

The cases are in ``tests/bad_input/tables``.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from bebop.errors import UserError
from tests.bad_input.case import Case
from tests.bad_input.fixtures import WorkingFolder, working_folder
from tests.bad_input.running import COMMANDS, faults, run_case
from tests.bad_input.tables import CASES
from tests.commands import on_disk

# The first mistake of each kind and the first for each command belong to the quick tests. The slow ones have those
# whose line is told in words, and some of the others. All of them are make bad-input.
FIRST = {key: case for case in reversed(CASES) for key in (("command", case.command), ("kind", case.kind))}
QUICK = [case for case in CASES if case in FIRST.values()]
TABLE = [
    *(pytest.param(case, id=case.id) for case in QUICK),
    *(
        pytest.param(case, id=case.id, marks=pytest.mark.slow)
        for i, case in enumerate(CASES)
        if case not in QUICK and (": " in case.names or not (i % 4 and i % 10))
    ),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkingFolder]:
    """The working folder, and what is wrong in it."""
    with working_folder(tmp_path_factory.mktemp("bad") / "here") as filled:
        yield filled


@pytest.mark.parametrize("case", TABLE)
def test_a_mistake_is_one_line_and_nothing_is_written(case: Case, here: WorkingFolder, tmp_path: Path) -> None:
    refuses(case, here, tmp_path)


def test_there_are_hundreds_of_them_and_no_two_are_the_same() -> None:
    assert len(CASES) == len({case.key for case in CASES}) >= 300
    assert {case.command for case in CASES} == set(COMMANDS)


def refuses(case: Case, here: WorkingFolder, temp: Path) -> None:
    filled = case.filled(here.put)
    assert faults(run_case(filled, here.folder, temp), filled.names) == []


def test_files_of_weights_that_an_index_names_must_be_there(here: WorkingFolder, tmp_path: Path) -> None:
    given = ("model.path={model:shard}",)
    refuses(Case(command="run", kind="models", arguments=given, names="model-00002-of-00002"), here, tmp_path)


def taken(
    raises: Exception | None, files: Mapping[str, str] = {}, log: str = "", out: str = "", err: str = "", code: int = 2
) -> Callable[[list[str]], int]:
    """Return a command that leaves and says all this, and ends so."""

    def main(_: list[str]) -> int:
        for name, text in files.items():
            Path(name).write_text(text)
        if log:
            logging.getLogger("transformers").error(log)
        sys.stdout.write(out)
        sys.stderr.write(err)
        if raises is not None:
            raise raises
        return code

    return main


REFUSAL = UserError("steps=0 is not possible: give 1 or more")


@pytest.mark.parametrize(
    ("main", "kinds"),
    [
        (taken(REFUSAL), set()),
        (taken(KeyError("steps")), {"traceback", "unclear"}),
        (taken(UserError("steps=0: full_key: steps")), {"unclear"}),
        (taken(REFUSAL, files={"left": "behind"}), {"written"}),
        (taken(REFUSAL, files={"rows.txt": "other"}), {"written"}),
        (taken(REFUSAL, log="page one"), {"unclear"}),
        (taken(REFUSAL, out="begun\n"), {"unclear"}),
        (taken(None, err="error: that is not possible\n"), {"unclear"}),
        (taken(None, err="error: steps=0 is not possible\n", code=1), {"exit code"}),
    ],
)
def test_each_way_to_take_a_mistake_badly_is_seen(
    main: Callable[[list[str]], int],
    kinds: set[str],
    here: WorkingFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COMMANDS, "broken", main)
    case = Case(command="broken", kind="numbers", arguments=("steps=0",), names="steps=0")
    assert {kind for kind, _ in faults(run_case(case, here.folder, tmp_path), case.names)} == kinds
    (here.folder / "left").unlink(missing_ok=True)
    (here.folder / "rows.txt").write_text("text\n")


def test_a_job_that_would_start_is_seen(here: WorkingFolder, tmp_path: Path) -> None:
    case = Case(command="run", kind="numbers", arguments=("trainer.steps=1",), names="trainer.steps")
    assert ("traceback", "AssertionError('the job was about to start')") in faults(
        run_case(case, here.folder, tmp_path), case.names
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("bebop.run", "rollout.max_length=1000000"),
        ("bebop.adapt", "head.objective=xyz"),
        ("bebop.certify", "engine.name=sglang"),
        ("bebop.bench", "rollout --batches 0"),
        ("bebop.report", "missing"),
        ("bebop.report.dashboards", "--staleness -1"),
        ("recipes.reproduce", "--fast"),
        ("recipes.reproduce.boundary", "--fast"),
        ("recipes.tiny", "--steps 0"),
        ("recipes.cluster", "8-gpus-8b-short --predict a=1"),
        ("bebop.simulate", "fleet.workers=0"),
        ("bebop.view", "missing"),
        ("bebop.metrics.catalogue", "x"),
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
