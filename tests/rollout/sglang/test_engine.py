"""The adapter over a made-up SGLang: order of calls, aborts, cuts, deaths. The real one: tests/integration/sglang."""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from bebop.config.engines import SglangConfig
from bebop.errors import UserError
from bebop.rollout.engine import EngineDied, Request
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.served_weights import WeightUpdate, update
from bebop.rollout.sglang.backend import Fleet
from bebop.rollout.sglang.engine import SglangServer
from bebop.trajectory import SamplingParams
from tests.cases import slow_but

HEAD = {"final_norm.weight": torch.ones(4)}
WEIGHTS = {"backbone.model.norm.weight": torch.full((4,), 2.0)}


class Counting:
    """Answers with the next numbers: the token after n is n + 1. Holds real tensors, and their checksums."""

    redrawn = 0

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.calls, self.version = seconds, [], "0"
        self.weights = {"target.norm": torch.ones(4), "draft.norm": torch.ones(4)}
        self.cut: dict[str, asyncio.Event] = {}
        self.going = asyncio.Event()
        self.why: str | None = None
        self.hung = False
        self.plugin = True

    async def start(self) -> None:
        self.why = None
        self.going.set()

    async def generate(self, payload: Any) -> dict[str, Any]:
        await self.going.wait()
        if self.why is not None or self.hung:
            await asyncio.sleep(3600 if self.hung else 0)
            raise EngineDied(str(self.why))
        wanted = payload["sampling_params"]["max_new_tokens"]
        cut = self.cut[payload.get("rid", "")] = asyncio.Event()
        ids: list[int] = []
        while len(ids) < wanted and not cut.is_set() and self.why is None:
            ids.append(payload["input_ids"][-1] + len(ids) + 1)
            await asyncio.sleep(self.seconds)
            if not cut.is_set():
                await self.going.wait()
        if self.why is not None:
            raise EngineDied(self.why)
        measured = [1] if self.plugin and "rid" not in payload else []
        meta = {
            "finish_reason": {"type": "abort" if len(ids) < wanted else "length"},
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
            "weight_version": self.version, "spec_verify_ct": len(ids), "spec_num_correct_drafts": 0,
            "spec_num_proposed_drafts": 2 * len(ids), "bebop_verify": measured,
        }  # fmt: skip
        return {"output_ids": ids, "meta_info": meta}

    async def control(self, name: str, payload: Any) -> dict[str, Any]:
        if self.why is not None:
            raise EngineDied(self.why)
        self.calls.append(name)
        if name == "abort_request" and payload["rid"] in self.cut:
            self.cut[payload["rid"]].set()
        if name == "pause_generation":
            self.going.clear()
            for event in self.cut.values() if payload["mode"] == "abort" else ():
                event.set()
        if name == "continue_generation":
            self.going.set()
        sums = {key: hashlib.sha256(t.numpy().tobytes()).hexdigest() for key, t in self.weights.items()}
        return {"success": True, "ranks": [{"checksums": sums}]}

    def dead(self) -> str | None:
        return self.why

    async def close(self) -> None:
        self.calls.append("close")


class Hand:
    """Carries weights into ``Counting`` by hand; may lose them, or touch the draft."""

    def __init__(self, lose: bool = False, zero: bool = False) -> None:
        self.lose, self.zero = lose, zero

    async def prepare(self, backend: Any, load: WeightUpdate, flush: bool) -> Any:
        backend.calls.append("prepare")
        return partial(self.send, backend, load, flush)

    async def send(self, backend: Any, load: WeightUpdate, flush: bool) -> None:
        backend.calls.append(f"send {load.selector} {'flush' if flush else 'keep'}")
        backend.version = str(load.version)
        for role, tensors in (("target", load.target), ("draft", load.draft)):
            for tensor in tensors.values() if not self.lose else ():
                backend.weights[f"{role}.norm"] = tensor
        if self.zero:
            backend.weights["draft.norm"] = torch.zeros(4)


