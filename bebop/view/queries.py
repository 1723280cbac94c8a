"""Lists of answers out of ``trajectories.sqlite``: sorted, filtered, searched and cut into pages by SQLite."""

import math
from collections.abc import Mapping
from typing import Any

from bebop.errors import UserError
from bebop.trajectories import Trajectories

# What a row of the list has. Numbers can be filtered by ``min_NAME`` and ``max_NAME``, the others by their value.
NUMBERS = (
    "step", "prompt", "member", "reward", "length", "staleness", "accept_length", "accept_rate", "overlap",
    "target_entropy", "version_first", "version_last", "traced", "turns", "written", "restarts", "epoch", "question",
)  # fmt: skip
WORDS = ("task", "system", "finish", "ended")
SHOWN = (*NUMBERS, *WORDS, "id", "timed_out", "exact")
SORTABLE = (*NUMBERS, *WORDS, "id")
PAGE = 500  # rows of a list at once, at most
EXCERPT = 160  # characters of an answer beside its row
_FROM = "FROM answers JOIN prompts USING (prompt)"


def listing(store: Trajectories, asked: Mapping[str, str]) -> dict[str, Any]:
    """Rows of the list from ``offset`` on, how many there are in all, and where answer ``anchor`` stands.

    Args:
        asked: the query of the address: sort, order (asc, desc), offset, limit, q (text to search for in prompts and
            answers), anchor, min_NAME and max_NAME of NUMBERS, NAME of WORDS. ``UserError`` for anything else.
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
    """What can be chosen from: values of WORDS with their counts, least and most of NUMBERS."""
    words = {
        name: {row[0]: row[1] for row in store.query(f"SELECT {name}, count(*) {_FROM} GROUP BY {name} ORDER BY 1")}
        for name in WORDS
    }
    ends = ", ".join(f"min({name}), max({name})" for name in NUMBERS)
    [row] = store.query(f"SELECT {ends} {_FROM}")
    return {"words": words, "ranges": {name: [row[2 * i], row[2 * i + 1]] for i, name in enumerate(NUMBERS)}}


def siblings(store: Trajectories, prompt: int, text: str) -> list[dict[str, Any]]:
    """All answers to prompt number ``prompt``, and to others of the same text; ``same_text`` tells whether it is it."""
    columns = ", ".join(SHOWN)
    query = (
        f"SELECT {columns}, prompts.text = ? AS same_text, substr(answers.text, 1, {EXCERPT}) AS excerpt {_FROM} "
        "WHERE prompt IN (SELECT prompt FROM prompts WHERE prompt = ? OR text = ?) ORDER BY step, id LIMIT ?"
    )
    return [dict(row) for row in store.query(query, (text, prompt, text, PAGE))]


def _where(asked: Mapping[str, str]) -> tuple[str, list[Any]]:
    """The condition and its values."""
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
    """Unless asked otherwise traced ones first, of each the newest; answers without the number come last either way."""
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
