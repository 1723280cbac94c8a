"""Functions as engines: both signatures, what is no answer, and cycles that somebody tells of."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bebop.certify import Certificate, Cycle, certify
from bebop.certify.answers import Answer
from bebop.certify.api import Inside, ScoreReference
from bebop.certify.declared import Rule
from bebop.certify.function import FunctionEngine, find
from bebop.certify.structure import check_structure
from bebop.certify.white_box import WhiteBox
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.kernels.verify import chain_verify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion, SamplingParams
from tests.builders import requests, tiny_policy

STOP = 11


def asked(count: int = 3) -> list[Request]:
    return requests([(1 + i, 2) for i in range(count)], seed=5, max_new_tokens=4, stop_token_ids=(STOP,))


def simple(prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> list[tuple[Any, Any]]:
    """The seed, then as many tokens as are allowed; or a stop token at once."""
    return [([seed] + [prompt[0]] * (max_new_tokens - 1), None) for prompt, seed in zip(prompts, seeds, strict=True)]


def answering(asked: list[Request]) -> list[Completion]:
    return generate(TorchEngine(tiny_policy(12), DecodingConfig(), slots=4, max_length=32), asked)


def test_prompts_seeds_and_length_in_tokens_and_log_probs_out() -> None:
    told: list[int] = []
    found = FunctionEngine(simple).sample(asked(), told.append)
    assert [answer.token_ids.tolist() for answer in found] == [[5, 1, 1, 1], [6, 2, 2, 2], [7, 3, 3, 3]]
    assert [answer.seed for answer in found] == [5, 6, 7] and [answer.request for answer in found] == [0, 1, 2]
    assert all(answer.finish_reason == "length" and answer.logprobs is None for answer in found)
    assert told == [12] and check_structure(found, vocabulary=12) == []


def test_answers_may_be_lists_arrays_or_tensors() -> None:
    def mixed(prompts: Any, seeds: Any, max_new_tokens: int) -> Any:
        return [
            ([3, STOP], [-1.0, -2.0]),
            (np.array([4, 5, 6, 7]), np.array([-1.0, -2, -3, -4])),
            (torch.tensor([STOP]), torch.tensor([-0.5])),
        ]

    found = FunctionEngine(mixed).sample(asked(), lambda tokens: None)
    assert [answer.finish_reason for answer in found] == ["stop", "length", "stop"]
    assert [answer.token_ids.dtype for answer in found] == [np.int64] * 3
    assert found[1].logprobs is not None and found[1].logprobs.tolist() == [-1, -2, -3, -4]
    assert check_structure(found, vocabulary=12) == []


def test_an_end_without_a_stop_token_is_broken_structure() -> None:
    found = FunctionEngine(lambda prompts, seeds, longest: [([3], None)] * 3).sample(asked(), lambda tokens: None)
    assert {one.sentence for one in check_structure(found, vocabulary=12)} == {
        "it says that it stopped, but none of its 1 tokens is a stop token"
    }


def test_a_function_of_requests_gives_completions_or_answers() -> None:
    whole = answering(asked())
    found = FunctionEngine(answering).sample(asked(), lambda tokens: None)
    assert [answer.token_ids.tolist() for answer in found] == [one.token_ids.tolist() for one in whole]
    assert found[0].versions is not None and check_structure(found, vocabulary=12) == []
    given = [Answer(request=i, prompt=(1,), token_ids=np.array([STOP])) for i in range(3)]
    assert FunctionEngine(lambda requests: given).sample(asked(), lambda tokens: None) == given


def test_functions_are_found_by_name() -> None:
    assert find("tests.certify.test_function:simple") is simple
    assert FunctionEngine(simple).describe() == {"function": "tests.certify.test_function:simple"}
    with pytest.raises(UserError, match=r"engine\.function='tests\.nowhere:simple': No module named"):
        find("tests.nowhere:simple")
    for name in ("missing", "STOP", ""):
        with pytest.raises(UserError, match=r"tests\.certify\.test_function has no function"):
            find(f"tests.certify.test_function:{name}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "gave NoneType for 3 requests: return a list of an answer each"),
        ([([1], None)], "gave 1 for 3 requests"),
        ([[1, 2]] * 3, r"gave list for an answer: return \(token ids, log-probs or None\)"),
        ([([1.5], None)] * 3, "gave token ids of type float64"),
        ([([[1]], None)] * 3, r"shape \(1, 1\)"),
        ([([1], ["a"])] * 3, "gave log-probs of type"),
        ([(None, None)] * 3, "gave token ids of type object"),
    ],
)
def test_what_is_no_answer(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FunctionEngine(lambda prompts, seeds, longest: given).sample(asked(), lambda tokens: None)


def test_what_is_no_such_function() -> None:
    with pytest.raises(UserError, match=r"takes 2 arguments: \(requests\), or \(prompts, seeds, max_new_tokens\)"):
        FunctionEngine(lambda prompts, seeds: [])  # type: ignore[arg-type,misc]
    with pytest.raises(UserError, match="gave int for an answer: return an Answer or a Completion"):
        FunctionEngine(lambda requests: [1, 2, 3]).sample(asked(), lambda tokens: None)  # type: ignore[arg-type,return-value]


def test_an_interrupted_function_gives_nothing() -> None:
    def interrupted(asked: Sequence[Request]) -> list[Answer]:
        raise KeyboardInterrupt

    found = FunctionEngine(interrupted).sample(asked(), lambda tokens: None)
    assert [answer.finish_reason for answer in found] == ["abort"] * 3 and [a.request for a in found] == [0, 1, 2]
    assert FunctionEngine(interrupted).sample([], lambda tokens: None) == []


# ---- cycles


V, K, END, LONGEST = 24, 3, 0, 24
CLAIM = SamplingParams(temperature=1.0, max_new_tokens=LONGEST, stop_token_ids=(END,))


def tables(size: int, *seeds: int) -> list[torch.Tensor]:
    """Distributions [V, V] by the last token."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return [(1.2 * torch.randn(size, size, generator=g, dtype=torch.float64)).softmax(-1) for g in generators]


