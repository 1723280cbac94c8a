"""One answer with all that is stored of its tokens, as JSON can hold it: NaN and missing tokens become null."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.trajectories import TRACED, StoredAnswer, Trajectories
from bebop.trajectory import NONE, VERDICTS
from bebop.view.queries import SHOWN

# Digits that are sent of a column; others are whole numbers.
DIGITS = {
    "logprobs": 7, "trainer_logprobs": 7, "draft_target_probs": 9, "draft_probs": 9, "overlap": 5, "target_entropy": 4,
    "draft_entropy": 4, "target_top": 5, "draft_top": 5,
}  # fmt: skip
PLAIN = ("ids", "logprobs", "versions", "trainer_logprobs")  # kept of every answer
WRITTEN = ("logprobs", "versions")  # of what the policy wrote alone
OPTIONAL = ("cycles", "drafters", "drafts")  # whole numbers where NONE means that there is none
IDS = ("ids", "drafts", "target_ids", "draft_ids")


def answer(store: Trajectories, number: int) -> dict[str, Any] | None:
    """Everything about answer ``number``; None if there is none.

    Returns:
        ``answer`` (columns of the list), ``gold`` (the right answer, or None), ``turns`` (role, text; an answer's with
        ``tokens``: [first, end)), ``tokens`` (column -> [T] or [T, M]; None for a column that is not stored),
        ``pieces`` (id -> text of every id in it), ``verdicts`` (their names) and ``drafters`` (theirs). An answer of
        several turns is one text, with what was read between them in it: the column ``turns`` has the turn that wrote
        each token, or -i where it was read before turn i; log-probs and versions of the latter are None.
    """
    if not store.query("SELECT id FROM answers WHERE id = ?", (number,)):
        return None
    found = store.answer(number)
    arrays = _arrays(found)
    turns = [
        {"role": "prompt", "text": found.prompt_text or _text(store, found.prompt_ids)},
        {"role": "answer", "text": found.text, "tokens": [0, len(found.ids)]},
    ]
    return {
        "answer": {name: _plain(found, name) for name in SHOWN},
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
    """The text of every id that occurs in the columns."""
    ids = [values.ravel() for name in IDS if (values := arrays[name]) is not None]
    wanted = np.unique(np.concatenate(ids))
    return {str(number): text for number, text in store.pieces(wanted[wanted != NONE].tolist()).items()}


def _text(store: Trajectories, ids: NDArray[np.int32]) -> str:
    """What tokens say, one after the other: of an environment's prompt nothing else is kept."""
    pieces = store.pieces(ids.tolist())
    return "".join(pieces.get(int(number), "") for number in ids)
