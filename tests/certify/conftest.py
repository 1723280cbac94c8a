"""A small HTTP server for the tests of served engines."""

from collections.abc import Iterator
from functools import cache

import pytest

import bebop.certify.calls
import bebop.rollout.http_client
from bebop.certify.calls import Server
from bebop.model.backbone import Policy
from tests.builders import tiny_policy
from tests.certify.local_server import LocalServer, running


@cache
def _policy() -> Policy:
    """The policy of every server; nothing changes it."""
    return tiny_policy(12)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    """With a tiny policy, and clients that do not wait long between tries."""
    monkeypatch.setattr(bebop.rollout.http_client, "FIRST_WAIT", 0.01)
    with running(LocalServer(_policy())) as server:
        yield server


@pytest.fixture
def opened() -> Iterator[list[Server]]:
    """Clients to be closed."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.close()
