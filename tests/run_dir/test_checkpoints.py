"""Checkpoint folders under crashes: after every operation on the file system there is one to go on from."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bebop.errors import UserError
from bebop.run_dir.checkpoints import Store, link_model, newest_model, seal, verify, write_text

OPERATIONS = ["mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "open", "close"]
CRASHED = 77


def save(store: Store, step: int, text: str, keep: int = 1) -> Path:
    """As trainer and driver do it, with a file in a folder of its own."""
    staged = store.staging(step)
    (staged / "policy").mkdir(parents=True)
    (staged / "policy" / "weights").write_text(text)
    (staged / "state").write_text(text * 2)
    seal(staged)
    place = store.publish(staged, step)
    store.prune(keep, place)
    return store.rename(place)


def save_by_two_renames(store: Store, step: int, text: str) -> Path:
    """How it was before: the planted fault."""
    partial, place = store.staging(step), store.path(step)
    partial.mkdir(parents=True)
    (partial / "state").write_text(text * 2)
    seal(partial)
    if place.exists():
        old = store.folder / ".partial-old"
        os.rename(place, old)
        os.rename(partial, place)
        shutil.rmtree(old)
    else:
        os.rename(partial, place)
    return place


def crashes(work: Callable[[], Any], after: int) -> bool:
    """Do ``work`` in a child that dies at once after so many operations on the file system; whether it got there."""
    child = os.fork()
    if child == 0:
        left = after
        # A file that was opened and not closed stays half written: the buffer goes with the process.
        for where, name in [(io, "open"), *((os, name) for name in OPERATIONS)]:
            real = getattr(where, name)

            def counted(*args: Any, _real: Any = real, **kwargs: Any) -> Any:
                nonlocal left
                result = _real(*args, **kwargs)
                left -= 1
                if left < 0:
                    os._exit(CRASHED)
                return result

            setattr(where, name, counted)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == CRASHED


def found_after_each_crash(folder: Path, prepare: Callable[[Store], Any], work: Callable[[Store], Any]) -> list[str]:
    """What ``state`` holds in the checkpoint that is found, crash by crash; "nothing" where there is none."""
    found = []
    for after in range(1000):
        store = Store(folder / str(after), "step_")
        prepare(store)
        crashed = crashes(lambda store=store: work(store), after)  # type: ignore[misc]
        try:
            place = store.newest_sound()
            found.append((place / "state").read_text() if place else "nothing")
        except UserError:
            found.append("nothing")
        if not crashed:
            return found
        # The next process goes on, whatever was left behind.
        if place:
            store.set_aside(place)
        save(store, 9, "next")
        assert sorted(p.name for p in store.folder.iterdir() if p.name.startswith((".", "step_"))) == ["step_000009"]
    raise AssertionError("it does not end")


@pytest.mark.parametrize(
    "step", [pytest.param(1, id="the same step again", marks=pytest.mark.slow), pytest.param(2, id="the next step")]
)
@pytest.mark.slow
def test_a_crash_after_any_operation_leaves_the_checkpoint_before_or_the_new_one(tmp_path: Path, step: int) -> None:
    found = found_after_each_crash(tmp_path, lambda s: save(s, 1, "old"), lambda s: save(s, step, "new"))
    assert len(found) > 20 and set(found) == {"oldold", "newnew"}
    assert found == sorted(found, reverse=True), "once it is there it stays"


@pytest.mark.slow
def test_the_planted_fault_is_found(tmp_path: Path) -> None:
    def prepare(store: Store) -> Path:
        return save_by_two_renames(store, 1, "old")

    found = found_after_each_crash(tmp_path, prepare, lambda s: save_by_two_renames(s, 1, "new"))
    assert "nothing" in found


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def test_damaged_checkpoints_are_skipped_by_name_and_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, "step_")
    one, two, three, four = (save(store, step, str(step), keep=9) for step in (1, 2, 3, 4))
    assert store.newest_sound() == four and not caplog.records
    damage(four / "policy" / "weights"), (three / "state").unlink(), (two / "manifest.json").write_text("{")
    assert store.newest_sound() == one
    told = caplog.text
    assert all(name in told for name in (f"{four}/policy/weights is corrupt", f"{three}/state is missing"))
    assert f"{two}/manifest.json is corrupt" in told and told.count("going on from step_000001") == 3
    store.set_aside(one)
    assert store.all() == [one] and len(list(store.folder.glob("aside-*"))) == 3
    damage(one / "state")
    with pytest.raises(UserError, match=r"holds no checkpoint that is whole: .*step_000001/state is corrupt"):
        store.newest_sound()
    assert Store(tmp_path / "none", "step_").newest_sound() is None


def test_an_unknown_format_is_no_damage(tmp_path: Path) -> None:
    """An older version of bebop must not go back to an older checkpoint by itself."""
    store = Store(tmp_path, "step_")
    save(store, 1, "a", keep=9)
    manifest = save(store, 2, "b", keep=9) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(UserError, match="format 99 is not known"):
        store.newest_sound()


def test_pruning_leaves_what_was_just_written_and_the_newest_before_it(tmp_path: Path) -> None:
    store = Store(tmp_path, "step_")
    for step in (20, 1_000_000, 3):
        save(store, step, "x", keep=9)
    (store.folder / "step_x").mkdir()
    again = save(store, 20, "y", keep=2)
    assert [path.name for path in store.all()] == ["step_000020", "step_1000000"]
    assert store.step(again) == 20 and (store.folder / "step_x").is_dir()
    last = save(store, 5, "z", keep=1)
    assert store.all() == [last], "the one just written stays, whatever its number"


@pytest.mark.parametrize("keep", range(1, 7))
def test_pruning_leaves_as_many_as_it_was_told_from_the_first_on(tmp_path: Path, keep: int) -> None:
    """Also while there are fewer than that."""
    store = Store(tmp_path, "step_")
    for step in range(1, 8):
        save(store, step, "x", keep=keep)
        assert [store.step(path) for path in store.all()] == [*range(1, step + 1)][-keep:]


def test_pruning_never_removes_the_best(tmp_path: Path) -> None:
    store = Store(tmp_path, "step_")
    for step in range(1, 6):
        store.prune(2, save(store, step, "x", keep=9), best=2)
    assert [store.step(path) for path in store.all()] == [2, 4, 5]
    store.prune(2, save(store, 6, "x", keep=9), best=6)
    assert [store.step(path) for path in store.all()] == [5, 6], "a former best goes"
    store.prune(1, save(store, 7, "x", keep=9), best=3)
    assert [store.step(path) for path in store.all()] == [7], "one that is not there is not missed"


def sealed(store: Store, step: int) -> Path:
    """A checkpoint of which nobody removes older ones."""
    staged = store.staging(step)
    staged.mkdir(parents=True)
    seal(staged)
    return store.publish(staged, step)


def test_a_step_that_is_saved_again_takes_its_first_name(tmp_path: Path) -> None:
    """By which an evaluation has named it already."""
    store = Store(tmp_path, "step_")
    for text in "abc":
        assert save(store, 20, text) == store.path(20) and store.all() == [store.path(20)]
        assert (store.path(20) / "state").read_text() == text * 2
    assert store.newest(20) == store.path(20) and store.newest(19) is None


def test_checkpoints_of_one_step_keep_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    """Whichever names are free: the last one is the newest."""
    store = Store(tmp_path, "step_")
    first, second = sealed(store, 20), sealed(store, 20)
    assert store.rename(second) == second == store.newest(20), "its first name is in use"
    shutil.rmtree(first)
    third = sealed(store, 20)
    assert store.rename(third) == third == store.newest(20), "another one would be the newest"
    store.prune(1, third, best=20)
    assert store.all() == [third] and store.rename(third) == first


def test_pruning_removes_nothing_where_the_new_checkpoint_is_not_as_it_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, "step_")
    old, new = save(store, 1, "old", keep=9), save(store, 2, "new", keep=9)
    (new / "state").write_text("")
    store.prune(1, new)
    assert old.is_dir() and "older checkpoints are kept" in caplog.text and store.newest_sound() == old


def test_a_file_is_the_old_one_or_the_new_one_after_any_crash(tmp_path: Path) -> None:
    seen = set()
    for after in range(100):
        path = tmp_path / str(after) / "overrides.json"
        path.parent.mkdir()
        write_text(path, "old")
        crashed = crashes(lambda path=path: write_text(path, "new"), after)  # type: ignore[misc]
        seen.add(path.read_text())
        if not crashed:
            break
    assert seen == {"old", "new"} and after > 3


def test_what_is_sealed_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, every folder, and the folders that list them, before the name appears; its list after it."""
    done: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(a: Path, b: Path) -> None:
        done.append("rename")
        real_rename(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    store = Store(tmp_path / "run", "step_")
    place = save(store, 1, "x")
    before, after = done[: done.index("rename")], done[done.index("rename") + 1 :]
    names = {path.rsplit(".partial-step_000001-", 1)[-1][8:] for path in before if ".partial-" in path}
    assert names == {"", "/policy", "/policy/weights", "/state", "/manifest.json"}
    assert {str(store.folder), str(tmp_path / "run")} <= set(before) and after[0] == str(store.folder)
    verify(place)


def test_the_newest_model_is_found_at_one_place_whatever_goes(tmp_path: Path) -> None:
    """Also while older checkpoints are removed, after a step back, and in a folder that was moved."""
    run, store = tmp_path / "run", Store(tmp_path / "run", "step_")
    assert newest_model(run) is None
    for step in (1, 2, 3):
        link_model(run, save(store, step, str(step), keep=2))
        assert newest_model(run) == Path("model") and (run / "model/weights").read_text() == str(step)
    link_model(run, store.path(2))
    moved = run.rename(tmp_path / "moved")
    assert (moved / "model/weights").read_text() == "2" and not (moved / "model").readlink().is_absolute()
    (moved / "checkpoints/step_000002").rename(moved / "checkpoints/step_000001")
    assert newest_model(moved) == Path("checkpoints/step_000003/policy"), "a link into nothing is none"
    link_model(moved, None)
    assert not os.path.lexists(moved / "model") and newest_model(moved) == Path("checkpoints/step_000003/policy")


def test_a_model_of_the_user_s_own_is_left_alone(tmp_path: Path) -> None:
    checkpoint = save(Store(tmp_path / "run", "step_"), 1, "new")
    for own in ("folder", "link"):
        place = tmp_path / "run" / "model"
        (tmp_path / "mine").mkdir(exist_ok=True)
        place.mkdir() if own == "folder" else place.symlink_to(tmp_path / "mine")
        for newest in (checkpoint, None):
            link_model(tmp_path / "run", newest)
            assert place.is_symlink() == (own == "link") and list(place.iterdir()) == []
        assert newest_model(tmp_path / "run") == Path("checkpoints/step_000001/policy")
        place.rmdir() if own == "folder" else place.unlink()


def test_a_file_system_without_links_leaves_the_model_in_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(1, "Operation not permitted")

    checkpoint = save(Store(tmp_path, "step_"), 1, "new")
    monkeypatch.setattr(os, "symlink", refused)
    link_model(tmp_path, checkpoint)
    assert "model cannot be made (Operation not permitted): the model is" in caplog.text
    assert newest_model(tmp_path) == Path("checkpoints/step_000001/policy")
