"""Rule for the gain of history from the second epoch on, written before the run that it judges.

A result stores the hash of this code (``hash_of_rule``), so a rule that was changed after its result is detected.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce import rule_hash

SEEDS = 3  # jobs of the same settings, of other questions and draws
SINCE = 1  # the first epoch, from 0, whose questions have past answers
ARM, PARTS = "bebop_history", ("bebop", "history")
ACCEPT = 1.5  # least accept length, in that of bebop
SPEED = 1.25  # least tokens/s, in that of bebop
BATCHES = (1, 8)  # at which speed is asked for
LOOKUP = 0.01  # largest share of decoding that lookups take
AUTO = {"history, auto": "history", "bebop_history, auto": "bebop_history"}  # as many drafts as pay -> a fixed number
PLAIN, FIXED = 0.98, 0.95  # least tokens/s of these, in those of plain decoding and of the fixed number

Rows = Sequence[Mapping[str, Any]]  # see replay.by_arm


def total(rows: Rows, what: str) -> float:
    """Return the total tokens, cycles or seconds of the rows."""
    return float(sum(row[what] if what == "seconds" else sum(row[what]) for row in rows))


def accept_length(rows: Rows) -> float:
    """Return the tokens per cycle."""
    return total(rows, "tokens") / total(rows, "cycles")


def speed(rows: Rows) -> float:
    """Return the tokens per second of processor time."""
    return total(rows, "tokens") / total(rows, "seconds")


def of(rows: Rows, **wanted: Any) -> Rows:
    """Return the rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def against(rows: Rows, number: Any, batch: int, other: str) -> Interval:
    """Return the ratio of the arm's number to that of ``other`` from the second epoch on, over seeds."""
    late = [row for row in rows if row["epoch"] >= SINCE and row["batch"] == batch]
    seeds = sorted({row["seed"] for row in late})
    return across_seeds(
        [number(of(late, seed=seed, arm=ARM)) / number(of(late, seed=seed, arm=other)) for seed in seeds]
    )


def judge(rows: Rows) -> Mapping[str, bool]:
    """Return each requirement and whether it is met; ``confirmed`` if all are.

    A ratio meets its bar if its mean over seeds does, and if its 95 % interval over seeds lies above 1.
    """
    batches = sorted({row["batch"] for row in rows})
    met = {f"{SEEDS} seeds": len({row["seed"] for row in rows}) >= SEEDS}
    for batch in batches:
        met[f"accept length, batch {batch}: {ACCEPT} x bebop's"] = _reached(
            against(rows, accept_length, batch, "bebop"), ACCEPT
        )
    for batch in BATCHES:
        met[f"tokens/s, batch {batch}: {SPEED} x bebop's"] = _reached(against(rows, speed, batch, "bebop"), SPEED)
        for part in PARTS:
            met[f"tokens/s, batch {batch}: more than {part}'s"] = against(rows, speed, batch, part).low > 1
    for batch in batches:
        shares = [row["lookup"] for row in of(rows, batch=batch, arm=ARM)]
        met[f"lookups, batch {batch}: at most {100 * LOOKUP:g} % of decoding"] = sum(shares) / len(shares) <= LOOKUP
    return {**met, "confirmed": all(met.values())}


def judge_auto(rows: Rows) -> Mapping[str, bool]:
    """Judge the automatic number of drafts (``draft_tokens=auto``) by a rule of its own.

    At every batch size, even in their worst epoch, the ``auto`` arms must keep a share of two speeds: that of plain
    decoding, and that of the same system with its fixed number of drafts. The ratios are means over seeds.
    """
    met = {}
    for arm, fixed in AUTO.items():
        for batch in sorted({row["batch"] for row in rows}):
            for other, bar in (("plain", PLAIN), (fixed, FIXED)):
                name = f"{arm}, batch {batch}: at least {bar} x {other}'s tokens/s in every epoch"
                met[name] = min(by_epoch(rows, arm, other, batch)) >= bar
    return {**met, "confirmed": all(met.values())}


def by_epoch(rows: Rows, arm: str, other: str, batch: int) -> list[float]:
    """Return the ratio of an arm's tokens/s to those of ``other`` in each epoch, as means over seeds."""
    ratios = []
    for epoch in sorted({row["epoch"] for row in rows}):
        here = of(rows, epoch=epoch, batch=batch)
        seeds = sorted({row["seed"] for row in here})
        each = [speed(of(here, seed=seed, arm=arm)) / speed(of(here, seed=seed, arm=other)) for seed in seeds]
        ratios.append(sum(each) / len(each))
    return ratios


def _reached(times: Interval, bar: float) -> bool:
    return times.value >= bar and times.low > 1


def hash_of_rule(name: str = "judge") -> str:
    """Return the hash of the definitions that make up ``judge``, or another rule."""
    return rule_hash.of_sources([Path(__file__).read_text()], (name,))
