"""``python -m bebop.bench.published``: compare predictions of ``bebop.simulate --gpu`` with published speed-ups.

``points.yaml`` has the points, their sources and the rule; it was committed before the first comparison. The result is
``pays.json`` and ``pays.md``. ``--fit`` prints the two constants that the rule allows to be fitted; their values are in
``bebop/simulation/roofline.py``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from bebop.bench.record import show, table
from bebop.command import Parser, run_main, writing
from bebop.config.fields import from_dict
from bebop.config.simulate import PaysConfig
from bebop.run_dir.checkpoints import write_text
from bebop.simulation.pays import Fleet
from bebop.simulation.roofline import GPUS, Gpu

FOLDER = Path(__file__).parent
POINTS = FOLDER / "points.yaml"
NO_SIGN = 0.02  # of a published speed-up, around 1
MEDIAN, WIDEST, SHARE = 0.15, 0.35, 0.9  # of the rules W2 and W3


def read() -> dict[str, Any]:
    """Return the contents of ``points.yaml``."""
    content: dict[str, Any] = yaml.safe_load(POINTS.read_text())
    return content


def predicted(point: Mapping[str, Any], gpus: dict[str, Gpu] | None = None, data_sheet: bool = False) -> float:
    """Return the predicted speed-up of a point; ``data_sheet``: without its measured speed of plain decoding."""
    inputs = {key: value for key, value in point["inputs"].items() if key != "rows"}
    if data_sheet:
        inputs = {key: value for key, value in inputs.items() if key not in ("step_ms", "step_rows")}
    fleet, rows = Fleet.of(from_dict(PaysConfig, inputs), gpus), point["inputs"].get("rows")
    drafts = fleet.config.draft_tokens
    speedup = fleet.speedup(rows, drafts) if rows else fleet.rollout(drafts)
    return fleet.step(speedup) if point["kind"].startswith("step") else speedup


def sign(speedup: float) -> int:
    """Return 1 or -1 for a speed-up above or below 1, and 0 if it is too near."""
    return 0 if abs(speedup - 1) <= NO_SIGN else 1 if speedup > 1 else -1


def compare(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each point."""
    fitted = set(content["fit"].values())
    rows = []
    for point in content["points"]:
        found, alone = predicted(point), predicted(point, data_sheet=True)
        published = point["published"]
        rows.append(
            {
                "point": point["id"],
                "group": "fitted" if point["id"] in fitted else point["group"],
                "published": published,
                "predicted": found,
                "error": found / published - 1,
                "sign": "right" if sign(published) == 0 or (found > 1) == (published > 1) else "wrong",
                "by data sheet alone": alone,
                "assumed": point["assumed"],
                "source": content["sources"][point["source"]]["link"],
            }
        )
    return rows


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of the rule, over the judged points and over the borrowed ones."""
    judged = [row for row in rows if row["group"] in ("named", "stated")]
    borrowed = [row for row in rows if row["group"] == "borrowed"]
    errors = sorted(abs(row["error"]) for row in judged)
    near = sum(error <= WIDEST for error in errors)
    right = sum(row["sign"] == "right" for row in judged)
    alone = [
        row for row in judged if sign(row["published"]) and (row["by data sheet alone"] > 1) != (row["published"] > 1)
    ]
    return {
        "judged": len(judged),
        "right signs": right,
        "median error": median(errors),
        "largest error": errors[-1],
        "within the wide bound": near,
        "right signs by data sheet alone": len(judged) - len(alone),
        "median error by data sheet alone": median(
            abs(row["by data sheet alone"] / row["published"] - 1) for row in judged
        ),
        "borrowed": len(borrowed),
        "right signs of borrowed": sum(row["sign"] == "right" for row in borrowed),
        "median error of borrowed": median(abs(row["error"]) for row in borrowed),
        "W1": "holds" if right == len(judged) else "missed",
        "W2": "holds" if median(errors) <= MEDIAN else "missed",
        "W3": "holds" if near >= SHARE * len(judged) else "missed",
    }


def fit(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the constants at which the predictions of their points equal the published speed-ups."""
    points = {point["id"]: point for point in content["points"]}
    found = {"products": 0.5, "draft_launch": 0.0}
    for _ in range(3):  # each hardly depends on the other
        for name, low, high in (("products", 0.05, 1.0), ("draft_launch", 0.0, 0.01)):
            point = points[content["fit"][name]]

            def off(value: float, name: str = name, point: Mapping[str, Any] = point) -> float:
                products, launch = {**found, name: value}.values()
                gpus = {card: replace(gpu, products=products, draft_launch=launch) for card, gpu in GPUS.items()}
                return predicted(point, gpus) - float(point["published"])

            found[name] = _root(off, low, high)
    return found


def _root(off: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of a monotonic function between two bounds, or the bound nearer to it."""
    rising = off(high) > off(low)
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (low, middle) if (off(middle) > 0) == rising else (middle, high)
    return (low + high) / 2


def main(arguments: list[str]) -> int:
    """Compare and store the predictions, or fit the constants."""
    parser = Parser(prog="python -m bebop.bench.published", description="Predictions against published speed-ups.")
    parser.add_argument("--fit", action="store_true", help="print the constants that the rule allows to be fitted")
    options = parser.parse_args(arguments)
    content = read()
    if options.fit:
        show("".join(f"{name} {value:.4g}\n" for name, value in fit(content).items()))
        return 0
    rows = compare(content)
    found = verdict(rows)
    text = table([{key: value for key, value in row.items() if key != "source"} for row in rows])
    summary = table([{"what": key, "value": value} for key, value in found.items()])
    with writing(FOLDER):
        stored = {"verdict": found, "rows": [{k: _rounded(v) for k, v in row.items()} for row in rows]}
        write_text(FOLDER / "pays.json", json.dumps(stored, indent=1) + "\n")
        title = (
            "# Predicted and published speed-ups\n\nBy `python -m bebop.bench.published`. The rule and the sources: "
        )
        write_text(FOLDER / "pays.md", f"{title}[points.yaml](points.yaml).\n\n{summary}\n{text}")
    show(text + "\n" + summary)
    return 0


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    run_main(main)
