"""What a measurement says about where it comes from: the commit at its start, not at its end."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from tqdm import tqdm

from bebop.bench import __main__ as main
from bebop.bench import record, rollout
from bebop.errors import UserError
from bebop.run_dir import machine


def git(root: Path, *arguments: str) -> str:
    name = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit."""
    root = tmp_path / "tree"
    root.mkdir()
    git(root, "init", "-q")
    (root / "code.py").write_text("x = 1\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def test_what_is_kept_is_the_commit_at_the_start(repository: Path, tmp_path: Path) -> None:
    origin, first = record.begin(repository), git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "-q", "--allow-empty", "-m", "while it measured")
    record.keep(tmp_path, "loop", [{"a": 1}], {"kind": "loop"}, origin)
    place = json.loads((tmp_path / "loop.json").read_text())["place"]
    assert place["commit"] == first != git(repository, "rev-parse", "HEAD")  # asked at the end, it would be the second
    assert place["dirty"] is False and place["torch"] and place["python"]
    assert place["command"].startswith("python ") and len(place["command"]) > len("python ")


def test_a_dirty_tree_is_told(repository: Path) -> None:
    (repository / "code.py").write_text("x = 2\n")
    assert record.begin(repository)["dirty"] is True
    git(repository, "commit", "-qam", "second")
    assert record.begin(repository)["dirty"] is False
    (repository / "new.py").write_text("")  # untracked code can be imported as well
    assert record.begin(repository)["dirty"] is True


def test_without_a_repository_nothing_is_made_up(tmp_path: Path) -> None:
    origin = record.begin(tmp_path)
    assert origin["commit"] == "unknown" and origin["dirty"] is None


def test_files_that_were_copied_are_told_their_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository beside them need not stand where they were copied from."""
    monkeypatch.setenv("BEBOP_COMMIT", "abc123")
    origin = record.begin(repository)
    assert (origin["commit"], origin["dirty"]) == ("abc123", None)


def test_a_package_in_somebody_s_repository_has_not_its_commit(repository: Path) -> None:
    (repository / "site-packages").mkdir()
    assert machine.commit(repository / "site-packages") == {"commit": "unknown", "dirty": None}


@pytest.mark.parametrize(
    ("word", "bare"),
    [
        ("model.path=/srv/a/b/model", "model.path=model"),
        ("/a b/c d.py", "c d.py"),
        ("task.path='/x/y/q.jsonl'", "task.path='q.jsonl'"),
        ("parts=[/a/b, /c/d]", "parts=[b, d]"),
        ("urls=[http://10.0.0.1:300/a/b]", "urls=[http://10.0.0.1:300/a/b]"),
        ("dir=/x", "dir=/x"),
        ("runs/a/b", "runs/a/b"),
    ],
)
def test_of_paths_of_a_machine_the_last_part_is_told(word: str, bare: str) -> None:
    assert machine.without_folders(word) == bare


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("vLLM ended"), MemoryError()])
def test_a_benchmark_that_is_ended_keeps_what_it_has_measured(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has measured nothing leaves nothing."""

    def run(bench: object) -> list[dict[str, object]]:
        def measure(arm: str) -> dict[str, object]:
            if arm == "second":
                raise error
            return {"tokens/s": 3.0}

        record.best_of(1, ["first", "second"], measure, "tokens/s", tqdm(disable=True), batch=8)
        return []

    out = tmp_path / "out"
    monkeypatch.setattr(rollout, "run", run)
    monkeypatch.setattr(main, "check_model", lambda model: None)
    with pytest.raises(type(error)):
        main.main(["--out", str(out), "rollout"])
    assert sorted(path.name for path in out.iterdir()) == ["rollout-unfinished.json", "rollout-unfinished.md"]
    kept = json.loads((out / "rollout-unfinished.json").read_text())
    assert kept["rows"] == [{"batch": 8, "arm": "first", "tokens/s": 3.0}] and kept["settings"]["kind"] == "rollout"
    assert str(out / "rollout-unfinished.json") in capsys.readouterr().err
    with pytest.raises(type(error)), record.kept_if_ended(tmp_path / "nothing", "rollout", {}, {}):
        raise error
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("path", sorted(Path(record.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_notes_what_it_measures(path: Path) -> None:
    """``simulate`` keeps its jobs itself, one by one."""
    text = path.read_text()
    assert "\ndef run(" not in text or re.search(r"\bnoted\b|\bbest_of\(", text)


def test_a_package_that_is_not_there_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise machine.PackageNotFoundError(name)

    monkeypatch.setattr(machine, "version", version)
    assert record.place({})["ray"] is None


MEASURED = [path for path in (machine.ROOT / "benchmarks").glob("*/*.json") if path.parent.name != "published"]


@pytest.mark.parametrize("path", sorted(MEASURED), ids=lambda path: path.stem)
def test_stored_benchmarks_say_what_was_not_recorded(path: Path) -> None:
    stored = json.loads(path.read_text())
    for field, gap in (("dirty", "whether the tree differed"), ("command", "the command")):
        assert (field not in stored["place"]) == any(m.startswith(gap) for m in stored.get("missing", ()))
