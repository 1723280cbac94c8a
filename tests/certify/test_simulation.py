"""Exact simulation: tokens redrawn from the claim raise no alarm, bounds hold, and broken ledgers are caught."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.certify import ledger, marginals
from bebop.certify.answers import Block
from bebop.certify.evidence import SHARES, Array, share_bound
from bebop.certify.ledger import Ledger
from tests.cases import slow_but
from tests.certify.blocks import Fault, block

M, N = 16, 120


def drawn(given: Block, tokens: Tensor) -> Block:
    """The block with other tokens [N]."""
    chosen = given.probs.gather(1, tokens[:, None])[:, 0].log()
    return replace(given, tokens=tokens, cells=tokens, logprobs=chosen, reported=None)


def simulated(cohorts: int, runs: int, *, fault: Fault | None = None, seed: int = 0, count: int = N) -> list[Ledger]:
    """Runs over the same rows, each with tokens of its own."""
    made = [Ledger(M, seed=seed + run, enumerate_rows=False) for run in range(runs)]
    for i in range(cohorts):
        given = block(count, M, seed=1000 * seed + i, first=100 * i)
        numbers = torch.Generator().manual_seed(seed + 7 * i)
        truth = given.probs if fault is None else fault(given)
        tokens = torch.multinomial(truth, runs, replacement=True, generator=numbers).T
        for one, own in zip(made, tokens, strict=True):
            one.update(drawn(given, own))
    return made


@cache
def clean(runs: int) -> list[Ledger]:
    return simulated(10, runs)


def false_alarms(made: list[Ledger]) -> tuple[int, int]:
    """Runs whose evidence ever reached 1/alpha, and those in which it reached 20."""
    return sum(one.highest >= math.log(1e4) for one in made), sum(one.highest >= math.log(20) for one in made)


@pytest.mark.parametrize("runs", slow_but([5], [5, 200]))
def test_no_false_alarm_in_200_runs(runs: int) -> None:
    alarms, twenties = false_alarms(clean(runs))
    assert alarms == 0 and twenties <= 0.05 * runs


@pytest.mark.slow
def test_learning_from_the_cohort_itself_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = marginals.Pit._one

    def peeking(self: marginals.Pit, name: str, bins: np.ndarray) -> Array:
        kept = self._logs[name]
        honest(self, name, bins)  # the counts have the cohort's tokens now
        self._logs[name] = kept
        return honest(self, name, bins)

    monkeypatch.setattr(marginals.Pit, "_one", peeking)
    alarms, twenties = false_alarms(simulated(10, 40))
    assert alarms > 0 and twenties > 0.05 * 40


def test_a_direction_that_knows_the_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peeking:
        def __init__(self, p: Tensor) -> None:
            self.p = p

        def at(self, cells: Tensor) -> Tensor:
            return 1.1 * self.p.gather(1, cells)  # a tenth more on whatever comes

        def tv(self, p: Tensor) -> Tensor:
            return torch.zeros(len(p), dtype=p.dtype)

    honest = ledger.directions
    monkeypatch.setattr(
        ledger, "directions", lambda rows: ((n, Peeking(rows.p) if n == "hotter" else d) for n, d in honest(rows))
    )
    assert false_alarms(simulated(3, runs=5))[0] == 5


def answers(runs: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """64 requests whose rows are all alike: rows [40, M] and tokens [40], of which those up to token 1 count."""
    g = torch.Generator().manual_seed(seed)
    p = torch.full((40, M), 0.96 / (M - 1), dtype=torch.float64)
    p[:, 1] = 0.04
    return [(p, torch.multinomial(p, 1, generator=g)[:, 0]) for _ in range(64)]


def as_block(given: list[tuple[Tensor, Tensor]], first: int, most: int) -> Block:
    parts = []
    for i, (p, x) in enumerate(given):
        end = min(most, int((x == 1).nonzero()[0, 0]) + 1 if (x == 1).any() else len(x))
        parts.append((p[:end], x[:end], torch.full((end,), first + i), torch.arange(end)))
    p, x, request, position = (torch.cat(one) for one in zip(*parts, strict=True))
    bare = block(len(x), M)
    return replace(bare, probs=p, tokens=x, cells=x, logprobs=p.gather(1, x[:, None])[:, 0].log(), request=request,
                   position=position, last=x.roll(1), before=None, raw=None, draft=None, seen=None, cycle=None,
                   twin=None, reported=None, declared=None, stops=(1,))  # fmt: skip


@pytest.mark.parametrize("runs", slow_but([3], [3, 20]))
@pytest.mark.parametrize("first_to_end", [False, True])
def test_answers_that_end_first_may_not_be_looked_at_first(first_to_end: bool, runs: int) -> None:
    """A cohort after 15 steps: whole, what did not end included, or those answers alone that ended."""
    highest = []
    for run in range(runs):
        made = Ledger(M, enumerate_rows=False)
        for i in range(3):
            given = answers(1, 50 * run + i)
            if first_to_end:
                given = [(p, x) for p, x in given if (x[:15] == 1).any()]
            made.update(as_block(given, 100 * i, 15))
        highest.append(made.highest)
    alarms = (np.asarray(highest) >= math.log(1e4)).mean()
    assert alarms == (1.0 if first_to_end else 0.0)


SHARE = 0.08


def towards_the_row_before(given: Block) -> Tensor:
    assert given.before is not None
    return (1 - SHARE) * given.probs + SHARE * given.before


def bounds(made: list[Ledger], name: str) -> Array:
    return np.asarray([one._bets.bound(name, one.tokens)[0] for one in made])


@pytest.mark.slow  # test_marginals.py checks a bound against the exact one
def test_bounds_hold_in_95_of_100_runs() -> None:
    faulty = simulated(10, 100, fault=towards_the_row_before, seed=1)
    wrong = (bounds(faulty, "row_before") < SHARE).mean()
    assert wrong <= 0.05
    assert np.median(bounds(clean(200), "row_before")) < SHARE < np.median(bounds(faulty, "row_before")) < 4 * SHARE


def unguarded(logs: Array) -> float:
    """The bound of one look: shares that a likelihood ratio test at 5 % does not reject; no good for two looks."""
    alive = np.flatnonzero(max(0.0, logs.max()) - logs < 1.35)
    return SHARES[alive[-1]] if len(alive) else 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "holds"), [(share_bound, True), (unguarded, False)])
def test_a_bound_holds_at_whichever_cohort_one_stops(bound: Callable[[Array], float], holds: bool) -> None:
    """A run that ends as soon as its bound lies below the true share is wrong; the true one is 2 %."""
    rng, share, runs = np.random.default_rng(0), 0.02, 400
    p = rng.dirichlet(np.ones(M))
    r = np.roll(p, 1)
    tokens = rng.choice(M, p=(1 - share) * p + share * r, size=(runs, 50, 100))  # [runs, cohorts, tokens]
    logs = np.log1p(np.asarray(SHARES) * (r / p - 1)[tokens][..., None]).sum(2).cumsum(1)
    wrong = np.mean([any(bound(look) < share for look in run) for run in logs])
    assert (wrong <= 0.05) == holds, wrong


@pytest.mark.parametrize("runs", slow_but([], [10, 100]))
def test_what_is_called_visible_is_seen(runs: int) -> None:
    """A fault of the share that is named after n clean tokens is found in about 90 % of runs after n tokens."""
    looked = Ledger(M)
    for i in range(6):
        looked.update(block(200, M, seed=i, first=100 * i))
    share = {one.name: one.share for one in looked.visible()}["row_before"]

    def fault(given: Block) -> Tensor:
        assert given.before is not None
        return (1 - share) * given.probs + share * given.before

    alarms, _ = false_alarms(simulated(6, runs, fault=fault, count=200))
    assert 0.05 < share < 0.5 and 0.8 <= alarms / runs


def enumerated(past: int) -> tuple[Array, list[Ledger], Ledger]:
    """A ledger for each token of one position, after a past that all of them have in common.

    Their probabilities, the ledgers, and one that does not know that position. It has a neighbour and a token before.
    """
    known, whole = Ledger(M), [Ledger(M) for _ in range(M)]
    for i in range(past):
        known.update(replace(block(60, M, seed=i, first=100 * i), reported=None))
    for one in whole:
        one.load_state_dict(known.state_dict())
    given = block(40, M, seed=5, first=900)
    own = {name: getattr(given, name) for name in given.__slots__}
    four = replace(given, **{k: v[[0, 1, 20, 21]] for k, v in own.items() if isinstance(v, Tensor)})
    known.update(drawn(four, four.cells).part(0, 3))
    for x, one in enumerate(whole):
        one.update(drawn(four, torch.where(torch.arange(4) == 3, x, four.cells)))
    return four.probs[3].numpy(), whole, known


@pytest.mark.parametrize("past", slow_but([0], [0, 2]))
def test_every_direction_has_expectation_one(past: int) -> None:
    p, whole, known = enumerated(past)
    before = {one.name: one.log_e for one in known.evidence()}
    runs = [{one.name: one for one in ledger.evidence()} for ledger in whole]
    names = [one.name for one in runs[0].values() if one.group not in ("pit", "reported")]  # pit: uniforms of its own
    assert len(names) > 70 and {"shared_uniform", "repeated_uniform", "copies", "ids", "learned_tilt"} <= set(names)
    for name in names:
        total = sum(p[x] * math.exp(runs[x][name].log_e - before.get(name, 0.0)) for x in range(M))
        assert total == pytest.approx(1, abs=1e-11), name


@pytest.mark.slow
def test_the_merged_e_value_has_expectation_one() -> None:
    p, whole, known = enumerated(0)
    merged = np.exp([one.log_e for one in whole])
    assert (p * merged).sum() == pytest.approx(math.exp(known.log_e), abs=1e-11)
    assert Ledger(M).log_e == pytest.approx(0, abs=1e-9)  # it starts at 1


def test_weights_that_add_up_to_two_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    doubled = {name: (group, 2 * weight) for name, (group, weight) in ledger.FAMILY.items()}
    monkeypatch.setattr(ledger, "FAMILY", doubled)
    assert Ledger(M).log_e == pytest.approx(math.log(2))
