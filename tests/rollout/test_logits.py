"""Cycles whose distributions stay logits: the same completions, the target's distribution, faults that are caught.

On a CPU such cycles run with the PyTorch reference (``DraftVerify.logits`` is set). With the kernels in Triton's
interpreter they run in ``tests/kernels/test_draw.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.kernels import draw
from bebop.kernels.draw import LogitRows
from bebop.kernels.verify import sample
from bebop.rollout.decoding import mtp
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.graphs import EagerRecorder
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import DRAFT_STATS, Completion
from tests.builders import needs_more, requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.broken import ResidualIsTheTarget
from tests.rollout.driving import decoder_of, finished, started
from tests.rollout.test_conformance import PROMPTS, engine
from tests.rollout.test_exactness import (
    CAUGHT,
    FEW,
    LEVEL,
    REJECTING,
    answers,
    assert_tested,
    of_system,
    smallest_p,
    target_law,
    tiny,
)
from tests.rollout.test_exactness import (
    PROMPTS as TWO_PROMPTS,
)
from tests.trainer.builders import TEMPERATURE, plain, plain_logprobs

pytestmark = pytest.mark.slow  # quick tests of their seams are elsewhere, and the quick suite has a budget

SYSTEMS = ("autoregressive", "target_only", "bebop", "bebop_adaptive", "draft_model", "eagle3")


def by_logits(one: TorchEngine) -> None:
    """Let the distributions of an engine stay logits from now on."""
    decoder_of(one).logits = True


def agree(found: Sequence[Completion], wanted: Sequence[Completion], close: float = 1e-5) -> None:
    """Completions are the same, log-probs and statistics up to rounding."""
    for a, b in zip(found, wanted, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=close)
        for name in DRAFT_STATS:
            np.testing.assert_allclose(getattr(a.stats, name), getattr(b.stats, name), rtol=0, atol=20 * close)


def completions(system: str, logits: bool, params: dict[str, Any], count: int = 5, **settings: Any) -> list[Completion]:
    one = engine(tiny_policy(seed=9, with_parts=needs_more(system)), system, drafts=2, **settings)
    decoder_of(one).logits = logits
    done = finished(started(one, requests(PROMPTS[:count], **params)))
    return [done[number] for number in range(count)]


@pytest.mark.parametrize(
    ("system", "temperature"),
    slow_but([("bebop", 0.7)], [(s, t) for s in SYSTEMS for t in (1.0, 0.7, 0.0)], several=True),
)
def test_completions_are_those_from_probabilities(system: str, temperature: float) -> None:
    """With and without measurements; in five slots, then in two, so that rows leave and come."""
    for settings in ({"slots": 5}, {"slots": 2, "measure": False}):
        params = {"max_new_tokens": 20, "temperature": temperature, "stop_token_ids": (11,)}
        agree(*(completions(system, logits, params, **settings) for logits in (True, False)))


def test_cycles_go_by_logits_only_where_nobody_looks_at_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncation or a penalty of any row, a rule or a drafter of another kind, a traced request, an observer."""
    policy = tiny_policy(seed=9)

    def asks(system: str = "bebop", one: TorchEngine | None = None, trace: bool = False, **params: Any) -> bool:
        one = one or engine(policy, system, drafts=2)
        by_logits(one)
        asked = requests(PROMPTS[:2], max_new_tokens=4)
        own = replace(asked[1], trace=trace, params=replace(asked[1].params, **params))
        started(one, [asked[0], own], cycles=1)
        found = decoder_of(one).plan(2, 16, 0).logits
        finished(one)
        return found

    assert all(asks(system) for system in SYSTEMS) and asks(temperature=0.7) and asks(temperature=0.0)
    for params in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2}):
        assert not asks(**params)
    assert not any(asks(system) for system in ("bebop_block", "ngram", "bebop_tree"))
    assert not asks(trace=True)
    assert not asks(one=engine(policy, drafts=2, recorder=EagerRecorder(), batch_invariant=True))
    ruled, watched = engine(policy, drafts=2), engine(policy, drafts=2)
    decoder_of(ruled).rule = ResidualIsTheTarget()
    decoder_of(watched).observers.append(lambda *_: None)
    assert not asks(one=ruled) and not asks(one=watched)


def test_one_line_switches_logits_on_or_off_for_new_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(seed=9, with_parts=False)
    for chosen, found in ((None, policy.device.type == "cuda"), (True, True), (False, False)):
        monkeypatch.setattr(DraftVerify, "logits", chosen)
        one = started(engine(policy, "autoregressive"), requests(PROMPTS[:1], max_new_tokens=4), cycles=0)
        assert decoder_of(one).plan(1, 16, 0).logits is found


