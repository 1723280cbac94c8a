"""Additions for newer SGLang that verl 0.9.1 lacks: sessions of weight updates, and the names of its arguments.

Newer versions (0.5.23 was read) refuse weights outside of a session, which verl 0.9.1 does not open. They would also
include the draft in every update: a frozen draft that is processed again drafts nonsense. So a session is opened
around verl's update, for the target alone unless the trainer also sends a head.
"""

import abc
import dataclasses
import inspect
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from bebop.verl_job.hooks import wrap
from bebop.verl_job.settings import SELECTOR

UPDATE = "update_weights_from_tensor"
STRUCTS = "sglang.srt.managers.io_struct"  # verl's adapter has imported it


def in_sessions(sglang_rollout: ModuleType) -> None:
    """Hook verl's SGLang adapter, which every training worker has."""
    if not hasattr(sys.modules.get(STRUCTS), "BeginWeightUpdateReqInput"):
        return  # an SGLang that knows no sessions

    async def around(original: Any, adapter: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        await adapter._init_server_adapter()
        adapters = kwargs.get("peft_config") is not None and kwargs.get("base_sync_done", False)  # as verl decides
        if adapter._engine is None or adapters:
            return await original(adapter, weights, *args, **kwargs)
        async with session(adapter._engine, os.environ.get(SELECTOR, "target")):
            return await original(adapter, weights, *args, **kwargs)

    wrap(sglang_rollout.ServerAdapter, "update_weights", around)


def complete_client(engine: ModuleType) -> None:
    """Add the two requests of a session to verl's server client; without them SGLang's base class stays abstract."""

    async def begin_weight_update(client: Any, selector: str = "all") -> Any:
        return await client._make_async_request("begin_weight_update", {"selector": selector})

    async def end_weight_update(client: Any) -> Any:
        return await client._make_async_request("end_weight_update")

    for method in (begin_weight_update, end_weight_update):
        setattr(engine.AsyncHttpServerAdapter, method.__name__, method)
    abc.update_abstractmethods(engine.AsyncHttpServerAdapter)


def list_arguments(server: ModuleType) -> None:
    """Let verl list SGLang's arguments where ``ServerArgs`` is no dataclass; verl needs only their names."""

    def fields(cls: type) -> Any:
        if dataclasses.is_dataclass(cls):
            return dataclasses.fields(cls)
        return tuple(SimpleNamespace(name=name) for name in inspect.signature(cls).parameters)

    server.dataclasses = SimpleNamespace(fields=fields)  # type: ignore[attr-defined]  # of this module of verl alone


@asynccontextmanager
async def session(client: Any, selector: str) -> AsyncIterator[None]:
    """Open a session on one server; updates by verl's ``client`` in this block go to ``selector``."""
    request = client._make_async_request

    async def chosen(endpoint: str, payload: Any = None, *args: Any, **kwargs: Any) -> Any:
        named = {**payload, "selector": selector} if endpoint == UPDATE else payload
        return await request(endpoint, named, *args, **kwargs)

    await client.begin_weight_update(selector)
    client._make_async_request = chosen
    try:
        yield
    finally:
        client._make_async_request = request
        await client.end_weight_update()
