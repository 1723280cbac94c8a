from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.block_verify import reference as block_reference
from bebop.kernels.verify import one_hot, reference, sample
from tests.cases import slow_but
from tests.goodness_of_fit import p_value

pytest.importorskip("triton", reason="Triton is not installed")
from bebop.kernels import block_verify_triton, verify_triton

BELOW_ONE = 1 - 2.0**-53
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU the kernels run in Triton's interpreter
Verify = Callable[..., tuple[Tensor, Tensor]]
pytestmark = pytest.mark.usefixtures("patched_once")


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def numbers(batch: int, drafts: int, seed: int) -> Tensor:
    """Uniforms with some at the ends of the interval."""
    u = torch.rand(batch, drafts + 2, dtype=torch.float64, generator=generator(seed))
    ends = torch.rand(batch, drafts + 2, generator=generator(seed + 1))
    return u.where(ends > 0.15, 0.0).where(ends < 0.85, BELOW_ONE)


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a.cpu(), b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [x.to(DEVICE) for x in tensors]


@pytest.mark.parametrize("vocabulary", slow_but([1, 129], [1, 2, 127, 128, 129, 300]))
def test_equals_the_reference_where_sums_are_exact(vocabulary: int) -> None:
    """Masses of a few 1024ths, many of them 0, add up without rounding in any order: not one token may differ."""
    batch, drafts = 4, 3
    mass = torch.randint(-4, 8, (2, batch, drafts + 1, vocabulary), generator=generator(vocabulary)).clamp_min(0)
    mass[..., -1] += 1
    p, q = mass[0] / 1024, mass[1, :, :drafts] / 1024
    tokens = sample(q, torch.rand(batch, drafts, generator=generator(1)))
    u = numbers(batch, drafts, vocabulary)
    for lengths in (None, torch.tensor([0, 3, 1, 2])):
        found = verify_triton.launch(
            *on_device(tokens, q, p, u), None if lengths is None else lengths.to(DEVICE), block=128
        )
        assert same(found, reference(tokens, q, p, u, lengths))


