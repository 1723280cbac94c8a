"""The joint distribution of the first three tokens, and faults in verification that it finds."""

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from bebop.rollout.engine import Request
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.vllm.cpu import Expansion
from bebop.systems import SYSTEMS as SYSTEMS_OF_BEBOP
from bebop.trajectory import SamplingParams
from tests.goodness_of_fit import p_value
from tests.integration.vllm.builders import engine
from tests.served_models import VOCAB, answers, draft_model, job, stock

PROMPTS = ((3, 1, 4), (2, 7, 2, 7, 2))  # the second with something to look up
DRAWS, TOKENS = 20_000, 3
SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=TOKENS),
    "cool": SamplingParams(max_new_tokens=TOKENS, temperature=0.7),
    "top-p": SamplingParams(max_new_tokens=TOKENS, top_p=0.8),
    "top-k": SamplingParams(max_new_tokens=TOKENS, top_k=5),
}
SYSTEMS = ("autoregressive", "target_only", "bebop", "ngram", "draft_model")
LEVEL = 1e-3  # of the smallest p-value of a system's, times their number
Fault = Callable[[Any, dict[str, Any]], Tensor]


@pytest.fixture(scope="module", params=SYSTEMS)
def vllm(
    folder: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedEngine]:
    separate = SYSTEMS_OF_BEBOP[request.param].separate
    draft = draft_model(tmp_path_factory.mktemp("draft")) if separate else None
    with engine(job(folder, request.param, draft)) as found:
        yield found


@pytest.fixture(scope="module")
def sampled(folder: Path) -> Iterator[ServedEngine]:
    with engine(job(folder)) as found:
        yield found


def drawn(engine: ServedEngine, prompt: tuple[int, ...], params: SamplingParams, draws: int = DRAWS) -> np.ndarray:
    """Counts [V, V, V] of the first three tokens."""
    counts = np.zeros((VOCAB,) * TOKENS)
    found = answers(engine, [Request(id=i, token_ids=prompt, params=params) for i in range(draws)])
    np.add.at(counts, tuple(np.stack([c.token_ids for c in found]).T), 1)
    return counts


@torch.no_grad()
def exact(folder: Path, prompt: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """By transformers, with its own truncation [V, V, V]."""
    model = copy.deepcopy(stock(folder)).double()
    keep = LogitsProcessorList()
    if params.top_k > 0:
        keep.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        keep.append(TopPLogitsWarper(params.top_p))
    joint, texts = torch.ones(1, dtype=torch.double), torch.tensor([prompt])
    for _ in range(TOKENS):
        logits = model(texts).logits[:, -1] / params.temperature
        joint = (joint[:, None] * keep(texts, logits).softmax(-1)).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    return joint.view((VOCAB,) * TOKENS).numpy()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_system_draws_from_the_target(vllm: ServedEngine, folder: Path, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    for prompt in PROMPTS:
        counts, wanted = drawn(vllm, prompt, params), exact(folder, prompt, params)
        assert p_value(counts, wanted) > LEVEL / len(SAMPLINGS) / len(PROMPTS) / len(SYSTEMS), (prompt, sampling)


def test_sampled_drafts_leave_the_distribution(sampled: ServedEngine, folder: Path) -> None:
    params = SAMPLINGS["cool"]
    assert p_value(drawn(sampled, PROMPTS[0], params, 5000), exact(folder, PROMPTS[0], params)) > LEVEL


def residual(own: Any, given: dict[str, Any]) -> Tensor:
    """After a rejection the token is drawn from p itself."""
    out: Tensor = own(**given)
    p, begin = given["target_logits"].softmax(-1), 0
    for row, drafts in enumerate(given["num_draft_tokens"]):
        place = int((out[row] >= 0).sum()) - 1
        if place < drafts:
            out[row, place] = torch.multinomial(p[begin + place], 1)[0].to(out.dtype)
        begin += drafts
    return out


def unprocessed(own: Any, given: dict[str, Any]) -> Tensor:
    """Drafts count as drawn from the head's distribution at temperature 1."""
    q = given["draft_probs"]
    if q is None:  # a step in which nothing was drafted
        return stock_expansion(own, given)
    hot = q ** SAMPLINGS["cool"].temperature
    result: Tensor = own(**given | {"draft_probs": hot / hot.sum(-1, keepdim=True)})
    return result


def stock_expansion(own: Any, given: dict[str, Any]) -> Tensor:
    """As it comes; the mend is taken out by the test."""
    result: Tensor = own(**given)
    return result


@pytest.mark.parametrize("fault", [residual, unprocessed, stock_expansion])
def test_faults_in_verification_are_found(
    sampled: ServedEngine, folder: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import rejection_sampler

    own = rejection_sampler.rejection_sample
    names = inspect.signature(inspect.unwrap(own))
    params = SAMPLINGS["cool"]

    def faulty(*args: Any, **named: Any) -> Tensor:
        return fault(own, dict(names.bind(*args, **named).arguments))

    monkeypatch.setattr(rejection_sampler, "rejection_sample", faulty)
    if fault is stock_expansion:
        expansion = rejection_sampler.expand_batch_to_tokens
        assert isinstance(expansion, Expansion)
        if expansion.works:
            pytest.skip("this version of vLLM verifies at the temperatures that were asked for")
        monkeypatch.setattr(expansion, "works", True)
    counts = drawn(sampled, PROMPTS[0], params, DRAWS)
    assert p_value(counts, exact(folder, PROMPTS[0], params)) < 1e-6
