"""As many drafts as pay, within the engine: by a clock of one's own, so that every number of drafts is known."""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.throughput_model import FADE, START, WEIGHT, ThroughputModel
from bebop.rollout.decoding.timed_lengths import CostLength
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.rollout.warmup import TURNS
from bebop.systems import SYSTEMS
from bebop.trajectory import Completion, DecodeStats
from tests.builders import requests, tiny_policy
from tests.cases import slow_but

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9]]
FREE = [name for name, system in SYSTEMS.items() if system.free_length]
Costs = Callable[[int], float]


class Paced:
    """An engine whose cycles take what ``costs`` says of their drafts; the number of drafts of each is kept."""

    def __init__(self, costs: Costs, most: int = 3, **settings: object) -> None:
        config = DecodingConfig(draft_tokens="auto", most_drafts=most, **settings)  # type: ignore[arg-type]
        policy = tiny_policy(seed=3, dtype=torch.float64)
        self.engine = TorchEngine(policy, config, slots=4, max_length=320, clock=itertools.count().__next__)
        decoder = self.engine.decoder
        assert isinstance(decoder, DraftVerify) and isinstance(decoder.length, CostLength)
        self.decoder, self.length, self.costs = decoder, decoder.length, costs
        for rows in self.length.pace.sizes:
            for drafts in range(most + 1):
                self.length.pace.timed(rows, drafts, costs(drafts))
        self.drafts: list[int] = []
        self.now, self.began = 0.0, True
        self.engine.clock = self.clock

    def clock(self) -> float:
        self.began = not self.began
        if self.began:  # the second call, when the cycle has ended
            self.drafts.append(self.length.limit)
            self.now += self.costs(self.length.limit)
        return self.now


def asked(tokens: int = 60) -> list[Request]:
    return requests(PROMPTS * 2, max_new_tokens=tokens, seed=9)


def totals(answers: list[Completion]) -> DecodeStats:
    return sum((answer.stats for answer in answers), DecodeStats())


def test_the_engine_measures_all_sizes_and_numbers_before_its_first_request() -> None:
    ticks = itertools.count()
    config = DecodingConfig(draft_tokens="auto", most_drafts=2)
    one = TorchEngine(tiny_policy(), config, slots=3, max_length=32, clock=lambda: 0.5 * next(ticks))
    assert isinstance(one.decoder, DraftVerify) and isinstance(pace := one.decoder.timing, ThroughputModel)
    assert pace.sizes == (1, 2, 3) and pace.seconds == [[0.5] * 3] * 3
    assert next(ticks) == 2 * 3 * 3 * TURNS and not one.unfinished, "two looks at the clock for each cycle"


@pytest.mark.parametrize("drafts", slow_but([], [1, 3]))
def test_measuring_leaves_nothing_behind(drafts: int) -> None:
    """With as many drafts in each cycle, answers are those of an engine where that number is fixed."""
    paced = Paced(lambda k: 1.0)
    paced.length.forced = drafts
    fixed, policy = DecodingConfig(draft_tokens=drafts), tiny_policy(seed=3, dtype=torch.float64)
    other = TorchEngine(policy, fixed, slots=4, max_length=320, room=3)
    for one, wanted in zip(generate(paced.engine, asked(30)), generate(other, asked(30)), strict=True):
        np.testing.assert_array_equal(one.token_ids, wanted.token_ids)
        np.testing.assert_array_equal(one.logprobs, wanted.logprobs)
        assert one.stats.cycles == wanted.stats.cycles and one.stats.accepted.sum() == wanted.stats.accepted.sum()


@pytest.mark.slow
@pytest.mark.parametrize("system", slow_but(["bebop"], FREE))
def test_drafts_that_cost_nothing_are_made_and_dear_ones_are_not(system: str) -> None:
    """But for the trials, which cost what they may: drafts that take longer than a plain cycle are hardly tried."""
    for cost, share in ((0.0, 0.6), (1.5, 0.05)):
        paced = Paced(lambda k, cost=cost: 1.0 + cost * k, system=system)  # type: ignore[misc]
        stats = totals(generate(paced.engine, asked(40)))
        late = paced.drafts[20:]
        assert (sum(k > 0 for k in late) > share * len(late)) == (cost == 0), late
        assert stats.tokens == 8 * 40 and (stats.reached >= stats.accepted).all()


