"""Writer of ``trajectories.sqlite`` during a job, one transaction for each step; ``reader`` beside this file reads it.

Invariants: each step is stored whole or not at all, and at most once. Writing a step drops it and all later ones first.

The journal is SQLite's default (a file beside it while a step is committed), not WAL. So between two steps a run is one
file that can be copied. It can also be read on read-only or network file systems, where WAL does not work. The price is
that a commit waits for readers, so readers fetch all rows at once.
"""

import errno
import json
import logging
import os
import resource
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.command import writing
from bebop.config.job import TraceMode
from bebop.errors import UserError
from bebop.trajectory import TOP, WEIGHED, Group, Trace, Trajectory, join_traces, spread_trace
from bebop.trajectory_db.reader import TRACED, WAIT, check_format
from bebop.trajectory_db.schema import COLUMNS, FORMAT, SCHEMA

log = logging.getLogger(__name__)
BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED")
DAMAGED = ("SQLITE_NOTADB", "SQLITE_CORRUPT")
# SQLite's errors, by the start of their name, and the corresponding system errors.
REFUSED = {
    "SQLITE_FULL": errno.ENOSPC, "SQLITE_READONLY": errno.EACCES, "SQLITE_CANTOPEN": errno.EACCES,
    "SQLITE_IOERR": errno.EIO,
}  # fmt: skip
REPLACED = "\ufffd"  # the replacement of incomplete characters in decoding
BETWEEN = "\n\n"  # separator of the texts of turns
SPACE = "▁"  # SentencePiece's blank; decoding drops the first one of a text


class TrajectoryLog:
    """Writer of each step's completions to the file of a run."""

    def __init__(
        self,
        path: Path,
        mode: TraceMode,
        piece: Callable[[int], str],
        group_size: int,
        resume_from: int | None = None,
    ) -> None:
        """Start ``path``, or keep its steps up to and including ``resume_from``.

        ``piece`` returns the text of a token (``piece_of``), and is called once for each token. Raises ``UserError`` if
        the file cannot be written, is foreign, or has another format.
        """
        self.path, self._piece, self._group_size = path, piece, group_size
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_from is None or not path.exists():
                _create(path)
            self._file = sqlite3.connect(path, timeout=WAIT, isolation_level=None)
            check_format(path, self._file.execute("SELECT value FROM meta WHERE key = 'format'").fetchall())
            with self._step():
                self._file.execute("REPLACE INTO meta VALUES ('mode', ?)", (mode,))
                self._drop((resume_from or 0) + 1)
            self._known = {number for (number,) in self._file.execute("SELECT id FROM pieces")}
        self._stale: int | None = None  # the first step that could not be replaced

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        version: int,
        system: str,
        trainer_logprobs: Mapping[int, NDArray[np.float32]],
    ) -> None:
        """Write the completions of update ``step`` (from 1), in one transaction.

        Args:
            step: the number of the update.
            groups: its batch.
            version: version of the weights that it updated.
            system: the decoding system in use.
            trainer_logprobs: [T] of the written tokens of traced completions, by index in the batch, group by group.

        Raises ``UserError`` if the disk refuses. If another process holds the file for longer than ``WAIT``, the step
        is left
        out with a warning: viewing a run must not end it.
        """
        trajectories = [(group.prompt.index, m, t) for group in groups for m, t in enumerate(group.trajectories)]
        answers = [
            {"id": prompt * self._group_size + member, "step": step, "prompt": prompt, "member": member,
             "system": system, **summary_row(trajectory, version)}
            for prompt, member, trajectory in trajectories
        ]  # fmt: skip
        tokens = [
            {"answer": row["id"], **token_row(t, trainer_logprobs.get(place))}
            for place, (row, (_, _, t)) in enumerate(zip(answers, trajectories, strict=True))
        ]
        prompts = [prompt_row(group) for group in groups]
        fresh = token_ids(groups) - self._known
        first = step if self._stale is None else min(step, self._stale)
        with storing(self.path):
            try:
                with self._step():
                    self._drop(first)
                    self._insert("prompts", prompts)
                    self._insert("answers", answers)
                    self._insert("tokens", tokens)
                    self._insert("pieces", [{"id": i, "text": self._piece(i)} for i in sorted(fresh)])
            except sqlite3.OperationalError as error:
                if not error.sqlite_errorname.startswith(BUSY):
                    raise
                self._stale = first
                log.warning("%s is held by another process: step %d is left out of it", self.path, step)
                return
        self._known |= fresh
        self._stale = None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Run the block as one transaction."""
        try:
            self._file.execute("BEGIN IMMEDIATE")
            yield
            self._file.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # after some errors SQLite has already rolled it back
                self._file.execute("ROLLBACK")
            raise

    def _drop(self, step: int) -> None:
        """Delete ``step`` and all later ones."""
        later = "SELECT id FROM answers WHERE step >= ?"
        if self._file.execute(f"{later} LIMIT 1", (step,)).fetchone() is None:
            return
        self._file.execute(f"DELETE FROM tokens WHERE answer IN ({later})", (step,))
        self._file.execute("DELETE FROM answers WHERE step >= ?", (step,))
        self._file.execute("DELETE FROM prompts WHERE prompt NOT IN (SELECT prompt FROM answers)")

    def _insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows, which all have the keys of the first."""
        if rows:
            names = list(rows[0])
            sql = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})"
            self._file.executemany(sql, rows)


