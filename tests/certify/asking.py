"""Engines that meet the local server, and requests to them."""

from typing import Any

import pytest

from bebop.certify.calls import Server
from bebop.certify.openai_server import OpenAIEngine
from bebop.certify.sglang_server import SglangEngine
from bebop.rollout.engine import Request
from tests.builders import requests
from tests.certify.local_server import LocalServer

STOP, V = 11, 12
Engine = SglangEngine | OpenAIEngine
BOTH = pytest.mark.parametrize("kind", [SglangEngine, OpenAIEngine])


def engine(kind: type[Engine], local: LocalServer, opened: list[Server], **own: Any) -> Any:
    opened.append(Server(local.url, key_name="BEBOP_API_KEY", **own))
    return kind(opened[-1])


def asked(count: int = 4, **params: Any) -> list[Request]:
    given = {"seed": 5, "max_new_tokens": 12, "stop_token_ids": (STOP,), **params}
    return requests([(1 + i // 2, 2, 3) for i in range(count)], **given)


def silent(tokens: int) -> None:
    pass
