"""Data of the viewer: run folders with their curves and alarms, lists of completions, and single completions.

SQLite sorts, filters, searches and paginates the lists. A completion comes with all stored data of its tokens, in JSON:
NaN and missing tokens become null.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bebop.errors import UserError
from bebop.metrics.catalogue import METRICS as CATALOGUE
from bebop.metrics.sinks import read_jsonl
from bebop.run_dir.folder import CONFIG, LOCK
from bebop.run_dir.safe_parse import finite, parse_yaml
from bebop.trajectory import NONE, VERDICTS
from bebop.trajectory_db.reader import NAME, TRACED, StoredAnswer, Trajectories

HOST, PORT = "127.0.0.1", 8710  # the viewer's address, and the first port that is tried
State = Literal["running", "waiting", "ended"]
METRICS, ALARMS = "metrics.jsonl", "controller.jsonl"
CURVES = tuple(row for row in CATALOGUE if row.curve)  # curves of the first page
LOCKS = Path("/proc/locks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Run folder as shown by the viewer.

    >>> Folder(path=Path("runs/gcd"), name="gcd")  # doctest: +SKIP
    """

    path: Path
    name: str

    @property
    def store(self) -> Path:
        """Return the path of its ``trajectories.sqlite``."""
        return self.path / NAME

    @property
    def state(self) -> State:
        """Return the state: ended unless a job holds the folder; waiting until that job has written completions."""
        if not _locked(self.path / LOCK):
            return "ended"
        return "running" if self.store.is_file() else "waiting"

    @contextlib.contextmanager
    def open(self) -> Iterator[Trajectories | None]:
        """Open its completions for one request, since a job may replace the file; None while there are none."""
        if not self.store.is_file():
            yield None
            return
        with Trajectories(self.store) as answers:
            yield answers

    def check(self) -> None:
        """Raise ``UserError`` if there is nothing to show now or later."""
        if not self.path.is_dir():
            raise UserError(f"{self.path} is not a folder: give the folder of a run")
        if not any((self.path / name).exists() for name in (METRICS, CONFIG, NAME, LOCK)):
            raise UserError(f"{self.path} is no run: give a folder that python -m bebop.run has made")
        if not self.store.is_file():
            self._explain_absence()
        with self.open():
            pass  # opening refuses a foreign file or an unknown format

    def _explain_absence(self) -> None:
        if self.setting("monitor", "trace") in ("off", False):  # YAML reads a bare off as False
            raise UserError(f"{self.path} ran with monitor.trace=off, which keeps no completions: set sample or all")
        if self.state == "ended":
            raise UserError(f"{self.store} is missing and no job runs there: this run kept no completions to show")

    def setting(self, group: str, name: str) -> Any:
        """Return a setting from its ``config.yaml``; None if the file does not give it."""
        try:
            return parse_yaml((self.path / CONFIG).read_text(encoding="utf-8"))[group][name]
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            return None

    def curves(self) -> dict[str, Any]:
        """Return the steps and the metrics of CURVES that the run has; null for a step without a value."""
        rows = _rows(self.path / METRICS)
        columns = {curve.name: [finite(row.get(curve.name)) for row in rows] for curve in CURVES}
        kept = {name: column for name, column in columns.items() if any(value is not None for value in column)}
        units = {curve.name: "" if curve.unit in curve.curve else curve.unit for curve in CURVES}
        labels = {row.name: {"label": row.curve, "unit": units[row.name]} for row in CURVES if row.name in kept}
        return {"steps": [row["step"] for row in rows], "columns": kept, "labels": labels}

    def alarms(self) -> list[dict[str, Any]]:
        """Return each change of the drift monitor's state and each proposal: step, state, evidence, action."""
        return alarms(self.path)

    def counts(self) -> dict[str, Any]:
        """Return cheap indicators of news: state, completions, newest step, sizes of the logs."""
        with self.open() as answers:
            rows = [] if answers is None else answers.query("SELECT count(*), max(step) FROM answers")
        sizes = [_size(self.path / name) for name in (METRICS, ALARMS)]
        count, newest = rows[0] if rows else (0, None)
        return {"state": self.state, "answers": count, "step": newest, "metrics": sizes[0], "alarms": sizes[1]}


def alarms(run: Path) -> list[dict[str, Any]]:
    """Return step, state, evidence and action of every change of state and every proposal of the controller."""
    return _rows(run / ALARMS)


def folders(paths: Sequence[Path]) -> list[Folder]:
    """Return the checked runs, named by their folders, or by whole paths if two folders share a name."""
    names = [path.resolve().name for path in paths]
    unique = len(set(names)) == len(names)
    found = [Folder(path=path, name=name if unique else str(path)) for path, name in zip(paths, names, strict=True)]
    for folder in found:
        folder.check()
    return found


