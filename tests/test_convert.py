"""``python -m bebop.convert``: pickled checkpoints of earlier versions written anew, and no code of theirs run."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bebop import codec, convert
from bebop.adaptation import part_job as adaptations
from bebop.errors import UserError
from bebop.monitor.probe_set import ProbeText
from bebop.run_folder import LOCK, RunFolder
from bebop.store import HEADS, STEPS, Store, seal
from bebop.trainer import checkpoint
from tests.commands import ended
from tests.stored_answers import group
from tests.test_codec import bits

MODEL = "policy/config.json"


def loop_state(step: int) -> dict[str, Any]:
    """As the loop hands it in."""
    ready = [group(2 * step, tokens=80), group(2 * step + 1, traced=False, version=step)]
    ready[0].prompt.item.update(answer="4", name=np.str_("Zoey"), metadata={3: [1, 2], "share": 0.5})
    bank = (ProbeText(prompt=(1, 2), answer=(3,)), ProbeText(prompt=(), answer=(4, 5), shown=0))
    return {"buffer": {"version": step, "groups_per_batch": 2, "ready": ready}, "restarts": {"0": 1}, "bank": bank}


def trainer_state(step: int) -> dict[str, Any]:
    """What a trainer's looks like."""
    torch.manual_seed(step)
    moments = {"layer.weight/exp_avg": torch.randn(3, 4), "layer.weight/step": torch.tensor(float(step))}
    rng = [{"cpu": torch.get_rng_state(), "cuda": []}]
    evidence = {"since": 0, "ledger": {"history": [[3, float("nan")]], "highest": torch.zeros(3, dtype=torch.float64)}}
    weights = {"layer.weight": torch.randn(3, 4).bfloat16()}
    return {
        "version": step,
        "rng": rng,
        "weights": weights,
        "optimizer": moments,
        "head": None,
        "certificate": evidence,
    }


def pickled(run: Path, prefix: str, step: int, **states: Any) -> Path:
    """A checkpoint as bebop wrote it up to 0.1.0: each state by ``torch.save``."""
    store = Store(run, prefix)
    staged = store.staging(step)
    (staged / "policy").mkdir(parents=True)
    (staged / MODEL).write_text(f"model {step}")
    for name, state in states.items():
        torch.save(state, staged / f"{name}.pt")
    seal(staged)
    return store.publish(staged, step)


def old_run(run: Path, *steps: int) -> list[Path]:
    return [pickled(run, STEPS, step, trainer=trainer_state(step), loop=loop_state(step)) for step in steps]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_converted_to_the_bit_and_the_old_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = old_run(tmp_path, 2, 4)
    before = [content(path) for path in old]
    for path in old:
        with pytest.raises(UserError, match=f"loop.pt is a pickle .* python -m bebop.convert {tmp_path}$"):
            checkpoint.load(path)
    with ended(convert.main, [str(tmp_path)], capsys) as (code, out, _lines):
        assert code == 0 and out.splitlines()[-1] == "2 checkpoints converted"
    new = checkpoint.store(tmp_path).newest_sound()
    assert new == tmp_path / "checkpoints" / "step_000004.2"
    found = checkpoint.load(new)
    assert bits(found.loop) == bits(loop_state(4)) and bits(found.trainer) == bits(trainer_state(4))
    assert (new / MODEL).read_text() == "model 4" and not list(new.rglob("*.pt"))
    assert [content(path) for path in old] == before
    names = sorted(content(tmp_path / "checkpoints"))
    with ended(convert.main, [str(tmp_path)], capsys) as (code, out, _lines):
        assert code == 0 and out == "0 checkpoints converted: none is pickled\n"
    assert sorted(content(tmp_path / "checkpoints")) == names


def test_an_adaptation_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"version": 3, **{name: trainer_state(3)[name] for name in ("weights", "optimizer")}, "best": [0.5, 2, {}]}
    old = pickled(tmp_path, HEADS, 3, head=state)
    with pytest.raises(UserError, match=r"head.pt is a pickle"):
        adaptations.read(old)
    with ended(convert.main, [str(tmp_path)], capsys) as (code, _out, _lines):
        assert code == 0
    new = adaptations.store(tmp_path).newest_sound()
    assert new is not None and bits(adaptations.read(new)) == bits(state)


class Runs:
    """What somebody might put into a run that he sends around."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


class Other:
    """A type that no state has."""


@pytest.mark.parametrize("bad", [Runs(), Other(), {"ready": [Runs()]}], ids=["code", "type", "inside"])
@pytest.mark.parametrize("name", ["trainer", "loop"])
def test_what_no_state_is_made_of_is_refused_and_nothing_is_written(
    tmp_path: Path, name: str, bad: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = pickled(tmp_path, STEPS, 1, **{"trainer": trainer_state(1), "loop": loop_state(1), name: bad})
    with ended(convert.main, [str(tmp_path)], capsys) as (code, _out, lines):
        assert code == 2 and len(lines) == 1
        assert lines[0].startswith(f"error: {path / name}.pt is not what a checkpoint of bebop holds, and is not read:")
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert not (tmp_path / "ran").exists()


def test_damaged_ones_are_named_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = old_run(tmp_path, 1, 2)
    file = old[1] / "loop.pt"
    file.write_bytes(file.read_bytes()[:-9])
    with ended(convert.main, [str(tmp_path)], capsys) as (code, out, _lines):
        assert code == 0 and f"left as it is: {file} is corrupt" in out and "1 checkpoint converted" in out
    assert not (tmp_path / "checkpoints" / "step_000002.2").exists()


def test_a_full_disk_leaves_no_new_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_run(tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(codec, "save", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device; free some space"):
        convert.main([str(tmp_path)])
    assert [path.name for path in Store(tmp_path, STEPS).all()] == ["step_000001"]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old_run(tmp_path / "run", 1)
    running = RunFolder(tmp_path / "run", "runtime.dir", True, Store(tmp_path / "run", STEPS))
    running.open()
    for arguments, named in (
        ([], "the following arguments are required: RUN"), ([str(tmp_path / "none")], "there is no checkpoint in"),
        ([str(tmp_path)], "there is no checkpoint in"), ([str(tmp_path / "run"), "x"], "unrecognized arguments: x"),
        ([str(tmp_path / "run")], "is in use by process"),
    ):  # fmt: skip
        with ended(convert.main, arguments, capsys) as (code, _out, lines):
            assert code == 2 and len(lines) == 1 and named in lines[0], lines
    running.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [LOCK, "checkpoints", "machine.json"]
