import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.stats import FIELDS, PairStats, pair_stats, reference
from tests.cases import slow_but

stats_triton = pytest.importorskip("bebop.kernels.stats_triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy in the interpreter: inf - inf, masked
    pytest.mark.usefixtures("patched_once"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")


def logits(rows: int, vocabulary: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    draft, target = torch.randn(2, rows, vocabulary, generator=generator, device=device) * 3
    return draft, target


def plain(q: list[float], p: list[float]) -> dict[str, float]:
    """The definitions, one row, in double precision."""

    def divergence(a: list[float], b: list[float]) -> float:
        return sum((x * math.log(x / y) if y > 0 else INF) for x, y in zip(a, b, strict=True) if x > 0)

    return {
        "overlap": sum(min(x, y) for x, y in zip(q, p, strict=True)),
        "target_only": p[q.index(max(q))],
        "draft_entropy": -sum(x * math.log(x) for x in q if x > 0),
        "target_entropy": -sum(x * math.log(x) for x in p if x > 0),
        "kl_pq": divergence(p, q),
        "kl_qp": divergence(q, p),
        "alpha_p_gt_q": sum(x for x, y in zip(q, p, strict=True) if y > x),
        "alpha_q_ge_p": sum(y for x, y in zip(q, p, strict=True) if x >= y),
    }


def assert_close(found: PairStats, expected: PairStats, tolerance: float = 1e-6) -> None:
    """Absolute up to 1, relative above, where fp32 itself ends."""
    for name in FIELDS:
        a, b = getattr(found, name).cpu(), getattr(expected, name).cpu()
        assert a.dtype == torch.float32
        scale = b.abs().nan_to_num(posinf=1).clamp_min(1)
        torch.testing.assert_close(
            a / scale, b / scale, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_numbers_worked_by_hand() -> None:
    q, p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[0.75, 0.25, 0.0], [0.0, 0.5, 0.5]])
    found = pair_stats(q, p, from_logits=False)
    ln2 = math.log(2)
    by_hand = {
        "overlap": [0.75, 0],
        "target_only": [0.75, 0],
        "draft_entropy": [ln2, 0],
        "target_entropy": [0.75 * math.log(4 / 3) + 0.5 * ln2, ln2],
        "kl_pq": [0.75 * math.log(1.5) - 0.25 * ln2, INF],
        "kl_qp": [0.5 * math.log(4 / 3), INF],
        "alpha_p_gt_q": [0.5, 0],
        "alpha_q_ge_p": [0.25, 0],
    }
    assert_close(found, PairStats(**{name: torch.tensor(value) for name, value in by_hand.items()}), 1e-7)
    assert_close(pair_stats(q.log(), p.log()), found)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 40), st.sampled_from([0.3, 1.0, 2.5]), st.integers(0, 999))
def test_reference_equals_the_definitions(rows: int, vocabulary: int, temperature: float, seed: int) -> None:
    draft, target = (x.double() for x in logits(rows, vocabulary, seed))
    found = pair_stats(draft, target, temperature=temperature)
    q, p = (draft / temperature).softmax(-1), (target / temperature).softmax(-1)
    lines = [plain(*pair) for pair in zip(q.tolist(), p.tolist(), strict=True)]
    assert_close(
        found, PairStats(**{name: torch.tensor([float(line[name]) for line in lines]) for name in FIELDS}), 1e-6
    )
    assert torch.equal(found.overlap, found.alpha_p_gt_q + found.alpha_q_ge_p)
    torch.testing.assert_close(found.overlap, 1 - (p - q).abs().sum(-1).float() / 2, rtol=0, atol=1e-6)
    assert (found.kl_pq >= -1e-6).all() and (found.overlap <= 1 + 1e-6).all()


@pytest.mark.parametrize(
    ("vocabulary", "block"),
    slow_but([(1, 128), (129, 128)], [(1, 128), (127, 128), (128, 128), (129, 128), (700, 256)], several=True),
)
@pytest.mark.parametrize("from_logits", [True, False])
def test_kernel_equals_the_reference(vocabulary: int, block: int, from_logits: bool) -> None:
    draft, target = logits(3, vocabulary, vocabulary)
    temperature = 0.7 if from_logits else 1.0
    if not from_logits:
        draft, target = draft.softmax(-1), target.softmax(-1)
    exact = reference(draft.double(), target.double(), temperature, from_logits)
    found = stats_triton.launch(draft.to(DEVICE), target.to(DEVICE), temperature, from_logits, block=block)
    assert_close(found, exact)
    assert torch.equal(found.overlap, found.alpha_p_gt_q + found.alpha_q_ge_p)