def make(backend: Any, transfer: Any = None, timeout: float = 30.0, **own: Any) -> ServedEngine:
    settings = SglangConfig(**{"pause": "in_place", "monitor_every": 2} | own)
    server = SglangServer(
        backend, transfer or Hand(), HEAD, settings, drafts=2, drafter="mtp",
        to_update=partial(update, layout="mimo", layers=2), dtype=torch.float32, rescored=False,
    )  # fmt: skip
    return ServedEngine(
        server, lambda ids, params, reason: str(ids), HEAD,
        system="bebop", dtype=torch.float32, max_length=64, timeout=timeout, retries=2,
    )  # fmt: skip


@pytest.fixture
def counting() -> Iterator[Counting]:
    yield Counting(0.01)


def request(number: int, tokens: int = 5, **params: Any) -> Request:
    return Request(id=number, token_ids=(1, 10 * number), params=SamplingParams(max_new_tokens=tokens, **params))


def drain(engine: ServedEngine) -> dict[int, Any]:
    done: dict[int, Any] = {}
    while engine.unfinished:
        done |= {f.id: f.completion for f in engine.step()}
    return done


def test_aborted_answers_go_on_where_they_were(counting: Counting) -> None:
    engine = make(counting)
    engine.add(request(1, 30))
    engine.add(request(2, 30))
    while not any(counting.cut):
        time.sleep(0.001)
    aborted = {f.id: f.completion for f in engine.abort([1])}
    assert set(aborted) == {1} and aborted[1].finish_reason == "abort" and len(aborted[1].token_ids) < 30
    engine.add(Request(id=1, token_ids=(1, 10), params=SamplingParams(max_new_tokens=30), partial=aborted[1]))
    done = drain(engine)
    assert done[1].token_ids.tolist() == list(range(11, 41)) and done[2].token_ids.tolist() == list(range(21, 51))
    engine.add(request(3, 30))
    assert [f.id for f in engine.abort()] == [3] and engine.step() == []
    engine.close()


@pytest.mark.parametrize("pause", slow_but(["retract"], ["in_place", "retract", "abort"]))
def test_weights_change_between_pause_and_continue(counting: Counting, pause: str) -> None:
    engine = make(counting, pause=pause)
    engine.add(request(1, 40))
    while not any(counting.cut):
        time.sleep(0.001)
    counting.calls.clear()
    engine.load_weights(WEIGHTS, 7)
    kept = "keep" if pause == "in_place" else "flush"
    order = ["prepare", "pause_generation", f"send target {kept}", "weights_checker", "continue_generation"]
    assert counting.calls == order
    assert engine.version == 7
    found = drain(engine)[1]
    assert found.token_ids.tolist() == list(range(11, 51))  # nothing lost, nothing twice
    assert found.versions[-1] == 7
    engine.close()


def test_the_head_is_sent_and_known(counting: Counting) -> None:
    engine = make(counting)
    before = engine.head
    engine.load_weights({"mtp.final_norm.weight": torch.ones(4)}, 1)
    assert engine.head == before and "send draft keep" in counting.calls
    engine.load_weights(WEIGHTS | {"mtp.final_norm.weight": torch.zeros(4)}, 2)
    assert engine.head != before and "send all keep" in counting.calls
    engine.close()


def test_weights_that_did_not_arrive_are_noticed(counting: Counting) -> None:
    engine = make(counting, Hand(lose=True))
    with pytest.raises(EngineDied, match="did not arrive"):
        engine.load_weights({"mtp.final_norm.weight": torch.zeros(4)}, 1)
    engine = make(Counting(), Hand(zero=True))
    with pytest.raises(EngineDied, match="not for the draft"):
        engine.load_weights(WEIGHTS, 1)


def test_the_same_weights_again_are_no_mistake(counting: Counting) -> None:
    engine = make(counting)
    for version in (1, 2):
        engine.load_weights(WEIGHTS, version)
    assert engine.version == 2


def test_a_missing_plugin_is_noticed(counting: Counting) -> None:
    counting.plugin = False
    with pytest.raises(UserError, match="monitor_every"):
        make(counting)
    make(counting, monitor_every=0).close()


def test_deaths_and_hangs_raise(counting: Counting) -> None:
    engine = make(counting)
    engine.add(request(1, 1000 - 950))
    counting.why = "process 7 ended"
    with pytest.raises(EngineDied, match="process 7"):
        drain(engine)
    hung = Counting()
    engine = make(hung, timeout=0.5)
    hung.hung = True
    engine.add(request(1))
    with pytest.raises(EngineDied, match="nothing was finished"):
        drain(engine)