def distributions(
    batch: int, drafts: int, vocabulary: int, seed: int, noise: float = 0.4, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafted tokens, draft logits and target logits that resemble each other."""
    one, two, three = ({"generator": generator(seed + k, device), "device": device} for k in range(3))
    target = torch.randn(batch, drafts + 1, vocabulary, **one) * 2
    draft = target[:, :drafts] + noise * torch.randn(batch, drafts, vocabulary, **two)
    draw = torch.rand(batch, drafts, dtype=torch.float64, **three)
    return sample(draft.softmax(-1), draw), draft, target


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_equals_the_reference_on_softmaxes(dtype: torch.dtype) -> None:
    tokens, draft, target = distributions(8, 3, 500, 5)
    q, p = draft.softmax(-1).to(dtype), target.softmax(-1).to(dtype)
    u = torch.rand(8, 5, dtype=torch.float64, generator=generator(6))
    expected = reference(tokens, q.float(), p.float(), u)
    assert same(verify_triton.launch(*on_device(tokens, q, p, u), block=128), expected)
    assert len(expected[0].unique()) >= 3


def test_one_hot_drafts_need_no_distribution() -> None:
    """Drafts that were not sampled: what the dense one-hot distributions give, with ragged lengths and tokens without
    mass."""
    tokens, _, target = distributions(8, 3, 300, 5)
    p = (target * 4).softmax(-1)
    tokens[::2] = p[::2, :3].argmax(-1)
    p[1, 0] = p[1, 0].scatter(-1, tokens[1, :1], 0.0)
    u = torch.rand(8, 5, dtype=torch.float64, generator=generator(6))
    lengths = torch.tensor([3, 3, 2, 3, 1, 0, 3, 3])
    dense = one_hot(tokens, 300, p.dtype)
    for given in (None, lengths):
        expected = reference(tokens, dense, p, u, given)
        assert len(expected[0].unique()) >= 3
        assert same(reference(tokens, None, p, u, given), expected)
        there = None if given is None else given.to(DEVICE)
        tokens_, p_, u_ = on_device(tokens, p, u)
        assert same(verify_triton.launch(tokens_, None, p_, u_, there, block=128), expected)


def test_a_uniform_on_a_boundary_takes_the_token_above_it() -> None:
    """Eight tokens of mass 1/8 and u = i/8: cumsum > u * total, strictly, gives the i-th."""
    support = torch.tensor([3, 50, 127, 128, 200, 255, 256, 299])
    target, draft = torch.full((8, 2, 300), -float("inf")), torch.full((8, 1, 300), -float("inf"))
    target[:, :, support], draft[:, :, 7] = 0.0, 0.0
    u = torch.stack([torch.zeros(8), torch.arange(8) / 8, torch.zeros(8)], 1).double()
    inputs = on_device(torch.full((8, 1), 7), draft.softmax(-1), target.softmax(-1), u)
    accepted, token = verify_triton.launch(*inputs, block=128)
    assert accepted.tolist() == [0] * 8 and torch.equal(token.cpu(), support)


def test_rounding_never_yields_a_token_without_mass() -> None:
    """Masses down to 1e-38 beside one of nearly 1, zeros at both ends, a residual of a few ulps, u at both ends."""
    V, inf = 300, float("inf")
    logits = torch.full((6, 2, V), -inf)
    logits[:, :, 7:250:3] = -60.0
    logits[:2, :, 130] = 0.0  # one heavy token in the middle, a tail below rounding behind it
    logits[2:4, :, 7:250] = torch.linspace(-80, 0, 243)
    draft = logits[:, :1] + 1e-6 * torch.randn(6, 1, V, generator=generator(0))
    q, p = draft.softmax(-1), logits.softmax(-1)
    tokens = q.argmax(-1)
    u = torch.tensor([[BELOW_ONE] * 3, [0.0] * 3] * 3, dtype=torch.float64)
    accepted, token = verify_triton.launch(*on_device(tokens, q, p, u), block=128)
    accepted, token = accepted.cpu(), token.cpu()
    assert (p[torch.arange(6), accepted, token] > 0).all()


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    p = torch.rand(4, 1, 50, generator=generator(1)).softmax(-1)
    q, target = p * 1.01, torch.cat([p, p], 1)
    tokens = sample(p, torch.rand(4, 1, generator=generator(2)))
    u = torch.tensor([[BELOW_ONE, 0.3, 0.9]] * 4, dtype=torch.float64)
    accepted, token = verify_triton.launch(*on_device(tokens, q, target, u))
    assert accepted.tolist() == [0] * 4
    assert torch.equal(token.cpu(), sample(p[:, 0], u[:, 1]))


def test_target_mass_of_zero_is_never_accepted_even_at_u_of_zero() -> None:
    """Strict: with ">=" (0 * q <= 0) the draft would pass."""
    q, p = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    arguments = torch.tensor([[0]]), q, p, torch.zeros(1, 3, dtype=torch.float64)
    expected = (torch.tensor([0]), torch.tensor([1]))
    assert same(reference(*arguments), expected)
    assert same(verify_triton.launch(*on_device(*arguments)), expected)


def test_strides_and_no_requests() -> None:
    tokens, draft, target = distributions(3, 2, 60, 12)
    q, p = draft.softmax(-1), target.softmax(-1)
    u = torch.rand(3, 4, dtype=torch.float64, generator=generator(4))
    scattered = [x.to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1) for x in (tokens, q, p, u)]
    assert same(verify_triton.launch(*scattered), reference(tokens, q, p, u))
    empty = [x[:0] for x in on_device(tokens, q, p, u)]
    assert [len(x) for x in verify_triton.launch(*empty)] == [0, 0]


@pytest.mark.parametrize("launch", [verify_triton.launch, block_verify_triton.launch])
def test_what_does_not_fit_is_named(launch: Verify) -> None:
    tokens, q, p = distributions(3, 2, 60, 12)
    u = torch.rand(3, 4, dtype=torch.float64)
    with pytest.raises(UserError, match=r"target of shape \[3, 2, 60\].*\[3, 3, 60\]"):
        launch(tokens, q, p[:, :2], u)
    with pytest.raises(UserError, match=r"not torch\.float64"):
        launch(tokens, q.double(), p.double(), u)


# ---- distributions of the reference, which the kernels equal: 20,000 draws against the exact joint distribution

V, K, DRAWS = 4, 2, 20_000


def tables(seed: int) -> tuple[Tensor, Tensor]:
    """Draft and target distributions of the next token after any prefix of up to K tokens: [V ** 0 + ... + V ** K,
    V]."""
    rows = sum(V**i for i in range(K + 1))
    draft, target = torch.randn(2, rows, V, dtype=torch.float64, generator=generator(seed)).mul(1.2).softmax(-1)
    target[:, 1] = 0  # a token that the target never emits
    return draft, target / target.sum(-1, keepdim=True)


def place(prefix: Tensor) -> Tensor:
    """Row of the tables for prefixes [..., i]."""
    i = prefix.shape[-1]
    return sum((V**j for j in range(i)), torch.zeros(prefix.shape[:-1], dtype=torch.long)) + sum(
        (prefix[..., j] * V ** (i - 1 - j) for j in range(i)), torch.zeros(prefix.shape[:-1], dtype=torch.long)
    )


def exact_joint(draft: Tensor, target: Tensor) -> dict[tuple[int, ...], float]:
    """P(accepted, accepted tokens, next token) = product of min(p, q), then max(0, p - q), or p after K drafts."""
    probs = {}
    for n in range(K + 1):
        for tokens in product(range(V), repeat=n + 1):
            rows = [int(place(torch.tensor(tokens[:i], dtype=torch.long))) for i in range(n + 1)]
            mass = 1.0
            for row, token in zip(rows[:n], tokens[:n], strict=True):
                mass *= min(float(draft[row, token]), float(target[row, token]))
            last = target[rows[n], tokens[n]] - (draft[rows[n], tokens[n]] if n < K else 0.0)
            probs[tokens] = mass * max(0.0, float(last))
    return probs


def chains_p_value(verify: Verify, seed: int) -> float:
    """Of (accepted, tokens) over 20,000 chains."""
    draft, target = tables(seed)
    tokens = torch.empty(DRAWS, 0, dtype=torch.long)
    u = torch.rand(DRAWS, 2 * K + 2, dtype=torch.float64, generator=generator(seed + 100))
    for i in range(K):
        tokens = torch.cat([tokens, sample(draft[place(tokens)], u[:, K + 2 + i])[:, None]], 1)
    q = torch.stack([draft[place(tokens[:, :i])] for i in range(K)], 1)
    p = torch.stack([target[place(tokens[:, :i])] for i in range(K + 1)], 1)
    accepted, token = verify(tokens, q, p, u[:, : K + 2])
    rows = zip(accepted.tolist(), tokens.tolist(), token.tolist(), strict=True)
    counts = Counter((*chain[:n], last) for n, chain, last in rows)
    probs = exact_joint(draft, target)
    assert abs(sum(probs.values()) - 1) < 1e-12
    assert set(counts) <= set(probs)
    return p_value(np.array([counts[o] for o in probs]), np.array(list(probs.values())))


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow_but(range(2), range(5)))
def test_joint_distribution_of_accepted_and_next_tokens(seed: int) -> None:
    assert chains_p_value(reference, seed) > 0.001 / 5


def bonus_of_row_k(tokens: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return reference(tokens, q, torch.cat([p[:, :-1], p[:, -2:-1]], 1), u)


def residual_is_p(tokens: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    accepted, token = reference(tokens, q, p, u)
    wrong = sample(p[torch.arange(len(p)), accepted], u[:, -2])
    return accepted, torch.where(accepted == K, token, wrong)


def one_number_for_test_and_draw(tokens: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return reference(tokens, q, p, torch.cat([u[:, :-2], u[:, :1], u[:, :1]], 1))


@pytest.mark.parametrize("fault", [bonus_of_row_k, residual_is_p, one_number_for_test_and_draw])
def test_planted_faults_are_rejected(fault: Verify) -> None:
    assert chains_p_value(fault, 0) < 1e-9


RULES = {
    "chain": (verify_triton.launch, reference, True),
    "one-hot chain": (verify_triton.launch, reference, False),
    "block": (block_verify_triton.launch, block_reference, True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("batch", "vocabulary"),  # full vocabularies are slow interpreted
    [(4, 300), pytest.param(256, 151_936, marks=pytest.mark.gpu), pytest.param(8, 248_320, marks=pytest.mark.gpu)],
)
def test_full_vocabularies_on_the_device(batch: int, vocabulary: int, rule: str) -> None:
    launch, wanted, sampled = RULES[rule]
    tokens, q, p, u = problem(batch, 3, vocabulary, 6, DEVICE)
    found, expected = (verify(tokens, q if sampled else None, p, u) for verify in (launch, wanted))
    # A uniform may fall within rounding of a block's threshold or of a boundary between two tokens: 1 in 32 may differ.
    assert (found[0] != expected[0]).sum() <= (batch // 32 if rule == "block" else 0)
    assert (found[1] != expected[1]).sum() <= batch // 32


# ---- Block verification in Triton against its reference on the same uniforms: interpreted here, compiled on a GPU


def problem(
    batch: int, drafts: int, vocabulary: int, seed: int, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drafts that were sampled from q, q, p and uniforms, some of them at the ends; acceptance of about a half."""
    one, two, three, four = ({"generator": generator(seed + k, device), "device": device} for k in range(4))
    target = torch.randn(batch, drafts + 1, vocabulary, **one) * 2
    draft = target[:, :drafts] + 0.8 * torch.randn(batch, drafts, vocabulary, **two)
    q, p = draft.softmax(-1), target.softmax(-1)
    u = torch.rand(batch, 2 * drafts + 2, dtype=torch.float64, **three)
    tokens = sample(q, u[:, drafts + 2 :])
    ends = torch.rand(batch, drafts + 2, **four)
    return tokens, q, p, u[:, : drafts + 2].where(ends > 0.05, 0.0).where(ends < 0.95, BELOW_ONE)


def launched(*inputs: Tensor, lengths: Tensor | None = None, block: int | None = 128) -> tuple[Tensor, Tensor]:
    moved = None if lengths is None else lengths.to(DEVICE)
    accepted, token = block_verify_triton.launch(*(x.to(DEVICE) for x in inputs), moved, block=block)
    return accepted.cpu(), token.cpu()


SIZES = [(1, 300), (2, 1), (3, 129), (4, 128), (7, 500)]


@pytest.mark.parametrize(("drafts", "vocabulary"), slow_but([(2, 1), (3, 129)], SIZES, several=True))
def test_blocks_equal_the_reference(drafts: int, vocabulary: int) -> None:
    inputs = problem(6, drafts, vocabulary, 10 * drafts)
    assert same(launched(*inputs), block_reference(*inputs))


def test_blocks_of_ragged_lengths_are_not_chain_verification() -> None:
    """Every length beside every other, 0 included. One by one accepts less and ends elsewhere."""
    inputs = problem(8, 3, 200, 0)
    lengths = torch.arange(8) % 4
    found = launched(*inputs, lengths=lengths)
    assert same(found, block_reference(*inputs, lengths))
    assert (found[0] <= lengths).all() and len(found[0].unique()) == 4
    assert not same(found, reference(*inputs, lengths))
    assert not same(found, block_reference(*inputs))


def test_blocks_in_bf16_of_any_stride_and_of_no_requests() -> None:
    tokens, q, p, u = problem(4, 2, 200, 3)
    rounded = tokens, q.bfloat16(), p.bfloat16(), u
    assert same(launched(*rounded), block_reference(tokens, rounded[1].float(), rounded[2].float(), u))
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (tokens, q, p, u)]
    assert same(launched(*turned, block=None), block_reference(tokens, q, p, u))
    assert [len(x) for x in launched(*(x[:0] for x in turned))] == [0, 0]


@pytest.mark.slow
def test_rounding_of_blocks_never_yields_a_token_without_mass() -> None:
    """Masses down to 1e-38, distributions that agree, drafts that are impossible under the target or under both."""
    p = torch.zeros(5, 3, 200)
    p[:, :, 105:109] = torch.tensor([1e-38, 1.0, 1e-30, 1e-20])
    q = p[:, :2] * torch.tensor([1.0, 1.01, 0.99, 1.0, 1.0])[:, None, None]
    q[3] = torch.nn.functional.one_hot(torch.tensor([0, 0]), 200)
    tokens = torch.tensor([[106, 105], [106, 106], [108, 106], [0, 0], [0, 0]])
    for value in (0.0, BELOW_ONE):
        u = torch.full((5, 4), value, dtype=torch.float64)
        accepted, token = launched(tokens, q, p, u)
        assert (p[torch.arange(5), accepted, token] > 0).all() and accepted[3:].tolist() == [0, 0]
        assert torch.equal(accepted, block_reference(tokens, q, p, u)[0])
