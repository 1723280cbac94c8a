"""From the command line to a checked configuration; shared by the entry points, the only importers of hydra."""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bebop.config import JobConfig, from_dict
from bebop.errors import UserError


def job_config(overrides: Sequence[str]) -> JobConfig:
    """The configuration that Hydra overrides describe; every mistake in them is one ``UserError``."""
    return from_dict(JobConfig, composed(overrides))


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """``conf/config.yaml`` with overrides, as plain data."""
    try:
        with initialize_config_module("bebop.conf", version_base="1.3"):
            config = compose("config", overrides=list(overrides))
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        reasons = [" ".join(str(e).split()) for e in _chain(error)]
        raise UserError(f"{' '.join(overrides)}: {reasons[0]}{_hint(overrides)}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _chain(error: BaseException) -> list[BaseException]:
    return [error] if error.__cause__ is None else [*_chain(error.__cause__), error]


def _hint(overrides: Sequence[str]) -> str:
    """The settings of the first override's group, if it names one."""
    for override in overrides:
        group = override.lstrip("+~").split("=")[0].split(".")[0]
        if group not in groups():
            return f" (groups: {', '.join(groups())})"
    return ""


def groups() -> dict[str, list[str]]:
    """The configuration groups and the choices in each."""
    root = resources.files("bebop.conf")
    return {
        folder.name: sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
        for folder in sorted(root.iterdir(), key=lambda f: f.name)
        if folder.is_dir() and not folder.name.startswith("_")
    }


def run_main(main: Callable[[list[str]], int]) -> None:
    """Run an entry point: a ``UserError`` becomes one line on stderr and exit code 2."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        code = main(sys.argv[1:])
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = 2
    sys.exit(code)
