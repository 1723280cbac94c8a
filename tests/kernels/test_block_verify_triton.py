"""Block verification in Triton against its reference on the same uniforms: interpreted here, compiled on a GPU."""

import pytest
import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.block_verify import reference
from bebop.kernels.verify import reference as chain_reference
from bebop.kernels.verify import sample
from tests.cases import slow_but

block_triton = pytest.importorskip("bebop.kernels.block_verify_triton", reason="Triton is not installed")

BELOW_ONE = 1 - 2.0**-53
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("patched_once")


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


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
    accepted, token = block_triton.launch(*(x.to(DEVICE) for x in inputs), moved, block=block)
    return accepted.cpu(), token.cpu()


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


SIZES = [(1, 300), (2, 1), (3, 129), (4, 128), (7, 500)]


@pytest.mark.parametrize(("drafts", "vocabulary"), slow_but([(2, 1), (3, 129)], SIZES, several=True))
def test_equals_the_reference(drafts: int, vocabulary: int) -> None:
    inputs = problem(6, drafts, vocabulary, 10 * drafts)
    assert same(launched(*inputs), reference(*inputs))


def test_ragged_lengths_and_it_is_not_chain_verification() -> None:
    """Every length beside every other, 0 included. One by one accepts less and ends elsewhere."""
    inputs = problem(8, 3, 200, 0)
    lengths = torch.arange(8) % 4
    found = launched(*inputs, lengths=lengths)
    assert same(found, reference(*inputs, lengths))
    assert (found[0] <= lengths).all() and len(found[0].unique()) == 4
    assert not same(found, chain_reference(*inputs, lengths))
    assert not same(found, reference(*inputs))


def test_bf16_and_strides_and_no_requests() -> None:
    tokens, q, p, u = problem(4, 2, 200, 3)
    rounded = tokens, q.bfloat16(), p.bfloat16(), u
    assert same(launched(*rounded), reference(tokens, rounded[1].float(), rounded[2].float(), u))
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (tokens, q, p, u)]
    assert same(launched(*turned, block=None), reference(tokens, q, p, u))
    assert [len(x) for x in launched(*(x[:0] for x in turned))] == [0, 0]


@pytest.mark.slow
def test_rounding_never_yields_a_token_without_mass() -> None:
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
        assert torch.equal(accepted, reference(tokens, q, p, u)[0])


def test_what_does_not_fit_is_named() -> None:
    tokens, q, p, u = problem(2, 2, 50, 0)
    with pytest.raises(UserError, match=r"target of shape \[2, 2, 50\]"):
        block_triton.launch(tokens, q, p[:, :2], u)
    with pytest.raises(UserError, match=r"not torch\.float64"):
        block_triton.launch(tokens, q.double(), p, u)


@pytest.mark.parametrize(
    ("batch", "vocabulary"),  # full vocabularies are slow interpreted
    [(4, 300), pytest.param(256, 151_936, marks=pytest.mark.gpu), pytest.param(8, 248_320, marks=pytest.mark.gpu)],
)
def test_full_vocabularies_on_the_device(batch: int, vocabulary: int) -> None:
    inputs = problem(batch, 3, vocabulary, 6, DEVICE)
    found, expected = block_triton.launch(*inputs), reference(*inputs)
    # A uniform may fall within rounding of a threshold or a boundary: 1 in 32 may differ, no more.
    assert all((one != other).sum() <= batch // 32 for one, other in zip(found, expected, strict=True))
