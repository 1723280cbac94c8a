"""How weights travel to vLLM, seen from its side: whole, by role, by number or by file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bebop.errors import UserError
from bebop.rollout.served_weights import WeightUpdate
from bebop.rollout.vllm.transfer import TABLES, FileTransfer, MemoryTransfer, WeightTransfer, table

TARGET = {"a": torch.arange(3.0), "b": torch.ones(2)}
DRAFT = {"h": torch.zeros(4)}
NAMES = {"target": set(TARGET), "draft": set(DRAFT)}


class Loads:
    """In the place of ``Core``: what it would have read when it was told to."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, torch.Tensor]]] = []

    def load(self, role: str, place: Mapping[str, Any]) -> None:
        weights = TABLES[place["table"]] if "table" in place else load_file(place["path"])
        self.seen.append((role, dict(weights)))


def sent(transfer: WeightTransfer, load: WeightUpdate) -> list[tuple[str, dict[str, list[float]]]]:
    core = Loads()
    transfer.send(core, load)  # type: ignore[arg-type]
    return [(role, {name: t.tolist() for name, t in weights.items()}) for role, weights in core.seen]


def update(version: int = 1, target: Any = TARGET, draft: Any = DRAFT) -> WeightUpdate:
    return WeightUpdate(version=version, target=target, draft=draft)


@pytest.fixture(params=["memory", "file"])
def transfer(request: pytest.FixtureRequest, tmp_path: Path) -> WeightTransfer:
    return MemoryTransfer(NAMES) if request.param == "memory" else FileTransfer(tmp_path, NAMES)


def test_both_models_arrive_apart(transfer: WeightTransfer) -> None:
    wanted = [("target", {"a": [0, 1, 2], "b": [1, 1]}), ("draft", {"h": [0, 0, 0, 0]})]
    assert sent(transfer, update()) == wanted
    assert sent(transfer, update(2, draft={})) == wanted[:1]
    assert sent(transfer, update(3, target={})) == wanted[1:]


def test_part_of_a_model_is_refused(transfer: WeightTransfer) -> None:
    transfer.refuse(update())
    transfer.refuse(update(draft={}))
    with pytest.raises(UserError, match=r"version 7 has 1 tensors of the target and lacks 'b'"):
        transfer.refuse(update(7, target={"a": TARGET["a"]}))
    with pytest.raises(UserError, match=r"of the draft and lacks 'h'"):
        transfer.refuse(update(draft={"x": TARGET["a"]}))


def test_numbers_are_gone_after_use() -> None:
    with table(TARGET) as first, table(DRAFT) as second:
        assert first != second and TABLES[first] is TARGET and TABLES[second] is DRAFT
    with pytest.raises(ZeroDivisionError), table(TARGET):
        raise ZeroDivisionError
    assert not TABLES


def test_the_newest_two_versions_stay(tmp_path: Path) -> None:
    transfer = FileTransfer(tmp_path, NAMES)
    for version in (1, 2, 3, 3, 4):
        sent(transfer, update(version))
    assert sorted(path.name for path in next(tmp_path.iterdir()).iterdir()) == ["version-3", "version-4"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        sent(FileTransfer(tmp_path / "file", NAMES), update())
    assert "file" in str(caught.value) and "\n" not in str(caught.value)
