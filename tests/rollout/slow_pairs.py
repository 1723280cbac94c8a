"""Decoding in pairs as it is written down, a pass over the whole text for every pair; and what to hold against it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.kernels.uniforms import uniforms
from bebop.kernels.verify import sample
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems.pipo.network import PairModel, as_pairs
from bebop.systems.pipo.options import PipoOptions
from bebop.trajectory import Completion, SamplingParams
from tests.builders import tiny_pairs, tiny_policy

VOCAB = 12
PROMPTS = [[(3 * i + j) % (VOCAB - 2) + 1 for j in range(length)] for i, length in enumerate((*range(1, 10), 5, 2))]
GATES = [
    PipoOptions(tau=0.5),
    PipoOptions(tau=-1.0),
    PipoOptions(tau=1.0),
    PipoOptions(gate="random", keep=0.6),
    PipoOptions(gate="random", keep=0.0),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A completion with the pairs that it was drawn in."""

    token_ids: list[int]
    logprobs: list[float]
    pairs: list[tuple[int, int]]  # of the completion
    drafts: list[int]  # of each pair; -1: none
    confidence: list[float]


def network_of(policy: Policy) -> PairModel:
    network = policy.parts["pipo"]
    assert isinstance(network, PairModel)
    return network


def states(policy: Policy, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """h [n, d] of all pairs."""
    network = network_of(policy)
    inputs = network.compress(policy.embed(torch.tensor(pairs)))
    return network.states(inputs[None], torch.arange(len(pairs))[None], CausalContext())[0]


def drafted(policy: Policy, pairs: Sequence[tuple[int, int]], h: Tensor, token: int) -> Tensor:
    """u [n, d] for h [n, d] of pairs, of which ``token`` follows the last."""
    firsts = policy.embed(torch.tensor([*(a for a, _ in pairs[1:]), token]))
    return network_of(policy).draft_states(firsts[None], h[None], torch.arange(len(pairs))[None], CausalContext())[0]


def distribution(policy: Policy, state: Tensor, params: SamplingParams, seen: set[int]) -> Tensor:
    """[V] of a state [d]."""
    columns = {name: torch.tensor([float(getattr(params, name))]) for name in ("temperature", "top_p", "min_p")}
    law = BatchSampling(
        **columns, top_k=torch.tensor([params.top_k]), penalty=torch.tensor([params.repetition_penalty])
    )
    marks = torch.tensor([[[token in seen for token in range(policy.vocab_size)]]])
    return law.probs(network_of(policy).logits(policy, state)[None, None], marks)[0, 0]


def decode(policy: Policy, prompt: Sequence[int], params: SamplingParams, options: PipoOptions) -> Drawn:
    """One completion."""
    network = network_of(policy)
    prompt_pairs = as_pairs(tuple(prompt), network.pad)
    tau = network.tau if options.tau is None else options.tau
    told = Drawn(token_ids=[], logprobs=[], pairs=[], drafts=[], confidence=[])

    def append(token: int, probs: Tensor) -> bool:
        told.token_ids.append(token)
        told.logprobs.append(float(probs[token].log()))
        return token in params.stop_token_ids or len(told.token_ids) == params.max_new_tokens

    with torch.no_grad():
        while True:
            pairs = [*prompt_pairs, *told.pairs]
            numbers = uniforms(torch.tensor([params.seed]), torch.tensor([len(prompt) + len(told.token_ids) - 1]), 3)[0]
            h = states(policy, pairs)
            first = distribution(policy, h[-1], params, {*prompt, *told.token_ids})
            token = int(sample(first, numbers[0]))
            told.pairs.append((token, network.pad))
            told.drafts.append(-1)
            told.confidence.append(0.0)
            if append(token, first):
                return told
            if (options.keep == 0) if options.gate == "random" else tau >= 1:
                continue
            u = drafted(policy, pairs, h, token)[-1]
            second = distribution(policy, u, params, {*prompt, *told.token_ids})
            draft = int(sample(second, numbers[1]))
            told.drafts[-1] = draft
            told.confidence[-1] = float(network.confidence(h[-1], u))
            kept = numbers[2] < options.keep if options.gate == "random" else told.confidence[-1] >= tau
            if kept:
                told.pairs[-1] = (token, draft)
                if append(draft, second):
                    return told


def paired(seed: int = 1, dtype: torch.dtype = torch.float64) -> Policy:
    """A tiny policy with a random network of pairs, whose confidence is on both sides of one half."""
    policy = tiny_policy(VOCAB, seed=seed, dtype=dtype)
    policy.parts["pipo"] = tiny_pairs(policy)
    return policy


@cache
def shared() -> Policy:
    """Return ``paired()`` for tests that leave it as it is."""
    return paired()


@cache
def written(prompt: tuple[int, ...], params: SamplingParams, options: PipoOptions = GATES[0]) -> Drawn:
    """Return the completion of the shared policy, which costs a pass over the text for every pair."""
    return decode(shared(), prompt, params, options)


def engine(policy: Policy, options: PipoOptions = GATES[0], slots: int = 3, **settings: object) -> TorchEngine:
    given = {name: value for name, value in dataclasses.asdict(options).items() if value is not None}
    config = DecodingConfig(system="pipo", draft_tokens=1, options=given)
    return TorchEngine(policy, config, slots=slots, max_length=64, **settings)  # type: ignore[arg-type]


def same(answer: Completion, wanted: Drawn) -> None:
    assert answer.token_ids.tolist() == wanted.token_ids
    np.testing.assert_allclose(answer.logprobs, wanted.logprobs, atol=2e-6)
    stats, whole = answer.stats, [draft for draft in wanted.drafts if draft >= 0]
    kept = sum(second != 0 for _, second in wanted.pairs)
    assert (stats.cycles, stats.target_forwards, stats.tokens) == (len(wanted.pairs),) * 2 + (len(wanted.token_ids),)
    assert stats.accept_length == len(wanted.token_ids) / len(wanted.pairs)
    assert (int(stats.reached.sum()), int(stats.accepted.sum())) == (len(whole), kept)
    confidence = stats.counts["confidence"].sum()
    assert confidence == pytest.approx(sum(wanted.confidence), abs=1e-6)


# ---- the distribution of what is drawn


def pair_distribution(
    policy: Policy, prompt: Sequence[int], options: PipoOptions, temperature: float, tokens: int = 3
) -> np.ndarray:
    """Return the joint distribution [V] * tokens of the next tokens after a prompt, by enumeration."""
    with torch.no_grad():
        found = _joint(policy, list(as_pairs(tuple(prompt), network_of(policy).pad)), tokens, options, temperature)
    assert float(found.sum()) == pytest.approx(1)
    return found.numpy()


def _joint(
    policy: Policy, pairs: list[tuple[int, int]], tokens: int, options: PipoOptions, temperature: float
) -> Tensor:
    """Distribution [V] * tokens of what follows some pairs."""

    def law(state: Tensor) -> Tensor:
        return (network_of(policy).logits(policy, state).double() / temperature).softmax(-1)

    h, vocab = states(policy, pairs), policy.vocab_size
    first = law(h[-1])
    if tokens == 1:
        return first
    follows = torch.zeros((vocab,) * tokens, dtype=torch.float64)
    for token in range(1, vocab):
        u = drafted(policy, pairs, h, token)[-1]
        kept = law(u) * _chances(policy, options, h[-1], u)
        rejected = 1 - kept.sum()
        if rejected > 0:
            follows[token] += rejected * _joint(policy, [*pairs, (token, 0)], tokens - 1, options, temperature)
        for draft in range(1, vocab):
            rest = torch.tensor(1.0)
            if tokens > 2:
                rest = _joint(policy, [*pairs, (token, draft)], tokens - 2, options, temperature)
            follows[token, draft] += kept[draft] * rest
    return first.view(-1, *[1] * (tokens - 1)) * follows


def _chances(policy: Policy, options: PipoOptions, h: Tensor, u: Tensor) -> Tensor:
    """The chance [V] that each draft is kept."""
    if options.gate == "random":
        return torch.full((policy.vocab_size,), options.keep, dtype=torch.float64)
    assert options.tau is not None
    return (network_of(policy).confidence(h, u) >= options.tau).double().expand(policy.vocab_size)