def _locked(lock: Path) -> bool:
    """Return whether a process holds the lock, without touching it: a job may be acquiring it."""
    try:
        inode, holder = lock.stat().st_ino, lock.read_text(encoding="utf-8").split()[1:2]
        held = LOCKS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    for line in held:
        fields = line.replace("->", "").split()  # 1: FLOCK ADVISORY WRITE pid major:minor:inode 0 EOF
        # The device is ignored, as overlays report another than stat; the process id separates equal inode numbers.
        if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode) and holder in ([], [fields[4]]):
            return True
    return False


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def dumps(value: object) -> str:
    """Return JSON that every browser reads; raise ``ValueError`` for NaN, which JSON lacks."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; empty without the file."""
    return read_jsonl(path) if path.is_file() else []


# ---- lists

# Columns of the list. Numbers can be filtered by ``min_NAME`` and ``max_NAME``, the others by their value.
NUMBERS = (
    "step", "prompt", "member", "reward", "length", "staleness", "accept_length", "accept_rate", "overlap",
    "target_entropy", "version_first", "version_last", "traced", "turns", "written", "restarts", "epoch", "question",
)  # fmt: skip
WORDS = ("task", "system", "finish", "ended")
SHOWN = (*NUMBERS, *WORDS, "id", "timed_out", "exact")
SORTABLE = (*NUMBERS, *WORDS, "id")
PAGE = 500  # maximum rows of a list at once
EXCERPT = 160  # characters of a completion beside its row
_FROM = "FROM answers JOIN prompts USING (prompt)"