class Speculating:
    """A sampler with three drafts a cycle over two tables, which keeps its cycles; ``fault``: noise is used twice."""

    def __init__(self, fault: str = "none") -> None:
        self.p, self.q = tables(V, 5, 6)
        self.fault = fault
        self.cycles: dict[int, list[Cycle]] = {}

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], most: int) -> list[tuple[list[int], None]]:
        return [(self._completion(prompt[-1], seed, most), None) for prompt, seed in zip(prompts, seeds, strict=True)]

    def _completion(self, last: int, seed: int, most: int) -> list[int]:
        numbers, ids, cycles = torch.Generator().manual_seed(seed), [last], list[Cycle]()
        while len(ids) <= most and (ids[-1] != END or len(ids) == 1):
            drafts, rows, noise = [ids[-1]], [], []
            for _ in range(K):
                g = -torch.rand(V, generator=numbers, dtype=torch.float64).log().neg().log()
                noise.append(g)
                rows.append(self.q[drafts[-1]])
                drafts.append(int((rows[-1].log() + g).argmax()))
            q, p = torch.stack(rows), self.p[drafts]
            u = torch.rand(1, K + 2, generator=numbers, dtype=torch.float64)
            accepted, following = chain_verify(torch.tensor([drafts[1:]]), q[None], p[None], u)
            stands, token = int(accepted), int(following)
            if self.fault == "noise" and stands < K:
                token = int(((p[stands] - q[stands]).clamp_min(0).log() + noise[stands]).argmax())
            cycles.append(Cycle(tokens=drafts[1:], accepted=stands, q=q.float()))
            written = [*drafts[1 : stands + 1], token]
            end = written.index(END) + 1 if END in written else len(written)
            ids += written[:end]
        self.cycles[seed] = cycles
        return ids[1 : most + 1]

    def score(self, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        return self.p[[prompt[-1], *ids[:-1]]].log()

    def draft(self, prompt: Sequence[int], seed: int, ids: Sequence[int]) -> list[Cycle]:
        return self.cycles[seed]

    def certificate(self, tokens: int, **options: Any) -> Certificate:
        prompts = [[i] for i in range(1, V)]
        return certify(self.sample, self.score, prompts, vocabulary=V, draft=self.draft, params=CLAIM, tokens=tokens,
                       logprobs="none", **options)  # fmt: skip


@pytest.mark.slow
def test_draws_inside_a_function_are_tested_and_noise_used_twice_is_named() -> None:
    intact, faulty = Speculating().certificate(4000), Speculating("noise").certificate(4000)
    assert intact.verdict != "fail" and intact.log_e < math.log(20)
    assert {one.group for one in intact.white_box} == {"draft_draw", "acceptance", "recovered", "bonus", "shared_noise"}
    assert intact.white_box_weight == pytest.approx(1 / 3) and "nobody look" not in str(intact.not_tested)
    tested = {one.name for one in intact.settings[0].evidence}
    assert {"residual_draft_gumbel@0", "draft", "hotter@2"} <= tested  # cycles tell the black box q, and places
    assert faulty.verdict == "fail" and faulty.cause is not None and faulty.cause.name == "shared_noise"
    whole = Speculating().certificate(500, rule="whole")
    assert {one.group for one in whole.white_box} == {"draft_draw", "bonus"} and "as a whole" in str(whole.not_tested)


def chances(rule: str, p: torch.Tensor, q: torch.Tensor, chain: list[int]) -> Iterator[tuple[float, torch.Tensor]]:
    """By the number of drafts of a chain that stand: how likely it is, and the law [V] of the token behind them."""
    ratios = [float(p[a, b] / q[a, b]) for a, b in itertools.pairwise(chain)]
    first, second = min(1.0, ratios[0]), min(1.0, min(1.0, ratios[0]) * ratios[1])
    if rule == "rejection":
        second, weights = min(1.0, ratios[1]), (1.0, 1.0)
        likely = [1 - first, first * (1 - second), first * second]
    else:  # block verification looks at the last draft first
        mass, weights = float((first * p[chain[1]] - q[chain[1]]).clamp_min(0).sum()), (1.0, first)
        first = mass / (mass + 1 - first) if mass > 0 or first < 1 else 1.0
        likely = [(1 - second) * (1 - first), (1 - second) * first, second]
    for accepted, chance in enumerate(likely):
        law = p[chain[accepted]]
        if accepted < 2:
            law = (weights[accepted] * law - q[chain[accepted]]).clamp_min(0)
            law = law / law.sum().clamp_min(1e-300)
        yield chance, law


def outcomes(
    rule: str, p: torch.Tensor, q: torch.Tensor, ids: list[int], limit: int, stops: tuple[int, ...]
) -> Iterator[Any]:
    """Every way in which exact verification of two drafts a cycle writes a completion: chance, ids and cycles."""
    if len(ids) > limit or (len(ids) > 1 and ids[-1] in stops):
        yield 1.0, ids[1 : limit + 1], []
        return
    for drafts in itertools.product(range(len(p)), repeat=2):
        chain = [ids[-1], *drafts]
        made = math.prod(float(q[a, b]) for a, b in itertools.pairwise(chain))
        rows = q[chain[:-1]]
        for accepted, (chance, law) in enumerate(chances(rule, p, q, chain)):
            chance *= made
            for x in range(len(p)):
                written = [*drafts[:accepted], x]
                end = next((i + 1 for i, token in enumerate(written) if token in stops), len(written))
                if chance * float(law[x]) > 0:
                    cycle = Cycle(tokens=drafts, accepted=accepted, q=rows)
                    for rest, done, cycles in outcomes(rule, p, q, ids + written[:end], limit, stops):
                        yield chance * float(law[x]) * rest, done, [cycle, *cycles]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "whole"])
