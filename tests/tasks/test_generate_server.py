"""The generate endpoint: who may ask, what it answers, and that a trajectory is one list of tokens that grows.

With real verifiers environments: tests/integration/agents.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import pytest

from bebop.tasks.environments.generate_server import GenerateServer, SampledTurn, TokenTrace, TraceRefused


async def counting(ids: Sequence[int], params: Mapping[str, Any]) -> tuple[list[int], list[float], str]:
    """Samples the length of the prompt and a stop token."""
    return [len(ids), 1], [-0.1, -0.30000000000000004], "length" if params.get("cut") else "stop"


async def traced(*requests: Sequence[int], cut: bool = False) -> TokenTrace:
    """A trajectory of these requests."""
    trace = TokenTrace(counting, "trace x")
    for ids in requests:
        await trace.turn(ids, {"cut": cut})
    return trace


async def test_turns_are_what_was_new_and_what_was_sampled() -> None:
    trace = await traced([5, 6], [5, 6, 2, 1, 7], [5, 6, 2, 1, 7, 5, 1])
    assert [turn.observation for turn in trace.turns] == [(5, 6), (7,), ()]
    assert [turn.sampled for turn in trace.turns] == [(2, 1), (5, 1), (7, 1)]
    assert trace.ids == [5, 6, 2, 1, 7, 5, 1, 7, 1]
    assert trace.turns[0] == SampledTurn(
        observation=(5, 6), sampled=(2, 1), logprobs=(-0.1, -0.30000000000000004), finish="stop"
    )


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        ([5, 6, 2, 9, 7], r"turn 1 parts from the trace at token 3 \(sampled in turn 0\): 1 there, 9 in the request"),
        ([5, 6, 3, 1, 7], r"token 2 \(sampled in turn 0\): 2 there, 3 in"),
        ([4, 6, 2, 1, 7], r"token 0 \(observed in turn 0\): 5 there, 4 in"),
        ([5, 6, 2], r"token 3 \(sampled in turn 0\), where the request ends"),
        ([5, 6], r"token 2 \(sampled in turn 0\), where the request ends: one branch"),
    ],
)
async def test_a_request_that_parts_is_refused_before_anything_is_sampled(request_: list[int], where: str) -> None:
    trace = await traced([5, 6])
    with pytest.raises(TraceRefused, match=where) as caught:
        await trace.turn(request_, {})
    assert str(caught.value).startswith("trace x: ") and len(trace.turns) == 1
    with pytest.raises(TraceRefused, match=where):  # nor is anything sampled after it
        await trace.turn([5, 6, 2, 1, 7], {})


async def test_nothing_follows_a_turn_that_was_cut_off() -> None:
    trace = await traced([5], cut=True)
    with pytest.raises(TraceRefused, match="cut off: a stop token would have to be made up"):
        await trace.turn([5, 1, 1, 1, 7], {})


async def test_two_requests_at_once_are_two_branches() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(ids: Sequence[int], params: Mapping[str, Any]) -> tuple[list[int], list[float], str]:
        asked.set()
        await go_on.wait()
        return [1], [0.0], "stop"

    trace = TokenTrace(slow, "trace x")
    first = asyncio.create_task(trace.turn([5], {}))
    await asked.wait()
    with pytest.raises(TraceRefused, match="twice at once"):
        await trace.turn([5], {})
    go_on.set()
    await first


@pytest.mark.parametrize("answer", [([], [], "stop"), ([1], [], "stop"), ([1], [0.0], "abort")])
async def test_an_answer_that_is_none_is_an_error_of_who_gave_it(answer: Any) -> None:
    async def given(ids: Sequence[int], params: Mapping[str, Any]) -> Any:
        return answer

    with pytest.raises(RuntimeError, match="a log-prob each"):
        await TokenTrace(given, "x").turn([5], {})


async def asked(server: GenerateServer, http: aiohttp.ClientSession, body: Any, **headers: str) -> tuple[int, Any]:
    given = {"Authorization": f"Bearer {server.key}", "X-Session-ID": "a", **headers}
    async with http.post(f"{server.address}/inference/v1/generate", json=body, headers=given) as response:
        return response.status, await response.json()


async def test_an_answer_on_the_wire() -> None:
    async with GenerateServer() as server, aiohttp.ClientSession() as http:
        seen = []

        async def logged(ids: Sequence[int], params: Mapping[str, Any]) -> tuple[list[int], list[float], str]:
            seen.append((list(ids), dict(params)))
            return await counting(ids, params)

        trace = server.open("a", "trace a", logged)
        server.open("b", "trace b", counting)
        body = {"model": "policy", "token_ids": [5, 6], "sampling_params": {"temperature": 0.5}}
        status, answer = await asked(server, http, body)
        [choice] = answer["choices"]
        assert status == 200 and choice["token_ids"] == [2, 1] and choice["finish_reason"] == "stop"
        content = choice["logprobs"]["content"]
        assert [(c["token"], c["logprob"]) for c in content] == [
            ("token_id:2", -0.1),
            ("token_id:1", -0.30000000000000004),
        ]
        assert seen == [([5, 6], {"temperature": 0.5})] and len(trace.turns) == 1
        other = await asked(server, http, {"token_ids": [9]}, **{"X-Session-ID": "b"})
        assert other[0] == 200 and other[1]["choices"][0]["token_ids"] == [1, 1]
        status, answer = await asked(server, http, {"token_ids": [5, 7]})
        assert status == 422 and "parts from the trace" in answer["error"]["message"]
        assert isinstance(trace.error, TraceRefused)
        server.close("b")
        assert (await asked(server, http, {"token_ids": [9, 1, 1]}, **{"X-Session-ID": "b"}))[0] == 404


async def test_only_who_has_the_key_is_answered() -> None:
    async with GenerateServer() as server, aiohttp.ClientSession() as http:
        trace = server.open("a", "trace a", counting)
        for key in ("", "Bearer ", f"Bearer {server.key}x", server.key, "Bearer \u00fc"):
            assert (await asked(server, http, {"token_ids": [5]}, Authorization=key))[0] == 401
        assert trace.turns == [] and server.address.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "body",
    [[], {}, {"token_ids": []}, {"token_ids": [1.5]}, {"token_ids": [-1]}, {"token_ids": [True]}, {"token_ids": "12"},
     {"token_ids": [1], "sampling_params": []}, {"token_ids": [1], "features": {}}],
)  # fmt: skip
async def test_a_request_without_tokens_is_refused(body: Any) -> None:
    async with GenerateServer() as server, aiohttp.ClientSession() as http:
        trace = server.open("a", "trace a", counting)
        assert (await asked(server, http, body))[0] == 400
        assert trace.turns == [] and trace.error is None
