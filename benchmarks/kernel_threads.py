"""The CPU kernels on several threads, alone and beside neighbours that keep a core busy: wall time.

Processor time does not show the gain of threads, and other work on the machine can only slow a run down. So arms take
turns, and the best of each counts.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from bebop.bench import kernel_arms
from bebop.bench.kernel_arms import Skip
from bebop.bench.kernels import Row
from bebop.bench.record import noted
from bebop.kernels.block_verify import block_verify
from bebop.kernels.draft_losses import LOSSES
from bebop.kernels.linear_losses import linear_draft_loss
from bebop.kernels.stats import pair_stats
from bebop.kernels.truncation import truncate_
from bebop.kernels.verify import chain_verify, sample

Call = Callable[[], object]
WARM_UP = 2  # calls of an arm before it is timed: one compiles, one touches its memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThreadsBench:
    """Settings of the benchmark; it ends after ``seconds``, and the remaining shapes are kept as skipped."""

    threads: tuple[int, ...]
    busy: int  # neighbours of the second half of the turns; 0: no such half
    losses: tuple[tuple[int, int], ...]  # (N, V)
    linear: tuple[tuple[int, int], ...]  # (N, V)
    chains: tuple[tuple[int, int, int], ...]  # (B, K, V)
    hidden: int
    turns: int
    seconds: float


def default(threads: Sequence[int], busy: int) -> ThreadsBench:
    """Return a benchmark over the vocabularies of three models, in fp32."""
    return ThreadsBench(
        threads=tuple(threads),
        busy=busy,
        losses=((256, 32_768), (192, 49_152), (64, 151_936)),
        linear=((512, 32_768), (128, 151_936)),
        chains=((8, 3, 32_768), (8, 7, 49_152), (8, 7, 151_936)),
        hidden=256,
        turns=5,
        seconds=360,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One computation that every arm does on the same inputs."""

    what: str
    shape: str
    arms: Mapping[str, Callable[[], Call]]  # each makes what is timed; raises Skip where it cannot be had
    inputs: Sequence[Tensor] = ()  # of what learns, once an arm is made


def run(bench: ThreadsBench) -> list[Row]:
    """Return a row per case, arm, number of threads and number of neighbours, with times in ms.

    ``x one thread`` is the speed relative to the same arm on one thread. ``x eager`` is relative to the fastest plain
    PyTorch on any number of threads; both are with the same number of neighbours. ``saved MB`` is the memory between
    forward and backward pass beyond the inputs, which is the same on every run.
    """
    before, ends, rows = torch.get_num_threads(), time.monotonic() + bench.seconds, list[Row]()
    try:
        for case in tqdm(list(_cases(bench)), desc="kernels"):
            if time.monotonic() > ends:
                rows.append({"what": case.what, "shape": case.shape, "arm": "all", "skipped": "time is up"})
                continue
            rows += map(noted, _measure(case, bench))
    finally:
        torch.set_num_threads(before)
    return rows


def _measure(case: Case, bench: ThreadsBench) -> list[Row]:
    calls, rows = dict[str, Call](), list[Row]()
    for arm, make in case.arms.items():
        try:
            calls[arm] = make()
        except Skip as reason:
            rows.append({"what": case.what, "shape": case.shape, "arm": arm, "skipped": str(reason)})
    for arm, threads in ((arm, threads) for arm in calls for threads in bench.threads):
        torch.set_num_threads(threads)
        for _ in range(WARM_UP):
            calls[arm]()
    saved = {arm: saved_bytes(call, case.inputs) for arm, call in calls.items()}
    measured = list[Row]()
    for busy in dict.fromkeys((0, bench.busy)):
        with neighbours(busy):
            best = _best(calls, bench)
        eager = min((t for (name, _), t in best.items() if name == "eager"), default=None)
        for (arm, threads), ms in best.items():
            measured.append(
                {
                    "what": case.what, "shape": case.shape, "arm": arm, "threads": threads, "busy neighbours": busy,
                    "ms": ms, "x one thread": best[arm, 1] / ms if (arm, 1) in best else None,
                    "x eager": None if eager is None else eager / ms,
                    "saved MB": saved[arm] / 2**20 if case.inputs else None,
                }
            )  # fmt: skip
    return measured + rows


def saved_bytes(call: Call, inputs: Sequence[Tensor]) -> int:
    """Return the bytes of all tensors that autograd saves for a backward pass in ``call``, without the inputs."""
    own, kept = {x.untyped_storage().data_ptr() for x in inputs}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(kept.values())


