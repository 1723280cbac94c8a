"""Draft losses and chain verification: time, share of the copy bandwidth, peak memory, beside other implementations."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bebop.bench import kernel_arms
from bebop.bench.kernel_arms import Skip
from bebop.bench.memory import peak_bytes
from bebop.bench.record import noted
from bebop.kernels.block_verify import reference as block_reference
from bebop.kernels.verify import reference, sample

Row = dict[str, Any]
# Bytes written between two runs on a GPU: more than any second-level cache. It takes some 0.3 ms, in which the launches
# of the timed call are queued.
FLUSH = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench:
    """Settings of the benchmark; it ends after ``seconds``, and the remaining shapes are kept as skipped."""

    device: str
    losses: tuple[tuple[int, int], ...]  # (N, V) of the losses from logits
    linear: tuple[tuple[int, int], ...]  # (N, V) of the losses from hidden states
    chains: tuple[tuple[int, int, int], ...]  # (B, K, V) of the verifiers
    hidden: int
    dtype: torch.dtype
    seconds: float
    repeats: int  # runs of each arm at most; the median counts


VOCABULARIES = (32_000, 151_936, 248_320)


def on_gpu() -> KernelBench:
    """Return full vocabularies, 1k-16k rows, batches of 1-256, which take some minutes on one device."""
    batches = [(b, k) for b in (1, 8, 64, 256) for k in (1, 3, 7)]
    return KernelBench(
        device="cuda",
        losses=tuple((n, v) for v in VOCABULARIES for n in (1024, 4096, 8192, 16_384)),
        linear=tuple((n, v) for v in VOCABULARIES for n in (4096, 16_384)),
        chains=tuple((b, k, v) for v in VOCABULARIES for b, k in batches),
        hidden=2048,
        dtype=torch.bfloat16,
        seconds=540,
        repeats=50,
    )


def on_cpu() -> KernelBench:
    """Return the same arms on smaller shapes, in fp32, which take about a minute with one thread."""
    return KernelBench(
        device="cpu",
        losses=((128, 32_000), (512, 32_768), (64, 151_936), (32, 248_320)),
        linear=((128, 32_000),),
        chains=tuple((b, k, v) for v in VOCABULARIES[:2] for b, k in ((1, 3), (8, 3), (8, 7))),
        hidden=256,
        dtype=torch.float32,
        seconds=150,
        repeats=7,
    )


def run(bench: KernelBench) -> list[Row]:
    """Return one row per arm and shape, with times in ms.

    ``x eager`` is the speed relative to plain PyTorch at that shape.
    """
    timer = Timer(bench.device, bench.repeats)
    ends = time.monotonic() + bench.seconds
    bandwidth = _copy_bandwidth(timer)
    rows = [noted({"what": "copy", "shape": "256 MB", "arm": "torch", "ms": timer.copy_ms, "GB/s": bandwidth})]
    for cases, shape in tqdm(_in_turns(bench), desc="kernels"):
        if time.monotonic() > ends:
            rows.append({"what": "left out", "shape": str(shape), "arm": "all", "skipped": "time is up"})
            continue
        measured = [noted(_measure(case, timer, bandwidth)) for case in cases(bench, shape)]
        eager = {row["what"]: row["ms"] for row in measured if row["arm"] == "eager"}
        for row in measured:
            base = eager.get(row["what"])
            row["x eager"] = base / row["ms"] if base and row["ms"] else None
        rows += measured
    return rows


def _in_turns(bench: KernelBench) -> list[tuple[Callable[..., Iterator["Case"]], tuple[int, ...]]]:
    """Return all shapes, one of each kind after the other: if time runs out, every kind has been measured."""
    sorts = ((_loss_cases, bench.losses), (_linear_cases, bench.linear), (_chain_cases, bench.chains))
    turns = zip_longest(*([(cases, shape) for shape in shapes] for cases, shapes in sorts))
    return [case for turn in turns for case in turn if case is not None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One arm at one shape."""

    what: str
    shape: str
    arm: str
    prepare: Callable[[], Callable[[], object]]  # makes what is timed; raises Skip where it cannot be had
    traffic: float  # bytes that any implementation must move

    def row(self, **numbers: object) -> Row:
        """Return the row of the case."""
        blank: Row = dict.fromkeys(("ms", "GB/s", "% of copy", "peak MB", "x eager", "skipped"))
        return {"what": self.what, "shape": self.shape, "arm": self.arm, **blank, **numbers}


def _measure(case: Case, timer: "Timer", bandwidth: float) -> Row:
    gc.collect()
    if timer.cuda:
        torch.cuda.empty_cache()
    try:
        call = case.prepare()
        ms = timer(call)
        peak = timer.peak(call)
    except Skip as reason:
        return case.row(skipped=str(reason))
    except torch.OutOfMemoryError:
        return case.row(skipped="out of memory")
    speed = case.traffic / ms / 1e6
    return case.row(**{"ms": ms, "GB/s": speed, "% of copy": 100 * speed / bandwidth, "peak MB": peak / 2**20})


# ---- the shapes


def _loss_cases(bench: KernelBench, shape: tuple[int, int]) -> Iterator[Case]:
    """Yield TV forward and backward from logits; any implementation reads both logits and writes the gradient."""
    rows, vocabulary = shape
    draft, target = _logits(bench, rows, vocabulary)
    traffic = 3 * draft.numel() * draft.element_size()
    for arm, make in kernel_arms.LOSSES.items():

        def prepare(make: kernel_arms.MakeLoss = make) -> Callable[[], object]:
            loss = make(draft.device.type)

            def step() -> None:
                loss(draft, target).sum().backward()
                draft.grad = None  # after, not before: the gradient belongs to what a call needs

            return step

        yield Case(what="tv", shape=f"N={rows} V={vocabulary}", arm=arm, prepare=prepare, traffic=traffic)


