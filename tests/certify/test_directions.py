"""Every bet is fair: its e-value has expectation 1, by enumeration over all tokens of a small row."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.certify.answers import Block
from bebop.certify.bets import Bigram
from bebop.certify.directions import CONTAMINATION, DRAFT, FLOOR, SHARED_NOISE, Rows, Table, directions
from bebop.certify.noise import accepted_by_own_uniform, same_gumbel, same_uniform, same_uniform_rejected
from tests.certify.blocks import block, coarse

V, M, N = 30, 11, 40


def past() -> Bigram:
    learned = Bigram(V)
    g = np.random.default_rng(0)
    learned.learn(g.integers(V, size=400), g.integers(V, size=400))
    return learned


def plain(given: Block) -> Rows:
    return Rows(part=given, vocabulary=M, neighbour=given.probs.roll(3, 0), bigram=_small().table(given))


def _small() -> Bigram:
    learned = Bigram(M)
    g = np.random.default_rng(0)
    learned.learn(g.integers(M, size=400), g.integers(M, size=400))
    return learned


def truncated(given: Block) -> Block:
    """All tokens impossible but the first, or the first two or three."""
    p = given.probs * (torch.arange(M) < 1 + given.position[:, None] % 3)
    return replace(given, probs=p / p.sum(-1, keepdim=True))


def few() -> Rows:
    given = coarse(block(N, M), V)
    return Rows(part=given, vocabulary=V, bigram=past().table(given))


CASES: dict[str, Callable[[], Rows]] = {
    "whole vocabulary": lambda: plain(block(N, M)),
    "truncated": lambda: plain(truncated(block(N, M))),
    "coarse columns": few,
    "one-hot": lambda: plain(replace(block(N, M), probs=torch.eye(M, dtype=torch.float64)[torch.arange(N) % M])),
    "no past": lambda: Rows(part=replace(block(N, M), before=None, seen=None, draft=None, raw=None), vocabulary=M),
}


def expectations(rows: Rows, direction) -> Tensor:
    """Sum over x of p(x) r(x) / p(x), by the very formula of the bets: [N]."""
    cells = torch.arange(rows.p.shape[1]).expand(len(rows.p), -1)
    return (rows.p * direction.at(cells) / rows.p.clamp_min(FLOOR)).sum(-1)


@pytest.mark.parametrize("case", CASES)
def test_the_expectation_is_one(case: str) -> None:
    rows = CASES[case]()
    for name, direction in directions(rows):
        found = expectations(rows, direction)
        assert (found <= 1 + 1e-12).all(), name
        if case in ("whole vocabulary", "coarse columns"):  # no token is impossible
            assert (found - 1).abs().max() < 1e-12, name


@pytest.mark.parametrize("case", CASES)
def test_directions_are_distributions_and_their_distance_is_right(case: str) -> None:
    rows = CASES[case]()
    cells = torch.arange(rows.p.shape[1]).expand(len(rows.p), -1)
    for name, direction in directions(rows):
        r = direction.at(cells)
        assert (r >= 0).all() and (r.sum(-1) - 1).abs().max() < 1e-12, name
        assert (direction.tv(rows.p) - (r - rows.p).abs().sum(-1) / 2).abs().max() < 1e-9, name


def test_directions_do_not_depend_on_the_token() -> None:
    given = block(N, M)
    other = replace(given, tokens=(given.tokens + 1) % M, cells=(given.cells + 1) % M, logprobs=given.logprobs - 1,
                    reported=given.logprobs)  # fmt: skip
    cells = torch.arange(M).expand(N, -1)
    for (name, one), (_, two) in zip(directions(plain(given)), directions(plain(other)), strict=True):
        assert torch.equal(one.at(cells), two.at(cells)), name


def test_a_direction_that_peeks_at_the_token_is_not_fair() -> None:
    total = torch.zeros(N, dtype=torch.float64)
    for x in range(M):  # e(x) of a direction that knows x
        peeking = Table(torch.eye(M, dtype=torch.float64)[torch.full((N,), x)])
        total += peeking.at(torch.full((N, 1), x))[:, 0]
    assert (total > 1 + 1e-6).all()


def test_all_names_are_there() -> None:
    assert [name for name, _ in directions(plain(block(N, M)))] == [*CONTAMINATION, *DRAFT, *SHARED_NOISE]
    left_out = {*CONTAMINATION, *DRAFT, *SHARED_NOISE} - {name for name, _ in directions(few())}
    assert left_out == {"neighbour"}


def test_equal_mass_is_equal_over_tokens_and_not_over_columns() -> None:
    given = coarse(block(N, M), V)
    p = torch.full_like(given.probs, 0.9 / (M - 1))
    p[:, -1] = 0.1
    r = dict(directions(Rows(part=replace(given, probs=p), vocabulary=V)))["uniform"]
    cells = torch.arange(M).expand(N, -1)
    assert torch.allclose(r.at(cells), torch.tensor([1 / V] * (M - 1) + [(V - M + 1) / V], dtype=torch.float64))


def test_directions_are_what_they_are_called() -> None:
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.6, 0.2, 0.1]], dtype=torch.float64)
    given = replace(block(1, 4), probs=p, before=q, draft=q, raw=q, last=torch.tensor([2]), stops=(3,),
                    seen=torch.tensor([[True, False, False, True]]), twin=torch.tensor([1]))  # fmt: skip
    found = {name: one.at(torch.arange(4)[None])[0] for name, one in directions(Rows(part=given, vocabulary=4))}
    by_hand = {
        "row_before": q[0],
        "hotter": p[0] ** 0.8 / (p**0.8).sum(),
        "much_colder": p[0] ** 2 / (p**2).sum(),
        "argmax": [1, 0, 0, 0],
        "second": [0, 1, 0, 0],
        "nucleus": [0.4, 0.3, 0.2, 0.1],  # .9 falls short of .95
        "uniform": [0.25] * 4,
        "low_ids": [0.4 * 1.6, 0.3 * 0.9, 0.2 * 0.4, 0.1 * 0.1],
        "high_ids": [0.4 * 0.4, 0.3 * 1.1, 0.2 * 1.6, 0.1 * 1.9],
        "stop": [0, 0, 0, 1],
        "no_stop": [4 / 9, 3 / 9, 2 / 9, 0],
        "repeat": [0, 0, 1, 0],
        "seen": [0.8, 0, 0, 0.2],
        "unseen": [0, 0.6, 0.4, 0],
        "copies": [0, 1, 0, 0],
        "overlap": [1 / 7, 3 / 7, 2 / 7, 1 / 7],
        "residual": [1, 0, 0, 0],
        "draft_top": [0, 1, 0, 0],
        "no_draft_top": [4 / 7, 0, 2 / 7, 1 / 7],
        "residual_is_target": [0.1 + 0.12, 0.3 + 0.09, 0.2 + 0.06, 0.1 + 0.03],  # .7 are accepted
        "residual_unnormalised": [0.1 + 0.3, 0.3, 0.2, 0.1],  # the residual has one token alone
        "draft_greedy": [0.5, 0.5, 0, 0],  # accepted with .3 / .6
        "draft_no_stop": [0.1 / 0.9 + 0.3 / 0.9, 0.3 / 0.9, 0.2 / 0.9, 0],
        "accept_more": [0.1 + 0.225, 0.375, 0.2, 0.1],
        "draft": q[0],
    }
    for name, r in by_hand.items():
        assert found[name].tolist() == pytest.approx(torch.as_tensor(r).tolist(), abs=1e-7), name


# ---- noise that two draws share


def gumbel(*shape: int, seed: int) -> Tensor:
    return -torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log().neg().log()


def table(*row: float) -> Tensor:
    return torch.tensor([row], dtype=torch.float64)


def shares(tokens: Tensor, size: int) -> list[float]:
    return (torch.bincount(tokens, minlength=size) / len(tokens)).tolist()


def test_gumbel_noise_used_twice_by_hand_and_drawn() -> None:
    p, q, r = table(0.2, 0.4, 0.4), table(0.6, 0.3, 0.1), table(0, 0.25, 0.75)
    # Token 1 starts at 1.2, token 2 at .1333; from 1.2 on S = t - .4, so that token 1 has .25 / (1 + 1.2 - .4).
    assert same_gumbel(q, r)[0].tolist() == pytest.approx([0, 0.25 / 1.8, 1 - 0.25 / 1.8])
    g = gumbel(200_000, 3, seed=0)
    first, second, again = ((one.log() + g).argmax(-1) for one in (q, r, p))
    refused = torch.rand(len(g), generator=torch.Generator().manual_seed(1)) >= (p / q)[0, first]
    assert shares(second[refused], 3) == pytest.approx(same_gumbel(q, r)[0].tolist(), abs=4e-3)
    for y in range(3):  # given the first token, which may win again
        law = same_gumbel(q, p, torch.tensor([y]))[0]
        assert shares(again[first == y], 3) == pytest.approx(law.tolist(), abs=8e-3)
    assert same_gumbel(q, q, torch.tensor([1]))[0].tolist() == pytest.approx([0, 1, 0])
    hot = table(1, 0, 0)  # a token that is certain says nothing of the noise
    assert same_gumbel(hot, r)[0].tolist() == pytest.approx(r[0].tolist())


def test_a_uniform_used_twice_by_enumeration() -> None:
    """Tenths: every u between two multiples of a tenth does the same, so that ten of them are all."""
    p, q = table(0.2, 0.5, 0.3), table(0.4, 0.2, 0.4)
    residual, other = table(0, 1, 0), table(0.3, 0.3, 0.4)
    u = torch.arange(0.05, 1, 0.1).double()
    first = (q.cumsum(-1) < u[:, None]).sum(-1)
    second = (other.cumsum(-1) < u[:, None]).sum(-1)
    for y in range(3):
        law = same_uniform(q, other, torch.tensor([y]))[0]
        assert shares(second[first == y], 3) == pytest.approx(law.tolist())
    refused = ((q - p) / q).clamp_min(0)[0, first]
    mean = torch.zeros(3).double().index_add(0, second, refused / refused.sum())
    assert same_uniform_rejected(q, other, (q - p).clamp_min(0))[0].tolist() == pytest.approx(mean.tolist())
    assert same_uniform_rejected(q, residual, (q - p).clamp_min(0))[0].tolist() == pytest.approx([0, 1, 0])
    # Token 0 has u up to .4 and p / q = .5: always accepted. Token 2 has u from .6 on and p / q = .75.
    chances = accepted_by_own_uniform(p, q, q.cumsum(-1) - q)[0]
    assert chances.tolist() == pytest.approx([1, 1, 0.15 / 0.4])
