"""As many drafts as pay, within the engine: by a clock of one's own, so that the work of every cycle is known.

Systems with a free length choose one number of drafts for all rows (``CostLength``); those with history choose in each
row (``RowCostLength``).
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.timed_lengths import (
    FADE,
    REST,
    START,
    WEIGHT,
    CostLength,
    RowCostLength,
    ThroughputModel,
    Work,
)
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TURNS, TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.trajectory import DecodeStats
from tests.builders import bare_policy, needs_more, requests, tiny_policy
from tests.rollout.driving import decoder_of, read_at_once, started

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9]]
FREE = [name for name, system in SYSTEMS.items() if system.free_length]
HISTORY = ["history", "bebop_history"]
PLAIN = (1.0, 0.0, 0.0, 0.0)
Costs = Callable[[Any], float]


class Paced:
    """An engine whose cycles take what ``costs`` says of their work, which is kept.

    The work of a cycle is its number of drafts, and a ``Work`` in systems with history, whose costs are four numbers.
    """

    def __init__(self, costs: Costs | tuple[float, ...], system: str = "bebop", **settings: Any) -> None:
        config = DecodingConfig(system=system, draft_tokens="auto", most_drafts=3)
        settings = {"seed": 3, "dtype": torch.float64, "with_parts": needs_more(system), **settings}
        self.engine = TorchEngine(
            tiny_policy(**settings), config, slots=4, max_length=320, clock=itertools.count().__next__
        )
        self.decoder, self.costs = decoder_of(self.engine), costs
        length: Any = self.decoder.length
        self.length = length
        if isinstance(length, RowCostLength):
            length.seconds.logs[:] = np.log(np.maximum(np.array(costs), 1e-9))
        else:
            assert isinstance(length, CostLength) and callable(costs)
            for rows, drafts in itertools.product(length.pace.sizes, range(4)):
                length.pace.timed(rows, drafts, costs(drafts))
        self.work: list[Any] = []
        self.now, self.began = 0.0, True
        self.engine.clock = self.clock

    def clock(self) -> float:
        self.began = not self.began
        if self.began:  # the second call, when the cycle has ended
            work = self.length._seen[1] if isinstance(self.length, RowCostLength) else self.length.limit
            self.work.append(work)
            self.now += self.costs(work) if callable(self.costs) else float(np.dot(self.costs, work))
        return self.now

    def share(self, since: int) -> float:
        """Return the share of cycles since one that drafted."""
        late = [work.drafts if isinstance(work, Work) else work for work in self.work[since:]]
        return sum(drafts > 0 for drafts in late) / len(late)


def asked(tokens: int = 60) -> list[Request]:
    return requests(PROMPTS * 2, max_new_tokens=tokens, seed=9)


def even(drafts: int) -> float:
    return 1.0


# ---- before the first request


def test_the_engine_measures_all_sizes_and_numbers_before_its_first_request() -> None:
    ticks = itertools.count()
    config = DecodingConfig(draft_tokens="auto", most_drafts=2)
    one = TorchEngine(bare_policy(), config, slots=3, max_length=32, clock=lambda: 0.5 * next(ticks))
    pace = decoder_of(one).timing
    assert isinstance(pace, ThroughputModel) and pace.sizes == (1, 2, 3) and pace.seconds == [[0.5] * 3] * 3
    assert next(ticks) == 2 * 3 * 3 * TURNS and not one.unfinished, "two looks at the clock for each cycle"


@pytest.mark.slow
@pytest.mark.parametrize("system", HISTORY)
def test_the_engine_measures_cycles_of_every_kind_before_its_first_request(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On prompts whose completions it seems to know, and forgets them."""
    seen: list[tuple[int, Work]] = []
    ticks, config = itertools.count(), DecodingConfig(system=system, draft_tokens="auto", most_drafts=3)
    measured = RowCostLength.timed

    def noted(self: RowCostLength, seconds: list[float]) -> None:
        assert self._seen is not None and len(seconds) == TURNS
        seen.append(self._seen[:2])
        measured(self, seconds)

    monkeypatch.setattr(RowCostLength, "timed", noted)
    one = TorchEngine(bare_policy(), config, slots=3, max_length=64, clock=ticks.__next__)
    for rows in (1, 2, 3):
        none, first, alone, headed = (work for size, work in seen if size == rows)
        assert none == Work() and first == Work(1.0, 1.0, rows, 0.0) and alone == Work(1.0, 1.0, 3.0 * rows, 0.0)
        assert headed == Work(1.0, 1.0, 3.0 * rows, 3.0) or system == "history"
    assert next(ticks) == 2 * 3 * 4 * TURNS and not one.unfinished and not len(one.slots.history)
    assert decoder_of(one).length.forced is None  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(("system", "drafts"), [("bebop", 1), ("bebop", 3), ("history", 3), ("bebop_history", 3)])
