"""Codec that writes state to files and reads it without pickle: structure in ``stem.json``, numbers in
``.safetensors``.

Invariants:

- Reading runs no code that a file could name. The result consists of the types below and of the dataclasses that the
  reader lists itself.
- Every number is restored exactly, with its type, including NaN and infinities.

In JSON, None, truth values, whole numbers, finite floats, texts and lists are themselves. Everything else is an object
of one entry, its kind and its parts::

    {"tuple": [...]}  {"dict": {"name": ...}}  {"items": [[key, value], ...]}  {"float": "nan"}
    {"tensor": "name"}  {"array": ["float64", place, [3, 2]]}  {"scalar": ["int64", place]}  {"str_": "text"}
    {"datetime": ["2026-05-04T03:02:01", "Europe/Berlin", 0]}  {"decimal": ["1.50"]}  {"set": [...]}
    {"Group": {field: ...}}

Tensors are entries of the safetensors file, named by their paths. Arrays are many and short, so all arrays of one type
lie in one entry such as ``array/float64``, and ``place`` is where an array begins in it.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bebop.errors import UserError
from bebop.run_dir.checkpoints import DamagedError
from bebop.run_dir.storable import ARRAYS, ATOMS, SETS, atom, in_order

FORMAT = 1
NUMBERS, WORDS = ".safetensors", ".json"
# Types of tensors by their names in safetensors.
TYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
assert {str(t).removeprefix("torch.") for t in TYPES} == {*ARRAYS, "bfloat16"}, "arrays are kept as tensors"
MADE = {name: make for name, _, make in ATOMS.values()}
SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def files(stem: Path) -> tuple[Path, Path]:
    """Return the two paths of a state: structure and numbers."""
    return stem.with_name(stem.name + WORDS), stem.with_name(stem.name + NUMBERS)


def save(tree: Any, stem: Path, kinds: Sequence[type] = ()) -> None:
    """Write ``tree``; raise ``TypeError`` for a value that is neither described above nor an instance of ``kinds``."""
    writer = _Writer(kinds)
    content = writer.put(tree, "")
    words, numbers = files(stem)
    numbers.unlink(missing_ok=True)  # tensors loaded from it are memory-mapped: they keep the old file
    _write_numbers(numbers, {**writer.tensors, **writer.joined()})
    words.write_text(json.dumps({"format": FORMAT, "content": content}, allow_nan=False), encoding="ascii")


def load(stem: Path, kinds: Sequence[type] = ()) -> Any:
    """Read a tree that ``save`` wrote, with tensors on the CPU.

    Raise ``DamagedError`` if the files are not what ``save`` writes, and ``UserError`` for another format. A kind that
    is not among ``kinds`` counts as damage: nothing that a file names is looked up anywhere else.
    """
    words, numbers = files(stem)
    try:
        whole = json.loads(words.read_text(encoding="ascii"))
        form, content = whole["format"], whole["content"]
    except OSError as error:
        raise DamagedError(f"{words} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{words} is corrupt") from None
    if form != FORMAT:
        raise UserError(f"{words}: format {form!r} is not known, this version of bebop reads format {FORMAT}")
    try:
        tensors = load_file(numbers)
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedError(f"{numbers} cannot be read ({' '.join(str(error).split())})") from None
    try:
        return _Reader(tensors, kinds).get(content)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DamagedError(f"{words} does not fit {numbers.name} or this version of bebop ({error})") from None


class _Writer:
    """Encoder of a tree: JSON structure, tensors and arrays."""

    def __init__(self, kinds: Sequence[type]) -> None:
        self.kinds = set(kinds)
        self.tensors: dict[str, Tensor] = {}
        self._arrays: dict[str, list[NDArray[Any]]] = {}
        self._places: dict[str, int] = {}

    def put(self, value: Any, path: str) -> Any:
        """Return ``value`` as JSON; ``path`` names its tensors."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is list:
            return [self.put(one, f"{path}/{i}") for i, one in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": [self.put(one, f"{path}/{i}") for i, one in enumerate(value)]}
        if (made := atom(value)) is not None:
            return made
        if type(value) in SETS:
            return {SETS[type(value)]: in_order([self.put(one, f"{path}/{i}") for i, one in enumerate(value)])}
        if isinstance(value, dict):
            if all(type(name) is str for name in value):
                return {"dict": {name: self.put(one, f"{path}/{name}") for name, one in value.items()}}
            pairs = enumerate(value.items())
            return {"items": [[self.put(k, f"{path}/{i}/key"), self.put(v, f"{path}/{i}")] for i, (k, v) in pairs]}
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, path)}
        if isinstance(value, np.ndarray):
            return {"array": [value.dtype.name, self._array(value, path), list(value.shape)]}
        if isinstance(value, np.str_):  # reasoning-gym's knights_knaves has them
            return {"str_": str(value)}
        if isinstance(value, np.generic):
            return {"scalar": [value.dtype.name, self._array(np.asarray(value), path)]}
        if type(value) in self.kinds:
            names = [field.name for field in dataclasses.fields(value)]
            return {type(value).__name__: {name: self.put(getattr(value, name), f"{path}/{name}") for name in names}}
        raise TypeError(f"{path or 'the state'} is a {type(value).__qualname__}, which no checkpoint can keep")

    def joined(self) -> dict[str, Tensor]:
        """Return all arrays, concatenated to one entry per type."""
        return {f"array/{name}": torch.from_numpy(np.concatenate(found)) for name, found in self._arrays.items()}

    def _tensor(self, value: Tensor, path: str) -> str:
        if value.dtype not in TYPES or value.is_sparse:
            raise TypeError(f"{path} is a tensor of {value.dtype}, {value.layout}, which no checkpoint can keep")
        name = f"tensor{path}"
        while name in self.tensors:  # a key with / in it may equal another path
            name += "'"
        self.tensors[name] = value.detach()
        return name

    def _array(self, value: NDArray[Any], path: str) -> int:
        name = value.dtype.name
        if name not in ARRAYS:
            raise TypeError(f"{path} is an array of {value.dtype}, which no checkpoint can keep")
        place = self._places.get(name, 0)
        self._places[name] = place + value.size
        # Copied, since the caller may change the array before it is written.
        self._arrays.setdefault(name, []).append(value.astype(value.dtype.newbyteorder("="), order="C").reshape(-1))
        return place


