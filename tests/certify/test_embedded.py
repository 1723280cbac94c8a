"""The embedded engine as a certificate asks it: the same answers, how they came, and what interrupts them."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.certify.embedded import EmbeddedEngine
from bebop.certify.structure import check_structure
from bebop.certify.white_box import WhiteBox
from bebop.config.job import DecodingConfig
from bebop.kernels import draw
from bebop.kernels.block_verify import block_verify
from bebop.kernels.verify import chain_verify, sample
from bebop.model.backbone import Policy
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import requests, tiny_policy
from tests.cases import slow_but

STOP = 11


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(12)


def engine(policy: Policy, system: str = "bebop", drafts: int = 3) -> TorchEngine:
    decoding = DecodingConfig(system=system, draft_tokens=drafts)
    return TorchEngine(policy, decoding, slots=4, max_length=64, measure=False)


def from_logits(one: TorchEngine) -> TorchEngine:
    """The engine, with distributions that stay logits as on a GPU, where its parts allow it."""
    assert isinstance(one.decoder, DraftVerify)
    one.decoder.logits = True
    return one


def asked(count: int = 6, **params: Any) -> list[Request]:
    prompts = [(1 + i // 2, 2, 3) for i in range(count)]
    return requests(prompts, **{"seed": 5, "max_new_tokens": 20, "stop_token_ids": (STOP,), **params})


def silent(tokens: int) -> None:
    pass


SYSTEMS = [("bebop", 3), ("bebop_adaptive", 3), ("autoregressive", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("system", "drafts"), slow_but([("bebop", 3), ("autoregressive", 0)], SYSTEMS, several=True))
def test_answers_are_those_of_the_engine_and_cycles_add_up(policy: Policy, system: str, drafts: int) -> None:
    plain = generate(engine(policy, system, drafts), asked())
    told: list[int] = []
    answers = EmbeddedEngine(engine(policy, system, drafts), white_box=WhiteBox()).sample(asked(), told.append)
    assert [answer.request for answer in answers] == [0, 1, 2, 3, 4, 5]
    for answer, completion in zip(answers, plain, strict=True):
        np.testing.assert_array_equal(answer.token_ids, completion.token_ids)
        assert answer.logprobs is not None and answer.cycles is not None
        np.testing.assert_array_equal(answer.logprobs, completion.logprobs)
        assert sum(answer.cycles) == len(answer.token_ids) and len(answer.cycles) == completion.stats.cycles
        assert 1 <= min(answer.cycles) and max(answer.cycles) <= drafts + 1
        if drafts:
            assert answer.accepted == (completion.stats.accepted.sum(), completion.stats.reached.sum())
        assert (answer.finish_reason, answer.stops, answer.limit) == (completion.finish_reason, (STOP,), 20)
    assert sum(told) == sum(len(answer.token_ids) for answer in answers)
    assert check_structure(answers, vocabulary=12) == []
    assert drafts == 0 or max(max(answer.cycles or ()) for answer in answers) > 1


def test_where_drafts_are_judged_as_a_whole_some_draws_cannot_be_tested(policy: Policy) -> None:
    box = WhiteBox()
    answers = EmbeddedEngine(from_logits(engine(policy, "bebop_block")), white_box=box).sample(asked(), silent)
    assert {group for group, _ in box.bets} == {"draft_draw", "bonus"} and "acceptance, recovered" in box.untested
    assert all(answer.cycles is not None for answer in answers), "places are fair all the same: see the next test"


@pytest.mark.parametrize("rule", [chain_verify, block_verify], ids=["chain", "block"])
def test_at_every_place_of_a_cycle_a_token_has_its_own_distribution(rule: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Given the text and that the cycle came so far: bets by place are fair, by place from its *end* not."""
    numbers = torch.Generator().manual_seed(0)
    rows, drafts = 60_000, 3
    p_of, q_of = (torch.rand(2, 2, 2, 2, generator=numbers, dtype=torch.float64) * 0.8 + 0.1 for _ in range(2))

    def row(of: Tensor, tokens: Tensor) -> Tensor:
        """Distribution of the token after some drafts [n, j], of which it depends on all."""
        padded = torch.nn.functional.pad(tokens, (0, 3 - tokens.shape[1]))
        first = of[padded[:, 0], padded[:, 1], padded[:, 2], (tokens.shape[1] + padded.sum(1)) % 2]
        return torch.stack([first, 1 - first], -1)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=numbers, dtype=torch.float64)

    tokens = torch.zeros(rows, 0, dtype=torch.long)
    q = []
    for _ in range(drafts):
        q.append(row(q_of, tokens))
        tokens = torch.cat([tokens, sample(q[-1], random(rows))[:, None]], 1)
    p = torch.stack([row(p_of, tokens[:, :j]) for j in range(drafts + 1)], 1)
    accepted, following = rule(tokens, torch.stack(q, 1), p, random(rows, drafts + 2))
    emitted = torch.cat([tokens, tokens[:, :1]], 1).scatter(1, accepted[:, None], following[:, None])

    def off(chosen: Tensor, place: int) -> float:
        """Standard errors by which tokens at a place, of some rows, are off their distribution."""
        expected = p[chosen, place, 0]
        spread = (expected * (1 - expected)).sum().sqrt()
        return float(((emitted[chosen, place] == 0).double() - expected).sum().abs() / spread)

    found = []
    for place in range(1, drafts + 1):
        for prefix in range(2**place):
            same = (emitted[:, :place] * 2 ** torch.arange(place)).sum(1) == prefix
            found.append(off((accepted >= place) & same, place))
    assert max(found) < 4
    assert off(accepted == 1, 1) > 10, "which token is the last of its cycle is not known before it"