def listing(store: Trajectories, asked: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows from ``offset`` on, the total number of rows, and the position of completion ``anchor``.

    Args:
        asked: the query of the address: sort, order (asc, desc), offset, limit, q (text to search for in prompts and
            completions), anchor, min_NAME and max_NAME of NUMBERS, NAME of WORDS. ``UserError`` for anything else.
    """
    where, values = _where(asked)
    order = _order(asked)
    columns = ", ".join(SHOWN)
    limit, offset = _whole(asked, "limit", 100, PAGE), _whole(asked, "offset", 0)
    [(total,)] = store.query(f"SELECT count(*) {_FROM} {where}", values)
    query = f"SELECT {columns}, substr(answers.text, 1, {EXCERPT}) AS excerpt {_FROM} {where} {order} LIMIT ? OFFSET ?"
    rows = [dict(row) for row in store.query(query, [*values, limit, offset])]
    found = {"total": total, "offset": offset, "rows": rows}
    if "anchor" in asked:
        places = f"SELECT id, row_number() OVER ({order}) - 1 AS place {_FROM} {where}"
        wanted = [*values, _whole(asked, "anchor", 0)]
        standing = store.query(f"SELECT place FROM ({places}) WHERE id = ?", wanted)
        found["place"] = standing[0]["place"] if standing else None
    return found


def facets(store: Trajectories) -> dict[str, Any]:
    """Return the possible filters: the values of WORDS with their counts, minimum and maximum of NUMBERS."""
    words = {
        name: {row[0]: row[1] for row in store.query(f"SELECT {name}, count(*) {_FROM} GROUP BY {name} ORDER BY 1")}
        for name in WORDS
    }
    ends = ", ".join(f"min({name}), max({name})" for name in NUMBERS)
    [row] = store.query(f"SELECT {ends} {_FROM}")
    return {"words": words, "ranges": {name: [row[2 * i], row[2 * i + 1]] for i, name in enumerate(NUMBERS)}}


def siblings(store: Trajectories, prompt: int, text: str) -> list[dict[str, Any]]:
    """Return all completions of prompt ``prompt``, and of others with the same text, marked by ``same_text``.

    Prompts of an environment have no text; their completions are found by the prompt alone.
    """
    columns = ", ".join(SHOWN)
    query = (
        f"SELECT {columns}, prompts.text = ? AS same_text, substr(answers.text, 1, {EXCERPT}) AS excerpt {_FROM} "
        "WHERE prompt IN (SELECT prompt FROM prompts WHERE prompt = ? OR (text = ? AND text <> '')) "
        "ORDER BY step, id LIMIT ?"
    )
    return [dict(row) for row in store.query(query, (text, prompt, text, PAGE))]


def _where(asked: Mapping[str, str]) -> tuple[str, list[Any]]:
    """Return the SQL condition and its values."""
    parts: list[str] = []
    values: list[Any] = []
    for key, text in asked.items():
        end, _, name = key.partition("_")
        if end in ("min", "max") and name in NUMBERS:
            parts.append(f"{name} {'>=' if end == 'min' else '<='} ?")
            values.append(_number(key, text))
        elif key in WORDS:
            parts.append(f"{key} = ?")
            values.append(text)
        elif key == "q":
            pattern = "%" + "".join("\\" + c if c in "%_\\" else c for c in text) + "%"
            parts.append("(answers.text LIKE ? ESCAPE '\\' OR prompts.text LIKE ? ESCAPE '\\')")
            values += [pattern, pattern]
        elif key not in ("sort", "order", "offset", "limit", "anchor"):
            allowed = (
                f"min_ and max_ of {', '.join(NUMBERS)}; {', '.join(WORDS)}; q, sort, order, offset, limit, anchor"
            )
            raise UserError(f"{key}={text} is not possible: give one of {allowed}")
    return f"WHERE {' AND '.join(parts)}" if parts else "", values


def _order(asked: Mapping[str, str]) -> str:
    """Return the SQL order of the list: by default traced completions first, newest first.

    Rows without a value come last.
    """
    sort, order = asked.get("sort", "traced"), asked.get("order", "desc")
    if sort not in SORTABLE or order not in ("asc", "desc"):
        raise UserError(f"sort={sort}, order={order} is not possible: sort by {', '.join(SORTABLE)}, asc or desc")
    newest = "" if "sort" in asked else f"step {order}, "
    return f"ORDER BY {sort} {order} NULLS LAST, {newest}id {order}"


def _whole(asked: Mapping[str, str], key: str, default: int, most: int = 1 << 62) -> int:
    text = asked.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) <= most):
        raise UserError(f"{key}={text[:40]} is not possible: give a whole number up to {most}")
    return int(text)


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{key}={text[:40]} is not possible: give a number")
    return value


# ---- one completion

# Decimals of each column that are sent; the other columns are whole numbers.
DIGITS = {
    "logprobs": 7, "trainer_logprobs": 7, "draft_target_probs": 9, "draft_probs": 9, "overlap": 5, "target_entropy": 4,
    "draft_entropy": 4, "target_top": 5, "draft_top": 5,
}  # fmt: skip
PLAIN = ("ids", "logprobs", "versions", "trainer_logprobs")  # stored for every completion
WRITTEN = ("logprobs", "versions")  # only for tokens that the policy wrote
OPTIONAL = ("cycles", "drafters", "drafts")  # whole numbers, NONE if missing
IDS = ("ids", "drafts", "target_ids", "draft_ids")


def answer(store: Trajectories, number: int) -> dict[str, Any] | None:
    """Return all data of completion ``number``; None if there is no such completion.

    Returns:
        ``answer`` (columns of the list, and the parts of its reward), ``gold`` (the right answer, or None), ``turns``
        (role, text; a completion's with ``tokens``: [first, end)), ``tokens`` (column -> [T] or [T, M]; None for a
        column that is not stored), ``pieces`` (id -> text of every id in it), ``verdicts`` and ``drafters`` (their
        names). A completion of several turns is one text, including what was read between them. Its column ``turns``
        has the turn that wrote each token, or -i if it was read before turn i; log-probs and versions of the latter are
        None.
    """
    if not store.query("SELECT id FROM answers WHERE id = ?", (number,)):
        return None
    found = store.answer(number)
    arrays = _arrays(found)
    turns = [
        {"role": "prompt", "text": found.prompt_text or _text(store, found.prompt_ids)},
        {"role": "completion", "text": found.text, "tokens": [0, len(found.ids)]},
    ]
    return {
        "answer": {name: _plain(found, name) for name in SHOWN} | {"parts": found.parts},
        "gold": found.gold,
        "turns": turns,
        "tokens": {name: None if values is None else _listed(values, name, found) for name, values in arrays.items()},
        "pieces": _pieces(store, arrays),
        "verdicts": VERDICTS,
        "drafters": () if found.trace is None else found.trace.names,
    }


def _plain(found: StoredAnswer, name: str) -> Any:
    value = found.trace is not None if name == "traced" else getattr(found, name)
    return int(value) if isinstance(value, bool) else value


def _arrays(found: StoredAnswer) -> dict[str, NDArray[Any] | None]:
    plain = {name: getattr(found, name) for name in PLAIN}
    plain["turns"] = found.marks if found.turns > 1 else None
    return plain | {name: None if found.trace is None else getattr(found.trace, name) for name in TRACED}


def _listed(values: NDArray[Any], name: str, found: StoredAnswer) -> list[Any]:
    if name in DIGITS:
        wide = values.astype(np.float64).round(DIGITS[name])
        plain = wide.astype(object)
        plain[~np.isfinite(wide)] = None
    else:
        plain = values.astype(object)
        if name in OPTIONAL:
            plain[values == NONE] = None
    if name in WRITTEN:
        plain[found.marks < 0] = None
    listed: list[Any] = plain.tolist()
    return listed


def _pieces(store: Trajectories, arrays: dict[str, NDArray[Any] | None]) -> dict[str, str]:
    """Return the text of every id that occurs in the columns."""
    ids = [values.ravel() for name in IDS if (values := arrays[name]) is not None]
    wanted = np.unique(np.concatenate(ids))
    return {str(number): text for number, text in store.pieces(wanted[wanted != NONE].tolist()).items()}


def _text(store: Trajectories, ids: NDArray[np.int32]) -> str:
    """Return the concatenated text of tokens: an environment's prompt is stored only as tokens."""
    pieces = store.pieces(ids.tolist())
    return "".join(pieces.get(int(number), "") for number in ids)
