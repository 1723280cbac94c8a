"""Storage of finished runs beside the results, each in a file of some hundred kilobytes.

The runs can thus be made at several times and on several machines, and be judged again without being repeated.
``falling-0.json.gz`` holds the metrics of the job, all evaluations of the heads beside it, and the training curves of
these heads. ``planted-0.json.gz`` holds the confusion table of a seed.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bebop.bench.record import place as place_of
from bebop.errors import UserError
from bebop.monitor.probe_set import Sweep
from recipes.reproduce.real.rl.analysis import Run
from recipes.reproduce.real.rl.jobs import RUN
from recipes.reproduce.real.rl.plan import RISING, RLPlan

FOLDER = "stored"  # inside the folder of the results


def run_file(folder: Path, direction: str, seed: int) -> Path:
    """Return the file of a stored run."""
    return folder / FOLDER / f"{direction}-{seed}.json.gz"


def planted_file(folder: Path, seed: int) -> Path:
    """Return the file of the planted streams of a seed."""
    return folder / FOLDER / f"planted-{seed}.json.gz"


def put(path: Path, plan: RLPlan, content: Mapping[str, Any]) -> None:
    """Write the content of a run or seed of ``plan``, atomically.

    The same content gives the same bytes.
    """
    told = json.dumps(
        {"plan": _settled(path, plan), "device": place_of({})["device"], **content}, separators=(",", ":")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_bytes(gzip.compress(told.encode(), mtime=0))
    scratch.replace(path)


def get(path: Path, plan: RLPlan) -> dict[str, Any]:
    """Read the file of ``put``.

    Raises:
        UserError: The file is missing, or of another plan.
    """
    if not path.is_file():
        raise UserError(f"{path} is not there: run --stage runs planted keep first")
    content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    now, then = _settled(path, plan), content["plan"]
    if others := sorted(name for name in {*now, *then} if now.get(name) != then.get(name)):
        raise UserError(f"{path} is of another plan ({', '.join(others)}): remove it, or make it again")
    return content


def _settled(path: Path, plan: RLPlan) -> dict[str, Any]:
    """Return the settings that a file depends on.

    Only runs with rising entropy depend on the bonus, so the others stay valid when it changes.
    """
    return plan.settled(bonus=path.name.startswith(RISING))


def as_left(place: Path, curves: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content to store of a run, from the folder in which it was made."""
    rows = [json.loads(line) for line in (place / RUN / "metrics.jsonl").read_text().splitlines()]
    looks = [json.loads(path.read_text()) for path in sorted((place / "looks").glob("step-*.json"))]
    return {"metrics": rows, "looks": looks, "sweep": json.loads((place / "sweep.json").read_text()), "curves": curves}


def runs(folder: Path, plan: RLPlan, wanted: Iterable[tuple[str, int]]) -> list[Run]:
    """Read the runs of these directions and seeds."""
    return [_run(get(run_file(folder, *each), plan), *each) for each in wanted]


def _run(content: Mapping[str, Any], direction: str, seed: int) -> Run:
    sweeps = {arm: Sweep.from_row(row) for arm, row in content["sweep"].items()}
    return Run(
        direction=direction, seed=seed, metrics=content["metrics"], looks=content["looks"], sweeps=sweeps,
        curves=content["curves"], device=content["device"],
    )  # fmt: skip
