"""Draft losses of whole rows on a CPU: a few rows at a time, so that everything but the gradient stays in the cache.

Threads share chunks of rows (``row_threads.py``). A chunk has the same rows as for one thread, so the numbers are the
same to the bit on any number of threads.

Beyond its inputs it holds the gradient, [N, V] in the draft's dtype, and some ten tensors of one chunk. Plain autograd
holds 4.5 tensors of [N, V] instead and waits for memory most of the time.

One core function serves twice. Eager, it makes each intermediate of a chunk in the second-level cache. Compiled, it
runs as a handful of vectorised loops. Compiling takes some seconds once per kind and dtype, so only large calls pay for
it, or smaller ones that come again and again. Without a working C++ compiler, or with ``BEBOP_COMPILE=0``, the eager
core does all of it.
"""

import logging
import os
import threading
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from bebop.kernels.draft_losses import LOSSES, gradient, needs_labels
from bebop.kernels.row_losses import NUMBERS, RowLosses, accumulator
from bebop.kernels.row_threads import large_empty, share, sharing, threads_for

# Elements of a chunk: 1 MB in fp32. With a quarter of it calls of the core cost a tenth to a quarter more; with twice
# as much some kinds fall out of the second-level cache (1 MB).
CHUNK_ELEMENTS = 2**18
SMALLEST_CHUNK = 2**14  # elements below which a chunk costs what its operators cost to call
COMPILE_FROM = 2**21  # elements of a call that is worth seconds of compilation: some 30 ms in the eager core
COMPILE_AFTER = 2**24  # elements of a kind and dtype in all calls, after which smaller ones are worth it too
COMPILE_MIN = 2**17  # elements of a call below which calling a compiled core costs more than it saves

done: Counter[tuple[str, torch.dtype]] = Counter()  # elements of all calls, by kind and dtype
# draft, target, labels, scale, eta, kind, out, numbers: see ``core``
Core = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, str, Tensor | None, Tensor], None]
ROWS, VOCABULARY = 3, 32_771  # sizes to compile with: of neither 1 nor anything that divides 16 may be made use of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Properties of a call that need a compiled core of their own."""

    kind: str
    draft: torch.dtype
    target: torch.dtype
    sums: torch.dtype
    labels: torch.dtype | None
    need_grad: bool
    shared: bool  # whether it runs on several threads at a time

    def inputs(self) -> tuple[Any, ...]:
        """Return example arguments of ``Core`` for this variant, without the kind."""
        draft, target = (torch.zeros(ROWS, VOCABULARY, dtype=dtype) for dtype in (self.draft, self.target))
        scale, eta = (torch.ones((), dtype=self.sums) for _ in range(2))
        labels = None if self.labels is None else torch.zeros(ROWS, dtype=self.labels)
        numbers = torch.empty(ROWS, number_count(self.kind), dtype=self.sums)
        return draft, target, labels, scale, eta, torch.empty_like(draft) if self.need_grad else None, numbers


def number_count(kind: str) -> int:
    """Return how many of ``row_losses.NUMBERS`` a kind has."""
    return 5 if needs_labels(kind) else 4


def run(
    draft_logits: Tensor,
    target_logits: Tensor,
    kind: str,
    temperature: float,
    labels: Tensor | None,
    eta: float,
    need_grad: bool,
) -> RowLosses:
    """Run ``row_losses`` on a CPU, or where Triton cannot run: [N, V], [N, V] -> RowLosses.

    ``row_losses`` itself checks the inputs.
    """
    done[kind, draft_logits.dtype] += draft_logits.numel()
    chosen: Core = core
    if worth_compiling(draft_logits, done[kind, draft_logits.dtype]):
        chosen = compiled.get(variant(draft_logits, target_logits, kind, labels, need_grad))
    return run_in_chunks(chosen, draft_logits, target_logits, kind, temperature, labels, eta, need_grad)


def worth_compiling(logits: Tensor, so_far: int = 0) -> bool:
    """Return whether compiling pays for a call with these logits, after ``so_far`` elements of its kind and dtype.

    The input has to be large enough, alone or with those before it, and on a CPU. ``BEBOP_COMPILE=0`` forbids
    compiling. A dispatch mode that watches operators does, too, since a compiled core shows none.
    """
    large = logits.numel() >= (COMPILE_FROM if so_far < COMPILE_AFTER else COMPILE_MIN)
    return (
        large
        and logits.device.type == "cpu"
        and os.environ.get("BEBOP_COMPILE") != "0"
        and not is_in_torch_dispatch_mode()
    )


