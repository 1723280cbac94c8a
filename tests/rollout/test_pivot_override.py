"""PAD's own: how far it moves from the target, what it counts of that, and the log-probs it records (SPEC 4.4, 4.7)."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.kernels.pivot import bias
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.pad.decoding import PivotOverride
from bebop.trajectory import Completion
from tests.builders import requests
from tests.cases import slow_but
from tests.rollout.broken import EndsAtOverrides, WrongState
from tests.rollout.driving import decoder_of
from tests.rollout.pad_distribution import P_MIN, STOP, TAU, VOCAB, PadDistribution, policy, random_network
from tests.rollout.test_exactness import exact_distribution

PROMPTS, TOKENS, DRAWS = [[0, 1, 2], [3, 3, 1, 0]], 3, 2_500
MODEL = policy()


def pad(tau: float = TAU, p_min: float = P_MIN) -> DecodingConfig:
    return DecodingConfig(system="pad", draft_tokens=2, options={"tau": tau, "p_min": p_min})


def answers(
    distribution: PadDistribution,
    prompt: Sequence[int],
    rule: type[PivotOverride] = PivotOverride,
    draws: int = DRAWS,
    count: int = TOKENS + 2,
    config: DecodingConfig | None = None,
) -> list[Completion]:
    distribution.policy.parts["pivot"] = distribution.network
    config = config or pad()
    engine = TorchEngine(distribution.policy, config, slots=1000, max_length=16)
    if rule is not PivotOverride:
        decoder_of(engine).rule = rule(distribution.policy, engine.slots, config)
    stops = (distribution.stop,) if distribution.stop >= 0 else ()
    asked = requests([prompt] * draws, temperature=distribution.temperature, max_new_tokens=count, stop_token_ids=stops)
    return generate(engine, asked)


def test_without_overrides_the_work_gives_the_target() -> None:
    """The enumeration is right where the answer is known."""
    distribution = PadDistribution(MODEL, random_network("pred", MODEL), stop=-1)
    for prompt in PROMPTS[1:]:
        expected = exact_distribution(distribution.policy, prompt, 1.0)
        assert np.abs(distribution.without_overrides().joint(prompt).numpy() - expected).max() < 1e-6
        joint = distribution.joint(prompt)
        assert abs(float(joint.sum()) - 1) < 1e-6 and np.abs(joint.numpy() - expected).max() > 0.01


def distances(
    distribution: PadDistribution, rule: type[PivotOverride], draws: int = DRAWS
) -> list[tuple[float, float, float]]:
    """Measured TV from the target, R_N and standard error at each place of the first cycle's drafts that is reached.

    The first draft of each prompt, and the second after each token that the first may be. TV(P, p) is P(B) - p(B), B
    being the tokens that P prefers: a share of completions, which no noise makes larger.
    """
    found = []
    for prompt in PROMPTS:
        emitted: list[Tensor] = []

        class Kept(rule):  # type: ignore[misc, valid-type]
            def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
                accepted = super().accept(rows, draft, out, uniforms)
                begun = rows.slots.count[: rows.batch] == 0
                emitted.append(torch.cat([accepted.tokens[begun, :2], accepted.lengths[begun, None]], 1))  # noqa: B023
                return accepted

        answers(distribution, prompt, Kept, draws, count=1)  # the first cycle is looked at alone
        one, two, _ = distribution.cycle(prompt)
        first, second, accepted = torch.cat(emitted).T
        places = [(one, 0, first)] + [
            (two, v, second[(accepted > 0) & (first == v)]) for v in range(VOCAB) if v != STOP
        ]
        for step, row, tokens in places:
            preferred = (step.emitted() > step.p)[row] & step.members[row]
            chance, expected = (
                float(step.emitted()[row, preferred].sum()),
                float(bias(step.p, step.q, step.members)[row]),
            )
            measured = float(preferred[tokens].double().mean() - step.p[row, preferred].sum())
            if len(tokens) >= 100 and expected > 0:
                found.append((measured, expected, (chance * (1 - chance) / len(tokens)) ** 0.5))
    return found


@pytest.mark.parametrize("position", slow_but(["pred"], ["pred", "cand"]))
def test_what_is_emitted_lies_as_far_from_the_target_as_the_bias_says_at_every_position(position: str) -> None:
    draws = DRAWS if position == "pred" else 2 * DRAWS  # fewer places are reached where candidates are judged
    found = distances(PadDistribution(MODEL, random_network(position, MODEL)), PivotOverride, draws)
    assert len(found) >= 4 and max(expected for _, expected, _ in found) > 0.05
    assert all(abs(measured - expected) < 3 * error for measured, expected, error in found), found


@pytest.mark.slow
@pytest.mark.parametrize("rule", slow_but([WrongState], [WrongState, EndsAtOverrides]))
def test_a_rule_that_moves_another_distance_is_caught(rule: type[PivotOverride]) -> None:
    found = distances(PadDistribution(MODEL, random_network("pred", MODEL)), rule)
    assert any(abs(measured - expected) > 5 * error for measured, expected, error in found), found


def test_tau_zero_is_rejection_sampling_to_the_bit() -> None:
    distribution = PadDistribution(MODEL, random_network("pred", MODEL), stop=-1)
    none = answers(distribution, PROMPTS[0], draws=300, config=pad(0.0))
    plain = answers(distribution, PROMPTS[0], draws=300, config=DecodingConfig(system="bebop", draft_tokens=2))
    for a, b in zip(none, plain, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
        assert a.exact and b.exact
    some = answers(distribution, PROMPTS[0], draws=300)
    assert any(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(some, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("position", ["pred", "cand"])
def test_bias_is_what_the_distribution_moves(position: str) -> None:
    """R_N of the first draft of a completion, over all positions, within three standard errors of overrides."""
    distribution = PadDistribution(MODEL, random_network(position, MODEL))
    first: list[Tensor] = []

    class Kept(PivotOverride):
        def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
            accepted = super().accept(rows, draft, out, uniforms)
            begun = rows.slots.count[: rows.batch] == 0
            first.append(torch.stack([accepted.counts[name][begun, 0].double() for name in self.counts]))
            return accepted

    done = answers(distribution, PROMPTS[1], Kept)
    step, *_ = distribution.cycle(PROMPTS[1])
    expected = float(bias(step.p, step.q, step.members))
    assert expected > 0.05 and abs(float((step.emitted() - step.p).abs().sum() / 2) - expected) < 1e-6
    overridden, moved = torch.cat(first, 1)
    error = float((expected * (1 - expected) / DRAWS) ** 0.5)
    assert abs(float(overridden.mean()) - expected) < 3 * error
    if position == "pred":
        assert torch.allclose(moved, torch.full_like(moved, expected), atol=1e-5), "known, not estimated"
    else:
        assert abs(float(moved.mean()) - expected) < 3 * error and float(moved.std()) < float(overridden.std())
    totals = {name: sum(c.stats.counts[name] for c in done) for name in PivotOverride.counts}
    reached = sum(c.stats.reached for c in done)
    assert np.all(np.abs(totals["overridden"] - totals["bias"]) < 4 * np.sqrt(totals["bias"])), (totals, reached)


def test_recorded_logprobs_are_those_of_the_distribution_that_was_drawn_from() -> None:
    """log P of the first token, which is not log p; log p stays beside it."""
    distribution = PadDistribution(MODEL, random_network("pred", MODEL), 0.7)
    step, *_ = distribution.cycle(PROMPTS[1])
    for done in answers(distribution, PROMPTS[1], draws=500):
        token = int(done.token_ids[0])
        assert abs(done.logprobs[0] - float(step.p[0, token].log())) < 1e-4
        assert (
            done.sampled_logprobs is not None
            and abs(done.sampled_logprobs[0] - float(step.emitted()[0, token].log())) < 1e-4
        )
    assert float((step.emitted() / step.p).log().abs().max()) > 0.05
    distribution = PadDistribution(MODEL, random_network("cand", MODEL), 0.7)
    assert all(done.sampled_logprobs is None for done in answers(distribution, PROMPTS[1], draws=50)), (
        "unknown for what was not drafted"
    )


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_what_truncation_excludes_is_never_emitted(sampling: dict[str, float]) -> None:
    """With tau=1 and p_min=0 whatever the target may emit is accepted, and nothing else."""
    distribution = PadDistribution(MODEL, random_network("pred", MODEL), 1.0)
    MODEL.parts["pivot"] = distribution.network
    engine = TorchEngine(MODEL, pad(1.0, 0.0), slots=200, max_length=16)
    done = generate(engine, requests([PROMPTS[1]] * 200, max_new_tokens=4, **sampling))
    assert sum(float(one.stats.counts["overridden"].sum()) for one in done) > 10
    assert all(np.isfinite(one.logprobs).all() for one in done)
    assert all(one.sampled_logprobs is not None and np.isfinite(one.sampled_logprobs).all() for one in done)