def prompt_row(group: Group) -> dict[str, Any]:
    """Return the row of ``prompts`` for a group."""
    prompt = group.prompt
    return {
        "prompt": prompt.index,
        "task": prompt.task,
        "text": prompt.text,
        "ids": _blob("ids", prompt.token_ids),
        "question": prompt.question,
        "epoch": prompt.epoch,
        "gold": _gold(prompt.item.get("answer")),
    }


def _gold(answer: object) -> str | None:
    """Return the right answer as text, or as JSON if it is not a text."""
    if answer is None:
        return None
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()  # SQLite accepts no half of a surrogate pair


def summary_row(trajectory: Trajectory, version: int) -> dict[str, Any]:
    """Return the columns of ``answers`` that a trajectory determines; ``version`` is that of the updated weights."""
    turns = [turn.completion for turn in trajectory.turns]
    stats = sum((turn.stats for turn in turns[1:]), turns[0].stats)
    versions = np.concatenate([turn.versions for turn in turns])
    tested = float(stats.reached.sum())
    # Sums of an engine that measures some cycles are over those, each times the cycles that it represents. An engine
    # that measures none leaves zeros.
    measured = float(stats.counts.get(WEIGHED, stats.reached).sum()) if stats.overlap.any() else 0.0
    return {
        "reward": float(trajectory.reward),
        "parts": json.dumps(dict(trajectory.parts)),
        "timed_out": int(trajectory.timed_out),
        "length": trajectory.written + sum(len(turn.observation) for turn in trajectory.turns),
        "finish": turns[-1].finish_reason,
        "version_first": int(versions[0]) if len(versions) else version,
        "version_last": int(versions[-1]) if len(versions) else version,
        "staleness": version - int(versions.min(initial=version)),
        "accept_length": _number(stats.accept_length),
        "accept_rate": _ratio(stats.accepted, tested),
        "overlap": _ratio(stats.overlap, measured),
        "target_entropy": _ratio(stats.target_entropy, measured),
        "exact": int(all(turn.exact for turn in turns)),
        "traced": int(_trace(trajectory) is not None),
        "text": BETWEEN.join(turn.text for turn in turns),
        "turns": len(turns),
        "written": trajectory.written,
        "ended": trajectory.ended,
        "restarts": trajectory.restarts,
        "cycles": stats.cycles,
        "tested": int(tested),
        "counts": json.dumps({name: round(float(sums.sum()), 4) for name, sums in stats.counts.items()}),
    }


def _ratio(sums: NDArray[np.float64], count: float) -> float | None:
    """Return the sum over ``count``, or None if that is 0."""
    return _number(float(sums.sum()) / count) if count else None


def _number(value: float) -> float | None:
    """Return a number, or None if it is not finite, since SQLite has no NaN."""
    return float(value) if np.isfinite(value) else None


