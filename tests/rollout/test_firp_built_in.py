"""Greedy answers of the built-in model to 300 prompts are those of plain decoding, whatever the matrices are worth."""

import pytest
import torch

from bebop.config import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.model.parts import has_part
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.firp.network import PseudoStates, middle_layers
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import SamplingParams

PROMPTS, FEWER, LONGEST = 300, 50, 12
SHIPPED = has_part(ModelConfig(), "firp")


def built_in(trained: bool) -> Policy:
    """In double precision, so that a tie is one; with the shipped part, or with matrices near the identity."""
    policy = load_policy(ModelConfig(path="tiny", device="cpu"), needs=["firp"] if trained else [])
    config = policy.backbone.config
    policy.backbone.double()
    if not trained:
        torch.manual_seed(3)
        network = PseudoStates(hidden_size=config.hidden_size, layers=middle_layers(config.num_hidden_layers))
        for matrix in network.requires_grad_(False).parameters():
            matrix.add_(0.02 * torch.randn_like(matrix))
        policy.parts["firp"] = network
    return policy


def tokens(policy: Policy, decoding: DecodingConfig, prompts: int = PROMPTS) -> tuple[list[list[int]], float]:
    """Answers, and accepted drafts in all."""
    source = PromptSource(TaskConfig(name="chain_sum"), chat_encoder(policy.tokenizer), 256)
    params = SamplingParams(temperature=0.0, max_new_tokens=LONGEST, stop_token_ids=policy.eos_token_ids)
    asked = [Request(id=i, token_ids=source.prompt(i).token_ids, params=params) for i in range(prompts)]
    done = generate(TorchEngine(policy, decoding, slots=50, max_length=320), asked)
    return [answer.token_ids.tolist() for answer in done], float(sum(a.stats.accepted.sum() for a in done))


@pytest.mark.exhaustive("the built-in model; test_conformance.py has tiny ones")
@pytest.mark.parametrize(
    "trained", [False, pytest.param(True, marks=pytest.mark.skipif(not SHIPPED, reason="no part"))]
)
def test_greedy_answers_are_those_of_plain_decoding(trained: bool) -> None:
    policy = built_in(trained)
    plain, _ = tokens(policy, DecodingConfig(system="autoregressive", draft_tokens=0))
    found, accepted = tokens(policy, DecodingConfig(system="firp", draft_tokens=16))
    assert found == plain and accepted > 0
    for decoding in (
        DecodingConfig(system="firp", draft_tokens=16, options={"pseudo_paths": 2}),
        DecodingConfig(system="firp_chain", draft_tokens=3),
    ):
        found, accepted = tokens(policy, decoding, FEWER)
        assert found == plain[:FEWER] and accepted > 0
    assert len({tuple(answer) for answer in plain}) > 100
