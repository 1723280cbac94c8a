"""Which checkpoint is the newest, and that it stays whatever is asked for."""

from pathlib import Path

import pytest

from bebop.trainer.checkpoint import folder_of, latest, prune, steps


@pytest.mark.parametrize("keep", [0, 1])
def test_the_newest_is_never_removed(tmp_path: Path, keep: int) -> None:
    folders = [folder_of(tmp_path, step) for step in (1, 2, 3)]
    for folder in folders:
        folder.mkdir(parents=True)
    prune(tmp_path, keep)
    assert steps(tmp_path) == folders[-1:]


def test_step_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    """Folder names have six digits until a run has more steps."""
    older, newer = folder_of(tmp_path, 999_999), folder_of(tmp_path, 1_000_000)
    assert newer.name < older.name
    for folder in (newer, older):
        folder.mkdir(parents=True)
    assert latest(tmp_path) == newer and steps(tmp_path) == [older, newer]