def variant(draft: Tensor, target: Tensor, kind: str, labels: Tensor | None, need_grad: bool) -> Variant:
    """Return the variant of the core that these inputs need."""
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
    """Compute the losses with ``core``, chunk by chunk of rows, shared between threads."""
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
    """Return the rows of a chunk, so that it fits the cache: a chunk takes about ten times its logits.

    A chunk has at most 1/64 of all rows unless those are tiny.
    """
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
    """Write the gradient of a chunk to ``out`` [R, V], and its numbers to ``numbers`` [R, 4], or [R, 5] with labels.

    The numbers are loss, alpha and both entropies, and with labels log p[label]. ``scale`` is 1 / temperature in the
    dtype of sums. Returned results would have to be copied, under the interpreter's lock.

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
    """Return log-probabilities and probabilities [R, V], and the largest scaled logit [R]."""
    scaled = logits.to(scale.dtype) * scale
    top = scaled.amax(-1)
    shifted = scaled - top[:, None]
    weights = shifted.exp()
    total = _sum(weights)[:, None]
    return shifted - total.log(), weights * (1 / total), top


def _sum(numbers: Tensor) -> Tensor:
    """Return the sums [R] of [R, V].

    A compiled loop adds in sequence, which in fp32 costs 1e-6 at V = 32,000; in fp64 it is as fast. Eager sums go
    pairwise (3e-7) and would first copy to fp64.
    """
    total = numbers.sum(-1, dtype=torch.float64 if torch.compiler.is_compiling() else None)
    return total.to(numbers.dtype)


# ---- the compiled core: compiled once per kind and dtype, for logits of any shape
#
# Before every call ``torch.compile`` checks guards, and compiles again where they fail: for one row and for many, for
# rows at the beginning of a tensor and further on, for each backend, kind and dtype. After some two dozen of these it
# silently ran eagerly, several times slower. Here each variant is a function of its own whose sizes are all unknown to
# the compiler, and guards are skipped: ``Variant`` has everything that the code depends on.


class CompiledLosses:
    """Compiled variants of a core, each compiled on first use; after a failure the uncompiled core is used."""

    def __init__(self, core: Core, backend: str | Callable[..., Any] = "inductor") -> None:
        self.core, self.backend = core, backend
        self.made: dict[Variant, Core] = {}
        self.failed: set[bool] = set()  # of ``Variant.shared``
        self._lock = threading.Lock()

    def get(self, variant: Variant) -> Core:
        """Return the core compiled for a variant; compiling it takes some seconds."""
        found = self.made.get(variant)
        if found is None:
            with self._lock:
                found = self.made[variant] = self.made.get(variant) or self._make(variant)
        return found

    def _make(self, variant: Variant) -> Core:
        if variant.shared in self.failed:
            return self.core
        call = self._compile(_own_code(self.core, variant.kind), variant.shared)
        try:
            with torch.inference_mode(False), torch.no_grad():
                call(*variant.inputs())
        except torch._dynamo.exc.TorchDynamoException as error:  # no compiler, most of the time
            reason = " ".join(str(error).strip().splitlines()[:2])  # the backend's name, then the cause
            logger.warning("draft losses run uncompiled, several times slower: %s", reason)
            self.failed.add(variant.shared)
            return self.core

        def compiled(
            draft: Tensor, target: Tensor, labels: Tensor | None, scale: Tensor, eta: Tensor, _: str, *out: Any
        ) -> None:
            call(draft, target, labels, scale, eta, *out)

        return compiled

    def _compile(self, function: Callable[..., None], shared: bool) -> Callable[..., None]:
        """Compile a function for one variant.

        By default the compiled function runs under the interpreter's lock, one thread at a time. With a C++ wrapper it
        releases the lock. The headers of that wrapper take some ten seconds once per machine, so only threads that
        share rows use it. The loops are the same, and so are their numbers.
        """
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        if self.backend == "inductor":
            options |= {"cpp.threads": 1, "cpp_wrapper": shared}
        return torch.compile(function, dynamic=True, fullgraph=True, backend=self.backend, options=options)


def _own_code(core: Core, kind: str) -> Callable[..., None]:
    """Return ``core`` for one kind, with a code object that no other function has.

    ``torch.compile`` keeps its results by code object and takes the first that fits. Without guards, that could be the
    result of another kind.
    """

    def call(
        draft: Tensor,
        target: Tensor,
        labels: Tensor | None,
        scale: Tensor,
        eta: Tensor,
        out: Tensor | None,
        numbers: Tensor,
    ) -> None:
        core(draft, target, labels, scale, eta, kind, out, numbers)

    code = call.__code__.replace(co_name=f"{kind}_loss")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


compiled = CompiledLosses(core)
