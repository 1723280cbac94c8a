"""Single tokens, uniforms behind tokens and reported log-probs: fair, and right by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bebop.certify.bets import Bets
from bebop.certify.directions import Table
from bebop.certify.evidence import SHARES, share_bound, visible_share
from bebop.certify.marginals import BINS, Ids, Pit, Reported, likelier, overlap
from tests.certify.blocks import block, rows

P = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)


def test_bets_on_single_tokens_are_fair_and_those_of_the_definition() -> None:
    total = 0.0
    for x in range(4):
        ids = Ids(6)
        for token, row in ((0, 0), (x, 1), (x, 0)):
            ids.add(np.asarray([token]), P[row, token].log().numpy()[None], None)
        history = [(0, 0.5), (x, 0.25), (x, float(P[0, x]))]
        by_hand = np.mean([
            math.prod(1 + s * ((token == bet) / p_x - 1) for token, p_x in history) for bet in range(6) for s in SHARES
        ])  # fmt: skip
        assert ids.log_e == pytest.approx(math.log(by_hand), abs=1e-12)
        first = Ids(6)
        first.add(np.asarray([x]), P[0, x].log().numpy()[None], None)
        total += float(P[0, x]) * math.exp(first.log_e)
    assert total == pytest.approx(4 / 6 * 1 + 2 / 6 * np.mean([1 - s for s in SHARES]))  # two tokens never come


def test_the_token_that_comes_too_often_leads_and_bounds_hold_the_rest() -> None:
    g = np.random.default_rng(0)
    tokens = np.where(g.random(3000) < 0.03, 7, g.integers(20, size=3000))
    ids = Ids(20)
    ids.add(tokens, np.full(3000, -math.log(20)), np.full(20, 3000 / 20))
    assert ids.leader()[0] == 7 and 0.01 < ids.leader()[1] <= 0.05
    share, tv = ids.bound()
    assert 0.03 <= share < 0.06 and tv == pytest.approx(share * 0.95) and type(tv) is float


def test_the_order_of_likelihood_needs_no_sort() -> None:
    p = torch.cat([rows(50, 9, torch.Generator().manual_seed(0)), P[1:].expand(3, 4).repeat(1, 3)[:, :9] / 2.25])
    cells = torch.randint(9, (53,), generator=torch.Generator().manual_seed(1))
    order = p.sort(dim=-1, descending=True, stable=True).indices
    ranked = p.gather(1, order)
    below = (ranked.cumsum(-1) - ranked).gather(1, order.argsort(-1)).gather(1, cells[:, None])[:, 0]
    assert (likelier(p, cells, p.gather(1, cells[:, None])[:, 0]) - below).abs().max() < 1e-12


def test_bins_are_fair_whatever_was_learned() -> None:
    g = np.random.default_rng(0)
    pit = Pit()
    ahead = np.arange(499, dtype=np.int64)
    pit.add(g.random(500) ** 2, g.random(500) ** 3, np.r_[-1, ahead], np.r_[-1, ahead])
    for name, bins in BINS.items():
        middle = (np.arange(bins[-1]) + 0.5) / bins[-1]
        total = 0.0
        for u in middle:
            again = Pit()
            again.load_state_dict(pit.state_dict())
            pair = np.asarray([0.4, u])
            partner = np.asarray([-1, 0])
            total += math.exp(again.add(pair, pair, partner, partner)[name][1]) / bins[-1]
        assert total == pytest.approx(1, abs=1e-12), name


def test_bins_learn_from_earlier_cohorts_alone() -> None:
    pit, u = Pit(), np.full(400, 0.5)
    none = np.full(400, -1)
    assert all(not gain.any() for gain in pit.add(u, u, none, none).values())
    assert pit.add(u, u, none, none)["pit"].sum() > 100


def test_a_uniform_used_twice() -> None:
    """u lies in [.6, .75): the token is 1 (0.5 to 0.8) for certain; in [.75, .9): 1 or 2, in proportion."""
    upper = P[:1].cumsum(-1)
    assert overlap(upper, P[:1], torch.tensor([[0.6]]), torch.tensor([[0.75]])).tolist() == [[0, 1, 0, 0]]
    found = overlap(upper.numpy(), P[:1].numpy(), np.asarray([[0.75]]), np.asarray([[0.9]]))
    assert found[0] == pytest.approx([0, 1 / 3, 2 / 3, 0])


def reported(errors: torch.Tensor, allowed: float = 1e-4) -> Reported:
    given = block(len(errors), 12)
    bets = Reported(allowed)
    bets.add(replace(given, reported=given.logprobs + errors, declared=given.logprobs), 2e-3)
    return bets


@pytest.mark.parametrize("allowed", [1e-4, 2e-3, 0.01])
def test_bets_on_reports_are_fair_at_what_is_allowed(allowed: float) -> None:
    right, wrong = reported(torch.zeros(1), allowed).log_es(), reported(torch.ones(1), allowed).log_es()
    assert allowed * math.exp(wrong["reported"]) + (1 - allowed) * math.exp(right["reported"]) == pytest.approx(1)
    one_side = allowed / 2 * math.exp(wrong["reported_high"]) + (1 - allowed / 2) * math.exp(right["reported_high"])
    assert one_side == pytest.approx(1)
    assert wrong["reported_low"] == pytest.approx(right["reported_low"])


def test_small_errors_and_rare_ones_are_forgiven() -> None:
    g = torch.Generator().manual_seed(0)
    noise = 1.9e-3 * (2 * torch.rand(5000, generator=g) - 1)
    assert reported(noise).log_es()["reported"] < 0
    assert reported(torch.where(torch.arange(5000) % 1000 == 0, 0.6, noise), 2e-3).log_es()["reported"] < 3
    assert reported(torch.where(torch.arange(5000) % 100 == 0, 0.6, noise), 2e-3).log_es()["reported"] > 15


def test_errors_have_a_side_and_a_temperature() -> None:
    given = block(2000, 12)
    warm = (given.probs**1.02) / (given.probs**1.02).sum(-1, keepdim=True)
    cold = warm.gather(1, given.cells[:, None])[:, 0].log() - given.logprobs
    found = reported(cold).log_es()
    assert found["reported_cold"] > found["reported"] > found["reported_hot"]
    found = reported(torch.full((2000,), -0.01)).log_es()
    assert found["reported_low"] > found["reported"] > found["reported_high"]


def test_log_probs_that_are_not_there_count_for_nothing() -> None:
    errors = torch.zeros(300)
    errors[::2] = torch.nan
    assert reported(errors).log_es()["reported"] == pytest.approx(reported(torch.zeros(150)).log_es()["reported"])
    assert reported(torch.full((300,), -torch.inf)).log_es()["reported"] > 100


def curve(h: np.ndarray) -> np.ndarray:
    return np.asarray([np.log1p(s * h).sum() for s in SHARES])


def test_a_bound_between_shares_is_at_least_the_exact_one() -> None:
    g = np.random.default_rng(0)
    for size in (100, 1000, 10_000):
        h = np.where(g.random(size) < 0.2, 4.0, -1.0)
        bound = share_bound(curve(h))
        fine = np.linspace(0.0001, 1 - 1e-6, 4000)
        exact = np.asarray([np.log1p(s * h).sum() for s in fine])
        mixture = math.log((1 + np.exp(curve(h)).mean()) / 2)
        last = fine[exact > mixture - math.log(20)].max(initial=0.0)
        assert last - 1e-3 <= bound <= 1.6 * last + 5e-4


def test_nothing_seen_bounds_nothing() -> None:
    assert share_bound(np.zeros(len(SHARES))) == 1.0
    assert visible_share(1000, np.zeros(len(SHARES)), np.zeros(len(SHARES)), 0.1, 1e-4) == 1.0


def test_mass_where_the_claim_has_none_shows_at_once() -> None:
    """One impossible token in 20,000 is proof."""
    p, bets = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 64, dtype=torch.float64), Bets(["uniform"])
    bets.learn(["uniform"], np.ones((1, 64)), Table(torch.full_like(p, 0.25)), p)
    assert bets.visible("uniform", 20_000, 0.1, 1e-4)[0] < 0.01
