"""Tree verification: the joint distribution of what comes out is the target's at every temperature, with faults that
must be seen; as a second implementation, sibling by sibling in plain numbers."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.kernels.tree_verify import ancestry, tree_verify, visible
from bebop.kernels.verify import one_hot, sample
from bebop.kernels.verify import reference as chain_verify
from tests.goodness_of_fit import p_value

V, DRAWS, LEVEL = 4, 16_000, 1e-3
PARENTS, DEPTH = [-1, -1, 0, 0, 1], 2  # two children of the root; two of the first, one of the second
TEMPERATURES = [0.0, 0.7, 1.0, 1.3]


def at(logits: Tensor, temperature: float) -> Tensor:
    """Softmax, or the likeliest token."""
    if temperature == 0:
        return one_hot(logits.argmax(-1), V, logits.dtype)
    return (logits / temperature).softmax(-1)


@dataclass(frozen=True, slots=True)
class Case:
    """A tree drafted ``DRAWS`` times, with the target's distributions after every node and after every prefix."""

    tokens: Tensor
    q: Tensor | None
    p: Tensor
    u: Tensor
    tables: tuple[Tensor, Tensor, Tensor]  # [V], [V, V], [V, V, V]: the target after 0, 1, 2 tokens

    @property
    def joint(self) -> np.ndarray:
        """Of the first three tokens [V, V, V]."""
        first, second, third = self.tables
        return (first[:, None, None] * second[:, :, None] * third).numpy()


def case(temperature: float, *, greedy: bool = False, replaced: bool = False, scaled: bool = True) -> Case:
    """``greedy``: children are the likeliest tokens of q. Faults: drawn with replacement; q not renormalised."""
    rng = torch.Generator().manual_seed(3)
    tables = [1.3 * torch.randn(*[V] * n, V, generator=rng, dtype=torch.float64) for n in range(3)]
    drafts = [0.8 * table + 1.5 * torch.randn(table.shape, generator=rng, dtype=torch.float64) for table in tables]
    u = torch.rand(DRAWS, 2 * len(PARENTS) + 2, generator=rng, dtype=torch.float64)
    tokens, probs, before = torch.zeros(DRAWS, 0, dtype=torch.long), [], []
    for node, parent in enumerate(PARENTS):
        prefix = () if parent < 0 else (tokens[:, parent],)
        logits = drafts[len(prefix)][prefix].expand(DRAWS, V).clone()
        siblings = [tokens[:, i] for i, other in enumerate(PARENTS[:node]) if other == parent]
        whole = at(logits, temperature)
        for sibling in siblings:
            logits = logits.scatter(1, sibling[:, None], -torch.inf)
        left = at(logits, 0.0 if greedy else temperature)
        token = sample(whole if replaced else left, u[:, node])
        tokens = torch.cat([tokens, token[:, None]], 1)
        gone = sum((whole.gather(1, sibling[:, None]) for sibling in siblings), torch.zeros(DRAWS, 1))
        probs.append(left if scaled else left * (1 - gone))
        before.append((*prefix, token))
    targets = tuple(at(table, temperature) for table in tables)
    p = torch.stack([targets[0].expand(DRAWS, V), *(targets[len(way)][way] for way in before)], 1)
    return Case(tokens, None if greedy else torch.stack(probs, 1), p, u[:, len(PARENTS) :], targets)