@pytest.mark.parametrize("stops", [(), (1,)])
def test_bets_on_cycles_that_a_stop_or_the_limit_cuts_are_fair(stops: tuple[int, ...], rule: Rule) -> None:
    p, q = tables(2, 1, 2)
    total: dict[tuple[str, str], Any] = {}
    mass: dict[tuple[int, ...], float] = {}
    for chance, ids, cycles in outcomes(rule, p, q, [0], 3, stops):
        box = WhiteBox()
        answer = Answer(request=0, prompt=(0,), token_ids=np.array(ids), seed=0)
        emitted, drawn = Inside(lambda *_, told=cycles: told, rule, box, stops).look(answer, p[[0, *ids[:-1]]])
        assert sum(emitted) == len(ids) and drawn.shape == (len(ids), 2)
        mass[tuple(ids)] = mass.get(tuple(ids), 0.0) + chance
        for key, bets in box.bets.items():
            total[key] = total.get(key, 0.0) + chance * (np.exp(bets.log_e) - 1)
    law = {ids: math.prod(float(p[a, b]) for a, b in itertools.pairwise((0, *ids))) for ids in mass}
    assert mass == pytest.approx(law) and sum(law.values()) == pytest.approx(1), "the rule is exact"
    for (group, name), gained in total.items():
        assert gained.max() < 1e-9, (group, name)
        if group in ("shared_noise", "bonus", "draft_draw"):
            assert gained.min() > -1e-9, (group, name)


