"""A real SGLang server in a process of its own, for tests that meet it over HTTP."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bebop.config.engines import SglangConfig
from bebop.config.job import JobConfig
from bebop.rollout.sglang.arguments import server_arguments
from bebop.rollout.sglang.backend import INTERPRETER, WHOLE_ANSWERS
from tests.integration.serving import healthy


@contextmanager
def serving(
    config: JobConfig, folder: Path, place: Path, environment: Mapping[str, str] | None = None, **extra: Any
) -> Iterator[str]:
    """Yield its address, once it is healthy; ``place`` gets its log, ``extra`` are ``sglang.ServerArgs``."""

    def command(port: int) -> list[str]:
        own = SglangConfig(cache_tokens=8192, extra={"port": port, **extra})
        return [sys.executable, "-m", "sglang.launch_server", *flags(server_arguments(config, own, folder, "cpu"))]

    with healthy(command, {**INTERPRETER, **WHOLE_ANSWERS, **(environment or {})}, place, 600) as address:
        yield address


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of ``sglang.Engine`` as the command line has them."""
    found = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        found += [flag] if value is True else [] if value in (False, None) else [flag, str(value)]
    return found
