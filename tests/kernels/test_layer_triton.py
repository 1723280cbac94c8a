"""The kernels of a decoder layer against what the lean pass computes on a CPU, rounding where it rounds."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from bebop.kernels import paged_attention
from bebop.model import lean
from bebop.model.attention import SlotContext, cache_shape
from bebop.model.lean import Norm, rotate
from bebop.model.mtp import MTPHead
from bebop.model.paged_cache import PagedContext
from bebop.model.ragged_attention import Ragged
from tests.cases import slow_but
from tests.kernels.rounding import to_nearest
from tests.model.families import made
from tests.model.test_lean import KNOWN

layer_triton = pytest.importorskip("bebop.kernels.layer_triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU the kernels run in Triton's interpreter
EPS = 1e-5
ULP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SHARE = {torch.float32: 1.0, torch.bfloat16: 0.01, torch.float16: 0.02}  # of numbers that may be rounded otherwise
GPU = pytest.mark.gpu
DTYPES = slow_but([torch.bfloat16], [*ULP])
pytestmark = pytest.mark.usefixtures("patched_once", "nearest")


@pytest.fixture(scope="module")
def nearest() -> Iterator[None]:
    with to_nearest():
        yield


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differing(found: Tensor, wanted: Tensor) -> float:
    """The share of numbers that differ, none by more than two roundings.

    Sums in another order, and another inverse root, change the last bit in fp32; in bf16 one in thousands is rounded
    otherwise for that.
    """
    found = found.cpu()
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert torch.allclose(found.double(), wanted.double(), rtol=2 * ULP[wanted.dtype], atol=1e-6)
    return float((found != wanted).double().mean())


def norm_of(width: int, dtype: torch.dtype, seed: int = 9) -> Norm:
    weight = 1 + numbers(width, dtype=dtype, seed=seed)
    return Norm(SimpleNamespace(weight=weight, variance_epsilon=EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        *slow_but([(3, 64), (2, 5, 40)], [(3, 64), (2, 5, 40), (1, 1), (4, 1100), (0, 8)]),
        *(pytest.param(shape, marks=GPU) for shape in [(1024, 2048), (3, 4096), (70, 576)]),
    ],
)
def test_norms_round_as_the_modules_do(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With the sum before them and without; the sum itself is the same to the bit."""
    x, more = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
    norm, limit = norm_of(shape[-1], dtype), SHARE[dtype]
    weight = norm.weight.to(DEVICE)
    alone = layer_triton.norm(x.to(DEVICE), weight, EPS)
    total, normed = layer_triton.add_norm(x.to(DEVICE), more.to(DEVICE), weight, EPS)
    assert torch.equal(total.cpu(), x + more)
    for found, wanted in ((alone, norm(x)), (normed, norm(x + more))):
        assert not wanted.numel() or differing(found, wanted) <= limit
    if dtype != torch.float32 and shape[-1] > 1 and x.numel():  # in one step, as torch's own does: rounded once
        late = rms_norm(x.float(), shape[-1:], norm.weight.float(), EPS).to(dtype)
        assert differing(alone, late) > 5 * limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "size"),
    [
        *slow_but([((9, 3), 16)], [((9, 3), 16), ((2, 2), 6), ((1, 1), 2)], True),
        *(pytest.param(*case, marks=GPU) for case in [((16, 8), 128), ((9, 3), 64), ((32, 32), 80)]),
    ],
)
def test_queries_and_keys_are_normed_and_turned(
    heads: tuple[int, int], size: int, normed: bool, dtype: torch.dtype
) -> None:
    """Of rows side by side and end to end, at positions of their own; what comes out is contiguous."""
    batch, width, turned = 2, 3, sum(heads)
    qkv = numbers(batch * width, turned + heads[1], size, dtype=dtype)
    norms = [norm_of(size, dtype, seed) for seed in (3, 4)] if normed else []
    angles = numbers(batch * width, size // 2, dtype=torch.float32, seed=5).repeat(1, 2)
    sign = torch.cat([-torch.ones(size // 2), torch.ones(size // 2)])
    cos, sin = angles.cos().to(dtype), (sign * angles.sin()).to(dtype)
    side = (qkv.view(batch, width, -1, size).transpose(1, 2), *(x.view(batch, 1, width, size) for x in (cos, sin)))
    for x, *rotary in (side, (qkv, cos[:, None], sin[:, None])):
        x = x.narrow(1, 0, turned)
        parts = x.split(heads, 1)
        wanted = rotate(torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], 1) if normed else x,
                        (rotary[0], rotary[1]))  # fmt: skip
        found = layer_triton.turn(
            qkv.to(DEVICE).as_strided(x.shape, x.stride()),
            [norm.weight.to(DEVICE) for norm in norms],
            EPS,
            tuple(table.to(DEVICE) for table in rotary),
            heads[0],
        )
        assert found.is_contiguous()
        assert differing(found, wanted) <= (SHARE[dtype] if normed else 0)
        both = [norm.weight.to(DEVICE) for norm in norms], EPS, tuple(table.to(DEVICE) for table in rotary)
        product = qkv.to(DEVICE) if x.dim() == 3 else qkv.to(DEVICE).view(batch, width, -1, size).transpose(1, 2)
        stored_like_turned(product, both, heads, found)


def stored_like_turned(product: Tensor, given: tuple[Any, ...], heads: tuple[int, int], turned: Tensor) -> None:
    """Check ``turn_and_store`` against ``turn``, in pages out of order and in slots; other entries stay as they are."""
    queries, kv_heads = heads
    count, size = product.numel() // product.shape[1] // product.shape[-1], product.shape[-1]
    by_token = [x if x.dim() == 3 else x.transpose(1, 2).flatten(0, 1) for x in (turned, product)]  # [N, heads, D]
    new = (by_token[0][:, queries:], by_token[1][:, queries + kv_heads :])
    for page, views in ((4, False), (20, True)):
        places = torch.randperm(20, generator=torch.Generator().manual_seed(page))[:count].to(DEVICE)
        shape = (20 // page, 2 * kv_heads if views else kv_heads, page, size)
        stores = [torch.full(shape, 7.0, dtype=product.dtype, device=DEVICE) for _ in range(2)]
        stores = [store[:, ::2] if views else store for store in stores]
        wanted = [store.clone() for store in stores]
        for store, one in zip(wanted, new, strict=True):
            store[places // page, :, places % page] = one
        rows = count if product.dim() == 3 else product.shape[0]
        # Row r begins with page -r, so that each has a table of its own.
        row, pages = torch.arange(rows, device=DEVICE)[:, None], 20 // page
        table, shaped = (torch.arange(pages, device=DEVICE) - row) % pages, places.view(rows, -1)
        entries = (shaped // page + row) % pages * page + shaped % page
        entries = entries[:, 0] if product.dim() == 3 else entries.T.contiguous().T  # as prefill has them: expanded
        found = layer_triton.turn_and_store(product, *given, heads, (stores[0], stores[1]), table, entries)
        assert found.is_contiguous() and torch.equal(found, turned[:, :queries])
        assert all(torch.equal(a, b) for a, b in zip(stores, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "width", [*slow_but([24], [24, 1, 1500]), *(pytest.param(one, marks=GPU) for one in (6144, 1536))]
)
def test_gates_are_rounded_before_they_are_multiplied(width: int, dtype: torch.dtype) -> None:
    x = 3 * numbers(5, 2 * width, dtype=dtype)
    gate, up = x.chunk(2, -1)
    assert differing(layer_triton.gated(x.to(DEVICE)), silu(gate) * up) <= SHARE[dtype]


@pytest.mark.parametrize(
    ("kind", "settings", "dtype"),
    [
        *slow_but(
            [("qwen3", {}, torch.bfloat16)],
            [(kind, settings, dtype) for dtype in (torch.bfloat16, torch.float32) for kind, settings in KNOWN],
            several=True,
        ),
        *(pytest.param(*case, dtype, marks=GPU) for dtype in (torch.bfloat16, torch.float32) for case in KNOWN),
    ],
)
@torch.no_grad()
def test_the_lean_pass_and_the_head_give_the_modules_states(
    kind: str, settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a row of two tokens, and of three rows of unequal length; a hook changes the states between layers.

    Over slots, and over pages with the kernel that attends to these.
    """
    policy = made(kind, dtype, **settings)
    policy.backbone.to(DEVICE)
    policy.mtp = MTPHead(policy.backbone).eval()
    policy.backbone.model.layers[0].register_forward_hook(lambda _module, _inputs, out: 0.5 * out)

    def states(hidden: Any, head: Any, lengths: list[int], paged: bool = False) -> Tensor:
        steps = torch.arange(max(lengths), device=DEVICE).expand(len(lengths), -1)
        ids, places = steps + 3, steps
        out: list[Tensor] = []
        for layers in (2, 1):
            context = SlotContext.for_model(policy.backbone.config, len(lengths), 8, policy.embed(ids), layers)
            if paged:
                table = torch.arange(len(lengths), device=DEVICE).flip(0)[:, None]
                shape = cache_shape(policy.backbone.config, layers)
                context = PagedContext(shape[0], table, len(lengths), 16, *shape[1:], policy.embed(ids))
            context.first_layer = 2 if layers == 1 else 0
            ragged = Ragged.of(torch.tensor(lengths, device=DEVICE), max(lengths)) if len(lengths) > 1 else None
            context.place(places, 8, ragged=ragged)
            given = [x if ragged is None else ragged.packed(x) for x in (ids, places)]
            out.append(
                hidden(*given, context) if layers == 2 else head(policy.embed(given[0]), *out, given[1], context)
            )
        return torch.cat(out).double()

    runs = [[2]] if (kind, dtype) == ("qwen3", torch.bfloat16) else [[2], [1, 3, 2]]
    wanted = [states(policy.hidden, policy.mtp, lengths) for lengths in runs]
    for module in (lean, paged_attention):
        monkeypatch.setattr(module, "compiled", lambda *_: True)
    # Products of q, k and v in one are summed otherwise than apart, on a device.
    close = (16 if dtype == torch.float32 else 4) * ULP[dtype]
    own = lean.lean_hidden(policy, 8), lean.lean_head(policy.mtp, 8)
    for lengths, one in zip(runs, wanted, strict=True):
        for paged in (False, True):
            assert (states(*own, lengths, paged) - one).abs().mean() < close * one.abs().mean()
