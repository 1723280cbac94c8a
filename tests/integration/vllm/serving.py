"""A real vLLM server in a process of its own, for tests that meet it over HTTP."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bebop.config.job import JobConfig
from bebop.rollout.vllm.arguments import ENVIRONMENT, engine_arguments
from bebop.rollout.vllm.plugin import CPU
from tests.integration.serving import healthy
from tests.integration.vllm.builders import with_vllm

OURS = ("weight_transfer_config", "use_tqdm_on_load", "disable_log_stats")  # not for a server that others start


@contextmanager
def serving(
    config: JobConfig, folder: Path, place: Path, environment: Mapping[str, str] | None = None, *, mended: bool = True
) -> Iterator[str]:
    """Yield its address, once it is healthy. ``mended``: the plugin acts on what a CPU lacks."""
    arguments = engine_arguments(with_vllm(config), folder, "cpu") | {"skip_tokenizer_init": False}
    given = flags({name: value for name, value in arguments.items() if name not in OURS})
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    settings = {**ENVIRONMENT, CPU: str(int(mended)), **(environment or {})}
    with healthy(lambda port: [*program, "--port", str(port), *given], settings, place, 300) as address:
        yield address


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of ``vllm.EngineArgs`` as the command line has them."""
    found = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found
