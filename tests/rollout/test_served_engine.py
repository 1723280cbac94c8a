"""A server's completions as an engine's: versions of every token, what cuts and aborts leave, who is told of a death.

Over a made-up server with another manner than SGLang's: it gives tokens one by one, and cuts whatever runs when its
weights change. SGLang's own are in tests/rollout/sglang.
"""

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import bebop.rollout.served_engine as served_engine
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.engine import EngineDied, Finished, Request, nothing
from bebop.rollout.served_engine import OutputChunk, ServedEngine, appended
from bebop.trajectory import Completion, DecodeStats, SamplingParams
from tests.cases import slow_but

PARAMS = SamplingParams(max_new_tokens=40)
WEIGHTS = {"mtp.norm.weight": torch.full((4,), 2.0)}


class Counter:
    """The token after n is n + 1; weights of version v give log p = -v, so that a token tells who produced it."""

    name, redrawn = "the counter", 0

    def __init__(self, recomputes: bool = False, cuts: bool = False, hasty: bool = False) -> None:
        """``hasty``: it gives up at once, as a server does that is overloaded."""
        self.recomputes, self.cuts, self.hasty = recomputes, cuts, hasty
        self.version, self.rested, self.why, self.slow = 0, 0, "", 0.0
        self.cut: dict[int, asyncio.Event] = {}
        self.queued = 0.0  # seconds that a request waits before its first token
        self.told: list[tuple[tuple[int, ...], list[list[int]]]] = []

    async def start(self) -> None: ...

    async def test(self) -> None: ...

    def check(self, request: Request) -> None:
        if request.params.min_p:
            raise UserError("no min_p here")

    async def generate(self, request: Request, written: Sequence[int]) -> OutputChunk:
        cut, made, versions = self.cut.setdefault(request.id, asyncio.Event()), list[int](), list[int]()
        cut.clear()
        wanted, cached = request.params.max_new_tokens - len(written), self.version
        await asyncio.sleep(self.queued)
        while len(made) < wanted and not cut.is_set() and not self.hasty:
            made.append(len(written) + len(made))
            versions.append(self.version)
            await asyncio.sleep(0.01)
        return OutputChunk(
            token_ids=np.array(made, dtype=np.int64),
            logprobs=-np.array(versions, dtype=np.float32),
            versions=np.array(versions, dtype=np.int64),
            reason="abort" if len(made) < wanted else "length",
            stats=DecodeStats(cycles=len(made), tokens=len(made)),
            why="too much to do",
            cached=cached,
        )

    async def abort(self, id: int) -> None:
        if id in self.cut:
            self.cut[id].set()

    async def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        await asyncio.sleep(self.slow)
        for event in self.cut.values() if self.cuts else ():
            event.set()
        self.version = version

    async def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        self.told.append((tuple(prompt), [list(answer) for answer in answers]))

    async def rest(self) -> None:
        self.rested += 1

    def dead(self) -> str | None:
        return self.why or None

    async def close(self) -> None: ...


@pytest.fixture
def engines() -> Iterator[list[ServedEngine]]:
    """Engines to be closed at the end, whatever happens."""
    made: list[ServedEngine] = []
    yield made
    for engine in made:
        engine.close()


def make(engines: list[ServedEngine], server: Counter, timeout: float = 30.0) -> ServedEngine:
    engines.append(
        ServedEngine(
            server, lambda ids, params, reason: str(ids), {}, system="bebop", dtype=torch.float32, max_length=64,
            timeout=timeout, retries=2,
        )
    )  # fmt: skip
    return engines[-1]


def request(id: int, partial: Completion | None = None) -> Request:
    return Request(id=id, token_ids=(1, 2), params=PARAMS, partial=partial)


def drain(engine: ServedEngine) -> dict[int, Completion]:
    done: list[Finished] = []
    while engine.unfinished:
        done += engine.step()
    return {finished.id: finished.completion for finished in done}


def test_past_completions_are_told_before_what_comes_after_them(engines: list[ServedEngine]) -> None:
    server = Counter()
    make(engines, server).remember((1, 2), [np.array([3, 4]), (5,)])
    assert server.told == [((1, 2), [[3, 4], [5]])]