def emitted(one: Case, accepted: Tensor, token: Tensor, path: Tensor) -> np.ndarray:
    """Counts [V, V, V] of three tokens: the path, the token after it, and then tokens of the target itself."""
    drafted = one.tokens.gather(1, (path[:, 1:] - 1).clamp_min(0))
    out = torch.cat([drafted, token[:, None]], 1).scatter(1, accepted[:, None], token[:, None])
    rest = torch.rand(DRAWS, 2, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    second = torch.where(accepted >= 1, out[:, 1], sample(one.tables[1][out[:, 0]], rest[:, 0]))
    third = torch.where(accepted >= 2, out[:, 2], sample(one.tables[2][out[:, 0], second], rest[:, 1]))
    return (out[:, 0] * V * V + second * V + third).bincount(minlength=V**3).view(V, V, V).numpy()


def smallest_p(one: Case, parents: list[int] = PARENTS) -> float:
    """Of the joint distribution of three tokens and of two, and of the first alone (Bonferroni)."""
    tree = torch.tensor(parents).expand(DRAWS, -1)
    accepted, token, path, _ = tree_verify(one.tokens, one.q, one.p, one.u, tree, DEPTH)
    counts, wanted = emitted(one, accepted, token, path), one.joint
    values = [p_value(counts.sum(axes), wanted.sum(axes)) for axes in ((), (2,), (1, 2))]
    assert accepted.max() == DEPTH or wanted.max() == 1, "nothing is tested"
    return 3 * min(values)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("greedy", [False, True])
def test_the_output_distribution_is_the_target(temperature: float, greedy: bool) -> None:
    assert smallest_p(case(temperature, greedy=greedy)) > LEVEL


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_broken_drafts_are_caught(temperature: float) -> None:
    """Siblings drawn with replacement but tested as without; what is left of q not renormalised; a wrong parent."""
    assert smallest_p(case(temperature, replaced=True)) < LEVEL / 100
    assert smallest_p(case(temperature, scaled=False)) < LEVEL / 100
    assert smallest_p(case(temperature), [-1, -1, 0, 0, 0]) < LEVEL / 100


def test_at_temperature_zero_the_longest_greedy_path_is_taken() -> None:
    one = case(0.0, greedy=True)
    accepted, token, path, _ = tree_verify(
        one.tokens, None, one.p, one.u, torch.tensor(PARENTS).expand(DRAWS, -1), DEPTH
    )
    best, place = one.p.argmax(-1), 0
    for node in range(len(PARENTS)):
        if PARENTS[node] == place - 1 and int(one.tokens[0, node]) == int(best[0, place]):
            place = node + 1
    assert int(path[0, int(accepted[0])]) == place and (token == best[0, place]).all()


# ---- sibling by sibling


def walk(one: Case, row: int, *, update: bool = True, renormalise: bool = True) -> tuple[list[int], list[float]]:
    """The accepted nodes of a row, and the distribution of the token after them, normalised as in the papers."""
    p_all, q_all, u = one.p[row].numpy(), one.q, one.u[row].numpy()
    nodes, at_node = [], -1
    p = p_all[0]
    for node, parent in enumerate(PARENTS):
        if parent != at_node:
            continue
        token = int(one.tokens[row, node])
        q = np.eye(V)[token] if q_all is None else q_all[row, node].numpy()
        if u[node] < (p[token] / q[token] if q[token] > 0 else 0):
            nodes.append(node)
            at_node, p = node, p_all[node + 1]
        elif update:
            residual = np.maximum(0, p - q)
            p = residual / residual.sum() if renormalise and residual.sum() > 0 else residual
    return nodes, list(p / p.sum() if p.sum() > 0 else p_all[at_node + 1])


@pytest.mark.parametrize("greedy", [False, True])
def test_it_decides_as_the_papers_do(greedy: bool) -> None:
    one = case(1.0, greedy=greedy)
    tree = torch.tensor(PARENTS).expand(DRAWS, -1)
    accepted, token, path, tried = tree_verify(one.tokens, one.q, one.p, one.u, tree, DEPTH)
    for row in range(400):
        nodes, after = walk(one, row)
        assert path[row].tolist() == [0, *(node + 1 for node in nodes)] + [0] * (DEPTH - len(nodes))
        full = not any(parent == (nodes or [-1])[-1] for parent in PARENTS)
        u = one.u[row, len(PARENTS) + full, None]
        assert int(token[row]) == int(sample(torch.tensor(after)[None], u)), "of the same distribution and number"
    assert tried[:, 0].unique().tolist() == [1, 2] and (accepted == (path > 0).sum(1)).all()
    second = torch.where(accepted > 0, tried[:, 1], -1)
    assert second[path[:, 1] == 1].unique().tolist() == [1, 2] and second[path[:, 1] == 2].unique().tolist() == [1]


@pytest.mark.slow
def test_broken_residuals_are_caught() -> None:
    one = case(1.0)

    def first(**broken: bool) -> float:
        """The p-value of the first token, drawn with a number of its own where it was not accepted."""
        counts = np.zeros(V)
        for row in range(3000):
            nodes, after = walk(one, row, **broken)
            drawn = int((np.cumsum(after)[:-1] <= float(one.u[row, -1])).sum())
            counts[int(one.tokens[row, nodes[0]]) if nodes else drawn] += 1
        return p_value(counts, one.tables[0].numpy())

    assert first() > LEVEL
    assert first(update=False) < LEVEL / 10 and first(renormalise=False) < LEVEL / 10


# ---- edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_chain_is_chain_verification_to_the_bit(dtype: torch.dtype, greedy: bool) -> None:
    rng = torch.Generator().manual_seed(4)
    q = (3 * torch.randn(500, 3, 9, generator=rng, dtype=dtype)).softmax(-1)
    p = (torch.cat([q, q[:, :1]], 1).log() + 0.5 * torch.randn(500, 4, 9, generator=rng, dtype=dtype)).softmax(-1)
    u = torch.rand(500, 8, generator=rng, dtype=torch.float64)
    tokens, lengths = sample(q, u[:, :3]), torch.arange(500) % 4
    probs = None if greedy else q
    chain = torch.arange(-1, 2).expand(500, -1)
    for some in (None, lengths):
        accepted, token, path, _ = tree_verify(tokens, probs, p, u[:, 3:], chain, 3, some)
        wanted = chain_verify(tokens, probs, p, u[:, 3:], some)
        assert torch.equal(accepted, wanted[0]) and torch.equal(token, wanted[1])
        assert (path == torch.arange(4) * (torch.arange(4) <= accepted[:, None])).all()
    assert accepted.unique().tolist() == [0, 1, 2, 3]


def test_children_of_all_tokens_leave_nothing_to_reject() -> None:
    """Without replacement the last of V children is what is left of the target: one of them is always accepted."""
    rng = torch.Generator().manual_seed(5)
    logits, u = torch.randn(2000, V, generator=rng, dtype=torch.float64), torch.rand(2000, 3 * V, generator=rng)
    p, tokens, probs = torch.randn(2000, V, generator=rng, dtype=torch.float64).softmax(-1), [], []
    for node in range(V):
        probs.append(logits.softmax(-1))
        tokens.append(sample(probs[-1], u[:, node]))
        logits = logits.scatter(1, tokens[-1][:, None], -torch.inf)
    drafted, q = torch.stack(tokens, 1), torch.stack(probs, 1)
    flat = torch.full((2000, V), -1)
    accepted, _, path, _ = tree_verify(drafted, q, p[:, None].expand(-1, V + 1, -1), u[:, V:].double(), flat, 1)
    assert (accepted == 1).all() and path[:, 1].unique().tolist() == [1, 2, 3, 4]


def test_rounding_never_yields_a_token_without_mass() -> None:
    below_one = 1 - 2.0**-53
    p = torch.zeros(3, 4, 40)
    p[:, :, 5:9] = torch.tensor([1e-38, 1.0, 1e-30, 1e-20])
    q = p[:, :3] * torch.tensor([1.0, 1.01, 0.99])[:, None, None]
    tokens = torch.tensor([[6, 5, 6], [6, 6, 7], [8, 0, 1]])
    parents = torch.tensor([-1, -1, 0]).expand(3, -1)
    for value in (0.0, below_one):
        u = torch.full((3, 5), value, dtype=torch.float64)
        for probs in (q, None):
            accepted, token, path, _ = tree_verify(tokens, probs, p, u, parents, 2)
            for row, way in enumerate(path.tolist()):
                steps = [(before, node - 1) for before, node in pairwise(way) if node]
                assert all(p[row, before, tokens[row, node]] > 0 for before, node in steps)
            rows = path.gather(1, accepted[:, None])[:, 0]
            assert (p[torch.arange(3), rows, token] > 0).all()


# ---- Who follows whom in a tree of drafts, and what its nodes see of a cache

#        0   1   2  3  4  5  6
TREES = [[-1, -1, 0, 0, 2, 1, 4], [-1, 0, 1, 2, 3, 4, 5], [-1] * 7]


def test_the_way_to_a_node_is_found_by_following_its_parents() -> None:
    for row, tree in zip(ancestry(torch.tensor(TREES)).tolist(), TREES, strict=True):
        for node in range(len(tree)):
            way, at = {node}, tree[node]
            while at >= 0:
                way, at = way | {at}, tree[at]
            assert {other for other, on in enumerate(row[node]) if on} == way
    assert ancestry(torch.tensor([[-1]])).tolist() == [[[True]]]


def test_a_deep_chain_has_all_before_it() -> None:
    for nodes in (2, 3, 4, 5, 16, 17, 63, 64):
        chain = torch.arange(-1, nodes - 1)[None]
        assert torch.equal(ancestry(chain)[0], torch.ones(nodes, nodes).tril().bool())


def test_a_node_sees_the_text_and_its_way() -> None:
    """Two rows with 2 and 4 entries of text; node 1 of the first tree does not see node 0, its sibling."""
    ways = ancestry(torch.tensor(TREES[:2]))
    seen = visible(torch.tensor([2, 4]), ways, 12)
    assert seen[0, 1].tolist() == [True, True, False, True] + [False] * 8
    assert seen[0, 6].nonzero()[:, 0].tolist() == [0, 1, 2, 4, 6, 8]
    chain = torch.arange(12) <= torch.arange(4, 11)[:, None]
    assert torch.equal(seen[1], chain)