def extremes() -> tuple[Tensor, Tensor]:
    """Rows: disjoint supports, one-hot target, q = p, a draft without the first tile, tied maxima in two tiles."""
    draft, target = logits(5, 300, 3)
    draft[0, 150:], target[0, :150] = -INF, -INF
    target[1] = -INF
    target[1, 140] = 2.0
    draft[2] = target[2]
    draft[3, :128] = -INF
    draft[4, [20, 200]] = 50.0
    return draft, target


@pytest.mark.parametrize("from_logits", [True, False])
def test_extremes_agree_and_are_right(from_logits: bool) -> None:
    draft, target = extremes()
    if not from_logits:
        draft, target = draft.softmax(-1), target.softmax(-1)
    expected = reference(draft.double(), target.double(), from_logits=from_logits)
    assert_close(pair_stats(draft, target, from_logits=from_logits), expected)
    found = stats_triton.launch(draft.to(DEVICE), target.to(DEVICE), 1.0, from_logits, block=128)
    assert_close(found, expected)
    assert expected.overlap[0] == 0 and expected.kl_pq[0] == expected.kl_qp[0] == INF
    assert expected.target_entropy[1] == 0 and expected.kl_qp[1] == INF and expected.kl_pq[1] < INF
    assert abs(expected.overlap[2] - 1) < 1e-6 and abs(expected.kl_pq[2]) < 1e-6
    assert expected.kl_pq[3] == INF and expected.kl_qp[3] < INF
    p = target[4].softmax(-1) if from_logits else target[4]
    assert expected.target_only[4] == pytest.approx(float(p[20]), rel=1e-5)  # the first of the tied
    values = torch.stack([getattr(found, name) for name in FIELDS])
    assert not values.isnan().any()


def test_bf16_strides_chunks_and_no_rows() -> None:
    draft, target = (x.bfloat16() for x in logits(8, 200, 1))
    exact = reference(draft.double(), target.double())
    assert_close(pair_stats(draft, target), exact)
    wide = [torch.cat([x, x], 1).to(DEVICE)[::2, :200] for x in (draft, target)]
    half = PairStats(**{name: getattr(exact, name)[::2] for name in FIELDS})
    assert_close(stats_triton.launch(*wide, 1.0, True, block=128), half)
    across = [x.t().contiguous().t().to(DEVICE) for x in (draft, target)]
    assert_close(stats_triton.launch(*across, 1.0, True, block=128), exact)
    nothing = pair_stats(draft[:0], target[:0])
    assert [len(getattr(nothing, field.name)) for field in dataclasses.fields(nothing)] == [0] * 8


def test_what_does_not_fit_is_named() -> None:
    draft, target = logits(2, 5, 0)
    with pytest.raises(UserError, match=r"\[2, 5\] and \[1, 5\]"):
        pair_stats(draft, target[:1])
    with pytest.raises(UserError, match=r"temperature 0\.0"):
        pair_stats(draft, target, temperature=0.0)
    with pytest.raises(UserError, match=r"temperature 0\.5"):
        pair_stats(draft.softmax(-1), target.softmax(-1), temperature=0.5, from_logits=False)


# Full vocabularies are slow interpreted. V = 50,257 has no aligned row but the first.
@pytest.mark.parametrize(
    ("rows", "vocabulary", "from_logits"),
    [
        (2, 130, True),
        (2, 130, False),
        pytest.param(256, 151_936, True, marks=pytest.mark.gpu),
        pytest.param(256, 151_936, False, marks=pytest.mark.gpu),
        pytest.param(256, 50_257, True, marks=pytest.mark.gpu),
    ],
)
def test_full_vocabularies_on_the_device(rows: int, vocabulary: int, from_logits: bool) -> None:
    draft, target = logits(rows, vocabulary, 0, DEVICE)
    if from_logits:
        draft, target = draft.bfloat16(), target.bfloat16()
    else:
        draft, target = draft.softmax(-1), target.softmax(-1)
    expected = reference(draft.double(), target.double(), from_logits=from_logits)
    assert_close(pair_stats(draft, target, from_logits=from_logits), expected, 2e-5)
    assert_close(stats_triton.launch(draft, target, 1.0, from_logits), expected, 2e-5)
