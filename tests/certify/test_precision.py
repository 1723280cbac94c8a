"""Log-probs of coarse types lie within their bounds, and flaws of the size of a rounding or two do not."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.bench import precision as bench
from bebop.certify import precision
from bebop.certify.answers import Answer
from bebop.certify.declared import check_reported, declare
from bebop.certify.embedded import EmbeddedEngine
from bebop.certify.model_reference import ModelReference, cast_weights
from bebop.certify.precision import Deviations, Sensitivity, gain_of
from bebop.config.decoding import DecodingConfig
from bebop.kernels.draw import LogitRows
from bebop.model import lean
from bebop.model.backbone import Policy
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.torch_engine import TorchEngine
from tests.builders import requests, tiny_policy
from tests.cases import slow_but

pytestmark = pytest.mark.slow


@cache
def random_policy(layers: int = 8, width: int = 64) -> Policy:
    return bench.random_policy(bench.random_shape(layers, width))


# ---- the numbers


def test_a_sensitivity_is_the_derivative_of_a_log_prob() -> None:
    chance = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in ((5, 7), (11, 7)))
    tokens, temperature = torch.tensor([0, 3, 10, 3, 5]), 0.7
    logits = hidden @ head.T
    own = Sensitivity.of(hidden, head, logits, (logits / temperature).softmax(-1), tokens, temperature)

    def logprobs(logits: Tensor) -> Tensor:
        return (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    # By its definition: root of the sum of squares of derivatives with each number, times that number, or the length.
    of_logits = torch.autograd.functional.jacobian(lambda x: logprobs(x), logits).diagonal(dim1=0, dim2=1).T
    torch.testing.assert_close(own.own, (of_logits * logits).norm(dim=1))
    of_hidden = torch.autograd.functional.jacobian(lambda x: logprobs(x @ head.T), hidden).diagonal(dim1=0, dim2=1).T
    torch.testing.assert_close(own.through, of_hidden.norm(dim=1) * hidden.norm(dim=1) / 7**0.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_that_are_rounded_deviate_as_expected(dtype: str) -> None:
    """Of logits alone, and of a hidden state that is off in a random direction."""
    chance = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(4000, 32, generator=chance), torch.randn(50, 32, generator=chance) / 2
    tokens = torch.randint(50, (4000,), generator=chance)
    logits = (hidden @ head.T).double()
    exact = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    own = Sensitivity.of(hidden, head, logits, logits.softmax(-1), tokens, 1.0)
    gain, unit = 4.0, precision.UNIT[dtype]
    for noise, expected in ((0.0, 0.0), (gain, gain)):
        error = unit * noise * torch.randn(hidden.shape, generator=chance)
        moved = hidden + error * hidden.norm(dim=1, keepdim=True) / 32**0.5
        rough = (moved @ head.T).to(getattr(torch, dtype)).double()
        off = rough.log_softmax(-1).gather(1, tokens[:, None])[:, 0] - exact
        assert float((off.square().mean() / own.spread(dtype, expected).square().mean()).sqrt()) == pytest.approx(
            1, abs=0.06
        )
        assert own.measured_gain(off, dtype) == pytest.approx(expected, abs=0.5)
    assert gain_of(15) == 6.0 and gain_of(15, 0.5) == 3.0


def test_few_tokens_exceed_no_bound_and_many_name_it() -> None:
    chance = torch.Generator().manual_seed(2)
    off, centred = (torch.randn(1000, generator=chance, dtype=torch.float64) for _ in range(2))

    def said(count: int, off: Tensor) -> list[str]:
        found = Deviations()
        found.add(off[:count], torch.full((count,), 0.01), centred[:count])
        return found.beyond()

    assert said(1000, 0.01 * off) == []
    assert said(399, 0.02 * off) == [] and "rms ratio" in said(1000, 0.02 * off)[0]
    [colder] = said(1000, 0.01 * off + 0.01 * centred)
    assert "sharper by +1" in colder
    lost = 0.01 * off
    lost[5] = torch.nan
    found = Deviations()
    found.add(lost, torch.full((1000,), 0.01), centred)
    assert len(found) == 999


# ---- the engine


@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], bench.TYPES))
@pytest.mark.parametrize("shape", slow_but([(8, 64)], [(2, 64), (8, 64), (24, 64), (8, 256)], several=False))
def test_an_engine_lies_within_the_bounds(shape: tuple[int, int], dtype: str) -> None:
    row, found = bench.deviations_of(random_policy(*shape), dtype, 16, 50, temperature=0.9)
    assert found.beyond() == [] and row["sampler"] < precision.SAMPLER
    assert 0.8 < row["rms ratio"] < 1.25, "the bound is no wider than it has to be"
    assert 0.3 < row["amplification"] < 1.5, "as independent roundings of so many layers would have it"


def of_probs(change: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    def probs(self: BatchSampling, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        assert self.temperature is not None
        return change(logits, self.temperature[:, None, None])

    return {"BatchSampling.probs": probs}


def coarse_norm(self: lean.Norm, x: Tensor) -> Tensor:
    """With a mean whose sum is kept in bfloat16."""
    total = torch.zeros_like(x[..., 0])
    for part in x.unbind(-1):
        total = total + part * part
    scale = torch.rsqrt(total.float() / x.shape[-1] + self.eps)
    return self.weight * (x.float() * scale[..., None]).to(x.dtype)


FLAWS: dict[str, tuple[dict[str, Any], str]] = {
    "softmax in bfloat16": (of_probs(lambda x, t: (x.float() / t).bfloat16().softmax(-1).float()), "sampler"),
    "logits rounded twice": (of_probs(lambda x, t: (x / t.to(x.dtype)).float().softmax(-1)), "sampler"),
    "log-probs rounded": (of_probs(lambda x, t: (x.float() / t).softmax(-1).bfloat16().float()), "sampler"),
    "temperature 1 % too high": (of_probs(lambda x, t: (x.float() / (1.01 * t)).softmax(-1)), "sampler, pass"),
    "norms summed in bfloat16": ({"Norm.__call__": coarse_norm}, "pass"),
}
HOMES = {"BatchSampling": BatchSampling, "Norm": lean.Norm}


@pytest.mark.parametrize("flaw", slow_but(["temperature 1 % too high", "softmax in bfloat16"], FLAWS))
def test_a_flaw_of_the_size_of_a_rounding_exceeds_a_bound(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, parts = FLAWS[flaw]
    for name, value in changed.items():
        home, _, method = name.partition(".")
        monkeypatch.setattr(HOMES[home], method, value)
    policy = random_policy(8, 256) if "norms" in flaw else random_policy()
    row, found = bench.deviations_of(policy, "bfloat16", 16, 50, temperature=0.9)
    assert (row["sampler"] > 10 * precision.SAMPLER) is ("sampler" in parts), row
    assert bool(found.beyond()) is ("pass" in parts), row


def test_log_probs_from_logits_are_measured_as_a_gpu_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftVerify, "logits", True)
    row, _ = bench.deviations_of(random_policy(2), "bfloat16", 8, 20, temperature=0.9)
    assert row["sampler"] < precision.SAMPLER
    own = LogitRows.logprobs
    monkeypatch.setattr(LogitRows, "logprobs", lambda *given: own(*given).bfloat16().float())
    row, _ = bench.deviations_of(random_policy(2), "bfloat16", 8, 20, temperature=0.9)
    assert row["sampler"] > 10 * precision.SAMPLER


def test_the_reference_knows_what_rounding_explains_and_the_certificate_uses_it() -> None:
    """A log-prob that a bf16 engine reports 0.3 nats off is a finding where its token leaves no room for that."""
    exact = tiny_policy(seed=3, with_parts=False)
    coarse = dataclasses.replace(exact, backbone=cast_weights(exact.backbone, "bfloat16"), mtp=None)
    one = TorchEngine(coarse, DecodingConfig(system="autoregressive", draft_tokens=0), slots=8, measure=False)
    asked = requests([[1 + i, 2] for i in range(8)], max_new_tokens=20)
    answers = EmbeddedEngine(one).sample(asked, lambda _: None)
    params = asked[0].params
    plain = ModelReference(exact).block(answers, params)
    assert plain.spread is None
    block = declare(ModelReference(exact, dtype="bfloat16").block(answers, params), "processed", 1.0)
    assert block.spread is not None and check_reported(block, "bfloat16") == []
    np.testing.assert_allclose(block.logprobs, plain.logprobs)
    assert block.reported is not None and block.spread.median() < 0.05
    sure = block.spread.argsort()[:4]
    wrong = block.reported.clone()
    wrong[sure] -= 0.3
    moved = dataclasses.replace(block, reported=wrong)
    assert len(check_reported(moved, "bfloat16")) == 4
    assert check_reported(dataclasses.replace(moved, spread=None), "bfloat16") == [], "of a model that nobody knows"


def test_rotary_frequencies_are_not_rounded_with_the_weights() -> None:
    """No engine rounds them, so the measured gain may not hold their effect."""
    policy, types = tiny_policy(seed=3, with_parts=False), set[tuple[torch.dtype, torch.dtype]]()

    class Seen(ModelReference):
        def _forward(self, policy: Policy, answers: Sequence[Answer]) -> tuple[Tensor, Tensor | None]:
            types.update((policy.backbone.dtype, buffer.dtype) for buffer in policy.backbone.buffers())
            return super()._forward(policy, answers)

    answer = Answer(request=0, prompt=(1, 2), token_ids=np.array([3, 4]), seed=0)
    Seen(policy, dtype="bfloat16").block([answer], requests([[1]])[0].params)
    assert types == {(torch.float32, torch.float32), (torch.bfloat16, torch.float32)}


def test_a_raw_log_prob_moves_more_than_one_at_a_high_temperature() -> None:
    policy = tiny_policy(seed=3, with_parts=False)
    asked = requests([[1, 2]], max_new_tokens=8, temperature=2.0)
    one = TorchEngine(policy, DecodingConfig(system="autoregressive", draft_tokens=0), slots=1, measure=False)
    block = ModelReference(policy, dtype="float16").block(
        EmbeddedEngine(one).sample(asked, lambda _: None), asked[0].params
    )
    hot, raw = declare(block, "processed", 2.0), declare(block, "raw", 2.0)
    assert hot.spread is not None and raw.spread is not None
    np.testing.assert_allclose(raw.spread, 2 * hot.spread)


def test_fp32_products_are_exact_while_precision_is_measured() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with bench.exact_products():
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 is before
