"""Statistics on their way through verl's layers, here played by classes with verl's own shapes of call."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from bebop.trajectory import DecodeStats
from bebop.verl_job.stats import (
    FIELD,
    SPEC,
    decode,
    encode,
    fields,
    note_answers,
    sum_answers,
    turns,
    unpack,
)


def stats(cycles: int, accepted: list[float]) -> DecodeStats:
    reached = np.array([cycles, *accepted[:-1]], dtype=float)
    ones = np.ones(len(accepted))
    return DecodeStats(
        cycles=cycles,
        tokens=cycles + int(sum(accepted)),
        target_forwards=cycles,
        draft_forwards=3 * cycles,
        reached=reached,
        accepted=np.array(accepted),
        overlap=ones * 0.5,
        target_only=ones * 0.25,
        draft_entropy=ones,
        target_entropy=ones,
    )


def output(piece: DecodeStats | None, reason: str = "completed") -> Any:
    extra = {} if piece is None else fields(piece, 3)
    return SimpleNamespace(extra_fields=extra, token_ids=[1], stop_reason=reason)


def test_what_vllm_sends_takes_its_place() -> None:
    piece = stats(4, [3.0, 2.0, 1.0])
    extra: dict[str, Any] = {"kv_transfer_params": {"bebop": piece, "block": 7}, "global_steps": 2}
    unpack(extra)
    assert extra == {"kv_transfer_params": {"block": 7}, "global_steps": 2, **fields(piece, 3)}
    assert [extra[name] for name in SPEC] == [12, 6, 4]
    for nothing in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {"block": 7}}):
        same = dict(nothing)
        unpack(same)
        assert same == nothing
    empty = {"kv_transfer_params": {"bebop": DecodeStats()}}  # aborted before its first cycle
    unpack(empty)
    assert empty == {}


def layers(pieces: list[DecodeStats | None]) -> tuple[Any, Any]:
    """A client that asks again after an abort and forgets what came before, and a worker of agent loops."""
    waiting = list(pieces)

    class Client:
        async def generate(self) -> Any:
            await asyncio.sleep(0)
            return output(waiting.pop(0), self.reason)

        reason = "completed"

    class Resuming(Client):
        async def generate(self) -> Any:
            self.reason = "aborted"
            await super().generate()
            self.reason = "completed"
            await super().generate()
            return output(None)

    class Worker:
        async def _run_agent_loop(self, turns: int) -> Any:
            first: dict[str, Any] = {}
            for _ in range(turns):
                first = first or (await asyncio.create_task(Resuming().generate())).extra_fields
            answer = SimpleNamespace(extra_fields=first)
            await self._compute_score([answer], kwargs={})
            return answer

        async def _compute_score(self, outputs: list[Any], kwargs: Any) -> None:
            await asyncio.sleep(0)

    return SimpleNamespace(LLMServerClient=Client), SimpleNamespace(AgentLoopWorker=Worker)


def test_statistics_survive_the_trip_as_plain_data() -> None:
    one = stats(4, [3.0, 2.0])
    again = decode(encode(one))
    assert encode(again) == encode(one)
    assert one.emitted == 9 and decode(encode(DecodeStats(cycles=4, tokens=10, prefilled=1))).emitted == 9
    assert fields(one, 3)["spec_num_draft_tokens"] == 12 and fields(one, 3)["spec_num_accepted_tokens"] == 5


def test_an_answer_of_several_pieces_and_turns_has_the_sum_of_their_statistics() -> None:
    pieces = [stats(4, [3.0, 2.0]), stats(2, [1.0, 0.0]), stats(8, [8.0, 7.0]), stats(1, [0.0, 0.0])]
    client, worker = layers([*pieces])
    note_answers(client)
    sum_answers(worker)
    answer = asyncio.run(worker.AgentLoopWorker()._run_agent_loop(2))
    assert decode(answer.extra_fields[FIELD]).cycles == 15
    assert decode(answer.extra_fields[FIELD]).accepted.tolist() == [12.0, 9.0]
    assert [answer.extra_fields[name] for name in SPEC] == [45, 21, 15]  # verl's own, which its client had dropped
    # Two turns of two pieces each: what was aborted goes on, and is no turn of its own.
    assert [(one.cycles, one.accepted.tolist()) for one in turns(answer.extra_fields[FIELD])] == [
        (6, [4.0, 2.0]), (9, [8.0, 7.0]),
    ]  # fmt: skip


def test_an_answer_of_one_turn_is_stored_as_before() -> None:
    client, worker = layers([stats(4, [3.0]), stats(2, [1.0])])
    note_answers(client)
    sum_answers(worker)
    answer = asyncio.run(worker.AgentLoopWorker()._run_agent_loop(1))
    assert answer.extra_fields[FIELD] == encode(DecodeStats.total([stats(4, [3.0]), stats(2, [1.0])]))
    assert [one.cycles for one in turns(answer.extra_fields[FIELD])] == [6]


def test_an_engine_with_verls_counts_alone_has_an_accept_length_in_every_mode() -> None:
    client, worker = layers([stats(4, [3.0]), stats(2, [1.0])])
    stock = client.LLMServerClient.generate

    async def counts_alone(self: Any) -> Any:
        answer = await stock(self)
        del answer.extra_fields[FIELD]
        return answer

    client.LLMServerClient.generate = counts_alone
    note_answers(client)
    sum_answers(worker)
    answer = asyncio.run(worker.AgentLoopWorker()._run_agent_loop(1))
    assert decode(answer.extra_fields[FIELD]).emitted == 10 and decode(answer.extra_fields[FIELD]).cycles == 6


def test_without_the_hooks_they_are_lost() -> None:
    _, worker = layers([stats(4, [3.0]), stats(2, [1.0])])
    assert FIELD not in asyncio.run(worker.AgentLoopWorker()._run_agent_loop(1)).extra_fields


def test_answers_side_by_side_do_not_mix() -> None:
    client, worker = layers([stats(n, [0.0]) for n in range(1, 9)])
    note_answers(client)
    sum_answers(worker)

    async def both() -> list[Any]:
        return list(await asyncio.gather(*(worker.AgentLoopWorker()._run_agent_loop(2) for _ in range(2))))

    cycles = [decode(answer.extra_fields[FIELD]).cycles for answer in asyncio.run(both())]
    assert sum(cycles) == 36 and len(cycles) == 2 and min(cycles) >= 10
