"""A draft loss compiled once per kind and dtype: no shape of the logits makes it anew.

``torch.compile`` looks at what it was compiled for before every call and compiles again where that differs: for one row
and for many, for rows at the beginning of a tensor and further on, for one backend and another; kinds and dtypes come
on top. After some two dozen of these it was seen to run eagerly, several times slower, and said nothing. Here each
variant is a function of its own whose sizes are all unknown to the compiler, and nothing is looked at: ``Variant`` has
all that one depends on.
"""

import logging
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bebop.kernels.draft_losses import needs_labels

# draft, target, labels, scale, eta, kind, out, numbers; see ``row_losses_cpu.core``
Core = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, str, Tensor | None, Tensor], None]
ROWS, VOCABULARY = 3, 32_771  # sizes to compile with: of neither 1 nor anything that divides 16 may be made use of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compiled by itself."""

    kind: str
    draft: torch.dtype
    target: torch.dtype
    sums: torch.dtype
    labels: torch.dtype | None
    need_grad: bool
    shared: bool  # whether it runs on several threads at a time

    def inputs(self) -> tuple[Any, ...]:
        """What ``Core`` takes, without the kind."""
        draft, target = (torch.zeros(ROWS, VOCABULARY, dtype=dtype) for dtype in (self.draft, self.target))
        scale, eta = (torch.ones((), dtype=self.sums) for _ in range(2))
        labels = None if self.labels is None else torch.zeros(ROWS, dtype=self.labels)
        numbers = torch.empty(ROWS, number_count(self.kind), dtype=self.sums)
        return draft, target, labels, scale, eta, torch.empty_like(draft) if self.need_grad else None, numbers


def number_count(kind: str) -> int:
    """How many of ``row_losses.NUMBERS`` a kind has."""
    return 5 if needs_labels(kind) else 4


class CompiledLosses:
    """Variants of a core, each compiled when it is first asked for; from a failure on, the core as it is."""

    def __init__(self, core: Core, backend: str | Callable[..., Any] = "inductor") -> None:
        self.core, self.backend = core, backend
        self.made: dict[Variant, Core] = {}
        self.failed: set[bool] = set()  # of ``Variant.shared``
        self._lock = threading.Lock()

    def get(self, variant: Variant) -> Core:
        """Some seconds at first."""
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
        """What ``torch.compile`` makes by default runs under the interpreter's lock, one thread at a time. With a
        wrapper in C++ it lets go of it; headers take some ten seconds once a machine, so only threads that share rows
        have it. The loops are the same, and so are their numbers."""
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        if self.backend == "inductor":
            options |= {"cpp.threads": 1, "cpp_wrapper": shared}
        return torch.compile(function, dynamic=True, fullgraph=True, backend=self.backend, options=options)


def _own_code(core: Core, kind: str) -> Callable[..., None]:
    """``core`` of a kind, with a code object that no other function has: it is there that ``torch.compile`` keeps what
    it made, and takes the first that fits; without a look at what for, that could be another kind's."""

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
