"""Objectives from hidden states equal the unfused losses of full logits, in value and in the head's gradient."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.losses import tv_loss
from bebop.kernels.truncation import truncate_
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain, gather_rows
from bebop.trainer.chains import ChainRows, TokenRow, chain_rows
from bebop.trainer.objectives import OBJECTIVES, Sampling, Steps, make_objective, unroll
from tests.builders import bare_policy
from tests.kernels.unfused import e2e_tv_loss

SAMPLING = Sampling(temperature=0.7)
KINDS = [name for name in OBJECTIVES if not name.startswith("e2e")]


def rows(seed: int = 0) -> ChainRows:
    """Four texts of different lengths, with chains of at most three steps."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 12, (count,), generator=generator).tolist())

    sizes = ((3, 8), (1, 5), (6, 1), (2, 12))
    return chain_rows([TokenRow(prompt=some(p), answer=some(a)) for p, a in sizes], 3)


def steps_of(policy: Policy, texts: ChainRows, sampling: Sampling = SAMPLING) -> Steps:
    assert policy.mtp is not None
    hidden = policy.hidden(texts.token_ids, torch.arange(texts.token_ids.shape[1])[None], CausalContext())
    weight = policy.backbone.get_output_embeddings().weight
    return unroll(policy.mtp, policy.embed(texts.token_ids), hidden, weight, texts, sampling)


def unfused(steps: Steps, name: str) -> Tensor:
    """The same from full logits."""
    draft, target = steps.draft @ steps.weight.T, (steps.target @ steps.weight.T).detach()
    if name.startswith("e2e"):
        tokens = steps.tokens.flatten(0, 1) if name == "e2e_tv_corrected" else None
        chains = (draft.flatten(0, 1), target.flatten(0, 1), steps.mask.flatten(0, 1))
        return e2e_tv_loss(*chains, temperature=steps.sampling.temperature, tokens=tokens)
    chosen = (draft[steps.mask], target[steps.mask])
    labels = steps.tokens[steps.mask] if name == "hard_ce" else None
    return tv_loss(*chosen, temperature=steps.sampling.temperature, kind=name, labels=labels).loss.mean()


def gradients(policy: Policy, loss: Tensor) -> list[Tensor]:
    assert policy.mtp is not None
    return list(torch.autograd.grad(loss, list(policy.mtp.parameters())))


def furthest(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry."""
    apart = float(np.max([float((x - y).abs().max()) for x, y in zip(a, b, strict=True)]))  # NaN stays
    return apart / max(float(y.abs().max()) for y in b)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_and_head_gradients_are_those_of_full_logits(name: str) -> None:
    policy, texts = bare_policy(), rows()
    fused, wanted = OBJECTIVES[name].loss(steps_of(policy, texts)), unfused(steps_of(policy, texts), name)
    assert fused.item() == pytest.approx(wanted.item(), abs=1e-5)
    assert furthest(gradients(policy, fused), gradients(policy, wanted)) < 1e-4


def test_objectives_differ() -> None:
    policy, texts = bare_policy(), rows()
    found = {name: OBJECTIVES[name].loss(steps_of(policy, texts)) for name in OBJECTIVES}
    grads = {name: gradients(policy, loss) for name, loss in found.items()}
    # ce is KL plus a constant: their gradients are one.
    pairs = [(a, b) for a in OBJECTIVES for b in OBJECTIVES if a < b and {a, b} != {"ce", "kl"}]
    assert min(furthest(grads[a], grads[b]) for a, b in pairs) > 1e-3
    assert furthest(grads["ce"], grads["kl"]) < 1e-4


def test_hard_ce_takes_the_tokens_of_the_data() -> None:
    policy = bare_policy()
    steps = steps_of(policy, rows())
    logits = (steps.draft @ steps.weight.T)[steps.mask] / SAMPLING.temperature
    wanted = torch.nn.functional.cross_entropy(logits, steps.tokens[steps.mask])
    assert OBJECTIVES["hard_ce"].loss(steps).item() == pytest.approx(wanted.item(), abs=1e-5)
    moved = dataclasses.replace(steps, tokens=steps.tokens.roll(1, -1))
    assert abs(OBJECTIVES["hard_ce"].loss(moved).item() - wanted.item()) > 1e-2


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7, target_top_p=0.8), Sampling(target_top_k=3)])
def test_a_truncated_target_is_what_the_draft_is_held_against(sampling: Sampling) -> None:
    steps = steps_of(bare_policy(), rows(), sampling)
    logits = (steps.target @ steps.weight.T).detach()[steps.mask] / sampling.temperature
    p = truncate_(logits, 1.0, sampling.target_top_p, sampling.target_top_k).softmax(-1)
    q = ((steps.draft @ steps.weight.T).detach()[steps.mask] / sampling.temperature).softmax(-1)
    assert OBJECTIVES["tv"].loss(steps).item() == pytest.approx(float(1 - torch.minimum(p, q).sum(-1).mean()), abs=1e-5)
    whole = dataclasses.replace(steps, sampling=Sampling(temperature=sampling.temperature))
    assert abs(OBJECTIVES["tv"].loss(whole).item() - OBJECTIVES["tv"].loss(steps).item()) > 1e-3


def leaky(policy: Policy, texts: ChainRows) -> Steps:
    """``unroll`` without its detachments: embedding and hidden states carry the gradient on into the policy."""
    assert policy.mtp is not None
    hidden = policy.hidden(texts.token_ids, torch.arange(texts.token_ids.shape[1])[None], CausalContext())
    draft = torch.stack(list(chain(policy.mtp, policy.embed(texts.token_ids), hidden, 3, texts.anchors)), 2)
    target = torch.stack(
        [gather_rows(hidden, (texts.anchors + i).clamp_max(hidden.shape[1] - 1)) for i in (1, 2, 3)], 2
    )
    tokens = torch.stack([texts.tokens(i) for i in (1, 2, 3)], 2)
    weight = policy.backbone.get_output_embeddings().weight
    return Steps(draft=draft, target=target, weight=weight, tokens=tokens, mask=texts.mask(3), sampling=SAMPLING)


def reached(policy: Policy, loss: Tensor) -> set[str]:
    """Names of the policy's parameters, the head's aside, that a gradient gets to."""
    loss.backward()
    return {name for name, p in policy.backbone.named_parameters() if p.grad is not None and bool(p.grad.any())}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_reach_the_head_alone(name: str) -> None:
    policy = bare_policy()  # the backbone's parameters want gradients: that they are frozen is no part of the proof
    assert reached(policy, OBJECTIVES[name].loss(steps_of(policy, rows()))) == set()
    assert policy.mtp is not None and all(p.grad is not None for p in policy.mtp.parameters())


def test_a_chain_that_is_not_detached_is_caught() -> None:
    policy = bare_policy()
    assert len(reached(policy, OBJECTIVES["e2e_tv"].loss(leaky(policy, rows())))) > 10


def test_shares_count_what_a_mean_is_over() -> None:
    texts = rows()
    steps = steps_of(bare_policy(), texts)
    per = {name: texts.count(OBJECTIVES[name].per) for name in ("tv", "e2e_tv", "e2e_tv_corrected")}
    assert per["tv"] == steps.mask.sum() and per["e2e_tv"] == per["e2e_tv_corrected"] == steps.mask.any(-1).sum()
    assert per["tv"] > per["e2e_tv"]


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(UserError, match="objective='warp' is not possible: choose one of tv, ce"):
        make_objective("warp")
