"""The self-test at start passes on vLLM as Bebop starts it, and says what fails where something does."""

from typing import Any

import pytest

from bebop.errors import UserError
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.vllm.cpu import Expansion
from bebop.rollout.vllm.engine import self_test
from bebop.rollout.vllm.steps import STEPS, StepRecord
from tests.integration.vllm.builders import RUNNER, core, fewer, verification

first_runner = pytest.mark.skipif(RUNNER == "v2", reason="the second runner has another function in its place")


def test_a_sound_engine_passes_every_time(vllm: ServedEngine) -> None:
    for _ in range(fewer(20, 2)):
        self_test(core(vllm), sampled=True)
    assert core(vllm).unfinished == 0


@first_runner
def test_temperatures_that_do_not_arrive(vllm: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stock vLLM on a CPU verifies: at temperatures that happened to lie in memory."""
    from vllm.v1.sample import rejection_sampler

    expansion = rejection_sampler.expand_batch_to_tokens
    assert isinstance(expansion, Expansion)
    if expansion.works:
        pytest.skip("this version of vLLM verifies at the temperatures that were asked for")
    monkeypatch.setattr(expansion, "works", True)
    for _ in range(5):
        with pytest.raises(UserError, match=r"decodes as if temperature=.* do not arrive") as caught:
            self_test(core(vllm), sampled=True)
        assert "\n" not in str(caught.value)


def test_a_temperature_that_is_always_one(vllm: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    if RUNNER == "v2":
        from vllm.v1.worker.gpu.sample.states import SamplingStates

        monkeypatch.setattr(SamplingStates, "apply_temperature", lambda *args: None)
    else:
        from vllm.v1.sample import rejection_sampler

        own = rejection_sampler.apply_sampling_constraints
        plain = lambda logits, *args: own(logits.clone(), *args) * 0 + logits  # noqa: E731
        monkeypatch.setattr(rejection_sampler, "apply_sampling_constraints", plain)
    with pytest.raises(UserError, match=r"as if temperature=0\.5 were (0\.9|1)"):
        self_test(core(vllm), sampled=True)


def test_drafts_whose_distributions_take_no_part(vllm: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rejection_sampler, place = verification(), fewer(4, 1)  # of the drafts' distributions among the arguments
    own = rejection_sampler.rejection_sample

    def one_hot(*args: Any, **named: Any) -> Any:
        return own(*args[:place], None, *args[place + 1 :], **named)

    monkeypatch.setattr(rejection_sampler, "rejection_sample", one_hot)
    with pytest.raises(UserError, match="without the distributions"):
        self_test(core(vllm), sampled=True)


def test_a_plugin_that_sees_nothing(vllm: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(STEPS), "take", lambda self: StepRecord())
    with pytest.raises(UserError, match="verified no draft"):
        self_test(core(vllm), sampled=True)
