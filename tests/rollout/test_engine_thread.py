"""The decoding thread on the real engine: order, completions, errors, and an end that leaves nobody waiting."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.driver.protocols import Pace
from bebop.errors import UserError
from bebop.rollout.engine import Engine, Finished, Request
from bebop.rollout.engine_thread import EngineThread, Stopped
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import SamplingParams
from tests.builders import bare_policy

PROMPT = (2, 7, 4, 3)
SECONDS = 60  # within which a future is answered


def make_engine() -> TorchEngine:
    """Four slots of 64 tokens; in float64, so that rounding in batches of other sizes cannot change a token."""
    return TorchEngine(bare_policy(dtype=torch.float64), DecodingConfig(), slots=4, max_length=64)


def request(seed: int, tokens: int = 24) -> Request:
    return Request(id=0, token_ids=PROMPT, params=SamplingParams(max_new_tokens=tokens, seed=seed))


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    made = EngineThread(make_engine())
    made.start()
    yield made
    made.stop()


def test_completions_are_those_of_the_engine_itself(thread: EngineThread) -> None:
    futures = thread.submit([request(seed) for seed in range(6)])
    expected = generate(make_engine(), [request(seed) for seed in range(6)])
    for future, answer in zip(futures, expected, strict=True):
        assert future.result(SECONDS).token_ids.tolist() == answer.token_ids.tolist()


def test_an_abort_ends_what_was_asked_for_before_it_and_nothing_that_comes_later(thread: EngineThread) -> None:
    before = thread.submit([request(seed, 60) for seed in range(3)])
    count = thread.abort()
    (after,) = thread.submit([request(9, 4)])
    assert count.result(SECONDS) <= 3
    assert all(future.result(SECONDS).finish_reason in ("abort", "stop") for future in before)
    assert after.result(SECONDS).finish_reason in ("stop", "length")


def test_weights_count_for_requests_that_come_after_them(thread: EngineThread) -> None:
    engine = thread.engine
    assert isinstance(engine, TorchEngine)
    old = thread.submit([request(1, 4)])[0].result(SECONDS)
    changed = {name: weight.detach() * 1.5 for name, weight in engine.policy.weights().items()}
    thread.load(changed, 7)
    new = thread.submit([request(1, 4)])[0].result(SECONDS)
    assert set(new.versions.tolist()) == {7} and set(old.versions.tolist()) == {0}
    assert torch.tensor(old.logprobs).sub(torch.tensor(new.logprobs[: len(old.logprobs)])).abs().max() > 1e-3
    engine.redrawn = 2
    now = thread.progress()
    assert (now.version, now.head, now.redrawn) == (7, engine.head, 2) and now.busy > 0 and now.swap > 0
    assert thread.progress()[:2] == (0, 0)


def test_what_can_never_fit_comes_back_as_an_error_and_the_engine_goes_on(thread: EngineThread) -> None:
    never, fits = thread.submit([request(1, 64), request(1, 4)])
    with pytest.raises(UserError, match="exceeds max_length=64"):
        never.result(SECONDS)
    assert len(fits.result(SECONDS).token_ids)
    with pytest.raises(UserError, match="do not fit the model"):
        thread.load({"backbone.nothing": torch.zeros(1)}, 1).result(SECONDS)
    assert thread.progress().version == 0, "weights that were refused are not in use"
    assert len(thread.submit([request(1, 4)])[0].result(SECONDS).token_ids)


def test_a_broken_engine_tells_everybody_who_waits(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(thread.engine, "step", fail)
    for future in thread.submit([request(1), request(2)]):
        with pytest.raises(RuntimeError, match="no memory"):
            future.result(SECONDS)
    with pytest.raises(RuntimeError, match="no memory"):
        thread.submit([request(2)])[0].result(SECONDS)
    with pytest.raises(RuntimeError, match="no memory"):
        thread.load({}, 1).result(SECONDS)


def test_nobody_waits_for_a_thread_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in progress gives its completions; what is open, queued or asked for later learns that none comes."""
    made = EngineThread(make_engine())
    step, inside, go = made.engine.step, threading.Event(), threading.Event()

    def slow() -> object:
        inside.set()
        go.wait(SECONDS)
        return step()

    monkeypatch.setattr(made.engine, "step", slow)
    ends, runs = made.submit([request(1, 1), request(2, 50)])
    made.start()
    assert inside.wait(SECONDS)
    (queued,) = made.submit([request(3)])
    weights = made.load({}, 4)
    threading.Timer(0.05, go.set).start()
    made.stop()
    assert len(ends.result(0).token_ids) == 1
    for future in (runs, queued, weights, *made.submit([request(4)])):
        with pytest.raises(Stopped):
            future.result(0)


def test_a_thread_that_was_never_started_can_be_stopped() -> None:
    made = EngineThread(make_engine())
    (queued,) = made.submit([request(1)])
    made.stop()
    with pytest.raises(Stopped):
        queued.result(0)


def test_the_thread_computes_on_the_gpu_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = list[tuple[str, torch.device]]()
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        engine = SimpleNamespace(policy=SimpleNamespace(device=device), unfinished=0, version=0, head="")
        made = EngineThread(cast(Engine, engine))
        made.start()
        made.stop()
    assert chosen == [("decode", torch.device("cuda", 3))]


def test_one_who_no_longer_waits_does_not_harm_the_others(thread: EngineThread) -> None:
    async def story() -> None:
        left = asyncio.wrap_future(thread.submit([request(1, 30)])[0])
        left.cancel()
        answer = await asyncio.wait_for(asyncio.wrap_future(thread.submit([request(2, 30)])[0]), SECONDS)
        assert len(answer.token_ids)

    asyncio.run(story())


def test_requests_that_come_together_enter_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a group's prompt is computed once."""
    made, prefills = EngineThread(make_engine()), list[int]()
    assert isinstance(made.engine, TorchEngine)
    prefill = made.engine.decoder.prefill

    def counted(first: int, contexts: list[list[int]], starts: Sequence[int]) -> None:
        prefills.append(len(contexts))
        prefill(first, contexts, starts)

    monkeypatch.setattr(made.engine.decoder, "prefill", counted)
    made.start()
    for _ in range(5):
        for future in made.submit([request(seed, 2) for seed in range(3)]):
            future.result(SECONDS)
    made.stop()
    assert prefills == [1] * 5


def test_its_pace_tells_an_idle_thread_from_one_that_hangs() -> None:
    class Stuck(TorchEngine):
        """Its second step waits for ever."""

        steps = 0

        def step(self) -> list[Finished]:
            self.steps += 1
            if self.steps == 2:
                begun.set()
                let_go.wait(SECONDS)
            return super().step()

    begun, let_go = threading.Event(), threading.Event()
    engine = Stuck(bare_policy(dtype=torch.float64), DecodingConfig(), slots=4, max_length=64)
    thread = EngineThread(engine)
    assert thread.pace() == Pace(name="decoding", silent=0.0, slowest=0.0)
    thread.submit([request(1)])
    queued = thread.pace().silent
    thread.start()
    assert begun.wait(SECONDS)
    first, second = thread.pace(), thread.pace()
    assert 0 < first.silent < second.silent, "a step that does not come back"
    assert 0 < first.slowest == second.slowest, "of the first step"
    assert queued > 0, "something was queued and nobody took it"
    let_go.set()
    thread.abort().result(SECONDS)
    thread.stop()
    assert thread.pace().silent == 0.0 and thread.pace().slowest >= second.silent