def _linear_cases(bench: KernelBench, shape: tuple[int, int]) -> Iterator[Case]:
    """Yield TV forward and backward from hidden states and heads; any implementation reads the heads and states."""
    rows, vocabulary = shape
    generator = torch.Generator(bench.device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=bench.device, generator=generator).to(bench.dtype)

    hidden, states = normal(rows, bench.hidden).requires_grad_(), normal(rows, bench.hidden)
    weight = normal(vocabulary, bench.hidden) / bench.hidden**0.5
    traffic = (3 * hidden.numel() + weight.numel()) * hidden.element_size()
    for arm, make in kernel_arms.LINEAR.items():

        def prepare(make: kernel_arms.MakeLinear = make) -> Callable[[], object]:
            loss = make(bench.device)

            def step() -> None:
                loss(hidden, weight, states).sum().backward()
                hidden.grad = None

            return step

        name = f"N={rows} d={bench.hidden} V={vocabulary}"
        yield Case(what="linear tv", shape=name, arm=arm, prepare=prepare, traffic=traffic)


def _chain_cases(bench: KernelBench, shape: tuple[int, int, int]) -> Iterator[Case]:
    """Yield verification of probabilities (fp32); any implementation reads the rows that decide."""
    batch, drafts, vocabulary = shape
    draft, target = (x.detach().view(batch, -1, vocabulary) for x in _logits(bench, batch * (drafts + 1), vocabulary))
    draft = draft[:, :drafts].contiguous()
    q, p = draft.float().softmax(-1), target.float().softmax(-1)
    numbers = torch.rand(batch, 2 * drafts + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, draws = numbers.to(bench.device).split([drafts + 2, drafts], 1)
    u, tokens = u.contiguous(), sample(q, draws)
    accepted, _ = reference(tokens, q, p, u)
    rejected, rejected_block = (int((n < drafts).sum()) for n in (accepted, block_reference(tokens, q, p, u)[0]))
    probs, block = ((batch + n) * vocabulary * p.element_size() for n in (rejected, rejected_block))
    name = f"B={batch} K={drafts} V={vocabulary}"
    for what, arms, inputs, traffic in (
        ("verify probs", kernel_arms.PROBS, (tokens, q, p, u), probs),
        ("verify block", kernel_arms.BLOCK, (tokens, q, p, u), block),
    ):
        for arm, make in arms.items():

            def prepare(
                make: kernel_arms.MakeVerify = make, inputs: tuple[Tensor, ...] = inputs
            ) -> Callable[[], object]:
                verify = make(bench.device, *inputs)
                verify()
                return verify

            yield Case(what=what, shape=name, arm=arm, prepare=prepare, traffic=traffic)


def _logits(bench: KernelBench, rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return similar draft (a leaf) and target [rows, V]; they are large, so they are made in place."""
    generator = torch.Generator(bench.device).manual_seed(0)
    target = torch.empty(rows, vocabulary, dtype=bench.dtype, device=bench.device)
    target.normal_(0, 2, generator=generator)
    draft = torch.empty_like(target).normal_(0, 0.4, generator=generator).add_(target)
    return draft.requires_grad_(), target


# ---- time and memory


class Timer:
    """Median milliseconds of a call: device events with cold caches on a GPU; wall clock with warm caches on a CPU."""

    def __init__(self, device: str, repeats: int) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.device, self.repeats = device, repeats
        self.flush = torch.empty(FLUSH, dtype=torch.int8, device=device) if self.cuda else None
        self.copy_ms = 0.0

    def __call__(self, call: Callable[[], object], limit: float = 2.0) -> float:
        """Time at least 3 runs after a warm-up, then more until ``limit`` seconds or ``repeats`` runs are reached."""
        call()
        call()
        times: list[float] = []
        started = time.monotonic()
        while len(times) < 3 or (len(times) < self.repeats and time.monotonic() - started < limit):
            times.append(self._once(call))
        return statistics.median(times)

    def _once(self, call: Callable[[], object]) -> float:
        if self.flush is None:
            started = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - started)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.flush.zero_()  # and the launches below are queued while it runs, so that they are not what is timed
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))

    def peak(self, call: Callable[[], object]) -> float:
        """Return the bytes that one call allocates at its peak, its results included."""
        if self.cuda:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            return float(torch.cuda.max_memory_allocated() - before)
        return float(peak_bytes(call))


def _copy_bandwidth(timer: Timer) -> float:
    """Return the GB/s of a copy, reads and writes counted; the other rows are compared with it."""
    source = torch.ones(1 << 26, device=timer.device)
    into = torch.empty_like(source)
    timer.copy_ms = timer(lambda: into.copy_(source))
    return 2 * source.numel() * source.element_size() / timer.copy_ms / 1e6


def default() -> KernelBench:
    """Return the benchmark of the present device."""
    return on_gpu() if torch.cuda.is_available() else on_cpu()


def charts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the measured rows by kind, without the copy and skipped rows; each list makes one bar chart."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        if row["what"] != "copy" and row.get("ms") is not None:
            by_kind.setdefault(row["what"], []).append(row)
    return by_kind