def test_measuring_leaves_nothing_behind(system: str, drafts: int) -> None:
    """With as many drafts in each cycle, completions are those of an engine that measured nothing."""
    paced = Paced(PLAIN if system in HISTORY else even, system)
    fixed = DecodingConfig(system=system, draft_tokens=drafts)
    policy = bare_policy(seed=3, dtype=torch.float64)
    other = TorchEngine(policy, fixed, slots=4, max_length=320, room=3)
    if system in HISTORY:
        paced.length.forced = (drafts, paced.length.seconds.costs(4))
        for engine in (paced.engine, other):
            decoder_of(engine).drafter.matching.first = True  # type: ignore[union-attr]
        decoder_of(other).length.costs = paced.length.forced[1]  # type: ignore[attr-defined]
    else:
        paced.length.forced = drafts
    for one, wanted in zip(generate(paced.engine, asked(30)), generate(other, asked(30)), strict=True):
        np.testing.assert_array_equal(one.token_ids, wanted.token_ids)
        np.testing.assert_array_equal(one.logprobs, wanted.logprobs)
        assert one.stats.cycles == wanted.stats.cycles and one.stats.accepted.sum() == wanted.stats.accepted.sum()


# ---- what is chosen


@pytest.mark.slow
@pytest.mark.parametrize("system", [*FREE, *HISTORY])
def test_drafts_that_cost_nothing_are_made_and_dear_ones_are_not(system: str) -> None:
    """But for the trials, which cost what they may: drafts that take longer than a plain cycle are hardly tried."""
    shares = []
    for each in (0.0, 1.5):
        costs = (1.0, each, each / 4, each) if system in HISTORY else lambda k, each=each: 1.0 + each * k
        paced = Paced(costs, system, **({"sharp": 16.0} if system in HISTORY else {}))  # it repeats itself
        answers = generate(paced.engine, asked())
        shares.append(paced.share(30))
        assert sum(len(answer.token_ids) for answer in answers) == 8 * 60
        assert all((answer.stats.reached >= answer.stats.accepted).all() for answer in answers)
    assert shares[0] > 0.6 and shares[1] < 0.08, shares


@pytest.mark.slow
def test_it_switches_off_where_drafts_become_dear() -> None:
    """Completions go on; how it is switched on again is for ``test_pace.py``, as it takes some hundred cycles."""
    paced, shares = Paced(even), []
    started(paced.engine, requests(PROMPTS, max_new_tokens=250, seed=1))
    for cost in (0.0, 3.0):
        paced.costs = lambda k, cost=cost: 1.0 + cost * k  # type: ignore[misc]
        paced.work.clear()
        started(paced.engine, (), 60)
        shares.append(paced.share(30))
    assert shares[0] > 0.9 and shares[1] < 0.15, shares


@pytest.mark.slow
def test_rows_with_history_stop_drafting_where_drafts_become_dear_and_begin_again() -> None:
    """Within some hundred cycles, as trials may lose little; completions go on meanwhile."""
    cheap, dear = (1.0, 0.1, 0.05, 0.0), (1.0, 1.0, 0.2, 0.0)
    paced, shares = Paced(cheap, "history", sharp=16.0), []
    for paced.costs, cycles in ((cheap, 200), (dear, 400), (cheap, 600)):
        paced.work.clear()
        while len(paced.work) < cycles:
            if not paced.engine.unfinished:
                started(paced.engine, requests(PROMPTS, max_new_tokens=300, seed=1))
            paced.engine.step()
        shares.append(paced.share(cycles - 100))
    assert shares[0] > 0.8 and shares[1] < 0.1 and shares[2] > 0.4, shares


def test_a_row_that_is_sure_drafts_on_beside_one_that_is_not() -> None:
    """At a price at which short matches do not pay; the fixed length gives every match a draft."""
    drafts = {}
    for tokens in ("auto", 3):
        config = DecodingConfig(system="history", draft_tokens=tokens, most_drafts=3, verify_ratio=0.7)
        one = TorchEngine(bare_policy(seed=3), config, slots=2, max_length=64, clock=itertools.count().__next__)
        decoder = decoder_of(one)
        if isinstance(decoder.length, RowCostLength):
            decoder.length.forced = (3, config.costs)
        known = [5, 6, 7, 8, 9, 10, 11, 2] * 2
        one.remember([1, 2, 3], [known] * 9)
        one.remember([4, 5, 6], [[2, 3, 4], [3, 2, 4], [4, 2, 2]])
        started(one, requests([[1, 2, 3], [4, 5, 6]], max_new_tokens=40, seed=1), 1)
        matches = one.slots.caches["history"].of
        for slot, said in ((0, known[:12]), (1, [3])):
            for token in said:
                matches[slot].advance(token)
        assert decoder.drafter is not None
        proposed = decoder.drafter.propose(Rows(one.slots, 2, max(one.fed)), decoder.length)
        assert proposed.lengths is not None
        drafts[tokens] = proposed.lengths.tolist()
    assert drafts["auto"] == [3, 0] and drafts[3] == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("stood", [0.0, 3.0])
