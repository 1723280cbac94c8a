"""What one thread of this machine can do at most: bytes read, multiplications, calls of operators.

In processor time, the best of several turns: other work on the machine can only slow a measurement down. It does so
here as well, since caches and memory are shared; a roof that was measured too low shows as a share above 100 %.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from bebop.model.backbone import ONEDNN

TURNS, SECONDS = 5, 0.03  # of a measurement: so many turns of at least so long


def fastest(work: Callable[[], object]) -> float:
    """Processor seconds of one call of ``work``, which has been called before."""
    work()
    best, calls, turns = float("inf"), 1, 0
    while turns < TURNS:
        started = time.process_time()
        for _ in range(calls):
            work()
        spent = time.process_time() - started
        if spent < SECONDS:  # too short to be told from what reading the clock takes
            calls *= 2
            continue
        best, turns = min(best, spent / calls), turns + 1
    return best


@torch.inference_mode()
def bandwidth(size: int) -> float:
    """Bytes a second read from a buffer of ``size`` bytes, by the best of three ways, again and again: a small buffer
    stays in a cache."""
    values = torch.ones(max(4096, size // 4 // 4096 * 4096))
    matrix, vector = values.view(-1, 4096), torch.ones(4096)
    readers: list[Callable[[], object]] = [values.sum, lambda: torch.dot(values, values), lambda: matrix @ vector]
    return values.numel() * 4 / min(fastest(read) for read in readers)


@torch.inference_mode()
def arithmetic(rows: int, shapes: list[tuple[int, int]]) -> float:
    """Floating-point operations a second of the fastest product of [rows, K] with one of the matrices [N, K], by the
    better of two libraries, again and again: where it fits, a matrix is in a cache."""
    best = 0.0
    for outputs, inputs in shapes:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        ways: list[Callable[[], object]] = [lambda x=x, weight=weight: linear(x, weight)]  # type: ignore[misc]
        if ONEDNN is not None:
            ways.append(lambda x=x, weight=weight: ONEDNN(x, weight, None, "none", [], ""))  # type: ignore[misc]
        best = max(best, *(2 * rows * outputs * inputs / fastest(way) for way in ways))
    return best


@torch.inference_mode()
def call() -> float:
    """Seconds that calling an operator takes, beside what it does: of one that adds two numbers."""
    one = torch.ones(1)
    into = torch.ones(1)

    def many() -> Tensor:
        for _ in range(100):
            torch.add(one, one, out=into)
        return into

    return fastest(many) / 100
