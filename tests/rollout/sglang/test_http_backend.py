"""Calls to servers by address, over a real socket."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import pytest
from aiohttp import web

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.rollout import http_client
from bebop.rollout.engine import EngineDied
from bebop.rollout.heartbeat import Heartbeat
from bebop.rollout.sglang.backend import Fleet, HttpBackend

INFO = {
    "version": "0.5.23", "speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_use_rejection_sampling": True,
}  # fmt: skip


NUMBERS = count()


class Server:
    """Answers on a port of its own; the first ``busy`` answers to /generate are 503."""

    def __init__(self, busy: int = 0, key: str | None = None, version: str = "4", drops: int = 0) -> None:
        self.busy, self.key, self.version, self.drops = busy, key, version, drops
        self.calls: list[str] = []
        self.rids: set[str] = set()
        self.slow: set[str] = set()  # calls that are answered once ``awake`` is set
        self.awake = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.path.strip("/")
        self.calls.append(name)
        if name in self.slow:
            await self.awake.wait()
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({}, status=401)
        if name == "server_info":
            return web.json_response(INFO)
        if name == "model_info":
            return web.json_response({"weight_version": self.version})
        if name == "update_weight_version":
            self.version = (await request.json())["new_version"]
            return web.json_response({"success": True})
        if name == "end_weight_update":
            return web.json_response({"success": False, "message": "no session"}, status=400)
        if name in ("abort_request", "continue_generation", "pause_generation", "update_weights_from_disk"):
            return web.Response()
        if name == "generate":
            rid = (await request.json()).get("rid", str(len(self.rids)))
            if rid in self.rids:  # SGLang refuses a name while a request of that name lives
                return web.json_response({"error": {"message": f"Duplicate request ID {rid}"}}, status=400)
            self.rids.add(rid)
            if self.drops:
                self.drops -= 1
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if self.busy:
                self.busy -= 1
                return web.json_response({}, status=503)
            body = await request.json()
            if not body["input_ids"]:
                return web.json_response({"error": {"message": "empty"}}, status=400)
            return web.json_response({"output_ids": body["input_ids"], "meta_info": {}})
        return web.json_response({}, status=404)


def talk(server: Server, work: Callable[[HttpBackend], Awaitable[Any]], **settings: Any) -> Any:
    """Run ``work`` against a server on the loopback address."""

    async def main() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{name}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        key = settings.pop("key", None)
        backend = HttpBackend(
            f"http://127.0.0.1:{port}/",
            key,
            DecodingConfig(),
            pause="in_place",
            **{"timeout": 10.0, "retries": 3, **settings},
        )
        try:
            await backend.start()
            return await work(backend)
        finally:
            await backend.close()
            server.awake.set()
            await runner.cleanup()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.01)


def wanted(ids: list[int]) -> dict[str, Any]:
    """A request with a name of its own."""
    return {"input_ids": ids, "rid": f"{next(NUMBERS)}."}


def ask(backend: HttpBackend) -> Awaitable[Any]:
    return backend.generate(wanted([1, 2]))


def test_what_fails_on_its_way_is_tried_again() -> None:
    async def work(backend: HttpBackend) -> tuple[list[int], int]:
        return (await ask(backend))["output_ids"], backend.redrawn

    server = Server(busy=1, drops=1)
    assert talk(server, work) == ([1, 2], 1), "a server that is busy has drawn nothing"
    assert server.calls.count("generate") == 3
    assert len(server.rids) == 3 and len({rid.split(".")[0] for rid in server.rids}) == 1, "an abort by prefix ends all"


def test_a_request_without_a_name_is_tried_again() -> None:
    assert talk(Server(busy=1), lambda backend: backend.generate({"input_ids": [1, 2]}))["output_ids"] == [1, 2]


def test_a_server_that_stays_busy_counts_as_dead() -> None:
    server = Server(busy=99)
    with pytest.raises(EngineDied, match=r"status 503 \(4 tries\)"):
        talk(server, ask)
    assert server.calls.count("generate") == 4


def test_nobody_there() -> None:
    async def work() -> None:
        backend = HttpBackend("http://127.0.0.1:9", None, DecodingConfig(), pause="in_place", timeout=2.0, retries=1)
        try:
            await backend.start()
        finally:
            await backend.close()

    with pytest.raises(EngineDied, match="2 tries"):
        asyncio.run(work())


def test_keys() -> None:
    assert talk(Server(key="secret"), ask, key="secret")["output_ids"] == [1, 2]
    with pytest.raises(UserError, match="api_key_env"):
        talk(Server(key="secret"), ask, key="wrong")


def test_a_request_that_is_refused_is_not_tried_again() -> None:
    server = Server()
    with pytest.raises(UserError, match="empty"):
        talk(server, lambda backend: backend.generate(wanted([])))
    assert server.calls.count("generate") == 1


def test_control_calls() -> None:
    assert talk(Server(), lambda backend: backend.control("abort_request", {"rid": "a"}))["success"]
    with pytest.raises(EngineDied, match="no session"):
        talk(Server(), lambda backend: backend.control("end_weight_update", {}))
    with pytest.raises(UserError, match="no SGLang server"):
        talk(Server(), lambda backend: backend.control("begin_weight_update", {}))


def test_what_a_dead_job_left_is_ended() -> None:
    server = Server()
    talk(server, ask)
    assert server.calls[-4:-1] == ["end_weight_update", "abort_request", "continue_generation"]


def test_versions_are_made_numbers() -> None:
    server = Server(version="default")
    talk(server, ask)
    assert server.version == "0"
    server = Server(version="12")
    talk(server, ask)
    assert server.version == "12" and "update_weight_version" not in server.calls


def test_a_server_that_accepts_and_never_answers_is_dead_though_an_answer_may_take_for_ever() -> None:
    async def work(backend: HttpBackend) -> None:
        await ask(backend)  # it is warm: from now on it answers between two steps
        server.slow = {"generate", "server_info"}
        assert backend.dead() is None
        with pytest.raises(EngineDied, match=r"is silent for .* with 1 requests open"):
            await ask(backend)
        assert backend.dead() is not None

    server = Server()
    talk(server, work, hang_after=0.4, timeout=5.0, retries=0)


def test_an_answer_may_take_long_while_the_server_answers_otherwise() -> None:
    async def work(backend: HttpBackend) -> Any:
        await ask(backend)
        server.slow, server.calls = {"generate"}, []
        answer = asyncio.ensure_future(ask(backend))
        while server.calls.count("server_info") < 8:  # more than hang_after passes, in a beat of a fifth of it
            await asyncio.sleep(0.01)
        assert not answer.done() and backend.dead() is None
        server.awake.set()
        return await answer

    server = Server()
    assert talk(server, work, hang_after=0.4)["output_ids"] == [1, 2]


def test_a_server_that_answers_nothing_from_the_start() -> None:
    server = Server()
    server.slow = {"server_info"}
    with pytest.raises(EngineDied, match="did not reply to server_info for 0 s"):
        talk(server, ask, hang_after=0.2)
    assert server.calls == ["server_info"], "it is not tried again"


def test_a_control_call_is_late_by_what_such_calls_took() -> None:
    async def work(backend: HttpBackend) -> None:
        await backend.control("pause_generation", {})  # the first may take minutes
        server.slow = {"pause_generation", "server_info"}
        with pytest.raises(EngineDied, match="did not reply to pause_generation"):
            await backend.control("pause_generation", {})

    server = Server()
    talk(server, work, hang_after=0.4)


def test_new_weights_keep_a_server_from_answering_pings_and_that_is_no_hang() -> None:
    async def work(backend: HttpBackend) -> Any:
        await ask(backend)
        server.slow = {"generate", "server_info", "update_weights_from_disk"}
        answer = asyncio.ensure_future(ask(backend))
        update = asyncio.ensure_future(backend.control("update_weights_from_disk", {}))
        await asyncio.sleep(1.0)  # more than twice hang_after
        assert backend.dead() is None and not answer.done()
        server.awake.set()
        await update
        return await answer

    server = Server()
    assert talk(server, work, hang_after=0.4)["output_ids"] == [1, 2]


def test_a_request_outlives_a_restart_of_the_questions() -> None:
    async def main() -> int:
        heart, gate = Heartbeat("it", asyncio.Event().wait, 30.0), asyncio.Event()

        async def work() -> int:
            await gate.wait()
            return 7

        heart.start()
        answer = asyncio.ensure_future(heart.answer(work()))
        await asyncio.sleep(0.01)
        heart.start()
        await asyncio.sleep(0.01)
        gate.set()
        try:
            return await answer
        finally:
            heart.close()

    assert asyncio.run(main()) == 7


def test_a_fleet_goes_on_without_a_server_that_hangs() -> None:
    async def work(backend: HttpBackend) -> None:
        other = HttpBackend(
            backend.url, None, DecodingConfig(), pause="in_place", timeout=10.0, retries=0, hang_after=30.0
        )
        fleet = Fleet([backend, other])
        await other.start()
        try:
            await asyncio.gather(ask(backend), ask(other))
            server.slow = {"generate"}
            answers = [asyncio.ensure_future(fleet.generate(wanted([i]))) for i in range(2)]
            while [len(requests) for requests in fleet.open] != [1, 1]:
                await asyncio.sleep(0)
            backend.heart.ask = asyncio.Event().wait  # the first one's scheduler answers no more
            while not fleet.out:
                await asyncio.sleep(0.01)
            assert list(fleet.out) == [0] and fleet.dead() is None
            server.awake.set()
            assert [(await answer)["output_ids"] for answer in answers] == [[0], [1]]
        finally:
            await other.close()

    server = Server()
    talk(server, work, hang_after=0.4)