def test_what_has_no_chain_is_not_looked_into(policy: Policy) -> None:
    box = WhiteBox()
    EmbeddedEngine(engine(policy, "bebop_tree", 7), white_box=box).sample(asked(), silent)
    assert box.cycles == 0 and box.skipped > 0 and "draws of a tree" in box.untested
    pairs = EmbeddedEngine(engine(policy, "pipo", 1), white_box=WhiteBox())
    assert pairs.white_box is None and not pairs.places_known and not pairs.describe()["looked inside"]


def test_a_fault_in_verification_from_logits_is_found(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on a GPU verify from logits. The fault: the token after an accepted draft is drawn from the row before."""
    own = draw.verify

    def row_before(
        tokens: Tensor, drafts: object, target: draw.LogitRows, uniforms: Tensor, *given: Any, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        accepted, token, overlap = own(tokens, drafts, target, uniforms, *given, measure=measure)  # type: ignore[arg-type]
        return accepted, torch.where(accepted == 0, token, sample(target.probs()[:, 0], uniforms[:, -1])), overlap

    monkeypatch.setattr(draw, "verify", row_before)
    box = WhiteBox()
    EmbeddedEngine(from_logits(engine(policy, drafts=1)), white_box=box).sample(
        asked(4, max_new_tokens=7, temperature=0.3), silent
    )
    assert box.found is not None and box.evidence()[0].group == "bonus"


def test_an_interrupted_call_gives_what_is_there(policy: Policy) -> None:
    whole = EmbeddedEngine(engine(policy)).sample(asked(stop_token_ids=()), silent)
    seen = 0

    def impatient(tokens: int) -> None:
        nonlocal seen
        seen += tokens
        if seen > 30:
            raise KeyboardInterrupt

    one = EmbeddedEngine(engine(policy))
    answers = one.sample(asked(stop_token_ids=()), impatient)
    assert [answer.request for answer in answers] == [0, 1, 2, 3, 4, 5] and one.engine.unfinished == 0
    assert {answer.finish_reason for answer in answers} == {"abort"}
    assert sum(len(answer.token_ids) for answer in answers) == seen
    assert [len(answer.token_ids) > 0 for answer in answers] == [True] * 4 + [False] * 2, "four slots"
    for answer, full in zip(answers, whole, strict=True):
        np.testing.assert_array_equal(answer.token_ids, full.token_ids[: len(answer.token_ids)])
        assert answer.cycles is not None and sum(answer.cycles) == len(answer.token_ids)


def test_what_the_engine_says_of_itself() -> None:
    own = tiny_policy(12, seed=1)
    one = EmbeddedEngine(engine(own), white_box=WhiteBox())
    before = one.describe()
    json.dumps(before)
    assert before["dtype"] == "float32" and before["decoding"]["system"] == "bebop" and before["looked inside"]
    with torch.no_grad():
        next(iter(own.backbone.parameters())).view(-1)[0] += 1e-3
    after = one.describe()
    assert {name for name in before if before[name] != after[name]} == {"target"}