def test_log_probs_of_a_model_in_bf16_are_those_of_its_logits() -> None:
    """The engine's log-probs are those of bf16 logits to 1e-5. So they differ from the model's in fp32 by what bf16
    does to hidden states and logits, and by nothing that sampling adds."""
    policy = tiny_policy(seed=9, dtype=torch.bfloat16, with_parts=False)
    one = engine(policy, "autoregressive")
    by_logits(one)
    kept: list[tuple[Tensor, Tensor]] = []
    own = draw.LogitRows.logprobs

    def watch(rows: LogitRows, tokens: Tensor) -> Tensor:
        found = own(rows, tokens)
        exact = (rows.logits.double() / TEMPERATURE).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        kept.append((found.double(), exact))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw.LogitRows, "logprobs", watch)
        [done] = finished(started(one, requests(PROMPTS[:1], max_new_tokens=12, temperature=TEMPERATURE))).values()
    assert len(kept) == 12 and all((a - b).abs().max() < 1e-5 for a, b in kept)
    reference = tiny_policy(seed=9, with_parts=False)
    reference.load({name: x.float() for name, x in policy.weights().items()})
    scored = plain_logprobs(plain(reference), PROMPTS[0], done.token_ids.tolist()).detach()
    assert 1e-4 < np.abs(done.logprobs - scored.numpy()).max() < 0.2


# ---- the distribution of completions

CASES = {f"{system}-{temperature}": of_system(system, temperature) for system in SYSTEMS for temperature in (1.0, 0.7)}


@pytest.mark.parametrize("name", slow_but(["bebop-0.7"], CASES))
def test_completions_have_the_distribution_of_the_target(name: str) -> None:
    has_the_distribution_of_the_target(name)


def has_the_distribution_of_the_target(name: str) -> None:
    case, policy = CASES[name], tiny()
    done = answers(case, policy, FEW, by_logits)
    assert_tested(case, done)
    assert smallest_p(case, policy, done, target_law) > LEVEL


Verify = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


def residual_is_the_target(verify: Verify) -> Verify:
    """After a rejection draws from p instead of max(0, p - q)."""

    def broken(tokens: Tensor, drafts: Any, target: LogitRows, u: Tensor, *rest: Any, **named: Any) -> Any:
        accepted, token, overlap = verify(tokens, drafts, target, u, *rest, **named)
        p = target.probs()[torch.arange(len(tokens)), accepted]
        return accepted, sample(p, u[:, -2]).where(accepted < tokens.shape[1], token), overlap

    return broken


def bonus_from_the_last_draft_row(verify: Verify) -> Verify:
    """Draws the bonus from row K instead of row K + 1."""

    def broken(tokens: Tensor, drafts: Any, target: LogitRows, *rest: Any, **named: Any) -> Any:
        places = torch.tensor([*range(tokens.shape[1]), tokens.shape[1] - 1])
        logits, stats, best = target.logits[:, places], target.stats[:, :, places], target.best[:, places]
        return verify(tokens, drafts, replace(target, logits=logits, stats=stats, best=best), *rest, **named)

    return broken


def drawn_without_temperature(own: Callable[..., Any]) -> Callable[..., Any]:
    """Inverts the CDF of the logits as they are, and hands the distribution at the temperature to verification."""

    def broken(logits: Tensor, temperature: Tensor | None, u: Tensor) -> tuple[LogitRows, Tensor]:
        return own(logits, temperature, u)[0], own(logits, None, u)[1]

    return broken


BROKEN: dict[str, tuple[Any, str, Callable[[Any], Any], tuple[tuple[int, ...], ...]]] = {
    "residual": (draw, "verify", residual_is_the_target, REJECTING),
    "bonus": (draw, "verify", bonus_from_the_last_draft_row, TWO_PROMPTS),
    "temperature": (mtp, "draw", drawn_without_temperature, REJECTING),
}


@pytest.mark.parametrize("fault", slow_but(["temperature"], BROKEN))
def test_broken_variants_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, breaks, prompts = BROKEN[fault]
    monkeypatch.setattr(module, name, breaks(getattr(module, name)))
    case, policy = replace(of_system("bebop", 0.7), prompts=prompts), tiny()
    done = answers(case, policy, FEW, by_logits)
    assert smallest_p(case, policy, done, target_law) < CAUGHT