def test_memory_changes_hands_between_rollout_and_update(counting: Counting) -> None:
    engine = make(counting, colocated=True)
    engine.load_weights(WEIGHTS, 0)
    engine.add(request(1, 3))
    engine.add(request(2, 9))
    drain(engine)
    assert counting.calls.count("release_memory_occupation") == 1
    counting.calls.clear()
    engine.add(request(3))  # as the questions of an evaluation, or the next turn of an environment
    engine.add(request(4))
    assert len(drain(engine)) == 2
    assert counting.calls.count("resume_memory_occupation") == 1 and counting.calls[0] == "resume_memory_occupation"
    counting.calls.clear()
    engine.load_weights(WEIGHTS, 1)
    assert counting.calls[:3] == ["resume_memory_occupation", "weights_checker", "prepare"]
    engine.add(request(3))
    assert len(drain(engine)) == 1
    engine.load_weights(WEIGHTS, 2)
    engine.add(request(4))
    drain(engine)
    counting.weights["draft.norm"] = torch.zeros(4)
    with pytest.raises(EngineDied, match="while memory was released"):
        engine.load_weights(WEIGHTS, 3)


def test_requests_that_can_never_be_served(counting: Counting) -> None:
    engine = make(counting)
    for bad in (request(1, 63), request(1, min_p=0.1), request(1, top_p=0.5), request(1, repetition_penalty=2.0)):
        with pytest.raises(UserError):
            engine.add(bad)
    with pytest.raises(UserError, match="empty"):
        engine.add(Request(id=1, token_ids=(), params=SamplingParams()))
    assert engine.unfinished == 0
    engine.close()


def test_a_fleet_loses_a_member_and_no_answer() -> None:
    members = [Counting(0.01), Counting(0.01)]
    fleet = Fleet(members)
    engine = make(fleet, FleetHand(members))
    for number in range(6):
        engine.add(request(number, 20))
    while not all(any(rid for rid in member.cut) for member in members):
        time.sleep(0.001)
    members[0].why = "gone"
    done = drain(engine)
    assert sorted(done) == list(range(6)) and all(len(c.token_ids) == 20 for c in done.values())
    assert list(fleet.out) == [0] and engine.redrawn == 3
    engine.load_weights(WEIGHTS, 1)  # brings it back, with the weights of now
    assert not fleet.out and members[0].version == members[1].version == "1"
    for member in members:
        member.why = "gone"
    engine.add(request(9))
    with pytest.raises(EngineDied, match="gone"):
        drain(engine)


def test_requests_of_a_member_whose_update_fails_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays paused."""
    members = [Counting(0.01), Counting(0.01)]
    fleet, control = Fleet(members), members[0].control
    engine = make(fleet, FleetHand(members), timeout=5.0)

    async def refuse(name: str, payload: Any) -> dict[str, Any]:
        if name == "weights_checker":
            raise EngineDied("no disk")
        return await control(name, payload)

    for number in range(2):
        engine.add(request(number, 20))
    while not all(any(rid for rid in member.cut) for member in members):
        time.sleep(0.001)
    monkeypatch.setattr(members[0], "control", refuse)
    engine.load_weights(WEIGHTS, 1)
    assert fleet.out == {0: "no disk"} and sorted(drain(engine)) == [0, 1] and engine.redrawn == 1


def test_a_fleet_with_different_weights_is_noticed() -> None:
    members = [Counting(), Counting()]
    engine = make(Fleet(members), FleetHand(members[:1]))
    with pytest.raises(EngineDied, match="different weights"):
        engine.load_weights(WEIGHTS, 1)


class FleetHand(Hand):
    """Hands weights to each member."""

    def __init__(self, members: list[Counting]) -> None:
        super().__init__()
        self.members = members

    async def prepare(self, backend: Any, load: WeightUpdate, flush: bool) -> Any:
        return partial(self.send, backend, load, flush)

    async def send(self, backend: Any, load: WeightUpdate, flush: bool) -> None:
        for member in self.members:
            await super().send(member, load, flush)
