"""Draft losses of whole rows on a CPU: a few rows at a time, so that everything but the gradient stays in the cache.

Threads share chunks of rows (``row_threads.py``). A chunk is what it is for one thread, so the numbers are the same to
the bit on any number of them.

Beyond its inputs it holds the gradient, [N, V] in the draft's dtype, and some ten tensors of one chunk. Plain autograd
holds 4.5 tensors of [N, V] instead and waits for memory most of the time.

One core serves twice. Eager, it makes each intermediate of a chunk in the second-level cache. Compiled
(``compiled_losses.py``), it runs as a handful of vectorised loops; that takes some seconds once per kind and dtype, so
only calls that are large pay for it, or smaller ones that come again and again. Without a working C++ compiler, or with
``BEBOP_COMPILE=0``, the eager core does all of it.
"""

import os
from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from bebop.kernels.compiled_losses import CompiledLosses, Core, Variant, number_count
from bebop.kernels.draft_losses import LOSSES, gradient, needs_labels
from bebop.kernels.large_tensors import large_empty
from bebop.kernels.row_losses import NUMBERS, RowLosses, accumulator
from bebop.kernels.row_threads import share, sharing, threads_for

# Elements of a chunk: 1 MB in fp32. With a quarter of it calls of the core cost a tenth to a quarter more; with twice
# as much some kinds fall out of the second-level cache (1 MB).
CHUNK_ELEMENTS = 2**18
SMALLEST_CHUNK = 2**14  # elements below which a chunk costs what its operators cost to call
COMPILE_FROM = 2**21  # elements of a call that is worth seconds of compilation: some 30 ms in the eager core
COMPILE_AFTER = 2**24  # elements of a kind and dtype in all calls, after which smaller ones are worth it too
COMPILE_LEAST = 2**17  # elements of a call below which calling a compiled core costs more than it saves

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
    chosen: Core = core
    if worth_compiling(draft_logits, done[kind, draft_logits.dtype]):
        chosen = compiled.get(variant(draft_logits, target_logits, kind, labels, need_grad))
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


def variant(draft: Tensor, target: Tensor, kind: str, labels: Tensor | None, need_grad: bool) -> Variant:
    """What these inputs need."""
    return Variant(
        kind=kind,
        draft=draft.dtype,
        target=target.dtype,
        sums=accumulator(draft, target),
        labels=None if labels is None else labels.dtype,
        need_grad=need_grad,
        shared=sharing() or threads_for(draft.numel(), draft.device) > 1,
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
    """Fill the results chunk by chunk."""
    rows, vocabulary = draft_logits.shape
    dtype, device = accumulator(draft_logits, target_logits), draft_logits.device
    scale, slope = (torch.tensor(x, dtype=dtype, device=device) for x in (1 / temperature, eta))
    numbers = torch.empty(rows, number_count(kind), dtype=dtype, device=device)
    grad = large_empty(rows, vocabulary, draft_logits.dtype, device) if need_grad else None
    step = chunk_rows(rows, vocabulary)

    def fill(block: int) -> None:
        some = slice(block * step, block * step + step)
        draft, target = draft_logits[some].contiguous(), target_logits[some].contiguous()
        out = None if grad is None else grad[some]
        core(draft, target, None if labels is None else labels[some], scale, slope, kind, out, numbers[some])

    share(fill, -(-rows // step), elements=draft_logits.numel(), device=device)
    return RowLosses(grad=grad, **dict(zip(NUMBERS, numbers.T.contiguous(), strict=False)))


def chunk_rows(rows: int, vocabulary: int) -> int:
    """Rows that fit the cache, at most 1/64 of all unless those are tiny: a chunk takes about ten times its logits."""
    cached = min(CHUNK_ELEMENTS // vocabulary, rows // 64)
    return max(1, cached, min(SMALLEST_CHUNK // vocabulary, rows))


def core(
    draft: Tensor,
    target: Tensor,
    labels: Tensor | None,
    scale: Tensor,
    eta: Tensor,
    kind: str,
    out: Tensor | None,
    numbers: Tensor,
) -> None:
    """Write the gradient of a chunk to ``out`` [R, V], and to ``numbers`` [R, 4] loss, alpha and both entropies; with
    labels log p[label] as well [R, 5].

    ``scale`` is 1 / temperature in the dtype of sums. Results that are returned would have to be copied, under the
    interpreter's lock.

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
    found = (loss, alpha, q_entropy, p_entropy, *((second,) if needs_labels(kind) else ()))
    lost = torch.where((q_top > -torch.inf) & (p_top > -torch.inf), 0.0, torch.nan).to(
        scale.dtype
    )  # rows: no distributions
    if out is not None:
        out.copy_(gradient(row, tv, own, alpha, eta) * (scale + lost)[:, None])
    numbers.copy_(torch.stack(found, -1) + lost[:, None])


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


compiled = CompiledLosses(core)
