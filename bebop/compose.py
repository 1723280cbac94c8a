"""From the command line to a checked configuration; shared by the entry points, the only importers of hydra."""

import dataclasses
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from bebop.adaptation.config import AdaptConfig
from bebop.config import JobConfig, from_dict
from bebop.errors import UserError

OVERRIDES = "overrides.json"  # in a run folder: the overrides that it was started with


def job_config(overrides: Sequence[str]) -> JobConfig:
    """The configuration that Hydra overrides describe; every mistake in them is one ``UserError``."""
    return from_dict(JobConfig, composed(overrides))


def adapt_config(overrides: Sequence[str]) -> AdaptConfig:
    """The same for an adaptation."""
    return from_dict(AdaptConfig, composed(overrides, "adapt"))


def saved_overrides(overrides: Sequence[str], section: str = "") -> list[str]:
    """What a run that is resumed was started with, where ``overrides`` do not say otherwise; empty for a new run.

    ``section`` holds ``dir`` and ``resume``, and ends in a dot unless it is empty.
    """
    given = dict(o.split("=", 1) for o in overrides if "=" in o)
    file = Path(given.get(f"{section}dir", "")) / OVERRIDES
    if given.get(f"{section}resume", "false").lower() != "true" or not file.is_file():
        return []
    return [o for o in json.loads(file.read_text()) if o.split("=")[0] not in given]


def write_down(config: Any, overrides: Sequence[str], folder: Path, section: str = "") -> None:
    """Keep what was asked: for readers, and for the next resume. Called once nothing in it was found wrong."""
    (folder / "config.yaml").write_text(as_yaml(config))
    kept = [o for o in overrides if not o.startswith((f"{section}resume=", f"{section}dir="))]
    (folder / OVERRIDES).write_text(json.dumps(kept) + "\n")


def as_yaml(config: Any) -> str:
    """A configuration dataclass as YAML."""
    return yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(config))), sort_keys=False)


def composed(overrides: Sequence[str], root: str = "config") -> dict[str, Any]:
    """``conf/<root>.yaml`` with overrides, as plain data."""
    parsed = [_read(override) for override in overrides]
    try:
        config = _compose(overrides, root)
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is missing: give {error.full_key}=VALUE") from error
    except (HydraException, OmegaConfBaseException) as error:
        _check_names(parsed, root)
        reason = " ".join(str(error).split())
        culprits = [o for o, p in zip(overrides, parsed, strict=True) if p.key_or_group in reason] or overrides
        raise UserError(f"{' '.join(culprits)} is not possible: {reason}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _compose(overrides: Sequence[str], root: str) -> DictConfig:
    with initialize_config_module("bebop.conf", version_base="1.3"):
        return compose(root, overrides=list(overrides))


def _read(override: str) -> Override:
    """One override, parsed; ``UserError`` where Hydra would go on about its grammar or list its search path."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except (HydraException, ValueError) as error:  # ValueError: a number of more digits than Python reads
        override = override if len(override) < 100 else override[:100] + "..."
        how = "give GROUP=CHOICE or GROUP.NAME=VALUE, and quotes around a VALUE that holds = { or ["
        raise UserError(f"{override!r} cannot be read: {how}") from error
    name, choices = parsed.key_or_group, groups()
    if parsed.package is not None:
        raise UserError(f"{override} is not possible: a group stays where it is; leave out @{parsed.package}")
    if not name:
        raise UserError(f"{override!r} cannot be read: there is no name before the =")
    if parsed.is_sweep_override():
        raise UserError(f"{override} is not possible: give one value; a list is written [1,2], a text in quotes")
    if name in choices and not parsed.is_delete() and parsed.value() not in choices[name]:
        raise UserError(f"{override} is not possible: choose one of {', '.join(choices[name])}")
    return parsed


def _check_names(parsed: Sequence[Override], root: str) -> None:
    """``UserError`` for the first override of a setting that does not exist, with those that do."""
    chosen = [p.input_line or "" for p in parsed if p.key_or_group in groups()]
    known: Any = OmegaConf.to_container(_compose(chosen, root))
    for override in parsed:
        if override.is_add():
            continue
        at, path = known, override.key_or_group.split(".")
        for depth, name in enumerate(path):
            where = ".".join(path[:depth])
            if not isinstance(at, dict):
                raise UserError(f"{override.key_or_group}: no such setting; {where} is a single value")
            if name not in at:
                there = f"{where} has {', '.join(at) or 'none'}" if where else f"the groups are {', '.join(at)}"
                new = f" (+{override.input_line} adds one)" if where == "task.args" else ""
                raise UserError(f"{override.key_or_group}: no such setting; {there}{new}")
            at = at[name]


def groups() -> dict[str, list[str]]:
    """The configuration groups and the choices in each."""
    root = resources.files("bebop.conf")
    return {
        folder.name: sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
        for folder in sorted(root.iterdir(), key=lambda f: f.name)
        if folder.is_dir() and not folder.name.startswith("_")
    }
