"""Training from Python: ``bebop.train`` runs the job of ``python -m bebop.run`` and returns its result."""

import asyncio
import importlib.util
import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bebop.config.compose import job_config, resumed_overrides
from bebop.config.fields import settings
from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.metrics.sinks import read_jsonl
from bebop.tasks.functions import MODULES

Reward = str | Callable[..., Any]  # a name as in ``task.reward``, or a function in a file
REWARD, WEIGHTS, DIR = "task.reward", "task.reward_weights", "runtime.dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of a job.

    >>> TrainResult(folder=Path("runs/gcd"), model=Path("runs/gcd/model"), metrics=[{"step": 1, "reward/mean": 0.4}],
    ...     verdict="The reward rose in 60 steps (0.41 → 0.62).", advice="Nothing needs to be done.",
    ...     finished=True)  # doctest: +SKIP
    """

    folder: Path  # of the run
    model: Path | None  # the newest one, a Hugging Face folder, with LoRA an adapter; None: no checkpoint was written
    metrics: list[dict[str, Any]]  # one row a step, as in metrics.jsonl; step 0 is an evaluation before training
    verdict: str  # the first sentence of the report; empty without a finished step
    advice: str  # and the second
    finished: bool  # False: it was interrupted, and ``train(runtime={"dir": folder, "resume": True})`` continues it


def train(
    overrides: Sequence[str] = (),
    *,
    reward: Reward | Sequence[Reward] | Mapping[Reward, float] | None = None,
    **chosen: Any,
) -> TrainResult:
    """Run a GRPO job in this process and its Ray actors; raise ``UserError`` for a fault before anything starts.

    Args:
        overrides: overrides as on the command line: ``["task=gcd", "trainer.steps=20"]``.
        reward: a function in a file, or its name; a list of them; or a mapping to their weights.
        **chosen: by group, a choice (``task="gcd"``) or a mapping of settings (``trainer={"steps": 20}``).
    """
    if any(name.startswith(f"{MODULES}reward_") for name in sys.modules):  # this is a reward's process
        raise UserError(
            "train() was called while this file was imported for its reward: put the call below "
            "if __name__ == '__main__':, or the reward in a file of its own"
        )
    _refuse_running_loop()
    if isinstance(overrides, str) or not all(isinstance(one, str) for one in overrides):
        raise UserError(f"{str(overrides)[:80]!r} is not possible: give a list of texts such as ['task=gcd']")
    given = [*overrides, *settings_as_overrides(chosen), *_rewards(reward)]
    if {"runtime=verl", override("runtime", "verl")} & {*given}:
        raise UserError(
            "runtime=verl is not possible: train() runs Bebop's own jobs, python -m bebop.run those of verl"
        )
    folder = job_config(resumed_overrides(given, "config", "runtime.")).runtime.dir
    if folder is None:
        folder = f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
        given.append(override(DIR, folder))
    from bebop.run import main  # which imports Ray

    code = main(given)
    return _result(Path(folder).resolve(), code == 0)


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UserError("train() cannot run inside of an event loop, as in a notebook: call it in a script")


def _result(folder: Path, finished: bool) -> TrainResult:
    """Read the result of a job from its folder."""
    from bebop.report.page import conclude
    from bebop.run_dir.checkpoints import newest_model

    log = folder / "metrics.jsonl"
    rows = read_jsonl(log) if log.is_file() else []
    verdict = advice = ""
    if any(row["step"] for row in rows):
        said = conclude(folder)
        verdict, advice = said.verdict, said.advice
    newest = newest_model(folder)
    model = None if newest is None else folder / newest
    return TrainResult(folder=folder, model=model, metrics=rows, verdict=verdict, advice=advice, finished=finished)


# ---- settings as overrides


def settings_as_overrides(values: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield an override for each setting in nested mappings. A mapping that is itself a setting gets new entries."""
    mappings = {one.name for one in settings(JobConfig) if one.kind in (dict, dict[str, Any])}
    mappings |= {one.name for one in settings(JobConfig) if getattr(one.kind, "__origin__", None) is dict}
    for name, value in values.items():
        full = f"{where}{name}"
        if not isinstance(value, Mapping):
            yield override(full, value)
        elif full in mappings:
            yield from (override(f"++{full}.{key}", inner) for key, inner in value.items())
        else:
            yield from settings_as_overrides(value, f"{full}.")


def override(name: str, value: Any) -> str:
    """Return ``NAME=VALUE`` in Hydra's grammar, which parses to the same value."""
    return f"{name}={_written(value, name)}"


def _written(value: Any, name: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        # A backslash is literal, unless a quote or the end follows (Hydra), or ${ (OmegaConf).
        text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))
        quoted = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
        return f"'{quoted}'"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_written(one, name) for one in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(one, name)}" for key, one in value.items()) + "}"
    raise UserError(
        f"{name}={str(value)[:80]!r} is not possible: give a number, a text, a truth value, None, or lists or mappings "
        "of them"
    )


# ---- rewards as names


def _rewards(reward: Reward | Sequence[Reward] | Mapping[Reward, float] | None) -> list[str]:
    """Return the overrides of a reward, or of several with their weights."""
    if reward is None:
        return []
    if isinstance(reward, str) or callable(reward):
        return [override(REWARD, reward_name(reward))]
    names = [override(REWARD, [reward_name(one) for one in reward])]
    weights = [override(WEIGHTS, list(reward.values()))] if isinstance(reward, Mapping) else []
    return names + weights


def reward_name(reward: Reward) -> str:
    """Return the name by which another process imports a function; raise ``UserError`` if no import can find it.

    >>> reward_name("reward.py:correct")
    'reward.py:correct'
    """
    if isinstance(reward, str):
        return reward
    shown = f"reward={getattr(reward, '__qualname__', None) or str(reward)[:80]}"
    own = "give a function at the top of a .py file: it is imported in a process of its own"
    if isinstance(reward, partial) or not inspect.isfunction(reward):
        raise UserError(f"{shown} is not possible: {own}")
    if reward.__name__ == "<lambda>" or reward.__qualname__ != reward.__name__:
        what = "a lambda" if reward.__name__ == "<lambda>" else "defined inside of a function or class"
        raise UserError(f"{shown} is not possible, as it is {what}: {own}")
    file = Path(inspect.unwrap(reward).__code__.co_filename)
    module = sys.modules.get(reward.__module__)
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{shown} is not possible, as it stands in no file: {own}")
    if getattr(module, reward.__name__, None) is not reward:
        raise UserError(f"{shown} is not possible, as {reward.__module__} has another {reward.__name__}: {own}")
    name: str = reward.__module__
    if "." in name and importlib.util.find_spec(name) is not None:  # in a package, whose imports may be relative
        return f"{name}.{reward.__name__}"
    return f"{file.resolve()}:{reward.__name__}"
