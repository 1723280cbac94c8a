"""Engines over HTTP: what goes to a server, what is made of its answers, and what goes wrong on the way."""

import json
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import web

import bebop.certify.calls
import bebop.rollout.http_client
from bebop import __version__
from bebop.certify.answers import Answer
from bebop.certify.calls import Server
from bebop.certify.openai_server import OpenAIEngine
from bebop.certify.served_reference import ServerReference
from bebop.certify.sglang_server import SglangEngine
from bebop.certify.structure import check_structure
from bebop.certify.white_box import WhiteBox
from bebop.errors import UserError
from bebop.rollout.engine import Request
from bebop.trajectory import SamplingParams
from tests.builders import requests
from tests.certify.asking import BOTH, STOP, Engine, V, asked, engine, silent
from tests.certify.local_server import KEY, LocalServer

# ---- what goes there and comes back


@BOTH
def test_answers_come_in_the_order_of_submission(kind: type[Engine], local: LocalServer, opened: list[Server]) -> None:
    told: list[int] = []
    found: list[Answer] = engine(kind, local, opened).sample(asked(6), told.append)
    assert [answer.request for answer in found] == [0, 1, 2, 3, 4, 5]
    assert [answer.prompt for answer in found] == [request.token_ids for request in asked(6)]
    assert check_structure(found, vocabulary=V) == []
    assert all(answer.stops == (STOP,) and answer.limit == 12 and answer.logprobs is not None for answer in found)
    assert sorted(told) == sorted(len(answer.token_ids) for answer in found)


def test_what_sglang_is_asked(local: LocalServer, opened: list[Server]) -> None:
    """The claim and no more: nothing of ours is aborted, nobody's weights are touched."""
    sglang = engine(SglangEngine, local, opened)
    sglang.sample(asked(2, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1), silent)
    payload = local.calls[-1][1]
    params = payload["sampling_params"]
    assert (params["temperature"], params["top_k"], params["top_p"]) == (0.7, 5, 0.9)
    assert params["repetition_penalty"] == 1.1 and params["stop_token_ids"] == [STOP]
    assert payload["return_logprob"] and "extra_key" not in payload and "sampling_seed" not in params
    assert {name for name, _ in local.calls} == {"server_info", "generate", "weights_checker"}
    rids = [call["rid"] for name, call in local.calls if "rid" in call]
    assert len(set(rids)) == len(rids) == 2 and all(rid.startswith(f"certify-{sglang.run}-") for rid in rids)
    assert sglang.sample(asked(2), silent)[0].seed is None


def test_seeds_go_where_inference_is_deterministic(local: LocalServer, opened: list[Server]) -> None:
    local.info["enable_deterministic_inference"] = True
    found = engine(SglangEngine, local, opened).sample(asked(2), silent)
    assert sorted(call["sampling_params"]["sampling_seed"] for _, call in local.calls[-2:]) == [5, 6]
    assert [answer.seed for answer in found] == [5, 6]


def test_what_they_say_of_themselves(local: LocalServer, opened: list[Server]) -> None:
    local.info |= {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4, "model_path": "tiny"}
    sums = {"ranks": [{"checksums": {"model.x": "a", "draft.y": "b"}}]}
    local.weights_checker = lambda payload: sums  # type: ignore[attr-defined]
    said = engine(SglangEngine, local, opened).describe()
    assert said["version"] == "0.5.23" and said["speculative_algorithm"] == "EAGLE" and said["vocabulary"] == V
    assert set(said["weights"]) == {"target", "draft"} and said["weight_version"] == "default"
    said = engine(OpenAIEngine, local, opened).describe()
    assert said["model"] == "tiny" and said["max_model_len"] == 64


def test_versions_that_are_no_numbers_are_numbered(local: LocalServer, opened: list[Server]) -> None:
    names = iter(["default", "default", "second", "third"])

    def edit(name: str, reply: Any) -> Any:
        if "output_ids" in reply:
            reply["meta_info"]["weight_version"] = next(names)
        return reply

    local.edit = edit
    sglang = engine(SglangEngine, local, opened)
    found = [int(answer.versions[0]) for i in range(2) for answer in sglang.sample(asked(2), silent)]
    assert found == [0, 0, 1, 2] and sglang.versions == {"default": 0, "second": 1, "third": 2}


