"""Draft losses of whole rows on a CPU: a few rows at a time, so that everything but the gradient stays in the cache.

Threads share chunks of rows (``row_threads.py``). A chunk is what it is for one thread, so the numbers are the same to
the bit on any number of them.

Beyond its inputs it holds the gradient, [N, V] in the draft's dtype, and some ten tensors of one chunk. Plain autograd
holds 4.5 tensors of [N, V] instead and waits for memory most of the time.

One core serves twice. Eager, it makes each intermediate of a chunk in the second-level cache. Compiled by
``torch.compile``, it runs as a handful of vectorised loops; that takes some seconds once per kind and dtype, so
only calls that are large pay for it, or smaller ones that come again and again. Without a working C++ compiler, or with
``BEBOP_COMPILE=0``, the eager core does all of it.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from bebop.kernels.draft_losses import LOSSES, gradient, needs_labels
from bebop.kernels.row_losses import NUMBERS, RowLosses, accumulator
from bebop.kernels.row_threads import share, sharing

# Elements of a chunk. 2 rows of V = 32,768: 64 ms for 512 rows compiled, the same as 8 rows at best, but 8
# rows fall out of the cache in some kinds (100 ms; one thread, 1 MB of second-level cache).
CHUNK_ELEMENTS = 2**16
SMALLEST_CHUNK = 2**14  # elements below which a chunk costs what its operators cost to call
COMPILE_FROM = 2**21  # elements of a call that is worth seconds of compilation: some 30 ms in the eager core
COMPILE_AFTER = 2**24  # elements of a kind and dtype in all calls, after which smaller ones are worth it too
COMPILE_LEAST = 2**17  # elements of a call below which calling a compiled core costs more than it saves

Core = Callable[..., tuple[Tensor, ...]]

logger = logging.getLogger(__name__)
done: Counter[tuple[str, torch.dtype]] = Counter()  # elements of all calls, by kind and dtype


def run(
    draft_logits: Tensor,
    target_logits: Tensor,
    kind: str,
    temperature: float,
    labels: Tensor | None,
    eta: float,
    need_grad: bool,
) -> RowLosses:
    """``row_losses`` on a CPU, or wherever Triton cannot go: [N, V], [N, V] -> RowLosses; inputs are checked there."""
    done[kind, draft_logits.dtype] += draft_logits.numel()
    chosen = compiled_core if worth_compiling(draft_logits, done[kind, draft_logits.dtype]) else core
    return run_in_chunks(chosen, draft_logits, target_logits, kind, temperature, labels, eta, need_grad)


def worth_compiling(logits: Tensor, so_far: int = 0) -> bool:
    """Large enough, alone or with those before it, on a CPU, not forbidden, and nobody watches operators (a compiled
    core shows none)."""
    large = logits.numel() >= (COMPILE_FROM if so_far < COMPILE_AFTER else COMPILE_LEAST)
    return (
        large
        and logits.device.type == "cpu"
        and os.environ.get("BEBOP_COMPILE") != "0"
        and not is_in_torch_dispatch_mode()
    )


@torch.no_grad()
def run_in_chunks(
    core: Core,
    draft_logits: Tensor,
    target_logits: Tensor,
    kind: str,
    temperature: float,
    labels: Tensor | None,
    eta: float,
    need_grad: bool,
) -> RowLosses:
    """Fill the results chunk by chunk. All chunks have the same number of rows, or a compiled core would be compiled
    again for the last: that one goes back over rows which are done, by the same thread, or two would write them."""
    rows, vocabulary = draft_logits.shape
    dtype, device = accumulator(draft_logits, target_logits), draft_logits.device
    scale, slope = (torch.tensor(x, dtype=dtype, device=device) for x in (1 / temperature, eta))
    numbers = torch.empty(5 if needs_labels(kind) else 4, rows, dtype=dtype, device=device)
    grad = torch.empty(rows, vocabulary, dtype=draft_logits.dtype, device=device) if need_grad else None
    step = chunk_rows(rows, vocabulary)
    starts = [min(start, rows - step) for start in range(0, rows, step)]
    whole = rows // step

    def fill(block: int) -> None:
        for start in starts[block:] if block == whole - 1 else starts[block : block + 1]:
            some = slice(start, start + step)
            draft, target = draft_logits[some].contiguous(), target_logits[some].contiguous()
            out = None if grad is None else grad[some]
            chunk = core(draft, target, None if labels is None else labels[some], scale, slope, kind, out)
            for row, number in zip(numbers, chunk, strict=True):
                row[some] = number

    share(fill, whole, elements=draft_logits.numel(), device=device)
    return RowLosses(grad=grad, **dict(zip(NUMBERS, numbers, strict=False)))


def chunk_rows(rows: int, vocabulary: int) -> int:
    """Rows that fit the cache, at most 1/64 of all unless those are tiny: a chunk takes about ten times its logits."""
    cached = min(CHUNK_ELEMENTS // vocabulary, rows // 64)
    return max(1, cached, min(SMALLEST_CHUNK // vocabulary, rows))


class CompiledCore:
    """``core``, compiled at its first call; from a failure on, the eager one.

    What ``torch.compile`` makes by default runs under the interpreter's lock, one thread at a time. With a wrapper in
    C++ it lets go of it; headers take some ten seconds once a machine, so only threads that share rows have it. The
    loops are the same, and so are their numbers.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self.backend = backend
        self.calls: dict[bool, Core] = {}  # by whether threads share rows

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """What ``core`` returns and writes."""
        shared = sharing()
        call = self.calls.get(shared)
        if call is core:
            return core(*arguments)
        if call is None:
            options = {"cpp_wrapper": True} if shared and self.backend == "inductor" else None
            # Seven kinds in three dtypes, for one row and for many, are more variants than torch allows by default.
            call = torch.compile(  # type: ignore[call-overload]  # its overloads leave recompile_limit out
                core, dynamic=True, fullgraph=True, backend=self.backend, options=options, recompile_limit=128
            )
            call = self.calls.setdefault(shared, call)
        try:
            return call(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:  # no compiler, most of the time; nothing is written yet
            if self.calls[shared] is not core:
                reason = " ".join(str(error).strip().splitlines()[:2])  # the backend's name, then the cause
                logger.warning("draft losses run uncompiled, several times slower: %s", reason)
            self.calls[shared] = core
            return core(*arguments)


def core(
    draft: Tensor, target: Tensor, labels: Tensor | None, scale: Tensor, eta: Tensor, kind: str, out: Tensor | None
) -> tuple[Tensor, ...]:
    """loss, alpha, both entropies [R] of a chunk, log p[label] where there are labels; the gradient to ``out`` [R, V].

    ``scale`` is 1 / temperature in the dtype of sums. Writing into ``out`` instead of returning a tensor saves an
    allocation of a megabyte per chunk, whose page faults cost as much as the arithmetic.

    Probabilities are exponentials of z - max z times 1 / their sum. exp(z - logsumexp z) is shorter, but keeps four
    digits where logits are in the thousands.
    """
    q_log, q, q_top = _distribution(draft, scale)
    p_log, p, p_top = _distribution(target, scale)
    common = q <= p
    alpha = _sum(torch.where(common, q, p))
    q_entropy = -_sum(torch.where(q > 0, q * q_log, 0))
    p_entropy = -_sum(torch.where(p > 0, p * p_log, 0))
    row = LOSSES[kind]
    tv = own = None
    if row.tv is not None:
        below = _sum(torch.where(common, q, 0))[:, None]
        tv = q * (below - common.to(q.dtype))  # the comparison that made ``below``: or rows would not add up to 0
    divergence = second = alpha  # of losses without a divergence, which do not look at it
    if row.divergence is not None:
        hit = None if labels is None else torch.arange(q.shape[-1], device=q.device) == labels[:, None]
        tile = (q, q_log, p, p_log, hit)
        divergence = _sum(row.divergence.terms(*tile))
        second = divergence if row.divergence.second is None else _sum(row.divergence.second(*tile))
        if row.own is not None:
            own = row.divergence.gradient(*tile, divergence[:, None], second[:, None])
    loss = row.value(alpha, divergence, p_entropy, eta)
    numbers = (alpha, q_entropy, p_entropy, second) if needs_labels(kind) else (alpha, q_entropy, p_entropy)
    lost = torch.where((q_top > -torch.inf) & (p_top > -torch.inf), 0.0, torch.nan).to(
        scale.dtype
    )  # rows: no distributions
    if out is not None:
        out.copy_(gradient(row, tv, own, alpha, eta) * (scale + lost)[:, None])
    return tuple(number + lost for number in (loss, *numbers))


def _distribution(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms and probabilities [R, V], and the largest scaled logit [R]."""
    scaled = logits.to(scale.dtype) * scale
    top = scaled.amax(-1)
    shifted = scaled - top[:, None]
    weights = shifted.exp()
    total = _sum(weights)[:, None]
    return shifted - total.log(), weights * (1 / total), top


def _sum(numbers: Tensor) -> Tensor:
    """[R] of [R, V]. A compiled loop adds in sequence, which in fp32 costs 1e-6 at V = 32,000; in fp64 it is as fast.
    Eager sums go pairwise (3e-7) and would first copy to fp64."""
    total = numbers.sum(-1, dtype=torch.float64 if torch.compiler.is_compiling() else None)
    return total.to(numbers.dtype)


compiled_core = CompiledCore()
