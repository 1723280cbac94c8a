"""Questions from a JSONL or parquet file: every row once per epoch, in an order shuffled anew for each epoch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bebop.config.fields import check
from bebop.errors import UserError
from bebop.run_dir.safe_parse import parse_json
from bebop.run_dir.storable import check_keepable
from bebop.tasks.epochs import Epochs


class FileItems:
    """Rows of a file, epoch after epoch; ``item`` is a pure function of its arguments, the file and the seed.

    ``prompt_key`` and ``answer_key`` may reach into nested rows with dots, as in verl's ``reward_model.ground_truth``.
    A prompt is a text or a list of messages with role and content. All rows are read and checked at the start.
    """

    def __init__(self, path: str, prompt_key: str, answer_key: str, seed: int, size: int | None = None) -> None:
        """Read and check the file; raise ``UserError`` that names the first unusable line or row.

        ``size``: use only the first rows, as if the file ended there; None: all of them.
        """
        self.prompt_key, self.answer_key = prompt_key, answer_key
        rows = read_rows(Path(path), "task.path")
        allowed = f"{path} has {len(rows)} rows: give as many or fewer, or null for all"
        check(size is None or size <= len(rows), "task.size", size, allowed)
        self.rows = rows[:size]
        self._epochs = Epochs(len(self.rows), seed)
        for where, row in self.rows:
            check_row(row, prompt_key, answer_key, "task", where)
            check_keepable(row, where)

    def item(self, index: int, attempt: int = 0) -> dict[str, Any]:
        """Return question, answer and metadata (the whole row); other attempts shuffle the epoch differently."""
        _, question = self.asked(index, attempt)
        where, row = self.rows[question]
        return {
            "question": lookup(row, self.prompt_key, "task.prompt_key", where),
            "answer": lookup(row, self.answer_key, "task.answer_key", where),
            "metadata": row,
        }

    def golds(self) -> Iterator[tuple[str, Any]]:
        """Yield each row's place and gold answer, in the order of the file."""
        for where, row in self.rows:
            yield where, lookup(row, self.answer_key, "task.answer_key", where)

    def asked(self, index: int, attempt: int = 0) -> tuple[int, int]:
        """Return the epoch and the row, both from 0, that ``item`` uses for the same arguments."""
        return self._epochs.place(index, attempt)


def lookup(row: dict[str, Any], key: str, setting: str, where: str) -> Any:
    """Return ``row[key]``, through nested mappings if ``key`` has dots; raise ``UserError`` if missing or null."""
    if row.get(key) is not None:
        return row[key]
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{setting}={key!r}: {where} has no such key; it has {', '.join(map(str, row)) or 'none'}")
        value = value[part]
        if value is None:
            raise UserError(f"{setting}={key!r}: {where} has null there; give a value, or leave the row out")
    return value


def check_row(row: dict[str, Any], prompt_key: str, answer_key: str, section: str, where: str) -> None:
    """Raise ``UserError`` unless a row has a question and an answer; ``section``: the section of its settings."""
    question = lookup(row, prompt_key, f"{section}.prompt_key", where)
    _check_question(question, f"{section}.prompt_key={prompt_key!r}: {where}")
    answer = lookup(row, answer_key, f"{section}.answer_key", where)
    _check_text(str(answer), f"{section}.answer_key={answer_key!r}: {where}")


def _check_question(question: Any, where: str) -> None:
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    texts = [m.get(key) if isinstance(m, dict) else None for m in messages for key in ("role", "content")]
    blank = isinstance(question, str) and not question.strip()
    if blank or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{where} holds {str(question)[:60]!r}; give a text or a list of messages with role and content, both texts"
        )
    _check_text("".join(map(str, texts)), where)


def _check_text(text: str, where: str) -> None:
    """Raise ``UserError`` for half a surrogate pair: JSON may hold one, but no tokenizer and no database accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 20) : error.start + 20]
        raise UserError(f"{where} holds {shown!r}: {error.reason}; give a text of whole characters") from None


def read_rows(path: Path, setting: str) -> list[tuple[str, dict[str, Any]]]:
    """Read the file named by ``setting``, and return its rows, each with its place for error messages."""
    try:
        rows = _read_parquet(path, setting) if path.suffix == ".parquet" else _read_jsonl(path)
    except OSError as error:
        raise UserError(f"{setting}={str(path)!r} cannot be read: {' '.join(str(error).split())}") from error
    if not rows:
        raise UserError(f"{setting}={str(path)!r} has no rows: give a file with at least one")
    return rows


def _read_parquet(path: Path, setting: str) -> list[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{setting}={str(path)!r} is no parquet file: {str(error).splitlines()[0]}") from error
    columns = {}
    for name in table.column_names:
        try:
            columns[name] = _in_microseconds(table[name]).to_pylist()
        except (ValueError, OverflowError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{setting}={str(path)!r}: column {name!r} cannot be read: {error}; leave it out"
            ) from error
    rows = zip(*columns.values(), strict=True)
    return [(f"row {n} of {path}", dict(zip(columns, row, strict=True))) for n, row in enumerate(rows, start=1)]


def _in_microseconds(column: Any) -> Any:
    """Cast a column of nanoseconds (times written by pandas) to microseconds, the resolution of Python's times."""
    import pyarrow
    from pyarrow import types

    def finest(kind: Any) -> Any:
        if types.is_timestamp(kind) and kind.unit == "ns":
            return pyarrow.timestamp("us", kind.tz)
        if types.is_time64(kind) and kind.unit == "ns":
            return pyarrow.time64("us")
        if types.is_duration(kind) and kind.unit == "ns":
            return pyarrow.duration("us")
        if types.is_struct(kind):
            return pyarrow.struct([field.with_type(finest(field.type)) for field in kind])
        if types.is_list(kind):
            return pyarrow.list_(kind.value_field.with_type(finest(kind.value_type)))
        return kind

    wanted = finest(column.type)
    return column if wanted == column.type else column.cast(wanted, safe=False)


def _read_jsonl(path: Path) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = parse_json(line)
        except ValueError as error:  # not JSON, or not UTF-8
            raise UserError(f"{where} cannot be read: {error}; give one JSON object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{where} cannot be read: it holds {str(row)[:40]!r}; give one JSON object a line")
        rows.append((where, row))
    return rows
