"""The EAGLE-3 drafter on the engine: its cache, and drafts that are drawn as it is trained."""

from collections.abc import Sequence

import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy, tapped
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems.eagle3.decoding import Eagle3Drafter
from bebop.systems.eagle3.network import Eagle3Network
from bebop.systems.eagle3.training import unroll_drafter
from bebop.trainer.chains import ChainRows
from bebop.trainer.objectives import Sampling
from tests.builders import requests, tiny_policy
from tests.rollout.driving import cache_error, decoder_of, drafter_of, read_at_once, started

PROMPTS = [[1, 2, 3], [3], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2], [3, 2]]
pytestmark = pytest.mark.slow  # exactness and conformance run the drafter in the quick suite


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(7, seed=11, sharp=16.0, dtype=torch.float64, layers=8)


def engine(policy: Policy, drafter: type[Eagle3Drafter] = Eagle3Drafter) -> TorchEngine:
    one = TorchEngine(policy, DecodingConfig(system="eagle3", draft_tokens=3), slots=4, max_length=64)
    drafter_of(one, Eagle3Drafter).__class__ = drafter
    return one


class LateStates(Eagle3Drafter):
    """Reads at each position the state of the one before it."""

    def states(self, out: TargetOutput) -> torch.Tensor:
        return super().states(out).roll(1, 1)


def test_a_context_that_grows_by_cycles_is_one_that_was_read_at_once(policy: Policy) -> None:
    def error(drafter: type[Eagle3Drafter]) -> float:
        one = started(engine(policy, drafter), requests(PROMPTS, max_new_tokens=40), 8)
        assert min(one.fed) > 6
        return cache_error(one, read_at_once(one, engine(policy)), "eagle3")

    assert error(Eagle3Drafter) < 1e-5
    assert error(LateStates) > 1e-2


@torch.no_grad()
def trained_on(policy: Policy, text: Sequence[int], depth: int) -> torch.Tensor:
    """Logits [depth, W] of the chain before the last ``depth`` tokens of a text, as training has them."""
    network = policy.parts["eagle3"]
    assert isinstance(network, Eagle3Network)
    ids = torch.tensor([list(text)])
    with tapped(policy.backbone.get_decoder().layers, {*network.taps}) as layers:
        hidden = policy.hidden(ids, torch.arange(len(text))[None], CausalContext())
    anchor = len(text) - depth - 2
    rows = ChainRows(token_ids=ids, anchors=torch.tensor([[anchor]]), steps=torch.tensor([[depth]]))
    states = torch.cat([hidden, *(layers[tap] for tap in network.taps)], -1)
    steps = unroll_drafter(
        network, policy.embed(ids), states, policy.backbone.get_output_embeddings().weight, rows, Sampling()
    )
    return network.lm_head(steps.draft)[0, 0]


def test_drafts_are_drawn_from_what_is_trained(policy: Policy) -> None:
    """Every draft of some cycles: its distribution is that of training on the same text, recursion included."""
    network = policy.parts["eagle3"]
    assert isinstance(network, Eagle3Network)
    compared = []

    def observe(rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted, emitted: torch.Tensor) -> None:
        context, sizes = rows.context(), rows.sizes.tolist()
        for row in range(rows.batch):
            if sizes[row] < 2:
                continue
            text = [*context[row, : sizes[row]].tolist(), *draft.tokens[row].tolist()]
            wanted = trained_on(policy, text, 3).softmax(-1)
            assert draft.probs is not None
            found = draft.probs[row]
            assert torch.allclose(found[:, network.tokens], wanted.float(), atol=1e-5)
            assert torch.allclose(found.sum(-1), torch.ones(3))
            compared.append(row)

    one = engine(policy)
    decoder_of(one).observers.append(observe)
    started(one, requests(PROMPTS, max_new_tokens=40), 4)
    assert len(compared) > 10


def test_draft_distributions_stand_against_those_of_their_positions(policy: Policy) -> None:
    """Step i of the chain at t drafts token t + i + 1, as the target's state at t + i does."""
    network = policy.parts["eagle3"]
    assert isinstance(network, Eagle3Network)
    ids = torch.tensor([[1, 2, 3, 0, 2, 4]])
    hidden = torch.arange(6.0, dtype=torch.float64)[None, :, None].expand(1, 6, 32)
    states = torch.cat([hidden, torch.zeros(1, 6, 96, dtype=torch.float64)], -1)
    rows = ChainRows(token_ids=ids, anchors=torch.tensor([[1, 2]]), steps=torch.tensor([[3, 2]]))
    weight = policy.backbone.get_output_embeddings().weight
    steps = unroll_drafter(network, policy.embed(ids), states, weight, rows, Sampling())
    assert steps.target[0, ..., 0].tolist() == [[2, 3, 4], [3, 4, 5]]
    assert steps.tokens[0, 0].tolist() == [0, 2, 4] and steps.mask[0].tolist() == [[True] * 3, [True, True, False]]
