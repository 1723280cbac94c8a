"""What the benchmark of decoding counts: floating-point operations of cycles, against parameters and positions."""

import pytest
import torch

from bebop.bench.rollout import products
from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import DecodeStats
from tests.builders import requests, tiny_policy
from tests.cases import slow_but


def linear(module: torch.nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, torch.nn.Linear))


def counted(policy: Policy, decoding: DecodingConfig) -> tuple[float, DecodeStats]:
    engine = TorchEngine(policy, decoding, slots=1, max_length=64)
    with products(policy, engine) as spent:
        [answer] = generate(engine, requests([[1, 2, 3]], max_new_tokens=20))
    assert not any(module._forward_pre_hooks for module in policy.backbone.modules())
    return spent[0], answer.stats


@pytest.mark.parametrize("drafts", slow_but([3], [1, 3]))
def test_operations_are_parameters_times_positions(drafts: int) -> None:
    policy = tiny_policy(5, seed=11, layers=3)
    assert policy.mtp is not None
    whole, head = linear(policy.backbone), linear(policy.backbone.get_output_embeddings())
    layer = linear(policy.backbone.get_decoder().layers[0])
    spent, stats = counted(policy, DecodingConfig(system="autoregressive", draft_tokens=0))
    assert spent == 2 * whole * stats.cycles == 2 * whole * 20
    spent, stats = counted(policy, DecodingConfig(system="firp_chain", draft_tokens=drafts))
    # Of five steps three enter after the first layer of three, and two after the last, so that two layers see three.
    beside = 3 * 2 * layer + 5 * 32 * 32
    verified = (1 + drafts) * (whole + beside)
    assert stats.extra_positions == 5 * (1 + drafts) * stats.cycles
    assert spent == 2 * stats.cycles * (verified + drafts * head)
    assert spent != 2 * stats.cycles * ((1 + drafts) * whole + drafts * head)
