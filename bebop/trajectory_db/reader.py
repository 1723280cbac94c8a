"""Reader of ``trajectories.sqlite``: the completions that a run trained on, and the decoding of traced tokens.

One transaction writes one step, so a reader beside a running job sees whole steps. The tables are in ``schema`` beside
this file, and ``writer`` writes them.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.errors import UserError
from bebop.trajectory import Trace
from bebop.trajectory_db.schema import COLUMNS, FORMAT

NAME = "trajectories.sqlite"
WAIT = 30.0  # seconds that a reader waits for a writer, and a writer for readers
PAIRS = ("target_ids", "target_top", "draft_ids", "draft_top")
TRACED = tuple(field.name for field in fields(Trace) if field.name != "names")
MAX_VARIABLES = 500  # variables in one query; old versions of SQLite allow 999
ROLL_BACK = ("SQLITE_READONLY_ROLLBACK", "SQLITE_READONLY_RECOVERY", "SQLITE_READONLY_CANTLOCK")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredAnswer:
    """One completion: its columns of ``answers`` and ``prompts``, and its T tokens. The arrays are read-only."""

    id: int
    step: int
    prompt: int
    member: int
    task: str
    system: str
    reward: float
    parts: dict[str, float | None]  # of the reward, by name; None: the part does not apply
    timed_out: bool
    length: int
    finish: str
    version_first: int
    version_last: int
    staleness: int
    accept_length: float | None
    accept_rate: float | None
    overlap: float | None
    target_entropy: float | None
    exact: bool
    prompt_text: str
    prompt_ids: NDArray[np.int32]  # [P]
    text: str
    turns: int
    written: int
    ended: str
    restarts: int
    cycles: int | None
    tested: int | None
    counts: dict[str, float] | None  # counters of the decoding system, summed over draft positions; None: not stored
    question: int | None
    epoch: int
    gold: str | None
    marks: NDArray[np.int32]  # [T] the turn that wrote the token; -i: it was read before turn i
    ids: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T] the engine's
    versions: NDArray[np.int32]  # [T]
    trainer_logprobs: NDArray[np.float32] | None  # [T]
    trace: Trace | None


class Trajectories:
    """Reader of the file of a finished or running run, which it never changes; every failure is one ``UserError``.

    ``with Trajectories(run / NAME) as stored: stored.answer(17)``. Calls may come from several threads, one at a time.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path``; raise ``UserError`` if it is missing, foreign, or has an unknown format."""
        self.path = path
        if not path.is_file():
            raise UserError(f"{path} is not there: the run keeps no trajectories (monitor.trace=off)")
        with reading(path):
            self._connection = _open(path, "ro")
        try:
            check_format(path, self.query("SELECT value FROM meta WHERE key = 'format'"))
        except BaseException:
            self.close()
            raise

    def query(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> list[sqlite3.Row]:
        """Return all rows of a SELECT at once: reading them one by one would block the job from writing."""
        with reading(self.path):
            try:
                return self._connection.execute(sql, parameters).fetchall()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname not in ROLL_BACK:
                    raise
            # A job was killed while it wrote a step. A writable connection lets SQLite roll that back.
            with closing(_open(self.path, "rw")) as other:
                other.execute("SELECT * FROM meta").fetchall()
            return self._connection.execute(sql, parameters).fetchall()

    def answer(self, number: int) -> StoredAnswer:
        """Return the completion with this ``id``; raise ``UserError`` if there is none."""
        found = self._answers("answers.id = ?", (number,))
        if not found:
            raise UserError(f"{self.path} has no completion {number}")
        return found[0]

    def answers(self, steps: range) -> list[StoredAnswer]:
        """Return all completions of consecutive steps, in the order of training."""
        return self._answers("step >= ? AND step < ?", (steps.start, steps.stop))

    def traced_tokens(self, steps: range) -> list[StoredAnswer]:
        """Return the traced completions of consecutive steps, in the order of training."""
        return self._answers("traced AND step >= ? AND step < ?", (steps.start, steps.stop))

    def pieces(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each of these tokens that occurs in the file, by id."""
        wanted = sorted({int(i) for i in ids})
        found: dict[int, str] = {}
        for start in range(0, len(wanted), MAX_VARIABLES):
            part = wanted[start : start + MAX_VARIABLES]
            marks = ",".join("?" * len(part))
            found |= dict(map(tuple, self.query(f"SELECT id, text FROM pieces WHERE id IN ({marks})", part)))
        return found

    def _answers(self, where: str, parameters: Sequence[Any]) -> list[StoredAnswer]:
        rows = self.query(
            "SELECT answers.*, task, question, epoch, gold, prompts.text AS prompt_text, prompts.ids AS prompt_ids, "
            f"drafter_names, {', '.join(f'tokens.{name} AS token_{name}' for name in COLUMNS)} "
            "FROM answers JOIN prompts USING (prompt) JOIN tokens ON tokens.answer = answers.id "
            f"WHERE {where} ORDER BY answers.id",
            parameters,
        )
        try:
            return [_answer(row) for row in rows]
        except (ValueError, TypeError) as error:  # blobs of another length, or no blobs
            raise UserError(f"{self.path} is damaged ({error}): move it away") from error

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> "Trajectories":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def check_format(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Raise ``UserError`` unless ``rows``, the format entry of ``meta``, name the current format."""
    found = rows[0][0] if rows else None
    if found != str(FORMAT):
        raise UserError(f"{path}: format {found!r} is not known, this version of bebop reads format {FORMAT}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise SQLite's errors on ``path`` within the block as one ``UserError``."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if "no such table" in str(error) or name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            raise UserError(f"{path} is damaged or no file of bebop's ({error}): move it away") from error
        raise UserError(f"{path} cannot be read: {error}") from error


def _open(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, timeout=WAIT, uri=True, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    return connection


def _answer(row: sqlite3.Row) -> StoredAnswer:
    tokens = {name: _array(name, row[f"token_{name}"], row["length"]) for name in COLUMNS}
    trace = None
    if row["traced"]:
        names = tuple(json.loads(row["drafter_names"]))
        trace = Trace(names=names, **{name: tokens[name] for name in TRACED})  # type: ignore[arg-type]
    own = {field.name for field in fields(StoredAnswer)}
    flags = {name: bool(row[name]) for name in ("timed_out", "exact")}
    plain = {name: row[name] for name in row.keys() if name in own}
    plain["parts"] = json.loads(row["parts"])
    plain["counts"] = None if row["counts"] is None else json.loads(row["counts"])
    arrays = {name: tokens[name] for name in ("ids", "logprobs", "versions", "trainer_logprobs")}
    prompt = np.frombuffer(row["prompt_ids"], dtype="<i4")
    marks = np.zeros(row["length"], dtype=np.int32) if tokens["turns"] is None else tokens["turns"]
    return StoredAnswer(**{**plain, **flags, **arrays, "prompt_ids": prompt, "marks": marks, "trace": trace})


def _array(name: str, blob: bytes | None, length: int) -> NDArray[Any] | None:
    """Return a column as [T], or [T, M]; None if it was not stored."""
    if blob is None:
        return None
    values = np.frombuffer(blob, dtype=COLUMNS[name])
    if name in PAIRS:
        return values.reshape(length, len(values) // length if length else 0)
    return values.reshape(length)