def _best(calls: dict[str, Call], bench: ThreadsBench) -> dict[tuple[str, int], float]:
    """Return the milliseconds of the fastest call of each arm on each number of threads."""
    best: dict[tuple[str, int], float] = {}
    for _ in range(bench.turns):
        for arm, threads in ((arm, threads) for arm in calls for threads in bench.threads):
            torch.set_num_threads(threads)
            began = time.perf_counter()
            calls[arm]()
            ms = 1e3 * (time.perf_counter() - began)
            best[arm, threads] = min(ms, best.get((arm, threads), ms))
    return best


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[list[int]]:
    """Start processes that each keep a core busy; yield their ids. They end with the block, or with this process."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(10**5))"
    processes = [subprocess.Popen([sys.executable, "-I", "-S", "-c", spin]) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ---- what is computed


def _cases(bench: ThreadsBench) -> Iterator[Case]:
    """Yield each kind's first shape, then each kind's second: if time runs out, every kind has been measured."""
    for at in range(max(map(len, (bench.losses, bench.linear, bench.chains)))):
        for kind, (rows, vocabulary) in ((kind, shape) for kind in LOSSES for shape in bench.losses[at : at + 1]):
            yield _loss(kind, rows, vocabulary)
        for rows, vocabulary in bench.linear[at : at + 1]:
            yield _linear(rows, vocabulary, bench.hidden)
        for shape in bench.chains[at : at + 1]:
            yield from _decoding(*shape)


def _logits(rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return similar logits of draft and target [rows, V]."""
    generator = torch.Generator().manual_seed(0)
    target = torch.empty(rows, vocabulary).normal_(0, 2, generator=generator)
    return torch.empty_like(target).normal_(0, 0.4, generator=generator).add_(target), target


def _loss(kind: str, rows: int, vocabulary: int) -> Case:
    """Return the case of a loss, forward and backward from logits. The first arm made creates the inputs."""
    inputs: list[Tensor] = []

    def prepared(make: Callable[[str], kernel_arms.LabelledLoss]) -> Call:
        loss = make(kind)
        if not inputs:
            draft, target = _logits(rows, vocabulary)
            inputs.extend((draft.requires_grad_(), target, target.argmax(-1)))
        draft, target, labels = inputs

        def step() -> None:
            loss(draft, target, labels).sum().backward()
            draft.grad = None

        return step

    arms = {name: partial(prepared, make) for name, make in kernel_arms.KINDS.items()}
    return Case(what=kind, shape=f"N={rows} V={vocabulary}", arms=arms, inputs=inputs)


def _linear(rows: int, vocabulary: int, width: int) -> Case:
    """Return the case of TV, forward and backward from hidden states."""
    generator = torch.Generator().manual_seed(0)
    hidden, states = (torch.randn(rows, width, generator=generator) for _ in range(2))
    weight = torch.randn(vocabulary, width, generator=generator) / width**0.5
    hidden.requires_grad_()

    def step(loss: Callable[[], Tensor]) -> None:
        loss().sum().backward()
        hidden.grad = None

    arms: dict[str, Callable[[], Call]] = {
        "bebop": lambda: lambda: step(lambda: linear_draft_loss(hidden, weight, states, weight).loss),
        "eager": lambda: lambda: step(lambda: kernel_arms.tv_of_softmaxes(hidden @ weight.T, states @ weight.T)),
    }
    inputs = hidden, states, weight
    return Case(what="linear tv", shape=f"N={rows} d={width} V={vocabulary}", arms=arms, inputs=inputs)


def _decoding(batch: int, drafts: int, vocabulary: int) -> Iterator[Case]:
    """Yield the cases of verification, statistics and truncation of B chains of K drafts."""
    logits, target = (x.view(batch, drafts + 1, vocabulary) for x in _logits(batch * (drafts + 1), vocabulary))
    q, p = logits[:, :drafts].softmax(-1), target.softmax(-1)
    numbers = torch.rand(batch, 2 * drafts + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, draws = (x.contiguous() for x in numbers.split([drafts + 2, drafts], 1))
    tokens, rows = sample(q, draws), target.flatten(0, 1)
    flat = q.flatten(0, 1), p[:, :drafts].flatten(0, 1)
    calls: dict[str, Call] = {
        "verify probs": lambda: chain_verify(tokens, q, p, u),
        "verify block": lambda: block_verify(tokens, q, p, u),
        "pair stats": lambda: pair_stats(*flat, from_logits=False),
        "top-p 0.9": lambda: truncate_(rows.clone(), top_p=0.9),
    }
    for what, call in calls.items():
        yield Case(what=what, shape=f"B={batch} K={drafts} V={vocabulary}", arms={"bebop": partial(_made, call)})


def _made(call: Call) -> Call:
    """Return the call itself, which needs no preparation."""
    return call
