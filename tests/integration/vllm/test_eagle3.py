"""EAGLE-3 drafters in vLLM: its class computes our logits, sampled drafts leave the distribution, weights arrive."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import ModelConfig
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy, tapped
from bebop.model.checkpoint import load_policy
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems.eagle3.network import FLOOR, Eagle3Network
from bebop.systems.eagle3.training import unroll_drafter
from bebop.trainer.chains import ChainRows
from bebop.trainer.objectives import Sampling
from bebop.trajectory import DecodeStats
from tests.eagle3_models import DRAFTED, drafter, eagle3_job, folders, target
from tests.integration.vllm.builders import RUNNER, core, engine
from tests.served_models import PROMPT, VOCAB, answers, ask, tokens_distribution_test

ANSWERS = 2048


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return folders(tmp_path_factory.mktemp("eagle3"))


@pytest.fixture(scope="module")
def vllm(models: tuple[Path, Path]) -> Iterator[ServedEngine]:
    with engine(eagle3_job(*models)) as found:
        yield found


def ours(models: tuple[Path, Path]) -> Policy:
    own, part = models
    config = ModelConfig(path=str(own), device="cpu", parts={"eagle3": str(part)})
    return load_policy(config, needs=("eagle3",))


def recorded(vllm: ServedEngine) -> tuple[list[Tensor], list[int]]:
    """The logits of both drafts after the first token, as vLLM's class gives them, and the text that they follow."""
    model = core(vllm).engine.model_executor.driver_worker.worker.model_runner.get_draft_model()
    seen: list[Tensor] = []
    compute, fed = model.compute_logits, list[Tensor]()
    embed = model.model.embed_input_ids
    model.compute_logits = lambda hidden: seen.append(compute(hidden)) or seen[-1]
    model.model.embed_input_ids = lambda ids: fed.append(ids.clone()) or embed(ids)
    try:
        answers(vllm, ask(1, 4))
    finally:
        del model.compute_logits, model.model.embed_input_ids
    first, second = fed[:2]
    return seen[:2], [PROMPT[0], *first[: len(PROMPT)].tolist(), int(second[0])]


@torch.no_grad()
def expected(policy: Policy, text: list[int]) -> list[Tensor]:
    """The same logits as training has them: both steps of the chain at the last prompt token."""
    network = policy.parts["eagle3"]
    assert isinstance(network, Eagle3Network)
    ids = torch.tensor([[*text, 0]])
    with tapped(policy.backbone.get_decoder().layers, {*network.taps}) as layers:
        hidden = policy.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
    rows = ChainRows(token_ids=ids, anchors=torch.tensor([[len(PROMPT) - 1]]), steps=torch.tensor([[2]]))
    states = torch.cat([hidden, *(layers[tap] for tap in network.taps)], -1)
    steps = unroll_drafter(network, policy.embed(ids), states, hidden[0], rows, Sampling())
    return list(network.lm_head(steps.draft)[0, 0])


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for theirs, own in zip(found, wanted, strict=True):
        assert torch.allclose(theirs[0, list(DRAFTED)], own, atol=1e-4)
        others = [token for token in range(VOCAB) if token not in DRAFTED]
        assert bool((theirs[0, others] <= FLOOR).all())


def test_logits_of_both_steps_are_those_of_vllms_class(vllm: ServedEngine, models: tuple[Path, Path]) -> None:
    found, text = recorded(vllm)
    assert_same(found, expected(ours(models), text))
    other = copy.deepcopy(ours(models))
    other.parts["eagle3"].fc.weight.data = other.parts["eagle3"].fc.weight.roll(32, 1)  # type: ignore[union-attr]
    assert not torch.allclose(found[0][0, list(DRAFTED)], expected(other, text)[0], atol=1e-2)


def stats(found: list[Any]) -> DecodeStats:
    return DecodeStats.total(c.stats for c in found)


@pytest.mark.skipif(RUNNER == "v2", reason="too many tokens for Triton's interpreter; test_drafters asks for fewer")
def test_completions_have_the_targets_distribution_and_our_acceptance(
    vllm: ServedEngine, models: tuple[Path, Path]
) -> None:
    found = answers(vllm, ask(ANSWERS, 30))
    tokens_distribution_test(found, models[0])
    own = TorchEngine(ours(models), eagle3_job(*models).decoding, slots=64, max_length=120)
    rates = [one.accepted / one.reached for one in (stats(answers(own, ask(ANSWERS, 30))), stats(found))]
    assert np.abs(rates[0] - rates[1]).max() < 0.03 and 0.1 < rates[0][0] < 0.9


def test_new_weights_of_target_and_drafter_arrive(
    vllm: ServedEngine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    changed = Policy(
        backbone=target(5).backbone, tokenizer=ours(models).tokenizer, mtp=None, layout="mimo",
        parts={"eagle3": drafter(seed=6)}, drafting="eagle3",
    )  # fmt: skip
    vllm.load_weights({name: t.detach() for name, t in changed.weights(mtp=True).items()}, 3)
    assert vllm.head == changed.head_fingerprint()
    found, text = recorded(vllm)
    assert_same(found, expected(changed, text))
    vllm.load_weights({name: t.detach() for name, t in ours(models).weights(mtp=True).items()}, 4)
    found, text = recorded(vllm)
    assert_same(found, expected(ours(models), text))
