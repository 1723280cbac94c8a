"""Folders of runs that were never run: answers decoded by a made-up model and head, whose traces fit together.

Cycles are what draft and verification give: a draft drawn from q stands with probability min(1, p/q), after the first
that does not a token is drawn from the residual, after three that stand one from p. p and q are those of a few places.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.trajectory import NONE, TOP, VERDICTS
from bebop.trajectory_db.reader import NAME
from bebop.trajectory_db.schema import FORMAT, SCHEMA

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
PIECES = (
    "", "\n", "\n\n", " ", "\t", "The", " answer", " is", " 4", " 12", " so", " we", " add", " them", ",", ".", " gcd",
    " of", " and", "=", " +", " x", "ä", "漢", "🙂", "\ufffd", "</b>", "&amp;", "'", '"', HOSTILE, "<|im_end|>",
)  # fmt: skip
DRAFTS, PLACES, GROUP, STEP = 3, 64, 4, 16
SYSTEMS = ("bebop", "target_only")
Array = NDArray[Any]


class Places:
    """``PLACES`` pairs of p and q over the pieces: [N, V]."""

    def __init__(self, seed: int, forgets: int | None = None) -> None:
        """``forgets``: a token that q hardly ever has where p has it first."""
        random = np.random.default_rng(seed)
        logits = random.normal(0, 2, (PLACES, len(PIECES)))
        self.p = _softmax(logits)
        drafted = logits + random.normal(0, 0.5, logits.shape)
        if forgets is not None:
            drafted[self.p.argmax(1) == forgets, forgets] -= 8
        self.q = _softmax(drafted)
        least = np.minimum(self.p, self.q)
        self.overlap = least.sum(1)
        # What a token is drawn from, by its verdict; a rejected draft from what q has too much of.
        self.shares = {"accepted": least, "recovered": self.p - least, "bonus": self.p, "rejected": self.q - least}

    def draw(self, verdict: str, at: Array, random: np.random.Generator) -> Array:
        """A token for each place ``at`` [N]."""
        cumulative = np.cumsum(self.shares[verdict], axis=1)
        cumulative /= cumulative[:, -1:]
        return (random.random(len(at))[:, None] > cumulative[at]).sum(1).clip(max=len(PIECES) - 1).astype(np.int32)


def write_run(
    folder: Path, answers: int = 40, length: int = 30, *, seed: int = 0, first_step: int = 1, trace: str = "all",
    forgets: tuple[int, int] | None = None, prompts: str = "What is the gcd?", questions: int | None = None,
) -> Path:  # fmt: skip
    """A run folder with ``answers`` answers of about ``length`` tokens, 16 a step, and an alarm at its last step.

    ``forgets``: a token, and the step from which on the head forgets it. ``questions``: asked again each epoch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"monitor:\n  trace: {trace}\ndecoding:\n  system: bebop\n")
    steps = -(-answers // STEP)
    write_metrics(folder, steps)
    (folder / "controller.jsonl").write_text(json.dumps({"step": steps, **CONCLUSION}) + "\n")
    with closing(sqlite3.connect(folder / NAME)) as store, store:
        store.executescript(SCHEMA)
        meta = {"format": str(FORMAT), "mode": trace, "top": str(TOP)}
        store.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        store.executemany("INSERT INTO pieces VALUES (?, ?)", enumerate(PIECES))
        token, spoiled = forgets or (None, steps + 1)
        before = min(answers, (spoiled - 1) * STEP)
        given = {"seed": seed, "prompts": prompts, "first_step": first_step, "questions": questions}
        add_answers(store, 0, before, length, **given)
        add_answers(store, before, answers - before, length, **given, forgets=token)
    return folder


CONCLUSION = {
    "state": "mismatch-driven", "evidence": "accept length 2.1 [2.0, 2.2], 0.5 below the steps before",
    "action": {"kind": "cotrain_start", "value": None, "why": "mismatch <b>grew</b>", "carried_out": False},
}  # fmt: skip


def write_metrics(folder: Path, steps: int) -> None:
    """``metrics.jsonl`` with a null in it, as a step without the number has."""
    rows = [
        {"step": s, "reward/mean": 0.3 + 0.4 * s / (steps + 1), "rollout/accept_length": 2.6 - 0.4 * s / (steps + 1),
         "policy/entropy": None if s == 2 else 0.3, "rollout/target_entropy": 0.25}
        for s in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_answers(
    store: sqlite3.Connection, first: int, count: int, length: int, *, seed: int, prompts: str, first_step: int = 1,
    forgets: int | None = None, questions: int | None = None,
) -> None:  # fmt: skip
    """Answers ``first`` ... ``first + count - 1``, the last of each group not traced; ``forgets`` as in ``Places``."""
    random = np.random.default_rng([seed, first])
    places = Places(seed, forgets)
    tops = {name: _top(probs) for name, probs in (("target", places.p), ("draft", places.q))}
    for number in range(first, first + count):
        prompt, member = divmod(number, GROUP)
        step = first_step + number // STEP
        text = f"<|user|>{prompts} ({prompt})<|assistant|>"
        if member == 0 or number == first:
            epoch, question = (0, None) if questions is None else divmod(prompt, questions)
            row = (prompt, "gcd", text, np.arange(5, dtype=np.int32).tobytes(), question, epoch, str(prompt + 2))
            store.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        tokens = _tokens(places, tops, max(2, int(random.normal(length, length / 5))), step, random)
        traced = member != GROUP - 1
        store.execute(*_insert("answers", _answer(number, step, tokens, traced, random)))
        store.execute(*_insert("tokens", _stored(number, tokens, traced)))


def _tokens(places: Places, tops: dict[str, Any], length: int, step: int, random: np.random.Generator) -> dict:
    """The columns of one answer, as arrays; cut to ``length``."""
    at = random.integers(PLACES, size=(length, DRAFTS + 1))
    stands = random.random((length, DRAFTS)) < places.overlap[at[:, :DRAFTS]]
    kept = np.cumprod(stands, axis=1).sum(1)  # [C] drafts that stand
    inside = np.arange(DRAFTS + 1) <= kept[:, None]
    cycles, place = (index[:length] for index in np.nonzero(inside))
    at = at[cycles, place]
    last = place == kept[cycles]
    verdicts = np.where(last, np.where(place == DRAFTS, 3, 2), 1).astype(np.int8)
    ids, drafts = np.zeros(length, np.int32), np.full(length, NONE, np.int32)
    for name in ("accepted", "recovered", "bonus"):
        those = verdicts == VERDICTS.index(name)
        ids[those] = places.draw(name, at[those], random)
    tested = verdicts != 3
    drafts[verdicts == 1] = ids[verdicts == 1]
    drafts[verdicts == 2] = places.draw("rejected", at[verdicts == 2], random)
    logprobs = np.log(places.p[at, ids]).astype(np.float32)
    real = np.where(tested, drafts, 0)
    unknown = np.float32(np.nan)
    versions = np.full(length, step - 1) - (cycles < cycles[-1] // 2)  # new weights came in its middle
    return {
        "ids": ids, "logprobs": logprobs, "versions": versions.clip(0).astype(np.int32),
        "trainer_logprobs": logprobs + random.normal(0, 1e-3, length).astype(np.float32), "verdicts": verdicts,
        "cycles": cycles.astype(np.int32), "drafters": np.where(tested, 0, NONE).astype(np.int8), "drafts": drafts,
        "draft_target_probs": np.where(tested, places.p[at, real], unknown).astype(np.float32),
        "draft_probs": np.where(tested, places.q[at, real], unknown).astype(np.float32),
        "overlap": np.where(tested, places.overlap[at], unknown).astype(np.float32),
        "target_entropy": _entropy(places.p)[at].astype(np.float32),
        "draft_entropy": np.where(tested, _entropy(places.q)[at], unknown).astype(np.float32),
        "target_ids": tops["target"][0][at], "target_top": tops["target"][1][at],
        "draft_ids": np.where(tested[:, None], tops["draft"][0][at], NONE).astype(np.int32),
        "draft_top": np.where(tested[:, None], tops["draft"][1][at], unknown).astype(np.float16),
    }  # fmt: skip


def _answer(number: int, step: int, tokens: dict, traced: bool, random: np.random.Generator) -> dict[str, Any]:
    tested = tokens["drafts"] != NONE
    return {
        "id": number, "step": step, "prompt": number // GROUP, "member": number % GROUP,
        "system": SYSTEMS[number // 160 % 2], "reward": float(random.integers(3) / 2), "timed_out": 0,
        "length": len(tokens["ids"]), "finish": "stop" if number % 5 else "length",
        "version_first": int(tokens["versions"][0]), "version_last": int(tokens["versions"][-1]),
        "staleness": int(step - tokens["versions"].min() - 1),
        "accept_length": len(tokens["ids"]) / (int(tokens["cycles"][-1]) + 1),
        "accept_rate": float((tokens["verdicts"][tested] == 1).mean()),
        "overlap": float(tokens["overlap"][tested].mean()) if traced else None,
        "target_entropy": float(tokens["target_entropy"][tested].mean()) if traced else None, "exact": 1,
        "parts": "{}" if number % 7 else '{"right": 0.5, "code": null}',
        "traced": int(traced), "text": "".join(PIECES[token] for token in tokens["ids"]),
    }  # fmt: skip


def _stored(number: int, tokens: dict, traced: bool) -> dict[str, Any]:
    kept = tokens if traced else {name: tokens[name] for name in ("ids", "logprobs", "versions", "trainer_logprobs")}
    blobs = {name: array.tobytes() for name, array in kept.items()}
    return {"answer": number, **blobs, **({"drafter_names": '["mtp"]'} if traced else {})}


def _insert(table: str, row: dict[str, Any]) -> tuple[str, list[Any]]:
    marks = ", ".join("?" * len(row))
    return f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values())


def _softmax(logits: Array) -> Array:
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def _entropy(probs: Array) -> Array:
    return -(probs * np.log(probs)).sum(1)


def _top(probs: Array) -> tuple[Array, Array]:
    """The ``TOP`` likeliest and their probabilities: [N, M] each."""
    order = np.argsort(-probs, axis=1)[:, :TOP]
    return order.astype(np.int32), np.take_along_axis(probs, order, 1).astype(np.float16)