def test_ids_from_words_where_there_are_no_others(local: LocalServer, opened: list[Server]) -> None:
    def edit(name: str, reply: Any) -> Any:
        for choice in reply.get("choices", ()):
            choice.pop("token_ids", None)
        return reply

    whole = engine(OpenAIEngine, local, opened).sample(asked(2), silent)
    local.edit = edit
    again = engine(OpenAIEngine, local, opened).sample(asked(2), silent)
    assert [a.token_ids.tolist() for a in again] == [a.token_ids.tolist() for a in whole]


# ---- what goes wrong


def refused(found: Engine, message: str, sent: Sequence[Request] | None = None) -> None:
    with pytest.raises(UserError, match=message):
        found.sample(sent or asked(2), silent)


def test_nobody_is_there(opened: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bebop.rollout.http_client, "FIRST_WAIT", 0.01)
    opened.append(Server("http://127.0.0.1:9", retries=1))
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 is not there: .* \(asked 2 times\).*engine\.url"):
        SglangEngine(opened[0])


@BOTH
def test_the_key(kind: type[Engine], local: LocalServer, opened: list[Server]) -> None:
    local.key = KEY
    with pytest.raises(UserError, match="refuses the key: set the variable BEBOP_API_KEY"):
        engine(kind, local, opened)
    assert len(engine(kind, local, opened, key=KEY).sample(asked(2), silent)) == 2


@BOTH
def test_a_busy_server_is_asked_again(kind: type[Engine], local: LocalServer, opened: list[Server]) -> None:
    found = engine(kind, local, opened)
    local.busy = 3
    assert len(found.sample(asked(4), silent)) == 4
    local.busy = 100
    refused(found, r"is not ready: status 503 \(asked 5 times\)")


@BOTH
def test_a_sample_is_drawn_once(kind: type[Engine], local: LocalServer, opened: list[Server]) -> None:
    """Whoever asks again after a failure or a timeout prefers short answers."""
    found = engine(kind, local, opened, timeout=2.0)
    local.edit = lambda name, reply: web.Response(status=502)
    before = len(local.calls)
    refused(found, "refuses a request", asked(1))
    assert len(local.calls) == before + 1
    if kind is SglangEngine:
        local.edit, local.silent = (lambda name, reply: reply), 5.0
        refused(found, r"no answer in engine\.timeout=2 seconds: raise it", asked(1))
        assert len(local.calls) == before + 2
    assert not local.kept  # on a kept connection a request may be lost without anybody's fault


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda reply: {"error": {"message": "too long"}}, "refuses a request: .*too long"),
        (lambda reply: web.Response(text="<html>"), "answers no JSON, but '<html>': is engine.url right"),
    ],
)
@BOTH
def test_what_a_server_may_answer_instead(
    kind: type[Engine], change: Any, message: str, local: LocalServer, opened: list[Server]
) -> None:
    found = engine(kind, local, opened)
    local.edit = lambda name, reply: change(reply)
    refused(found, message)


def without(*names: str) -> Any:
    """An edit that takes fields out of a choice."""

    def edit(name: str, reply: Any) -> Any:
        for choice in reply.get("choices", ()):
            for gone in names:
                choice[gone] = None
        return reply

    return edit


def test_text_alone_cannot_be_certified(local: LocalServer, opened: list[Server]) -> None:
    found = engine(OpenAIEngine, local, opened)
    local.edit = without("token_ids", "logprobs")
    refused(found, "gives text without token ids")
    local.edit = without("logprobs")
    refused(found, "gives no log-probs: set logprobs=none")
    opened.append(Server(local.url))
    (answer,) = OpenAIEngine(opened[-1], logprobs=False).sample(asked(1), silent)
    assert answer.logprobs is None and len(answer.token_ids)
    local.edit = without("prompt_logprobs")
    with pytest.raises(UserError, match="no prompt_logprobs, which reference=server needs"):
        ServerReference(found, V).block([answer], SamplingParams())


