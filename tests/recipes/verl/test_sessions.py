"""Sessions around verl's weight updates, with a client that keeps what it was asked to post."""

import asyncio
import dataclasses
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bebop.verl_job.sessions import UPDATE, complete_client, in_sessions, list_arguments
from bebop.verl_job.settings import SELECTOR


class Base(ABC):
    """SGLang's base class of engines, newer than verl's client."""

    @abstractmethod
    def begin_weight_update(self, selector: str = "all") -> Any: ...

    @abstractmethod
    def end_weight_update(self) -> Any: ...


class Client(Base):
    """verl's HTTP client of one server."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []

    async def _make_async_request(self, endpoint: str, payload: Any = None) -> None:
        self.posted.append((endpoint, payload))


complete_client(SimpleNamespace(AsyncHttpServerAdapter=Client))  # type: ignore[arg-type]


def module(fails: bool = False, leads: bool = True) -> Any:
    """The shape of verl's adapter: two buckets of weights, then the cache."""

    class ServerAdapter:
        _engine: Client | None = None

        async def _init_server_adapter(self) -> None:
            self._engine = Client() if leads and self._engine is None else self._engine

        async def update_weights(self, weights: Any, **kwargs: Any) -> None:
            await self._init_server_adapter()
            for bucket in weights:
                if self._engine is not None:
                    await self._engine._make_async_request(UPDATE, {"tensors": bucket})
                if fails:
                    raise RuntimeError("no memory")
            if self._engine is not None:
                await self._engine._make_async_request("flush_cache")

    return SimpleNamespace(ServerAdapter=ServerAdapter)


@pytest.fixture(params=[True, False])
def sessions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """An SGLang with sessions, and one without."""
    structs = ModuleType("sglang.srt.managers.io_struct")
    if request.param:
        structs.BeginWeightUpdateReqInput = object  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, structs.__name__, structs)
    return bool(request.param)


def update(changed: Any, **kwargs: Any) -> list[tuple[str, Any]]:
    adapter = changed.ServerAdapter()
    asyncio.run(adapter.update_weights(["a", "b"], **kwargs))
    return adapter._engine.posted if adapter._engine is not None else []


@pytest.mark.parametrize("selector", ["target", "all"])
def test_every_bucket_lies_in_a_session_for_what_is_sent(
    sessions: bool, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SELECTOR, selector)
    changed = module()
    in_sessions(changed)
    stock = [(UPDATE, {"tensors": "a"}), (UPDATE, {"tensors": "b"}), ("flush_cache", None)]
    chosen = {"selector": selector}
    opened = [("begin_weight_update", chosen), (UPDATE, {"tensors": "a"} | chosen), (UPDATE, {"tensors": "b"} | chosen)]
    opened += [("flush_cache", None), ("end_weight_update", None)]
    assert update(changed) == (opened if sessions else stock)


def test_lora_adapters_are_no_weights_and_other_ranks_post_nothing(sessions: bool) -> None:
    changed, other = module(), module(leads=False)
    in_sessions(changed)
    in_sessions(other)
    lora = {"peft_config": {"rank": 8}}
    assert "begin_weight_update" not in dict(update(changed, **lora, base_sync_done=True))
    assert ("begin_weight_update" in dict(update(changed, **lora, base_sync_done=False))) is sessions, "the base model"
    assert update(other) == []


def test_a_session_is_closed_when_the_update_fails(sessions: bool) -> None:
    changed = module(fails=True)
    in_sessions(changed)
    adapter = changed.ServerAdapter()
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(adapter.update_weights(["a", "b"]))
    assert (adapter._engine.posted[-1][0] == "end_weight_update") is sessions


def test_verl_finds_the_arguments_of_an_sglang_whose_arguments_are_no_dataclass() -> None:
    class Arguments:
        def __init__(self, model_path: str, enable_weights_cpu_backup: bool = False) -> None: ...

    @dataclasses.dataclass
    class Older:
        model_path: str

    server = SimpleNamespace(dataclasses=dataclasses)
    list_arguments(server)  # type: ignore[arg-type]
    assert [one.name for one in server.dataclasses.fields(Arguments)] == ["model_path", "enable_weights_cpu_backup"]
    assert [one.name for one in server.dataclasses.fields(Older)] == ["model_path"]