def test_the_heads_cache_follows_where_nothing_is_drafted() -> None:
    """After plain cycles, and after plain and drafted ones in turn, its states are those of a head that read it all."""
    paced = Paced(lambda k: 1.0)
    for request in asked()[:4]:
        paced.engine.add(request)
    for drafts in (0, 0, 0, 3, 0, 1, 0, 0):
        paced.length.forced = drafts
        assert not paced.engine.step()
    contexts = [paced.engine._context(slot) for slot in range(4)]
    other = TorchEngine(tiny_policy(seed=3, dtype=torch.float64), DecodingConfig(), slots=4, max_length=320)
    other.decoder.prefill(0, contexts)
    states, wanted = (e.slots.columns["mtp/hidden"][:4] for e in (paced.engine, other))
    assert torch.allclose(states, wanted) and states.abs().sum(1).min() > 0


def test_statistics_are_of_the_cycles_that_drafted() -> None:
    paced = Paced(lambda k: 1.0)
    paced.engine.add(asked()[0])
    for drafts in (0, 2, 0, 3, 1):
        paced.length.forced = drafts
        paced.engine.step()
    [cut] = paced.engine.abort()
    stats = cut.completion.stats
    assert stats.cycles == 5 == stats.target_forwards and stats.reached[0] == 3 and stats.reached[2] <= 1
    assert stats.draft_forwards == 1 + 2 + 1 + 3 + 1, "a pass of the head each, for what came out"
    assert stats.tokens == 5 + stats.accepted.sum()


def test_acceptance_is_that_of_drafts_that_were_tested() -> None:
    """The engine's own statistics, by position, once what was assumed has faded; no cycle counts twice."""
    paced = Paced(lambda k: 1.0)
    paced.length.forced = 3
    for request in requests(PROMPTS, max_new_tokens=250, seed=1):
        paced.engine.add(request)
    pace, tested, passed = paced.length.pace, [WEIGHT] * 3, [WEIGHT * START] * 3
    before = np.zeros((2, 3))
    for _ in range(20):
        assert not paced.engine.step()
        sums = paced.engine.slots.stats[:4].sum((0, 1))[:2].numpy()  # reached, accepted
        tested = (FADE * np.array(tested) + sums[0] - before[0]).tolist()
        passed = (FADE * np.array(passed) + sums[1] - before[1]).tolist()
        before = sums
    assert pace.tested == pytest.approx(tested) and pace.passed == pytest.approx(passed) and passed[0] > 1


@pytest.mark.slow
def test_it_switches_off_where_drafts_become_dear() -> None:
    """Answers go on; how it is switched on again is for ``test_pace.py``, as it takes some hundred cycles."""
    paced = Paced(lambda k: 1.0)
    for request in requests(PROMPTS, max_new_tokens=250, seed=1):
        paced.engine.add(request)
    seen = []
    for cost in (0.0, 3.0):
        paced.costs = lambda k, cost=cost: 1.0 + cost * k  # type: ignore[misc]
        paced.drafts.clear()
        for _ in range(60):
            paced.engine.step()
        seen.append(sum(k > 0 for k in paced.drafts[30:]) / 30)
    assert seen[0] > 0.9 and seen[1] < 0.15, seen


def test_what_is_known_stays_while_another_system_is_in_charge() -> None:
    paced = Paced(lambda k: 1.0)
    for request in asked():
        paced.engine.add(request)
    paced.engine.step()
    known = paced.length.pace
    for system in ("target_only", "autoregressive", "bebop"):
        paced.engine.configure(dataclasses.replace(paced.engine.decoding, system=system))
        paced.engine.step()
    assert isinstance(paced.decoder.length, CostLength) and paced.decoder.length.pace is known
    paced.engine.configure(dataclasses.replace(paced.engine.decoding, most_drafts=2))
    assert paced.decoder.timing is not known and paced.decoder.length.limit == 2


@pytest.mark.parametrize("system", ["bebop_adaptive", "bebop_tree", "blockpilot", "pipo"])
def test_systems_whose_cycles_have_a_length_of_their_own_say_so(system: str) -> None:
    with pytest.raises(
        UserError, match=r"draft_tokens='auto' is not possible: give a number with .*; auto is for .*bebop"
    ):
        DecodingConfig(system=system, draft_tokens="auto", most_drafts=1)


def test_the_limit_is_what_others_need_room_for() -> None:
    config = DecodingConfig(draft_tokens="auto", most_drafts=7)
    assert config.limit == config.depth == 7 and config.timed
    assert DecodingConfig(draft_tokens=2).limit == 2 and not DecodingConfig(draft_tokens=2).timed
    plain = DecodingConfig(system="autoregressive", draft_tokens="auto")
    assert not plain.timed
    for most in (0, 17):
        with pytest.raises(UserError, match=f"most_drafts={most}"):
            DecodingConfig(draft_tokens="auto", most_drafts=most)
