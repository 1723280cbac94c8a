"""Which checkpoint is the newest when step numbers outgrow their six digits."""

from pathlib import Path

from bebop.trainer.checkpoint import store


def test_step_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    kept = store(tmp_path)
    older, newer = kept.path(999_999), kept.path(1_000_000)
    assert newer.name < older.name
    for folder in (newer, older):
        folder.mkdir(parents=True)
    assert kept.all() == [older, newer]