class _Reader:
    """Decoder that rebuilds a tree from JSON structure and tensors."""

    def __init__(self, tensors: dict[str, Tensor], kinds: Sequence[type]) -> None:
        self.tensors, self.kinds = tensors, {kind.__name__: kind for kind in kinds}

    def get(self, value: Any) -> Any:
        """Return the value that a piece of JSON encodes."""
        if type(value) is list:
            return [self.get(one) for one in value]
        if type(value) is not dict:
            return value
        ((kind, made),) = value.items()
        if kind == "dict":
            return {name: self.get(one) for name, one in made.items()}
        if kind == "tuple":
            return tuple([self.get(one) for one in made])
        if kind == "array":
            return self._array(*made)
        if kind in self.kinds:
            return self.kinds[kind](**{name: self.get(one) for name, one in made.items()})
        if kind == "items":
            return {self.get(key): self.get(one) for key, one in made}
        if kind == "tensor":
            return self.tensors[made]
        if kind == "float":
            return SPECIAL[made]
        if kind in MADE:
            return MADE[kind](*made)
        if kind in SETS.values():
            return (set if kind == "set" else frozenset)(self.get(one) for one in made)
        if kind == "str_":
            return np.str_(made)
        if kind == "scalar":
            name, place = made
            return self._array(name, place, [])[()]
        raise ValueError(f"{kind!r} is not known")

    def _array(self, name: str, place: int, shape: list[int]) -> NDArray[Any]:
        size = math.prod(shape)
        flat: NDArray[Any] = self.tensors[f"array/{name}"].numpy()
        if min([place, *shape]) < 0 or place + size > len(flat):
            raise ValueError(f"an array of {shape} at {place} is not there")
        return flat[place : place + size].reshape(shape).copy()


def _write_numbers(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, one tensor at a time; the library's own writer copies all of them in memory."""
    ordered = sorted(tensors.items(), key=lambda entry: -entry[1].element_size())  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if count := tensor.numel():
                flat = tensor.cpu().contiguous().as_strided((count,), (1,))  # one element may have any stride
                file.write(flat.view(torch.uint8).numpy().data)
