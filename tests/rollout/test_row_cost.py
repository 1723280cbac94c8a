"""As many drafts from history in each row as pay, within the engine: by a clock of one's own."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.throughput_model import REST, Work
from bebop.rollout.decoding.timed_lengths import RowCostLength
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.rollout.warmup import TURNS
from tests.builders import bare_policy, requests
from tests.cases import slow_but

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9]]
SYSTEMS = ("history", "bebop_history")
PLAIN = (1.0, 0.0, 0.0, 0.0)


class Paced:
    """An engine whose cycles take what ``seconds`` says of their work, which is kept."""

    def __init__(self, system: str, seconds: tuple[float, ...] = PLAIN, sharp: float | None = None) -> None:
        """``sharp``: of a policy that says the same again and again; None: of one that hardly does."""
        config = DecodingConfig(system=system, draft_tokens="auto", most_drafts=3)
        made = {"seed": 3} if sharp is None else {"seed": 3, "sharp": sharp}
        policy = bare_policy(dtype=torch.float64, **made)  # type: ignore[arg-type]
        self.engine = TorchEngine(policy, config, slots=4, max_length=320, clock=itertools.count().__next__)
        decoder = self.engine.decoder
        assert isinstance(decoder, DraftVerify) and isinstance(decoder.length, RowCostLength)
        self.decoder, self.length, self.seconds = decoder, decoder.length, seconds
        self.length.seconds.logs[:] = np.log(np.maximum(seconds, 1e-9))
        self.work: list[Work] = []
        self.now, self.began = 0.0, True
        self.engine.clock = self.clock

    def clock(self) -> float:
        self.began = not self.began
        if self.began:  # the second call, when the cycle has ended
            assert self.length._seen is not None
            self.work.append(self.length._seen[1])
            self.now += float(np.dot(self.seconds, self.work[-1]))
        return self.now


def asked(tokens: int = 60) -> list[Request]:
    return requests(PROMPTS * 2, max_new_tokens=tokens, seed=9)


@pytest.mark.slow
@pytest.mark.parametrize("system", slow_but(["bebop_history"], SYSTEMS))
def test_the_engine_measures_cycles_of_every_kind_before_its_first_request(system: str) -> None:
    """On prompts whose answers it seems to know, and forgets them."""
    seen: list[tuple[int, Work]] = []
    ticks, config = itertools.count(), DecodingConfig(system=system, draft_tokens="auto", most_drafts=3)
    measured = RowCostLength.timed

    def noted(self: RowCostLength, seconds: list[float]) -> None:
        assert self._seen is not None and len(seconds) == TURNS
        seen.append(self._seen[:2])
        measured(self, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowCostLength, "timed", noted)
        one = TorchEngine(bare_policy(), config, slots=3, max_length=64, clock=ticks.__next__)
    head = system == "bebop_history"
    for rows in (1, 2, 3):
        none, first, alone, headed = (work for size, work in seen if size == rows)
        assert none == Work() and first == Work(1.0, 1.0, rows, 0.0) and alone == Work(1.0, 1.0, 3.0 * rows, 0.0)
        assert headed == Work(1.0, 1.0, 3.0 * rows, 3.0) or not head
    assert next(ticks) == 2 * 3 * 4 * TURNS and not one.unfinished and not len(one.slots.history)
    assert isinstance(one.decoder, DraftVerify) and one.decoder.length.forced is None  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("system", slow_but(["bebop_history"], SYSTEMS))
def test_measuring_leaves_nothing_behind(system: str) -> None:
    """Cycles of one kind after it are those of an engine that measured nothing."""
    paced, policy = Paced(system), bare_policy(seed=3, dtype=torch.float64)
    paced.length.forced = (3, paced.decoder.length.seconds.costs(4))  # type: ignore[attr-defined]
    config = DecodingConfig(system=system, draft_tokens=3)
    other = TorchEngine(policy, config, slots=4, max_length=320)
    for engine in (paced.engine, other):
        drafter = engine.decoder.drafter  # type: ignore[attr-defined]
        drafter.matching.first = True
    other.decoder.length.costs = paced.length.forced[1]  # type: ignore[attr-defined]
    for one, wanted in zip(generate(paced.engine, asked(30)), generate(other, asked(30)), strict=True):
        np.testing.assert_array_equal(one.token_ids, wanted.token_ids)
        assert one.stats.cycles == wanted.stats.cycles and one.stats.accepted.sum() == wanted.stats.accepted.sum()


@pytest.mark.parametrize("system", slow_but([], SYSTEMS))
def test_drafts_that_cost_nothing_are_made_and_dear_ones_are_not(system: str) -> None:
    """But for the trials: of answers that repeat themselves most cycles draft, and none where that takes long."""
    shares = []
    for each in (0.0, 2.0):
        paced = Paced(system, (1.0, each, each / 4, each), sharp=16.0)
        answers = generate(paced.engine, asked())
        late = paced.work[30:]
        shares.append(sum(work.drafts > 0 for work in late) / len(late))
        assert sum(len(answer.token_ids) for answer in answers) == 8 * 60
    assert shares[0] > 0.7 and shares[1] < 0.08, shares


def test_a_row_that_is_sure_drafts_on_beside_one_that_is_not() -> None:
    """At a price at which short matches do not pay; the fixed length gives every match a draft."""
    drafts = {}
    for tokens in ("auto", 3):
        config = DecodingConfig(system="history", draft_tokens=tokens, most_drafts=3, verify_ratio=0.7)
        one = TorchEngine(bare_policy(seed=3), config, slots=2, max_length=64, clock=itertools.count().__next__)
        assert isinstance(one.decoder, DraftVerify) and one.decoder.drafter is not None
        if isinstance(one.decoder.length, RowCostLength):
            one.decoder.length.forced = (3, config.costs)
        known = [5, 6, 7, 8, 9, 10, 11, 2] * 2
        one.remember([1, 2, 3], [known] * 9)
        one.remember([4, 5, 6], [[2, 3, 4], [3, 2, 4], [4, 2, 2]])
        first, second = requests([[1, 2, 3], [4, 5, 6]], max_new_tokens=40, seed=1)
        one.add(first)
        one.add(second)
        one.step()
        matches = one.slots.caches["history"].of
        for slot, said in ((0, known[:12]), (1, [3])):
            for token in said:
                matches[slot].advance(token)
        proposed = one.decoder.drafter.propose(Rows(one.slots, 2, max(one.fed)), one.decoder.length)
        assert proposed.lengths is not None
        drafts[tokens] = proposed.lengths.tolist()
    assert drafts["auto"] == [3, 0] and drafts[3] == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("stood", [0.0, 3.0])
def test_trials_cost_what_they_may(stood: float) -> None:
    """A hundredth of the time, whichever pays; where both are as good, one in so many cycles."""
    paced = Paced("history", (1.0, 0.5, 0.125, 0.5))
    length = paced.length
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


@pytest.mark.slow
def test_it_switches_off_where_drafts_become_dear_and_on_again() -> None:
    """Within some hundred cycles, as trials may lose little; answers go on meanwhile."""
    paced, seen = Paced("history", (1.0, 0.1, 0.05, 0.0), sharp=16.0), []
    cheap, dear = (1.0, 0.1, 0.05, 0.0), (1.0, 1.0, 0.2, 0.0)
    for paced.seconds, cycles in ((cheap, 200), (dear, 400), (cheap, 600)):
        paced.work.clear()
        while len(paced.work) < cycles:
            if not paced.engine.unfinished:
                for request in requests(PROMPTS, max_new_tokens=300, seed=1):
                    paced.engine.add(request)
            paced.engine.step()
        late = paced.work[cycles - 100 :]
        seen.append(sum(work.drafts > 0 for work in late) / len(late))
    assert seen[0] > 0.8 and seen[1] < 0.1 and seen[2] > 0.4, seen


def test_what_is_known_stays_while_another_system_is_in_charge() -> None:
    paced = Paced("bebop_history")
    known = paced.length.seconds
    for request in asked():
        paced.engine.add(request)
    for system in ("history", "autoregressive", "bebop_history"):
        paced.engine.configure(dataclasses.replace(paced.engine.decoding, system=system))
        paced.engine.clock = itertools.count().__next__
        paced.engine.step()
    assert isinstance(paced.decoder.length, RowCostLength) and paced.decoder.length.seconds is known


def test_as_many_drafts_as_history_may_be_sure_of_where_nobody_says_how_many() -> None:
    assert DecodingConfig(system="history", draft_tokens="auto").limit == 16
    assert DecodingConfig(draft_tokens="auto").limit == 5
    assert DecodingConfig(draft_tokens="auto", most_drafts=2).limit == 2
    with pytest.raises(UserError, match="most_drafts=17"):
        DecodingConfig(system="history", draft_tokens="auto", most_drafts=17)