@pytest.mark.parametrize(
    ("cycle", "message"),
    [
        (Cycle(tokens=[2], accepted=2, q=None), r"cycle 0 with 2 of the drafts \[2\] accepted"),
        (Cycle(tokens=[3], accepted=1, q=None), r"not write token 0 of 2 .*: \[2, 1\]"),
        (Cycle(tokens=[2], accepted=0, q=None), "draft gave cycles of 1 tokens for a completion of 2"),
        (Cycle(tokens=[2], accepted=1, q=torch.zeros(2, 4)), r"q of shape \(2, 4\): give \[1, 4\]"),
        (Cycle(tokens=[2], accepted=1, q=torch.ones(1, 4)), r"rows of sum \[4.0\]: give distributions, not logits"),
        (Cycle(tokens=[2, 9], accepted=1, q=None), r"the drafts \[2, 9\]: token ids go from 0 to 3"),
    ],
)
def test_what_is_no_cycle(cycle: Cycle, message: str) -> None:
    answer = Answer(request=0, prompt=(0,), token_ids=np.array([2, 1]), seed=0)
    inside = Inside(lambda *_: [cycle], "rejection", WhiteBox(), ())
    with pytest.raises(UserError, match=message):
        inside.look(answer, torch.full((2, 4), 0.25, dtype=torch.float64))


def test_tables_may_be_tensors_of_any_type_with_a_gradient() -> None:
    logits, q = (torch.full((n, 4), 0.25, dtype=torch.bfloat16, requires_grad=True) for n in (2, 1))
    inside = Inside(lambda *_: [Cycle(tokens=[2], accepted=1, q=q)], "rejection", WhiteBox(), ())
    answer = Answer(request=0, prompt=(0,), token_ids=np.array([2, 1]), seed=0)
    block = ScoreReference(lambda *_: logits, inside).block([answer], SamplingParams())
    assert block.probs.tolist() == [[0.25] * 4] * 2 and block.probs.dtype is torch.float64 and inside.box.cycles == 1


def test_what_draft_and_rule_need() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nothing is asked")

    with pytest.raises(UserError, match="rule='typical' is unknown: give one of rejection, one_hot, whole"):
        certify(never, never, [[1]], vocabulary=4, draft=never, rule="typical")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="draft needs score"):
        certify(never, None, [[1]], vocabulary=4, draft=never)
