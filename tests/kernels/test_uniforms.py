import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bebop.kernels.uniforms import _GOLDEN, _mix, digest, uniforms

Draw = Callable[[Tensor, Tensor, int], Tensor]
SEEDS, COUNTERS, LANES = 50, 250, 8  # 100,000 draws


def table(draw: Draw) -> Tensor:
    """Draws [SEEDS, COUNTERS, LANES] of neighbouring seeds and counters, as requests use them."""
    seeds, counters = torch.arange(SEEDS).repeat_interleave(COUNTERS), torch.arange(COUNTERS).repeat(SEEDS)
    return draw(seeds, counters, LANES).view(SEEDS, COUNTERS, LANES)


def correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1])


def faults(u: Tensor) -> list[str]:
    """What is wrong with draws that should be independent and uniform, each test at about 4 standard errors."""
    n, flat = u.numel(), u.flatten()
    error = 1 / math.sqrt(n)
    found = []
    if not (flat.min() >= 0 and flat.max() < 1):
        found.append("range")
    if abs(flat.mean() - 0.5) > 4 * error * math.sqrt(1 / 12):
        found.append("mean")
    if abs(flat.var() - 1 / 12) > 4 * error * math.sqrt(1 / 180):
        found.append("variance")
    ordered = flat.sort().values
    grid = torch.arange(n, dtype=torch.float64) / n
    distance = torch.maximum((ordered - grid).max(), (grid + 1 / n - ordered).max())
    if distance > 2.0 * error:  # Kolmogorov-Smirnov: exceeded with probability 7e-4
        found.append("distribution")
    for axis, name in enumerate(("seeds", "counters", "lanes")):
        for lag in (1, 2):
            x, y = u.narrow(axis, 0, u.shape[axis] - lag), u.narrow(axis, lag, u.shape[axis] - lag)
            if abs(correlation(x, y)) > 4 / math.sqrt(x.numel()):
                found.append(f"correlation over {name}")
    if len(flat.unique()) < n:
        found.append("repeats")
    return found


def test_draws_are_uniform_and_independent() -> None:
    assert faults(table(uniforms)) == []


def weyl(seeds: Tensor, counters: Tensor, count: int) -> Tensor:
    """Equidistributed, but each number tells the next."""
    return (seeds[:, None] * 0.7548 + counters[:, None] * 0.6180339887 + torch.arange(count) * 0.5698).double() % 1


def unmixed_counter(seeds: Tensor, counters: Tensor, count: int) -> Tensor:
    """Lane l of counter c is lane l - 1 of counter c + 1: the next cycle sees this cycle's numbers again."""
    bits = _mix(_mix(seeds)[:, None] + (counters[:, None] + torch.arange(1, count + 1)) * _GOLDEN)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def seedless(seeds: Tensor, counters: Tensor, count: int) -> Tensor:
    return uniforms(torch.zeros_like(seeds), counters, count)


def closed(seeds: Tensor, counters: Tensor, count: int) -> Tensor:
    """In single precision numbers just below 1 round up to 1."""
    u = uniforms(seeds, counters, count)
    u[0, 0] = torch.tensor(1 - 2.0**-53, dtype=torch.float64).float()
    return u


def squared(seeds: Tensor, counters: Tensor, count: int) -> Tensor:
    return uniforms(seeds, counters, count) ** 1.03


@pytest.mark.parametrize(
    ("draw", "fault"),
    [
        (weyl, "correlation over counters"),
        (unmixed_counter, "repeats"),
        (seedless, "correlation over seeds"),
        (closed, "range"),
        (squared, "distribution"),
    ],
)
def test_broken_generators_are_caught(draw: Draw, fault: str) -> None:
    assert fault in faults(table(draw))


def test_draws_do_not_depend_on_the_batch_or_on_how_many_are_asked_for() -> None:
    seeds, counters = torch.tensor([3, -7, 2**62, 3, 0]), torch.tensor([0, 5, 5, 1, 2**40])
    together = uniforms(seeds, counters, 6)
    order = torch.tensor([4, 2, 0, 1, 3])
    assert torch.equal(uniforms(seeds[order], counters[order], 6), together[order])
    for row in range(5):
        alone = uniforms(seeds[row : row + 1], counters[row : row + 1], 3)
        assert torch.equal(alone[0], together[row, :3])
    assert len(together.unique()) == 30 and together.dtype == torch.float64
    # Fixed once and for all: a run that is resumed with a later release must draw the same numbers.
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((mix(-7 & mask) + 5 * golden) & mask)
    assert together[1, 2].item() == (mix((key + 3 * golden) & mask) >> 11) * 2.0**-53


@pytest.mark.usefixtures("patched_once")
@pytest.mark.parametrize(
    ("counts", "widths"), [((1, 10), (1, 300)), pytest.param((8,), (4096,), marks=pytest.mark.gpu)]
)
def test_triton_gives_the_same_numbers_to_the_bit(counts: tuple[int, ...], widths: tuple[int, ...]) -> None:
    """Seeds and counters at the ends of 64 bits, one draw and several blocks of them, one token and several blocks."""
    triton = pytest.importorskip("bebop.kernels.uniforms_triton", reason="Triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU the kernels run in Triton's interpreter
    ends = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    seeds, counters = ends.repeat_interleave(6), ends.repeat(6)
    for count in counts:
        found = triton.draw(seeds.to(device), counters.to(device), count)
        assert torch.equal(found.cpu(), uniforms(seeds, counters, count)) and found.dtype == torch.float64
    assert triton.draw(seeds[:0].to(device), seeds[:0].to(device), 3).shape == (0, 3)
    for width in widths:
        tokens = torch.randint(0, 2**20, (5, width), generator=torch.Generator().manual_seed(width))
        lengths = torch.tensor([0, 1, width // 2, width, width + 7])
        for table in (tokens, tokens.T.contiguous().T):
            assert torch.equal(triton.digest(table.to(device), lengths.to(device)).cpu(), digest(tokens, lengths))
