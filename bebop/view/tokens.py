"""One answer with all that is stored of its tokens, as JSON can hold it: NaN and missing tokens become null."""

import json
import sqlite3
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.errors import UserError
from bebop.token_trace import NONE, VERDICTS
from bebop.view.queries import SHOWN

# Columns of ``tokens``: how a number is stored, and the digits that are sent of it (None: a whole number).
SCALARS: dict[str, tuple[str, int | None]] = {
    "ids": ("<i4", None), "logprobs": ("<f4", 7), "versions": ("<i4", None), "trainer_logprobs": ("<f4", 7),
    "verdicts": ("i1", None), "cycles": ("<i4", None), "drafters": ("i1", None), "drafts": ("<i4", None),
    "draft_target_probs": ("<f4", 5), "draft_probs": ("<f4", 5), "overlap": ("<f4", 5), "target_entropy": ("<f4", 4),
    "draft_entropy": ("<f4", 4),
}  # fmt: skip
TOPS: dict[str, tuple[str, int | None]] = {
    "target_ids": ("<i4", None), "target_top": ("<f2", 5), "draft_ids": ("<i4", None), "draft_top": ("<f2", 5),
}  # fmt: skip
OPTIONAL = ("cycles", "drafters", "drafts")  # whole numbers where NONE means that there is none
BATCH = 500  # pieces asked for at once


def answer(store: sqlite3.Connection, number: int) -> dict[str, Any] | None:
    """Everything about answer ``number``; None if there is none.

    Returns:
        ``answer`` (columns of the list), ``prompt`` and ``turns`` (role, text; an answer's with ``tokens``: [first,
        end)), ``tokens`` (column -> [T] or [T, M]; None for a column that is not stored), ``pieces`` (id -> text of
        every id in it), ``verdicts`` (their names) and ``drafters`` (theirs).
    """
    columns = f"{', '.join(SHOWN)}, answers.text AS text, prompts.text AS prompt_text"
    query = f"SELECT {columns} FROM answers JOIN prompts USING (prompt) WHERE id = ?"
    found = store.execute(query, (number,)).fetchone()
    if found is None:
        return None
    row = dict(found)
    text, prompt = row.pop("text"), row.pop("prompt_text")
    stored = store.execute("SELECT * FROM tokens WHERE answer = ?", (number,)).fetchone()
    tokens = {} if stored is None else _columns(stored, number)
    length = len(tokens["ids"]) if tokens else 0
    names = json.loads(stored["drafter_names"] or "[]") if stored is not None else []
    turns = [{"role": "prompt", "text": prompt}, {"role": "answer", "text": text, "tokens": [0, length]}]
    pieces = _pieces(store, tokens)
    return {
        "answer": row, "turns": turns, "tokens": tokens, "pieces": pieces, "verdicts": VERDICTS, "drafters": names,
    }  # fmt: skip


def _columns(stored: sqlite3.Row, number: int) -> dict[str, Any]:
    """Blobs as lists; ``UserError`` where one has another length than the tokens."""
    length = len(stored["ids"]) // 4
    columns: dict[str, Any] = {}
    for name, (kind, digits) in (SCALARS | TOPS).items():
        blob = stored[name]
        if blob is None:
            columns[name] = None
            continue
        size = np.dtype(kind).itemsize
        values = np.frombuffer(blob[: len(blob) // size * size], dtype=kind)
        if len(blob) % size or (len(values) != length if name in SCALARS else length and len(values) % length):
            raise UserError(f"{name} of answer {number} has {len(blob)} bytes, which do not fit its {length} tokens")
        rows = values.reshape(length, -1) if name in TOPS and length else values
        columns[name] = _listed(rows, digits, name in OPTIONAL)
    return columns


def _listed(values: NDArray[Any], digits: int | None, optional: bool) -> list[Any]:
    if digits is None:
        whole = values.astype(object)
        if optional:
            whole[values == NONE] = None
    else:
        wide = values.astype(np.float64).round(digits)
        whole = wide.astype(object)
        whole[~np.isfinite(wide)] = None
    listed: list[Any] = whole.tolist()
    return listed


def _pieces(store: sqlite3.Connection, tokens: dict[str, Any]) -> dict[str, str]:
    """The text of every id that occurs in the columns."""
    ids: set[int] = set()
    for name in ("ids", "drafts"):
        ids.update(number for number in tokens.get(name) or () if number is not None)
    for name in ("target_ids", "draft_ids"):
        ids.update(number for row in tokens.get(name) or () for number in row)
    wanted = sorted(ids - {NONE})
    found: dict[int, str] = {}
    for first in range(0, len(wanted), BATCH):
        part = wanted[first : first + BATCH]
        marks = ", ".join("?" * len(part))
        found.update(store.execute(f"SELECT id, text FROM pieces WHERE id IN ({marks})", part).fetchall())
    return {str(number): text for number, text in found.items()}
