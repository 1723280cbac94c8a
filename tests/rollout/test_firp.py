"""Pseudo states on the engine: those of a pass over the whole text, whatever batch and cycles they come from."""

import dataclasses

import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.model.attention import SlotContext
from bebop.model.backbone import Policy
from bebop.model.firp import PseudoContext, PseudoSlots, PseudoStates, hidden_with_pseudo
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.drafters.firp import FirpDrafter
from bebop.rollout.decoding.rules.rejection import Rejection
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import requests, tiny_policy
from tests.rollout.greedy_answers import AcceptsOneMore, greedy
from tests.rollout.test_exactness import LEVEL, smallest_p

PROMPTS = [[1, 2, 3], [3, 1], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2], [2]]


@pytest.fixture
def policy() -> Policy:
    return tiny_policy(5, seed=11, layers=3, sharp=16.0, dtype=torch.float64)


def drafter(one: TorchEngine) -> FirpDrafter:
    assert isinstance(one.decoder, DraftVerify) and isinstance(one.decoder.drafter, FirpDrafter)
    return one.decoder.drafter


def started(policy: Policy, cycles: int, kind: type[FirpDrafter] = FirpDrafter) -> TorchEngine:
    """An engine so many cycles after its start."""
    one = TorchEngine(policy, DecodingConfig(system="firp_chain", draft_tokens=3), slots=4, max_length=64)
    drafter(one).__class__ = kind
    for request in requests(PROMPTS, max_new_tokens=40):
        one.add(request)
    for _ in range(cycles):
        one.step()
    return one


def states_error(one: TorchEngine) -> float:
    """How far the kept pseudo states are from those of a pass over the text that each row has fed."""
    own, errors = drafter(one), []
    for slot, fed in enumerate(one.fed):
        ids, anchors = torch.tensor([one._context(slot)[:fed]]), torch.tensor([[fed - 1]])
        context = PseudoContext.training(anchors, fed, own.network.masked)
        with torch.inference_mode():
            _, wanted = hidden_with_pseudo(one.policy, own.network, ids, torch.arange(fed)[None], anchors, context)
        errors.append(float((own.states[slot] - wanted[0, 0]).abs().max()))
    return max(errors)


class TakesTheNextRow(FirpDrafter):
    """Keeps the pseudo states of the first draft that was rejected."""

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        super().commit(rows, out, tokens, (emitted + 1).clamp_max(tokens.shape[1]))


class SeesTheDrafts(PseudoSlots):
    """An anchor sees all that the pass feeds."""

    def __init__(self, cache: SlotContext, anchors: Tensor, masked: bool = False) -> None:
        super().__init__(cache, torch.full_like(anchors, int(anchors.max())), masked)


def test_kept_states_are_those_of_a_pass_over_the_text(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    for masked in (False, True):
        network = policy.parts["firp"]
        assert isinstance(network, PseudoStates)
        network.masked = masked
        assert states_error(started(policy, 8)) < 1e-6
        assert states_error(started(policy, 8, TakesTheNextRow)) > 1e-3
    monkeypatch.setattr("bebop.rollout.decoding.drafters.firp.PseudoSlots", SeesTheDrafts)
    assert states_error(started(policy, 8)) > 1e-3


def test_greedy_answers_are_those_of_plain_decoding_also_with_matrices_of_zeros(policy: Policy) -> None:
    plain = greedy(policy, PROMPTS, "autoregressive", 0)
    for drafts in (1, 3, 5):
        assert greedy(policy, PROMPTS, "firp_chain", drafts) == plain
    assert greedy(policy, PROMPTS, "firp_chain", 3, AcceptsOneMore()) != plain
    for matrix in policy.parts["firp"].parameters():
        matrix.zero_()
    assert greedy(policy, PROMPTS, "firp_chain", 3) == plain


def test_drafts_cost_no_pass_of_their_own(policy: Policy) -> None:
    one = TorchEngine(policy, DecodingConfig(system="firp_chain", draft_tokens=3), slots=6, max_length=64)
    for answer in generate(one, requests(PROMPTS, max_new_tokens=20)):
        assert answer.stats.draft_forwards == 0 and answer.stats.reached[0] == answer.stats.cycles


def test_more_drafts_than_the_part_predicts_are_refused(policy: Policy) -> None:
    with pytest.raises(UserError, match=r"decoding\.draft_tokens=6 is not possible: the part firp predicts 5"):
        TorchEngine(policy, DecodingConfig(system="firp_chain", draft_tokens=6), slots=1, max_length=64)


class TakesTheNextDraft(Rejection):
    """Verifies a draft with the distribution of the one after it."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        assert draft.probs is not None
        return super().accept(rows, dataclasses.replace(draft, probs=draft.probs.roll(-1, 1)), out, uniforms)


@pytest.mark.slow
def test_a_draft_verified_with_the_distribution_of_another_is_caught() -> None:
    """That the system itself is exact is left to the test of all systems."""
    system = DecodingConfig(system="firp_chain", draft_tokens=2)
    assert smallest_p(tiny_policy(5, seed=11, sharp=16.0), system, 1.0, TakesTheNextDraft()) < LEVEL / 100
