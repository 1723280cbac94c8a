"""The Triton kernels against the reference in fp64: in the interpreter here, compiled where there is a GPU."""

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.losses import tv_loss
from bebop.kernels.row_losses import KINDS, RowLosses, reference
from tests.cases import slow_but

pytest.importorskip("triton")
triton_losses = importlib.import_module("bebop.kernels.row_losses_triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
ROOT = Path(__file__).resolve().parents[2]
# A rounded gradient is off by half a unit in the last place; the interpreter truncates to bf16, which makes it a whole.
BF16_ULP = 2.0**-8 if DEVICE == "cuda" else 2.0**-7

pytestmark = [
    # 0 * -inf under a mask: numpy speaks of what the kernel selects away.
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning"),
    pytest.mark.usefixtures("patched_once"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PATHS: dict[str, dict[str, int]] = {"row": {}, "tiles": {"block": 128}, "split": {"splits": 3, "block": 128}}


def cases(paths: Iterable[str], quick: Mapping[str, Iterable[str]], kinds: Iterable[str] = KINDS) -> list[Any]:
    """Every kind on every path; kinds that are not in ``quick[path]`` are slow, as a tile costs 20 ms interpreted."""
    return [
        pytest.param(kind, PATHS[path], id=f"{path}-{kind}", marks=[] if kind in quick[path] else pytest.mark.slow)
        for path in paths
        for kind in kinds
    ]


def logits(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draft and target logits of distributions that overlap by about two thirds."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    draft = torch.randn(rows, vocabulary, generator=generator, device=DEVICE) * 3
    target = draft + torch.randn(rows, vocabulary, generator=generator, device=DEVICE)
    return draft.to(dtype), target.to(dtype)


def run(
    draft: Tensor, target: Tensor, kind: str, temperature: float = 1.0, need_grad: bool = True, **path: Any
) -> RowLosses:
    """The kernels, with the labels that ``expected`` uses; ``path`` may have row weights."""
    labels = labels_of(draft) if kind == "hard_ce" else None
    return triton_losses.launch(draft, target, kind, temperature, labels, 3.0, need_grad, **path)


def expected(draft: Tensor, target: Tensor, kind: str, temperature: float = 1.0) -> RowLosses:
    """The reference in fp64."""
    labels = labels_of(draft) if kind == "hard_ce" else None
    return reference(draft.double(), target.double(), kind=kind, temperature=temperature, labels=labels, eta=3.0)


def labels_of(draft: Tensor) -> Tensor:
    """One possible token per row."""
    return draft.argmax(-1)


def deviation(found: RowLosses, wanted: RowLosses) -> float:
    """Largest difference of the numbers per row, relative to those above 1 (an fp32 number between 8 and 16 nats is
    itself rounded by up to 5e-7); equal infinities do not differ. A NaN anywhere gives NaN, unlike Python's ``max``."""
    pairs = [(a.double(), b.double()) for a, b in zip(found.numbers(), wanted.numbers(), strict=True)]
    return torch.stack([torch.where(a == b, 0, (a - b).abs() / b.abs().clamp_min(1)) for a, b in pairs]).amax().item()


def assert_equal(found: RowLosses, wanted: RowLosses, tolerance: float = 1e-6) -> None:
    """Numbers of fp32, and a gradient rounded once to its dtype."""
    assert deviation(found, wanted) < tolerance
    if found.grad is not None:
        relative = {torch.float32: 0.0, torch.float16: 2.0**-10}.get(found.grad.dtype, BF16_ULP)
        torch.testing.assert_close(found.grad.double(), wanted.grad.double(), rtol=relative, atol=1e-6)


WEIGHTS = [3.0, 1.0, 0.0, -0.5]


@pytest.mark.parametrize(("kind", "path"), cases(PATHS, {"row": ["tv", "hard_ce"], "tiles": [], "split": ["nla"]}))
def test_weights_of_rows_multiply_the_gradient_alone(kind: str, path: dict[str, int]) -> None:
    draft, target = logits(4, 300)
    weights = torch.tensor(WEIGHTS, device=DEVICE)
    wanted = expected(draft, target, kind)
    assert wanted.grad is not None
    found = run(draft, target, kind, row_weights=weights, **path)
    assert_equal(found, replace(wanted, grad=wanted.grad * weights[:, None]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 257])
def test_rows_are_scaled_in_place_unless_their_number_is_1(vocabulary: int, dtype: torch.dtype) -> None:
    grad, _ = logits(4, vocabulary, dtype)
    before = grad.double()
    upstream = torch.tensor(WEIGHTS, device=DEVICE)
    triton_losses.scale_rows(grad, upstream, block=128)
    torch.testing.assert_close(grad.double(), before * upstream[:, None].double(), rtol=2 * BF16_ULP, atol=0)
    assert torch.equal(grad[1].double(), before[1]) and grad[2].abs().max() == 0
    before = grad.double()
    triton_losses.scale_rows(grad, torch.tensor(2.0, device=DEVICE).expand(4), block=128)  # of a sum: stride 0
    assert torch.equal(grad.double(), before * 2)
    triton_losses.scale_rows(grad[:0], upstream[:0])


@pytest.mark.parametrize(("kind", "path"), cases(PATHS, {"row": KINDS, "tiles": ["hybrid"], "split": ["jsd"]}))
def test_every_kind_on_every_path(kind: str, path: dict[str, int]) -> None:
    draft, target = logits(2, 500)
    assert_equal(run(draft, target, kind, 0.7, **path), expected(draft, target, kind, 0.7))


@pytest.mark.parametrize(
    ("rows", "vocabulary"), slow_but([(1, 1), (3, 257)], [(1, 1), (2, 7), (1, 128), (1, 129), (3, 257)], several=True)
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_odd_shapes_and_dtypes(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    draft, target = logits(rows, vocabulary, dtype)
    found = run(draft, target, "tv", splits=1, block=128)
    assert found.loss.dtype == torch.float32
    assert found.grad is not None and found.grad.dtype == dtype
    assert_equal(found, expected(draft, target, "tv"))


@pytest.mark.parametrize("path", [{"splits": 1}, {"splits": 4}], ids=("row", "split"))
def test_a_real_vocabulary(path: dict[str, int]) -> None:
    draft, target = logits(1, 32_003, torch.bfloat16)
    assert_equal(run(draft, target, "hybrid", **path), expected(draft, target, "hybrid"))


def test_no_rows_and_no_gradient() -> None:
    empty = run(*logits(0, 50), "tv")
    assert empty.loss.shape == (0,) and empty.grad is not None and empty.grad.shape == (0, 50)
    draft, target = logits(2, 300)
    for path in ({"splits": 1}, {"splits": 2, "block": 128}):
        found = run(draft, target, "kl", need_grad=False, **path)
        assert found.grad is None
        assert_equal(found, expected(draft, target, "kl"))


def test_rows_of_any_stride_are_read_in_place() -> None:
    wide, target = logits(6, 400)
    draft = wide[::2, 40:340]
    assert draft.stride() == (800, 1)
    turned = target[:3, :300].T.contiguous().T
    assert_equal(run(draft, turned, "tv"), expected(draft, turned, "tv"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path"),
    cases(("tiles", "split"), {"tiles": ["tv"], "split": ["kl"]}, kinds=("tv", "ce", "kl", "nla", "hybrid")),
)
def test_masked_tiles(kind: str, path: dict[str, int]) -> None:
    """The first tile, and so a whole split, has no mass: where others return NaN."""
    draft, target = logits(2, 300)
    draft[:, :130] = target[:, :150] = -INF
    draft[1, 200:] = target[1, 190:] = -INF
    found = run(draft, target, kind, **path)
    assert torch.isfinite(found.loss).all() and torch.isfinite(found.grad).all()
    assert_equal(found, expected(draft, target, kind))


def test_divergences_from_a_distribution_without_the_token_are_infinite() -> None:
    draft, target = logits(1, 200)
    without = draft.clone()
    without[:, 3] = -INF
    for kind, pair in (("kl", (without, target)), ("ce", (without, target)), ("rkl", (draft, without))):
        assert run(*pair, kind, block=128).loss.item() == INF
    assert math.isfinite(run(draft, without, "kl", block=128).loss.item())
    assert math.isfinite(run(without, target, "rkl", block=128).loss.item())


@pytest.mark.parametrize("path", slow_but([PATHS["tiles"]], [PATHS["tiles"], PATHS["split"]]), ids=("tiles", "split"))
def test_ties_and_identities_of_the_gradient(path: dict[str, int]) -> None:
    """q = p is a tie at every token: no gradient; elsewhere its sum is 0 and its L1 norm 2 S (1 - S)."""
    draft, target = logits(2, 300)
    same = run(draft, draft, "tv", **path)
    assert same.loss.abs().max() < 1e-6 and same.grad.abs().max() < 1e-7
    found = run(draft, target, "tv", **path)
    q, p = draft.double().softmax(-1), target.double().softmax(-1)
    below = torch.where(q <= p, q, 0).sum(-1)
    assert found.grad.double().sum(-1).abs().max() < 1e-6
    torch.testing.assert_close(found.grad.double().abs().sum(-1), 2 * below * (1 - below), rtol=0, atol=1e-6)


def test_one_hot_and_disjoint_distributions() -> None:
    """By hand: p = one-hot at 0 gives alpha = q_0; without a common token the loss is 1 and the gradient 0."""
    draft, target = torch.zeros(2, 4, device=DEVICE), torch.full((2, 4), -INF, device=DEVICE)
    target[0, 0] = target[1, 3] = 0.0
    draft[1, 2:] = -INF
    found = run(draft, target, "tv")
    assert found.loss.tolist() == [0.75, 1.0]
    assert found.target_entropy.tolist() == [0.0, 0.0]
    torch.testing.assert_close(found.draft_entropy, torch.tensor([math.log(4), math.log(2)], device=DEVICE))
    assert found.grad.tolist() == [[-0.1875, 0.0625, 0.0625, 0.0625], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.slow
@settings(max_examples=30, deadline=None, phases=[Phase.generate])  # shrinking takes minutes in the interpreter
@given(
    rows=st.integers(1, 3),
    vocabulary=st.integers(1, 400),
    splits=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.1, 3.0, 8.0]),
    temperature=st.sampled_from([0.7, 1.0, 2.0]),
    kind=st.sampled_from([kind for kind in KINDS if kind != "hard_ce"]),
    masked=st.floats(0, 1),
)
def test_any_shape_and_values(
    rows: int, vocabulary: int, splits: int, seed: int, spread: float, temperature: float, kind: str, masked: float
) -> None:
    """Tokens without mass on both sides, whole tiles of them; equal distributions at spread 0."""
    generator = torch.Generator().manual_seed(seed)
    pair = [torch.randn(rows, vocabulary, generator=generator) * spread for _ in range(2)]
    hidden = torch.rand(rows, vocabulary, generator=generator) < masked
    hidden[:, -1] = False
    draft, target = (x.masked_fill(hidden, -INF).to(DEVICE) for x in pair)
    found = run(draft, target, kind, temperature, splits=splits, block=128)
    wanted = expected(draft, target, kind, temperature)
    assert deviation(found, wanted) < 1e-6
    assert found.grad is not None and wanted.grad is not None
    size = wanted.loss[:, None].clamp_min(1)  # of rkl, whose gradient has logarithms as large as its loss
    assert ((found.grad.double() - wanted.grad).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize(("kind", "path"), cases(("tiles", "split"), {"tiles": ["nla"], "split": ["tv"]}))
def test_distributions_without_a_common_token_and_rows_that_are_none(kind: str, path: dict[str, int]) -> None:
    """Where nothing is shared: as the reference says. No finite logit on a side: NaN in every number and kind."""
    draft, target = logits(5, 200)
    draft[0, 100:] = target[0, :100] = -INF
    draft[1] = target[2] = -INF
    draft[3] = target[3] = -INF
    found, wanted = run(draft, target, kind, **path), expected(draft, target, kind)
    for a, b in zip((*found.numbers(), found.grad), (*wanted.numbers(), wanted.grad), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert a[1:4].isnan().all() and not a[4].isnan().any()
    if kind == "nla":
        assert found.loss[0].item() == INF and found.grad[0].abs().max() == 0


def hard_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows: -inf in the draft, in the target, in both at once and in neither, whole tiles and ragged ends of them; a
    peak against a flat row, both ways; the lowest finite number as a mask; a maximum that rises at every tile; ties."""
    draft, target = logits(9, 389, dtype)
    draft[0, ::3] = target[1, 1::3] = draft[2, :140] = target[2, :140] = draft[2, 380:] = target[2, 380:] = -INF
    draft[2, 200:220], target[2, 210:230] = -INF, -INF
    draft[4], target[4] = 0.0, 0.0
    draft[4, 130] = target[5, 7] = 40.0
    target[5, 8:], draft[5] = 0.0, 0.0
    draft[6, 100:300] = target[6, 200:] = torch.finfo(dtype).min
    rising = torch.arange(389, device=DEVICE) / 16
    draft[7], target[7] = rising, rising.flip(0)
    target[8] = draft[8]
    return draft, target


QUICK_PATHS = ("fp32-tiles", "fp32-split", "fp16-tiles")


@pytest.mark.parametrize(
    "name", slow_but(QUICK_PATHS, [f"{dtype}-{path}" for dtype in DTYPES for path in ("tiles", "split")])
)
def test_tv_of_hard_rows(name: str) -> None:
    dtype, path = name.split("-")
    draft, target = hard_rows(DTYPES[dtype])
    found, wanted = run(draft, target, "tv", 0.9, **PATHS[path]), expected(draft, target, "tv", 0.9)
    assert_equal(found, wanted)


@pytest.mark.parametrize("temperature", [1e-9, 1e9])
def test_temperatures_at_which_exponents_overflow_or_vanish(temperature: float) -> None:
    """One-hot or flat: entropies are 0 or log V, and a token of mass 0 adds 0 to them, not a NaN."""
    draft, target = logits(2, 300)
    for path in (PATHS["tiles"], PATHS["split"]):
        assert_equal(run(draft, target, "tv", temperature, **path), expected(draft, target, "tv", temperature))


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_a_nan_stays_in_its_row_and_is_not_lost(kind: str) -> None:
    draft, target = logits(3, 300)
    draft[0, 200] = target[1, 5] = float("nan")
    found = run(draft, target, kind, **PATHS["tiles"])
    for numbers in (*found.numbers(), found.grad):
        assert numbers[:2].isnan().all() and not numbers[2].isnan().any()


def test_large_logits_and_temperatures() -> None:
    draft, target = logits(1, 300)
    shifted = (draft * 4 + 3000, target * 4 - 2000)
    for temperature in (0.05, 1.0, 50.0):
        assert_equal(run(*shifted, "tv", temperature), expected(*shifted, "tv", temperature))


def test_labels_outside_of_the_vocabulary_read_nothing() -> None:
    draft, target = logits(2, 100)
    labels = torch.tensor([100, -1], device=DEVICE)
    assert triton_losses.launch(draft, target, "hard_ce", 1.0, labels, 3.0, True).loss.isnan().all()


def test_the_comparison_sees_planted_faults() -> None:
    """A wrong temperature, a lost tile and a gradient without its comparison are all far out of tolerance."""
    draft, target = logits(2, 300)
    found, wanted = run(draft, target, "tv"), expected(draft, target, "tv")
    assert deviation(run(draft, target, "tv", 1.01), wanted) > 1e-4
    assert deviation(run(draft[:, :128], target[:, :128], "tv"), wanted) > 1e-4
    assert found.grad is not None
    q = draft.softmax(-1)
    without = replace(found, grad=found.grad + q * (q <= target.softmax(-1)))
    with pytest.raises(AssertionError):
        assert_equal(without, wanted)


def test_dtypes_that_are_refused() -> None:
    with pytest.raises(UserError, match="float64"):
        run(*logits(1, 8, torch.float64), "tv")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter forgives what the compiler refuses; no GPU is needed to find out."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_offline"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 3 * len(KINDS) + 3 + 8 + 9 + 24 + 8


def equal_but_for_ties(found: Tensor, wanted: Tensor, relative: float) -> bool:
    """Gradients, but for 1 in 10,000: that of TV jumps by q where q = p up to rounding, and a row of bf16 logits has
    many such tokens at once."""
    close = torch.isclose(found.double(), wanted, rtol=relative, atol=1e-6)
    return bool((~close).double().mean() <= 1e-4)


# (kind, rows, V): many rows take the row path and few the split path, of which four kinds have all sums between them.
# The rows of V = 50,257 are not aligned.
ON_A_GPU = [*((kind, 256, 151_936) for kind in KINDS), ("tv", 256, 50_257)]
ON_A_GPU += [(kind, 7, 151_936) for kind in ("tv", "hard_ce", "jsd", "hybrid")]


@pytest.mark.parametrize(
    ("kind", "rows", "vocabulary"),
    [("tv", 2, 130), *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_A_GPU)],
)
def test_full_vocabulary_compiled(kind: str, rows: int, vocabulary: int) -> None:
    draft, target = logits(rows, vocabulary, torch.bfloat16)
    found, wanted = run(draft, target, kind), expected(draft, target, kind)
    assert deviation(found, wanted) < 1e-5
    assert found.grad is not None and wanted.grad is not None
    assert equal_but_for_ties(found.grad, wanted.grad, BF16_ULP)


@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [(8, 130), *(pytest.param(*x, marks=pytest.mark.gpu) for x in [(256, 151_936), (8, 50_257)])],
)
def test_weights_and_upstream_gradients_of_the_public_function(rows: int, vocabulary: int) -> None:
    """Weights are folded into the kernel; every other upstream gradient is 1, and its row is not touched."""
    draft, target = logits(rows, vocabulary, torch.bfloat16)
    weights, upstream = torch.linspace(-1, 2, rows, device=DEVICE), torch.ones(rows, device=DEVICE)
    upstream[::2] = -0.75
    wanted = expected(draft, target, "tv")
    assert wanted.grad is not None
    result = tv_loss(draft.requires_grad_(), target, row_weights=weights)
    torch.testing.assert_close(result.loss.double(), wanted.loss * weights.double(), rtol=0, atol=1e-5)
    for last in (False, True):
        (grad,) = torch.autograd.grad(result.loss, draft, upstream, retain_graph=not last)
        scaled = wanted.grad * (weights * upstream).double()[:, None]
        assert equal_but_for_ties(grad, scaled, 2 * BF16_ULP)
