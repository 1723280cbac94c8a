"""Fused attention of a GPU gives its result with the heads of a token side by side, not the tokens of a head.

In double precision, and on a CPU, torch takes other kernels, and nobody notices who relies on the order in memory.
"""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from bebop.model import attention, ragged_attention
from bebop.model.parity import check_parity
from bebop.rollout.torch_engine import generate
from bebop.systems import SYSTEMS
from bebop.systems.firp import network
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.test_conformance import PROMPTS, engine

PLAIN = attention.scaled_dot_product_attention
CALLERS: tuple[ModuleType, ...] = (attention, network, ragged_attention)


def as_on_a_gpu(*args: object, **kwargs: object) -> Tensor:
    """The same numbers; in memory [B, n, H, D]."""
    out: Tensor = PLAIN(*args, **kwargs)  # type: ignore[arg-type]
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in CALLERS:
        monkeypatch.setattr(module, "scaled_dot_product_attention", as_on_a_gpu)


@pytest.mark.parametrize("system", slow_but(["bebop", "block", "firp", "pipo"], SYSTEMS))
def test_tokens_do_not_depend_on_the_order_in_memory(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, asked = tiny_policy(seed=9, dtype=torch.float64), requests(PROMPTS, max_new_tokens=12)
    expected = [a.token_ids.tolist() for a in generate(engine(policy, system), asked)]
    for module in CALLERS:
        monkeypatch.setattr(module, "scaled_dot_product_attention", as_on_a_gpu)
    assert [a.token_ids.tolist() for a in generate(engine(policy, system), asked)] == expected


@pytest.mark.usefixtures("fused")
def test_all_ways_through_a_model_are_its_own() -> None:
    check_parity(tiny_policy(seed=2), "tiny")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ways_through_a_model_are_its_own_on_a_gpu(dtype: torch.dtype) -> None:
    policy = tiny_policy(seed=2, dtype=dtype)
    for module in policy.modules():
        module.to("cuda")
    check_parity(policy, "tiny")
    answers = generate(engine(policy), requests(PROMPTS, max_new_tokens=24))
    assert all(len(answer.token_ids) for answer in answers)