@pytest.mark.parametrize(
    ("cuts", "recomputes"),
    slow_but([(True, True)], [(c, r) for c in (True, False) for r in (True, False)], several=True),
)
def test_every_token_has_the_version_that_produced_it(
    engines: list[ServedEngine], recomputes: bool, cuts: bool
) -> None:
    """Whether an update leaves running completions alone or cuts them: nothing is lost, nothing comes twice."""
    engine = make(engines, Counter(recomputes, cuts))
    for id in (1, 2):
        engine.add(request(id))
    time.sleep(0.1)
    engine.load_weights(WEIGHTS, 3)
    assert engine.version == 3 and engine.head
    for answer in drain(engine).values():
        assert answer.token_ids.tolist() == list(range(40)) and answer.finish_reason == "length"
        assert set(answer.versions) == {0, 3} and answer.versions[-1] == 3
        assert (answer.logprobs == -answer.versions).all()
        # A cut completion is read anew by the new weights; one that was left alone keeps what the old ones wrote.
        fresh = recomputes or cuts
        assert answer.oldest.tolist() == (answer.versions.tolist() if fresh else [0] * 40)
        assert answer.stats.tokens == 40 and answer.text == str(list(range(40)))


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_request_that_waited_through_an_update_may_have_read_the_cache_of_before(
    engines: list[ServedEngine], recomputes: bool
) -> None:
    server = Counter(recomputes)
    server.queued = 0.3
    engine = make(engines, server)
    engine.add(request(1))
    time.sleep(0.1)
    engine.load_weights(WEIGHTS, 3)
    (answer,) = drain(engine).values()
    assert set(answer.versions) == {3} and set(answer.oldest) == {3 if recomputes else 0}


def test_an_aborted_completion_goes_on_where_it_was(engines: list[ServedEngine]) -> None:
    engine = make(engines, Counter())
    engine.add(request(1))
    engine.add(request(2))
    time.sleep(0.1)
    (aborted,) = engine.abort([1])
    part = aborted.completion
    assert part.finish_reason == "abort" and 0 < len(part.token_ids) < 40
    engine.add(request(1, part))
    assert {id: a.token_ids.tolist() for id, a in drain(engine).items()} == {id: list(range(40)) for id in (1, 2)}
    engine.add(request(1, part))
    (again,) = engine.abort()  # perhaps before the server has seen it
    assert len(again.completion.token_ids) >= len(part.token_ids) and engine.step() == []


def test_a_server_that_gives_nothing_is_not_asked_for_ever(engines: list[ServedEngine]) -> None:
    engine = make(engines, Counter(hasty=True))
    engine.add(request(1))
    with pytest.raises(EngineDied, match="cut 3 times without a new token: too much to do"):
        drain(engine)


def test_a_dead_server_is_noticed_while_it_owes_something(engines: list[ServedEngine]) -> None:
    server = Counter()
    engine = make(engines, server)
    server.why = "process 7 ended"
    assert engine.step() == []  # nobody waits for it
    engine.add(request(1))
    with pytest.raises(EngineDied, match="process 7 ended"):
        engine.step()


def test_a_call_that_is_never_answered(engines: list[ServedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_engine, "LOOK_SECONDS", 0.05)
    servers = Counter(), Counter()
    for server in servers:
        server.slow = 3600
    with pytest.raises(EngineDied, match="the counter did not reply for 2 s"):
        make(engines, servers[0], timeout=2.0).load_weights(WEIGHTS, 1)
    engine = make(engines, servers[1])
    threading.Timer(0.3, lambda: setattr(servers[1], "why", "process 7 ended")).start()
    with pytest.raises(EngineDied, match="process 7"):
        engine.load_weights(WEIGHTS, 1)
    assert engine.version == 0


def test_what_cannot_be_served_is_refused_at_once(engines: list[ServedEngine]) -> None:
    server = Counter()
    engine = make(engines, server)
    long, strange = SamplingParams(max_new_tokens=63), SamplingParams(min_p=0.5, max_new_tokens=2)
    for ids, params, word in (((), PARAMS, "empty"), ((1, 2), long, "max_length=64"), ((1,), strange, "no min_p")):
        with pytest.raises(UserError, match=word):
            engine.add(Request(id=1, token_ids=ids, params=params))
    with pytest.raises(UserError, match="the counter runs 'bebop'"):
        engine.configure(DecodingConfig(system="target_only"))
    engine.configure(DecodingConfig(draft_tokens=1))
    engine.add(request(1))
    drain(engine)
    assert server.rested == 1 and engine.step() == [] and server.rested == 1


def test_a_completion_that_was_not_exact_does_not_become_so() -> None:
    before = Completion(token_ids=np.array([1]), logprobs=np.zeros(1, np.float32), versions=np.zeros(1), exact=False)
    empty = nothing()
    part = OutputChunk(
        token_ids=empty.token_ids, logprobs=empty.logprobs, versions=empty.versions, reason="stop",
        stats=DecodeStats(), why=None,
    )  # fmt: skip
    assert not appended(before, part, PARAMS, lambda ids, params, reason: "", recomputed=True).exact
