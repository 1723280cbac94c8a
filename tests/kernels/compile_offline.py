"""Compiles the Triton kernels of the draft losses for an H100; needs no GPU. Prints one line per kernel.

The interpreter runs Python and forgives what the compiler refuses. ``python -m tests.kernels.compile_offline`` is a
process of its own because triton decides on import whether it interprets.
"""

import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bebop.kernels import row_losses_triton as losses
from bebop.kernels.row_losses import KINDS

H100 = GPUTarget("cuda", 90, 32)
POINTERS = {"stats": "*fp32", "partial": "*fp32"}
FLOATS = ("scale", "slope", "eta")


def compiled(kernel: Any, dtype: str, **constants: Any) -> str:
    """The PTX of a kernel whose logits are of ``dtype``."""
    logits = dict.fromkeys(("draft", "target", "out"), f"*{dtype}")
    labels = {"labels": "*i64" if constants.get("KIND") == "hard_ce" else "*fp32"}
    types = POINTERS | logits | labels | dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    program = triton.compile(ASTSource(kernel, signature, constexprs=values), target=H100, options={"num_warps": 8})
    return str(program.asm["ptx"])


def kernels() -> Iterator[tuple[str, str]]:
    """(name, PTX) of every kernel and kind."""
    for kind in KINDS:
        name = f"row {kind}"
        yield name, compiled(losses._row_kernel, "bf16", KIND=kind, GRAD=True, BLOCK=1024)
        constants = {"KIND": kind, "BLOCK": 1024, "LANES": 16}
        yield f"split sums {kind}", compiled(losses._split_sums, "bf16", **constants)
        yield f"split finish {kind}", compiled(losses._split_finish, "bf16", GRAD=True, **constants)
    yield "row tv fp32", compiled(losses._row_kernel, "fp32", KIND="tv", GRAD=False, BLOCK=1024)
    yield "split normalise", compiled(losses._split_normalise, "bf16", BLOCK=1024)


if __name__ == "__main__":
    for name, ptx in kernels():
        sys.stdout.write(f"{name}: {len(ptx.splitlines())} lines\n")
