"""Parsers of JSON and YAML from untrusted files: any fault of a text raises ``ValueError``, and nothing else."""

import codecs
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bebop.errors import UserError

DEEP = "it is nested too deeply"
MAX_HEADER = 10**8  # bytes, as the safetensors library has it


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise ``ValueError`` also for nesting and numbers beyond Python's limits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(DEEP) from None


def text_lines(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each line of a file in UTF-8 and whether it is the last one; only two lines are in memory at a time.

    A line without an end is the last one, even if another process goes on writing the file. A byte order mark is left
    out. ``UnicodeDecodeError`` has the place in the file as its ``start``.
    """
    with path.open("rb") as file:
        line, place = file.readline().removeprefix(codecs.BOM_UTF8), 0
        while line:
            after = file.readline() if line.endswith(b"\n") else b""
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                error.start += place
                raise
            yield text, not after
            line, place = after, place + len(line)


def json_lines(path: Path, blank: bool = False) -> Iterator[tuple[int, str, Any]]:
    """Yield number, text and value of each line of a JSONL file, without an incomplete last line.

    ``blank``: leave out lines without text. Raises ``UserError`` for a line that is no JSON, and the errors of
    ``text_lines``.
    """
    for number, (line, last) in enumerate(text_lines(path), 1):
        if blank and not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError:
            if last:  # the process was killed while writing
                return
            raise UserError(f"{path} line {number} is not JSON: repair or delete that line") from None
        yield number, line, value


def parse_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML text; raise ``ValueError`` with a one-line message."""
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError(DEEP) from None
    except Exception as error:  # YAML's own errors, and those of invalid dates, numbers and keys
        raise ValueError(" ".join(str(error).split())) from None


def finite(value: object) -> float | None:
    """Return a number as float; None for other types, NaN, infinity, or a number too large for a float."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def main_type(folder: Path) -> str:
    """Return the data type of most weights in a folder, as ``BF16``; empty if they cannot be read.

    It reads the headers of safetensors files: eight bytes of length, then a JSON object. It does not use the
    safetensors library, since a process that watches a job does not import it.
    """
    counts: Counter[str] = Counter()
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                entries = parse_json(file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER)))
            for name, tensor in entries.items():
                if name != "__metadata__":
                    counts[str(tensor["dtype"])] += math.prod(tensor["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # the code that loads them reports the error
    return max(counts, key=counts.__getitem__, default="")