def test_trials_cost_what_they_may(stood: float) -> None:
    """A hundredth of the time, whichever pays; where both are as good, one in so many cycles."""
    length = Paced((1.0, 0.5, 0.125, 0.5), "history").length
    length.past = np.array([1.0, 1.0, stood, *Work(1.0, 1.0, 1.0, 0.0)])
    tokens, taken, plain = length.expected(4)
    assert (tokens, taken, plain) == pytest.approx((1 + stood, 2.0, 1.0))
    loss, pays = ((2.0 - tokens), False) if not stood else (1.0 - 2.0 / tokens, True)
    tried = [length._choice(4) for _ in range(2000)]
    assert {believed for believed, _ in tried} == {pays}
    assert 0.5 < sum(trial for _, trial in tried) * loss / (2000 * 0.01 * (taken if pays else plain)) < 1.1
    length.past[2] = 1.0
    tried = [length._choice(4) for _ in range(2000)]
    assert not any(believed for believed, _ in tried), "a tie is left to the plain one"
    assert sum(trial for _, trial in tried) == pytest.approx(2000 / REST, abs=2)


# ---- what is learned and counted


def test_the_heads_cache_follows_where_nothing_is_drafted() -> None:
    """After plain cycles, and after plain and drafted ones in turn, its states are those of a head that read it all."""
    paced = Paced(even)
    started(paced.engine, asked()[:4])
    for paced.length.forced in (0, 0, 0, 3, 0, 1, 0, 0):
        assert not paced.engine.step()
    other = TorchEngine(bare_policy(seed=3, dtype=torch.float64), DecodingConfig(), slots=4, max_length=320)
    read_at_once(paced.engine, other)
    states, wanted = (e.slots.columns["mtp/hidden"][:4] for e in (paced.engine, other))
    assert torch.allclose(states, wanted) and states.abs().sum(1).min() > 0


def test_statistics_are_of_the_cycles_that_drafted() -> None:
    paced = Paced(even)
    started(paced.engine, asked()[:1])
    for paced.length.forced in (0, 2, 0, 3, 1):
        paced.engine.step()
    [cut] = paced.engine.abort()
    stats: DecodeStats = cut.completion.stats
    assert stats.cycles == 5 == stats.target_forwards and stats.reached[0] == 3 and stats.reached[2] <= 1
    assert stats.draft_forwards == 1 + 2 + 1 + 3 + 1, "a pass of the head each, for what came out"
    assert stats.tokens == 5 + stats.accepted.sum()


def test_acceptance_is_that_of_drafts_that_were_tested() -> None:
    """The engine's own statistics, by position, once what was assumed has faded; no cycle counts twice."""
    paced = Paced(even)
    paced.length.forced = 3
    started(paced.engine, requests(PROMPTS, max_new_tokens=250, seed=1))
    pace, tested, passed = paced.length.pace, [WEIGHT] * 3, [WEIGHT * START] * 3
    before = np.zeros((2, 3))
    for _ in range(20):
        assert not paced.engine.step()
        sums = paced.engine.slots.stats[:4].sum((0, 1))[:2].numpy()  # reached, accepted
        tested = (FADE * np.array(tested) + sums[0] - before[0]).tolist()
        passed = (FADE * np.array(passed) + sums[1] - before[1]).tolist()
        before = sums
    assert pace.tested == pytest.approx(tested) and pace.passed == pytest.approx(passed) and passed[0] > 1


@pytest.mark.parametrize("system", ["bebop", "bebop_history"])
def test_what_is_known_stays_while_another_system_is_in_charge(system: str) -> None:
    paced = Paced(PLAIN if system in HISTORY else even, system)
    started(paced.engine, asked(), 1)
    kind, known = type(paced.length), paced.decoder.timing
    other = "history" if system in HISTORY else "target_only"
    for name in (other, "autoregressive", system):
        paced.engine.configure(dataclasses.replace(paced.engine.decoding, system=name))
        paced.engine.clock = itertools.count().__next__
        paced.engine.step()
    assert isinstance(paced.decoder.length, kind) and paced.decoder.timing is known
    paced.engine.configure(dataclasses.replace(paced.engine.decoding, most_drafts=2))
    assert paced.decoder.length.limit == 2 and (paced.decoder.timing is known) == (system in HISTORY)
