"""Refuses settings of somebody else's run that would import code, reach servers or write outside the run folder.

A resumed run reads its settings from ``overrides.json``. In a folder that this user did not begin
(``bebop.run_dir.folder``) they may name any file to import. Such settings need ``--trust``, or must be given on the
command line, where the user sees them. Everything else in a run folder is data: numbers, texts, weights without
pickle.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.config.compose import composed, trusted
from bebop.config.fields import from_dict
from bebop.errors import UserError
from bebop.run_dir.folder import OVERRIDES, own
from bebop.tasks.environment import ENVIRONMENTS

BUILT_IN = ("auto", "math_verify", "dataset")
OF_ENVIRONMENT = ("task.name", "task.args")
# Effect of a setting on a resume, other than reading files and writing into the run folder.
REACHING = {
    "task.reward": "import and run",
    "evaluation.task.reward": "import and run",
    "task.name": "run the environment",
    "task.args": "give it",
    "runtime.address": "join, and so run what it is sent by, the Ray cluster",
    "runtime.temp_dir": "write to",
    "out": "write to",
    "rollout.sglang.extra": "start SGLang with",
    "rollout.sglang.draft": "have SGLang load",
    "rollout.sglang.folder": "write weights to",
    "rollout.sglang.address": "listen for whoever wants the weights at",
    "rollout.sglang.urls": "send prompts and weights to",
    "rollout.sglang.api_key_env": "send to a server the variable",
    "rollout.vllm.extra": "start vLLM with",
    "rollout.vllm.folder": "write weights to",
}


def refuse_foreign(
    run: str | None,
    config: Any,
    given: Sequence[str],
    root: str = "config",
    section: str = "",
    apart: str | None = None,
) -> None:
    """Raise ``UserError`` if resuming ``run``, which somebody else began, would have one of these effects.

    Args:
        run: the folder; None, or a folder without stored settings, is harmless.
        config: the configuration dataclass that the resume would use.
        given: the overrides of this call only; the other arguments are those of ``resumed_overrides``.
    """
    folder = Path(run) if run else None
    if folder is None or not (folder / OVERRIDES).is_file() or trusted(given, section) or own(folder):
        return
    now = dataclasses.asdict(config)
    alone = _alone(type(config), [o for o in given if apart is None or not o.startswith(apart)], root)
    harmless = [dataclasses.asdict(type(config)()), alone]
    named = [
        f"{doing} {name}={value!r}"
        for name, doing in REACHING.items()
        if (value := _value(now, name)) not in [_value(one, name) for one in harmless]
        and not (
            name.endswith("task.reward") and set([value] if isinstance(value, str) else value or ()) <= set(BUILT_IN)
        )
        and not (name in OF_ENVIRONMENT and _stays_here(now.get("task")))
    ]
    if named:
        raise UserError(
            f"{section}resume=true: {folder} is not a run that you began here, and it would {'; '.join(named)}: look "
            f"at {folder / OVERRIDES}, then add --trust, or give these settings yourself"
        )


def _alone(cls: type[Any], overrides: Sequence[str], root: str) -> Mapping[str, Any]:
    """Return the settings from these overrides alone; empty if they are invalid without the stored ones."""
    try:
        return dataclasses.asdict(from_dict(cls, composed(overrides, root)))
    except UserError:
        return {}


def _stays_here(task: Any) -> bool:
    """Return whether a task has no environment, or one that runs only our code and reaches no server."""
    if not isinstance(task, Mapping) or task["source"] != "environment":
        return True
    kind = ENVIRONMENTS.get(task["name"])
    return kind is not None and not kind.reaches


def _value(config: Any, name: str) -> Any:
    """Return a setting from nested mappings; None if it is missing."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config
