"""A server of the plug-in, with the built-in model."""

from typing import Any

from bebop.model.checkpoint import resolve
from bebop.verl_job.server import EmbeddedServer, ServerConfig
from bebop.verl_job.settings import EngineConfig

PROMPT = (2, 17, 40, 3)


def make_server(**changes: Any) -> EmbeddedServer:
    """As verl's replica makes it."""
    settings: dict[str, Any] = {
        "path": str(resolve("tiny")),
        "dtype": "float32",
        "device": "cpu",
        "prompt_length": 24,
        "response_length": 40,
        "max_length": 64,
        "seed": 1,
        "engine": EngineConfig(slots=4),
    }
    return EmbeddedServer(ServerConfig(**(settings | changes)))
