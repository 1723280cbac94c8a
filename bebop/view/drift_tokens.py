"""Tokens that explain an alarm of the drift monitor, as JSON for the viewer's alarm page."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bebop.errors import UserError
from bebop.monitor.drift_monitor import MonitorSettings
from bebop.monitor.estimate import Estimate
from bebop.monitor.records import first_of_kind, kind_name
from bebop.monitor.token_drift import Ints, Part, Places, TokenDrift, share_out
from bebop.systems import SYSTEMS
from bebop.trajectory_db.reader import NAME, StoredAnswer, Trajectories
from bebop.view.folders import alarms

SHOWN = 12  # kinds in a table
CONTEXT = 12  # tokens before an example
START = -1  # in place of the token before the first one
WHOLE = ("expects", "follows", "position", "turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tested:
    """Tested places of traced completions, with their kinds; all [N]."""

    answers: Sequence[StoredAnswer]
    places: Places
    expects: Ints  # the target's likeliest token
    follows: Ints  # the token before
    position: Ints  # the draft's in its cycle, from 1
    turn: Ints  # the first turn of its kind of turn


def explain(run: Path, step: int) -> dict[str, Any]:
    """Explain the causes of a step's alarm by tokens.

    ``change`` of the mean overlap at tested places is ``explained`` (by entropies and the mix of places) less ``loss``.
    ``tokens`` share that loss out by the token that the target expects, ``previous`` by the token before, ``positions``
    by the draft's place in its cycle, ``turns`` by the turn (0, 1, 2-3, ...; empty if all completions have one turn). A
    ``note`` says why too little was traced. Raises ``UserError`` if the step has no alarm.
    """
    rows = {row["step"]: row for row in alarms(run)}
    if step not in rows:
        raise UserError(f"step {step} of {run} has no alarm: there are {_listed([*rows])}")
    row = rows[step]
    first, now = _windows(run, step)
    found = {
        "step": step,
        "state": row.get("state"),
        "evidence": row.get("evidence"),
        "action": row.get("action"),
        "before": [first.start, first.stop - 1],
        "after": [now.start, now.stop - 1],
        "note": "",
        "tokens": [],
        "previous": [],
        "positions": [],
        "turns": [],
    }
    if now.start < first.stop:
        return found | {"note": "The alarm came within the first steps, which later ones are held against."}
    with Trajectories(run / NAME) as stored:
        before, after = (_tested(stored.traced_tokens(steps)) for steps in (first, now))
        if not len(before.places) or not len(after.places):
            return found | {"note": "No tested drafts were traced in these steps: see monitor.trace."}
        if any(system.history for answer in after.answers if (system := SYSTEMS.get(answer.system)) is not None):
            return found | {"note": "Traces have drafts of head and history mixed: see what the probe set says."}
        return found | _explained(stored, before, after)


def _windows(run: Path, step: int) -> tuple[range, range]:
    """Return the steps that the monitor compared: those of the reference, and those up to ``step``."""
    settings, start = MonitorSettings(), 1
    path = run / "drift.jsonl"
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            for line in lines:  # long lines, of which few restart the reference: only those are parsed
                if '"restart": true' in line and (at := int(json.loads(line)["step"])) <= step:
                    start = at
    return range(start, start + settings.reference_steps), range(step - settings.window_steps + 1, step + 1)


def _tested(answers: Sequence[StoredAnswer]) -> _Tested:
    """Return the tested places of some completions."""
    columns: dict[str, list[np.ndarray[Any, Any]]] = {
        name: [np.zeros(0)] for name in ("answer", "place", "overlap", "entropy", *WHOLE)
    }
    for number, answer in enumerate(answers):
        trace = answer.trace
        if trace is None:
            continue
        at = np.flatnonzero(np.isfinite(trace.overlap) & np.isfinite(trace.target_entropy))
        _, first, cycle = np.unique(trace.cycles, return_index=True, return_inverse=True)
        begins = first[cycle]  # where the cycle of each token begins
        own = {
            "answer": np.full(len(at), number),
            "place": at,
            "overlap": trace.overlap[at],
            "entropy": trace.target_entropy[at],
            "expects": trace.target_ids[at, 0],
            "follows": np.concatenate([[START], answer.ids[:-1]])[at],
            "position": at - begins[at] + 1,
            "turn": [first_of_kind(int(turn)) for turn in answer.marks[at]],
        }
        for name, values in own.items():
            columns[name].append(np.asarray(values))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    whole = {name: joined[name].astype(np.int64) for name in ("answer", "place", *WHOLE)}
    places = Places(
        answer=whole["answer"],
        place=whole["place"],
        overlap=joined["overlap"].astype(np.float64),
        entropy=joined["entropy"].astype(np.float64),
    )
    return _Tested(answers=answers, places=places, **{name: whole[name] for name in WHOLE})


def _explained(stored: Trajectories, before: _Tested, after: _Tested) -> dict[str, Any]:
    """Return the tables of an explanation."""
    asked = [("tokens", "expects"), ("previous", "follows"), ("positions", "position")]
    asked += [("turns", "turn")] * bool(before.turn.any() or after.turn.any())
    drifts: dict[str, TokenDrift] = {
        table: share_out(before.places, after.places, getattr(before, kind), getattr(after, kind))
        for table, kind in asked
    }
    shown = {table: drift.parts[:SHOWN] for table, drift in drifts.items()}
    texts = stored.pieces(
        {
            *(part.kind for table in ("tokens", "previous") for part in shown[table]),
            *(int(t) for answer in after.answers for t in answer.ids),
        }
    )
    whole = drifts["tokens"]
    tables = {
        table: [_row(part, _name(part, table, texts), drifts[table].loss, after, texts) for part in parts]
        for table, parts in shown.items()
    }
    return {
        "change": whole.change,
        "explained": whole.explained,
        "loss": _interval(whole.loss),
        "answers": [len(before.answers), len(after.answers)],
        **tables,
    }


def _name(part: Part, table: str, texts: Mapping[int, str]) -> str:
    """Return a row's name: the text of its token, the draft's place, or the turn."""
    if table == "turns":
        return f"turn {kind_name(part.kind)}"
    if table == "positions":
        return f"draft {part.kind}"
    return "" if part.kind == START else texts.get(part.kind, "")


def _row(part: Part, name: str, whole: Estimate, after: _Tested, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return a row of a table, with examples."""
    return {
        "id": part.kind,
        "piece": name,
        "share": part.loss.point / whole.point if whole.point else None,
        "loss": _interval(part.loss),
        "count_before": part.before,
        "count_after": part.after,
        "overlap_before": _number(part.overlap_before),
        "expected": _number(part.expected),
        "overlap_after": _number(part.overlap_after),
        "examples": [_example(after, int(i), texts) for i in part.worst],
    }


def _example(after: _Tested, index: int, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return one place, as the completion's id and the token's index, with the text before it."""
    answer, place = after.answers[int(after.places.answer[index])], int(after.places.place[index])
    ids = answer.ids[max(0, place - CONTEXT) : place].tolist()
    return {
        "answer": answer.id,
        "place": place,
        "step": answer.step,
        "overlap": _number(float(after.places.overlap[index])),
        "context": "".join(texts.get(token, "") for token in ids),
        "token": texts.get(int(answer.ids[place]), ""),
    }


def _interval(estimate: Estimate) -> list[float | None]:
    """Return [point, low, high], with None for unknown numbers."""
    return [_number(value) for value in estimate.triple()]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