def token_row(trajectory: Trajectory, trainer_logprobs: NDArray[np.float32] | None) -> dict[str, Any]:
    """Return the columns of ``tokens``; ``trainer_logprobs`` [T] are those of the tokens that the policy wrote."""
    completion, trace = trajectory.completion, _trace(trajectory)
    written, count = completion.written, len(completion.token_ids)
    assert trace is None or len(trace) == count, f"a trace of {len(trace)} tokens, a completion of {count}"
    logprobs = completion.logprobs
    if completion.mask is not None:
        logprobs = np.where(written, logprobs, np.float32(np.nan))
    if trainer_logprobs is not None:
        assert len(trainer_logprobs) == trajectory.written, "the trainer saw another completion"
        found = np.full(count, np.nan, dtype=np.float32)
        found[written] = trainer_logprobs
        trainer_logprobs = found
    return {
        "ids": _blob("ids", completion.token_ids),
        "logprobs": _blob("logprobs", logprobs),
        "versions": _blob("versions", completion.versions),
        "trainer_logprobs": None if trainer_logprobs is None else _blob("trainer_logprobs", trainer_logprobs),
        "drafter_names": None if trace is None else json.dumps(trace.names),
        **{name: None if trace is None else _blob(name, getattr(trace, name)) for name in TRACED},
        "turns": None if completion.mask is None else _blob("turns", _marks(trajectory)),
    }


def _marks(trajectory: Trajectory) -> NDArray[np.int32]:
    """Return the turn that wrote each token [T]; -i if it was read before turn i."""
    parts = [
        np.repeat(np.array([-i, i], dtype=np.int32), [len(turn.observation), len(turn.completion.token_ids)])
        for i, turn in enumerate(trajectory.turns)
    ]
    return np.concatenate(parts)


def _trace(trajectory: Trajectory) -> Trace | None:
    """Return the trace of all turns, with empty rows for observations; None if any turn has none."""
    traces = [turn.completion.trace for turn in trajectory.turns]
    known = [trace for trace in traces if trace is not None]
    if len(known) < len(traces):
        return None
    return known[0] if len(known) == 1 else spread_trace(join_traces(known), trajectory.completion.written)


def _blob(name: str, values: Iterable[Any] | NDArray[Any]) -> bytes:
    return np.asarray(values).astype(COLUMNS[name]).tobytes()


def token_ids(groups: Sequence[Group]) -> set[int]:
    """Return every token that a reader may have to display."""
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    traces = [trace for turn in turns if (trace := turn.completion.trace) is not None]
    shown = chain(
        (np.asarray(group.prompt.token_ids) for group in groups),
        (ids for turn in turns for ids in (turn.observation, turn.completion.token_ids)),
        *((t.drafts, t.target_ids, t.draft_ids) for t in traces),
    )
    found = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(part.ravel() for part in shown)]))
    return {int(i) for i in found if i >= 0}


def piece_of(tokenizer: Any) -> Callable[[int], str]:
    """Return a function that returns the text of one token of a Hugging Face tokenizer.

    A part of a character is shown as in the vocabulary. An id that the tokenizer does not know (a model may have more)
    is ``<number>``.
    """

    def piece(number: int) -> str:
        raw = tokenizer.convert_ids_to_tokens(number)
        if raw is None:
            return f"<{number}>"
        text = str(tokenizer.decode([number], clean_up_tokenization_spaces=False))
        if REPLACED in text:
            return str(raw)
        return f" {text}" if str(raw).startswith(SPACE) and not text.startswith(" ") else text

    return piece


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Raise disk errors while SQLite writes ``path``, and a foreign file, as one ``UserError``."""
    with writing(path):
        try:
            yield
        except sqlite3.Error as error:
            name = error.sqlite_errorname
            if name.startswith(DAMAGED) or "no such table" in str(error):
                raise UserError(f"{path} is damaged or no file of bebop's ({error}): move it away") from error
            if name.startswith(BUSY):
                raise UserError(f"{path} is held by another process: end it first") from error
            number = next((number for start, number in REFUSED.items() if name.startswith(start)), None)
            if number is None:
                raise
            limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
            number = errno.EFBIG if number == errno.EIO and limited else number
            raise OSError(number, os.strerror(number)) from error


def _create(path: Path) -> None:
    """Create a file that appears with its tables already in it, since a reader may be waiting for it."""
    scratch = path.with_name(f".{path.name}.new")
    for old in (scratch, path, *(place.with_name(f"{place.name}-journal") for place in (scratch, path))):
        old.unlink(missing_ok=True)  # SQLite would replay an old journal into the new file
    with closing(sqlite3.connect(scratch, isolation_level=None)) as file:
        meta = {"format": FORMAT, "mode": "off", "top": TOP}
        values = ", ".join(f"('{key}', '{value}')" for key, value in meta.items())
        file.executescript(f"BEGIN; {SCHEMA} INSERT INTO meta VALUES {values}; COMMIT;")
    scratch.replace(path)
