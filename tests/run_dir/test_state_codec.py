"""States go to files and come back to the bit, and nothing that a file says is run or looked up."""

import contextlib
import dataclasses
import json
import math
import os
import pickle
from collections import OrderedDict
from datetime import datetime, time, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from bebop.errors import UserError
from bebop.run_dir import state_codec as codec
from bebop.run_dir.checkpoints import DamagedError
from bebop.run_dir.storable import check_keepable
from bebop.trainer.checkpoint import KINDS
from bebop.trajectory import DecodeStats
from tests.stored_answers import group

REAL = ("float64", "float32", "float16")
WHOLE = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool")


class Zone(tzinfo):
    """A zone that has no name to be found by."""

    def utcoffset(self, _: Any) -> timedelta:
        return timedelta(hours=1)


def array(kind: str, shape: list[int], seed: int) -> np.ndarray:
    """Any bits: NaN of every kind, infinities and subnormal numbers among them."""
    size = math.prod(shape) * np.dtype(kind).itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if kind == "bool" else 256, size, dtype=np.uint8)
    return np.frombuffer(raw.tobytes(), dtype=kind).reshape(shape)


arrays = st.builds(
    array, st.sampled_from(REAL + WHOLE), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 1 << 30)
)


def tensor(kind: str, shape: list[int], seed: int, how: int) -> torch.Tensor:
    """The same as a tensor: contiguous, turned, in strides, or in bfloat16."""
    made = torch.from_numpy(array(kind, shape, seed).copy())
    if how == 3 and made.dtype == torch.int16:
        return made.view(torch.bfloat16)
    return (made, made.mT if made.ndim > 1 else made, made[..., ::2] if made.ndim else made, made)[how]


tensors = st.builds(
    tensor, st.sampled_from(REAL + WHOLE), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 1 << 30),
    st.integers(0, 3),
)  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.characters(codec=None), arrays, tensors,
    arrays.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0]), st.text().map(np.str_),
    st.sampled_from([DecodeStats(), group(3), group(4, traced=False)]),
    st.datetimes(timezones=st.none() | st.timezones(), allow_imaginary=False), st.times(), st.dates(), st.timedeltas(),
    st.decimals(), st.binary(), st.uuids(), st.sets(st.integers() | st.text()), st.frozensets(st.decimals("1", "2")),
    st.sampled_from([datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=-3, seconds=1)))]),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.none(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4), st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip


def bits(value: Any) -> Any:
    """Something to compare by ==, which tells types, NaN, signed zeros and the order of entries apart."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().view(torch.int16) if value.dtype == torch.bfloat16 else value
        return "tensor", value.dtype, tuple(value.shape), raw.numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.str_):
        return type(value), value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes()
    if dataclasses.is_dataclass(value):
        return type(value), [(f.name, bits(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        return type(value), [bits(one) for one in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, value))
    if isinstance(value, datetime | time):
        return repr(value), value.fold
    if isinstance(value, dict):
        return "dict", [(bits(key), bits(one)) for key, one in value.items()]
    return type(value), repr(value)


def back(tree: Any, folder: Path) -> Any:
    codec.save(tree, folder / "state", KINDS)
    return codec.load(folder / "state", KINDS)


@settings(max_examples=80, deadline=None)
@given(trees)
@pytest.mark.slow
def test_any_state_comes_back_to_the_bit(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "codec"
    folder.mkdir(exist_ok=True)
    assert bits(back(tree, folder)) == bits(tree)


def test_what_a_loop_and_a_trainer_hand_in(tmp_path: Path) -> None:
    weights = torch.randn(4, 6, dtype=torch.float64)
    state = {
        "ready": [group(0), group(1, traced=False)],
        "a/b": weights[:, ::2], "a": {"b": weights[1], "c": (weights[1], torch.tensor(3.0))},
        "moments": OrderedDict(step=torch.tensor(7), empty=torch.zeros(0, 3)),
        "rng": [{"cpu": torch.get_rng_state(), "cuda": []}],
        "odd": {-0.0: [math.nan, -math.inf, -0.0, 10**30, "\ud800\0ü", True, np.float32(0.1), np.arange(6)[::-2]]},
    }  # fmt: skip
    found = back(state, tmp_path)
    assert bits(found) == bits(state) and type(found["moments"]) is dict
    assert found["ready"][0].trajectories[0].completion.token_ids.flags.writeable
    found["a"]["b"].zero_()
    assert bits(found["a"]["c"]) == bits(state["a"]["c"]), "tensors that shared memory do not do so afterwards"
    with safe_open(tmp_path / "state.safetensors", "pt") as file:
        assert {"tensor/a/b", "tensor/a/b'", "array/int64"} <= set(file.keys())


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda: 0, "/a/1 is a function"), (np.array([None]), "/a/1 is an array of object"),
        ({1, 2j}, "/a/1/. is a complex"), (Path("x"), "/a/1 is a PosixPath"),
        (np.array(["x"]), "/a/1 is an array of <U1"),
        (torch.zeros(2, dtype=torch.complex64), "/a/1 is a tensor of torch.complex64"),
        (torch.eye(2).to_sparse(), "/a/1 is a tensor of torch.float32, torch.sparse_coo"),
        (bytearray(b"x"), "/a/1 is a bytearray"), (datetime(2024, 1, 2, tzinfo=Zone()), "/a/1 is a datetime"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_named_and_not_written(tmp_path: Path, value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"^{named}"):
        codec.save({"a": [0, value]}, tmp_path / "state")
    assert list(tmp_path.iterdir()) == []
    if not isinstance(value, torch.Tensor):  # no row of a file has any
        with pytest.raises(UserError, match=r"^row 7: a\[1\] is .*, which no checkpoint can hold"):
            check_keepable({"a": [0, value]}, "row 7")


@settings(max_examples=40, deadline=None)
@given(trees)
def test_what_is_let_into_a_job_can_be_kept(tree: Any) -> None:
    with contextlib.suppress(UserError):  # a dataclass of ours is in no row
        check_keepable(tree, "row 7")
        codec._Writer(()).put(tree, "")


class Runs:
    """What a pickle could name."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_a_file_names_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    codec.save({"a": 1}, tmp_path / "state")
    for kind in (
        "Runs",
        "os.mkdir",
        "tests.run_dir.test_state_codec.Runs",
        "Group",
        "DecodeStats",
        "__import__",
        "Path",
    ):
        content = {"format": 1, "content": {kind: {"path": "ran"}}}
        (tmp_path / "state.json").write_text(json.dumps(content))
        with pytest.raises(DamagedError, match=f"'{kind}' is not known"):
            codec.load(tmp_path / "state")
    for name in ("state.json", "state.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Runs()))
        with pytest.raises(DamagedError, match=name):
            codec.load(tmp_path / "state")
        codec.save({"a": 1}, tmp_path / "state")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Runs()))
    assert (tmp_path / "ran").exists(), "and a pickle does"