def test_other_servers(local: LocalServer, opened: list[Server]) -> None:
    local.models = ["one", "two"]
    with pytest.raises(UserError, match=r"several models: set engine\.model to one of one, two"):
        engine(OpenAIEngine, local, opened)
    with pytest.raises(UserError, match=r"engine\.model='three' is not at .*: it has one, two"):
        OpenAIEngine(opened[-1], "three")
    assert OpenAIEngine(opened[-1], "two").describe()["model"] == "two"
    local.info = {"version": "0.5.9"}
    with pytest.raises(UserError, match=r"sglang 0\.5\.9"):
        engine(SglangEngine, local, opened)
    local.edit = lambda name, reply: web.Response(status=404)
    with pytest.raises(UserError, match="it is no SGLang server"):
        engine(SglangEngine, local, opened)
    with pytest.raises(UserError, match="it is no OpenAI-compatible server"):
        engine(OpenAIEngine, local, opened)


def test_requests_that_would_do_harm_are_not_sent(local: LocalServer, opened: list[Server]) -> None:
    found = engine(SglangEngine, local, opened)
    before = len(local.calls)
    refused(found, "token 12, but the server's vocabulary has 12", requests([(1, 12)], max_new_tokens=3))
    refused(found, "certified by its tokens", requests([(1, 2)], max_new_tokens=3, stop=("a",)))
    refused(found, r"prompt \[\] is not possible", requests([()], max_new_tokens=3))
    assert len(local.calls) == before


def test_log_probs_of_other_tokens(local: LocalServer, opened: list[Server]) -> None:
    def edit(name: str, reply: Any) -> Any:
        if "output_ids" in reply:
            reply["output_ids"][0] = (reply["output_ids"][0] + 1) % V
        return reply

    found = engine(SglangEngine, local, opened)
    local.edit = edit
    refused(found, r"gives log-probs of .* other tokens")


def test_ctrl_c_ends_our_own_requests_and_gives_what_is_there(
    local: LocalServer, opened: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bebop.certify.calls, "GRACE", 0.3)
    found = engine(SglangEngine, local, opened)
    first: list[int] = []

    def edit(name: str, reply: Any) -> Any:
        if "output_ids" in reply:
            local.silent = 60.0  # all others
        return reply

    def interrupt(tokens: int) -> None:
        """Once the first answer has come: on a busy machine it may be on its way for long."""
        if not first:
            first.append(tokens)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    local.edit = edit
    answers = found.sample(asked(4), interrupt)
    ended = [call["rid"] for name, call in local.calls if name == "abort_request"]
    reasons = [answer.finish_reason for answer in answers]
    # The first one counts for nothing either: which completions had come would be a choice by their lengths.
    assert reasons == ["abort"] * 4 and len(ended) == 3
    assert all(rid.startswith(f"certify-{found.run}-") for rid in ended)
    assert all(len(answer.token_ids) == 0 for answer in answers if answer.finish_reason == "abort")
    assert not any("abort_all" in call for _, call in local.calls)
    np.testing.assert_array_equal([answer.request for answer in answers], range(4))


def with_states(local: LocalServer, **state: Any) -> None:
    """As if there were a plugin of bebop's in the server."""
    local.info |= {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 3}

    def edit(name: str, reply: Any) -> Any:
        if "output_ids" in reply:
            entry = {"accepted": 0, "state": json.dumps(state)}
            reply["meta_info"] |= {"bebop_certify": [{**entry, "state": ""}, entry], "spec_verify_ct": 0}
        return reply

    local.edit = edit


def test_the_look_inside_is_fetched_after_every_cohort(local: LocalServer, opened: list[Server]) -> None:
    box = WhiteBox()
    with_states(local, bebop=__version__, box=box.state_dict())
    found = engine(SglangEngine, local, opened)
    assert found.white_box is not None and found.white_box.cycles == 0
    box.cycles = 7
    with_states(local, bebop=__version__, box=box.state_dict())
    found.sample(asked(2), silent)
    assert found.white_box.cycles == 7
    rids = [call["rid"] for name, call in local.calls if "rid" in call]
    assert [rid.startswith(f"certify-{found.run}-state-") for rid in rids] == [True, False, False, True]
    opened.append(Server(local.url))
    assert SglangEngine(opened[-1], look_inside=False).white_box is None
    with_states(local, bebop="0.0", box=box.state_dict())
    refused(found, r"has the plugin of bebop 0\.0, this is .*: install the same")


def test_a_server_without_the_plugin_lets_nobody_look(local: LocalServer, opened: list[Server]) -> None:
    local.info |= {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 3}
    assert engine(SglangEngine, local, opened).white_box is None
