"""The picture of the README, drawn from stored files by ``python -m recipes.docs``."""

import json
import re
from pathlib import Path
from typing import Any

from bebop.bench.record import ROOT
from bebop.metrics.intervals import Interval
from recipes.reproduce import rule_hash
from recipes.reproduce.figures import COLORS, band, figure

PICTURE = ROOT / "docs" / "decoding.svg"
STUDIES = Path(rule_hash.__file__).parent
SPEEDS = ROOT / "benchmarks" / "cpu" / "rollout.json"
SYSTEMS = {"target_only": "#c79a1e", "bebop": "#16407a", "bebop_adaptive": "#4aa3b8"}
HEADS = {"ce": "cross-entropy head", "e2e_tv": "total-variation head"}
NUMBER = r"(-?\d+\.?\d*)"
NAME = r"\b[mp][0-9a-f]{10}\b"  # of a marker or a clip: a hash of what it draws
ROUNDING = 0.01  # points


def draw(path: Path = PICTURE) -> None:
    """Draw the speed over plain decoding by batch size, and the accept length by temperature."""
    with figure(path, 2, 5.0, 3.4) as (left, right):
        speeds(left, json.loads(SPEEDS.read_text())["rows"])
        lengths(right, json.loads((STUDIES / "temperature" / "results.json").read_text())["tables"])


def speeds(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw one group of bars per batch size, with one bar per system."""
    batches = sorted({row["batch"] for row in rows})
    for i, (system, color) in enumerate(SYSTEMS.items()):
        values = {row["batch"]: row["x plain"] for row in rows if row["arm"] == system}
        places = [at + 0.26 * (i - 1) for at in range(len(batches))]
        drawn = axes.bar(places, [values[batch] for batch in batches], 0.24, color=color, label=system)
        axes.bar_label(drawn, fmt="%.2f", fontsize=7)
    axes.axhline(1, color=COLORS["start"], linewidth=1, linestyle="--")
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set(title="tokens/s, against plain decoding", ylim=(0, 1.9))
    axes.legend(fontsize=8, ncols=3, loc="upper center")


def lengths(axes: Any, tables: dict[str, list[dict[str, Any]]]) -> None:
    """Draw two lines per head, solid for sampled drafts and dotted for greedy ones, with intervals over seeds."""
    for head, label in HEADS.items():
        rows = [row for row in tables["Means by temperature"] if row["head"] == head]
        for drafts, column, line in (("sampled", "accept length", "-"), ("greedy", "greedy drafts", ":")):
            found = [Interval(**row[column]) for row in rows]
            band(axes, [row["temperature"] for row in rows], found, head, f"{drafts}, {label}", linestyle=line)
    axes.set(title="accept length, three drafts a cycle", xlabel="temperature of the model")
    axes.legend(fontsize=7)


def same(one: str, other: str) -> bool:
    """Return whether two pictures agree: numbers may differ by rounding, and so may the clip names hashed from them."""
    parts = [re.split(NUMBER, re.sub(NAME, "", text)) for text in (one, other)]
    if len(parts[0]) != len(parts[1]):
        return False
    return all(a == b or _near(a, b) for a, b in zip(*parts, strict=True))


def _near(one: str, other: str) -> bool:
    return all(re.fullmatch(NUMBER, text) for text in (one, other)) and abs(float(one) - float(other)) < ROUNDING