BROKEN = [
    {"tensor": "none"}, {"tensor": []}, {"array": ["int64", 2, [2]]}, {"array": ["int64", -1, [1]]}, {"float": "7"},
    {"array": ["int64", -2, [1]]}, {"array": ["int64", 0, [-1, -3]]}, {"array": ["float8", 0, [1]]},
    {"array": ["int64", 0, "3"]}, {"array": 3}, {"array": ["int64", 0.5, [1]]}, {"scalar": ["int64"]}, {"dict": [1]},
    {"tuple": 1}, {"items": [1]}, {"items": 1}, {"items": [[[1], 2]]}, {}, {"dict": {}, "tuple": []},
    {"DecodeStats": {"unknown": 1}}, {"DecodeStats": [1]}, {"Group": {}},
]  # fmt: skip


@pytest.mark.parametrize("content", BROKEN, ids=str)
def test_what_save_never_writes_is_one_line(tmp_path: Path, content: Any) -> None:
    codec.save([np.arange(3)], tmp_path / "state")
    (tmp_path / "state.json").write_text(json.dumps({"format": 1, "content": [content]}))
    with pytest.raises(DamagedError, match=r"state\.json does not fit state\.safetensors") as caught:
        codec.load(tmp_path / "state", KINDS)
    assert "\n" not in str(caught.value)


def test_what_was_loaded_stays_when_its_file_is_written_again(tmp_path: Path) -> None:
    codec.save({"weights": torch.ones(1 << 16)}, tmp_path / "state")
    mapped = codec.load(tmp_path / "state")["weights"]
    codec.save({"weights": torch.zeros(1 << 16)}, tmp_path / "state")
    assert mapped.sum() == 1 << 16


def test_files_that_are_cut_or_of_another_format(tmp_path: Path) -> None:
    stem = tmp_path / "state"
    codec.save({"w": torch.arange(5.0), "rows": list(range(9))}, stem)
    for name in ("state.json", "state.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for cut in range(0, len(whole), 7):
            (tmp_path / name).write_bytes(whole[:cut])
            with pytest.raises(DamagedError, match=name):
                codec.load(stem)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "state.json").write_text("[" * 100_000)
    with pytest.raises(DamagedError, match=r"state\.json is corrupt"):
        codec.load(stem)
    (tmp_path / "state.json").write_text('{"format": 2, "content": 0}')
    with pytest.raises(UserError, match="format 2 is not known, this version of bebop reads format 1"):
        codec.load(stem)
    (tmp_path / "state.json").unlink()
    with pytest.raises(DamagedError, match="cannot be read"):
        codec.load(stem)
