"""Validation curves of the runs, and the drops of the learning rate on them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.reproduce.real.curve import Validation, flat
from recipes.reproduce.real.heads import CURVE, DONE
from recipes.reproduce.real.runs import HeadRun, all_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Run with the files that it has written so far."""

    run: HeadRun
    curve: tuple[Validation, ...]
    done: dict[str, Any] | None  # None: it has not ended

    @property
    def drops(self) -> list[Validation]:
        """Return the validations at which the learning rate was lowered."""
        return drops(self.run, self.curve)


def trained(place: Path) -> list[Trained]:
    """Return all runs that have a curve, in their order, with the settings stored in their folders."""
    found = []
    for run in all_runs():
        folder = run.folder(place)
        if (folder / CURVE).is_file():
            curve = [Validation(**one) for one in json.loads((folder / CURVE).read_text())["validations"]]
            ended = folder / DONE
            found.append(
                Trained(
                    run=settings(folder / "run.json"),
                    curve=tuple(replace(one, overlaps=tuple(one.overlaps)) for one in curve),
                    done=json.loads(ended.read_text()) if ended.is_file() else None,
                )
            )
    return found


def settings(path: Path) -> HeadRun:
    """Read the settings of a run from the file in its folder."""
    kept: dict[str, Any] = json.loads(path.read_text())
    options: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()}
    return HeadRun(**options)


def drops(run: HeadRun, curve: Sequence[Validation]) -> list[Validation]:
    """Return the validations after which the learning rate was lowered, by the rule of ``heads.Training``.

    The rate drops where the curve since the last drop is flat and another drop is left. The last validation ends the
    run and is never one of them.
    """
    found: list[Validation] = []
    since = 0
    for end, one in enumerate(curve[:-1]):
        part = [replace(each, step=each.step - since) for each in curve[: end + 1] if each.step >= since]
        if len(found) < run.drops and flat(part, run.patience, run.rise):
            found.append(one)
            since = one.step
    return found


def line(one: Trained) -> dict[str, Any]:
    """Return the line of a run for a table."""
    done = one.done or {}
    return {
        "run": one.run.name,
        "ended": done.get("ended", "not yet"),
        "flat": {True: "yes", False: "no"}.get(done.get("flat"), ""),  # type: ignore[arg-type]
        "steps": one.curve[-1].step,
        "minutes of processor time": one.curve[-1].seconds / 60,
        "rate lowered at": ", ".join(str(drop.step) for drop in one.drops),
        "best step": done.get("best step"),
        "best validation, tokens": done.get("best length"),
        "last rise, tokens": done.get("risen"),
    }
