from collections.abc import Iterator

import pytest
import torch

from bebop.errors import UserError
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import SamplingParams
from bebop.verl_job.engine import EngineThread
from tests.recipes.verl.builders import PROMPT, make_engine


def request(seed: int, tokens: int = 24) -> Request:
    return Request(id=0, token_ids=PROMPT, params=SamplingParams(max_new_tokens=tokens, seed=seed))


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    made = EngineThread(make_engine())
    yield made
    made.stop()


def test_answers_are_those_of_the_engine_itself(thread: EngineThread) -> None:
    futures = [thread.submit(request(seed)) for seed in range(6)]
    expected = generate(make_engine(), [request(seed) for seed in range(6)])
    for future, answer in zip(futures, expected, strict=True):
        assert future.result(60).token_ids.tolist() == answer.token_ids.tolist()


def test_an_abort_ends_what_was_asked_for_before_it_and_nothing_that_comes_later(thread: EngineThread) -> None:
    before = [thread.submit(request(seed, 60)) for seed in range(3)]
    count = thread.abort()
    after = thread.submit(request(9, 4))
    assert count.result(60) <= 3
    assert all(future.result(60).finish_reason in ("abort", "stop") for future in before)
    assert after.result(60).finish_reason in ("stop", "length")


def test_weights_count_for_requests_that_come_after_them(thread: EngineThread) -> None:
    engine = thread.engine
    assert isinstance(engine, TorchEngine)
    old = thread.submit(request(1, 4)).result(60)
    changed = {name: weight.detach() * 1.5 for name, weight in engine.policy.weights().items()}
    thread.load(changed, 7)
    new = thread.submit(request(1, 4)).result(60)
    assert set(new.versions.tolist()) == {7} and set(old.versions.tolist()) == {0}
    assert torch.tensor(old.logprobs).sub(torch.tensor(new.logprobs[: len(old.logprobs)])).abs().max() > 1e-3


def test_what_can_never_fit_comes_back_as_an_error_and_the_engine_goes_on(thread: EngineThread) -> None:
    with pytest.raises(UserError, match="exceeds max_length=64"):
        thread.submit(request(1, 64)).result(60)
    with pytest.raises(UserError, match="do not fit the model"):
        thread.load({"backbone.nothing": torch.zeros(1)}, 1).result(60)
    assert len(thread.submit(request(1, 4)).result(60).token_ids)


def test_a_broken_engine_tells_everybody_who_waits(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(thread.engine, "step", fail)
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    first = thread.submit(request(1))
    with pytest.raises(RuntimeError, match="no memory"):
        first.result(60)
    with pytest.raises(RuntimeError, match="no memory"):
        thread.submit(request(2)).result(60)
