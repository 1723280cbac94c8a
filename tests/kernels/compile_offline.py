"""Compiles every Triton kernel for an H100; needs no GPU. Prints one line per kernel.

The interpreter runs Python and forgives what the compiler refuses. ``python -m tests.kernels.compile_offline`` is a
process of its own because triton decides on import whether it interprets.
"""

import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bebop.kernels import block_verify_triton as block
from bebop.kernels import draw_triton as draw
from bebop.kernels import layer_triton as layer
from bebop.kernels import row_losses_triton as losses
from bebop.kernels import stats_triton as stats
from bebop.kernels import uniforms_triton as uniforms
from bebop.kernels import verify_triton as verify
from bebop.kernels.draft_losses_triton import TWINS

H100 = GPUTarget("cuda", 90, 32)
FLOATS = dict.fromkeys(("scale", "slope", "eta"), "fp32")
SUMS = dict.fromkeys(("stats", "partial", "masses", "norms", "tops", "scales", "weights", "upstream"), "*fp32")
TOKENS = dict.fromkeys(("tokens", "lengths", "accepted"), "*i64")


def compiled(kernel: Any, dtype: str, types: dict[str, Any] | None = None, **constants: Any) -> str:
    """The PTX of a kernel whose logits or distributions are of ``dtype``; what is not named is an i32."""
    distributions = dict.fromkeys(("draft", "target", "out", "q", "p"), f"*{dtype}")
    known = (
        FLOATS | SUMS | TOKENS | distributions | {"u": "*fp64"} | (types or {}) | dict.fromkeys(constants, "constexpr")
    )
    signature = {name: known.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    program = triton.compile(ASTSource(kernel, signature, constexprs=values), target=H100, options={"num_warps": 8})
    return str(program.asm["ptx"])


def loss_kernels() -> Iterator[tuple[str, str]]:
    """(name, PTX) of every kind."""
    written = {"GRAD": True, "WEIGHTED": True}
    for kind, twin in TWINS.items():
        labels = {"labels": "*i64" if twin.labels else "*fp32"}
        constants = twin.constants()
        yield f"row {kind}", compiled(losses._row_kernel, "bf16", labels, BLOCK=1024, **written, **constants)
        del constants["EARLY"]
        sizes = {"BLOCK": 1024, "LANES": 16}
        terms = {name: constants.pop(name) for name in ("TERMS", "SECOND")}
        yield f"split sums {kind}", compiled(losses._split_sums, "bf16", **terms, **sizes)
        yield f"split finish {kind}", compiled(losses._split_finish, "bf16", labels, **written, **constants, **sizes)
    labels = {"labels": "*fp32"}
    plain = {"GRAD": False, "WEIGHTED": False, "BLOCK": 1024, **TWINS["tv"].constants()}
    yield "row tv fp32", compiled(losses._row_kernel, "fp32", labels, **plain)
    yield "split normalise", compiled(losses._split_normalise, "bf16", BLOCK=1024)
    yield "scale", compiled(losses._scale_kernel, "bf16", {"grad": "*bf16"}, BLOCK=1024)


def verify_kernels() -> Iterator[tuple[str, str]]:
    """(name, PTX) of chain and block verification and of the statistics."""
    chain, token = {"K": 3, "BLOCK": 1024}, {"out": "*i64"}
    yield "block masses", compiled(block._masses, "fp32", LANES=4, **chain)
    yield "block draw", compiled(block._draw, "fp32", token, LANES=4, TILE_LANES=32, **chain)
    for one_hot in (True, False):
        options = {"ONE_HOT": one_hot, **chain}
        yield f"chain masses {one_hot}", compiled(verify._masses, "fp32", LANES=4, **options)
        yield f"chain draw {one_hot}", compiled(verify._draw, "fp32", token, TILE_LANES=32, **options)
    for given in (True, False):
        yield f"stats {given}", compiled(stats._stats, "bf16", {"out": "*fp32"}, LOGITS=given, BLOCK=1024)


def draw_kernels() -> Iterator[tuple[str, str]]:
    """(name, PTX) of drawing and verifying from logits, of three drafts and of one."""
    pointers = dict.fromkeys(("logits", "p"), "*bf16") | dict.fromkeys(
        ("stats", "p_stats", "sums", "overlaps"), "*fp32"
    )
    pointers |= {"temperatures": "*fp32"} | dict.fromkeys(("best", "p_best", "accepted", "out"), "*i64")
    many = {"BLOCK": 4096, "TILES": 64}
    yield "draw tiles", compiled(draw._tiles, "bf16", pointers, PLACES=4, TEMPERED=True, BLOCK=4096)
    yield "draw finish", compiled(draw._finish, "bf16", pointers, PLACES=1, TEMPERED=False, DRAW=True, **many)
    yield "draw", compiled(draw._draw, "bf16", pointers, **many)
    for drafts in (1, 3):
        given = {"q": ("*bf16",) * drafts, "q_stats": ("*fp32",) * drafts, "q_best": ("*i64",) * drafts}
        options = {"K": drafts, "MEASURE": drafts > 1}
        yield f"draw compare {drafts}", compiled(draw._compare, "bf16", pointers | given, BLOCK=4096, **options)
        yield (
            f"draw verify {drafts}",
            compiled(draw._verify, "bf16", pointers | given, ONE_HOT=False, **many, **options),
        )
    options = {"K": 3, "MEASURE": False, "ONE_HOT": True}
    yield "draw verify one-hot", compiled(draw._verify, "bf16", pointers | given, **many, **options)


def layer_kernels() -> Iterator[tuple[str, str]]:
    """(name, PTX) of what lies between the products of a decoder layer, and of random numbers."""
    states = ("x", "more", "weight", "total", "query_weight", "key_weight", "cos", "sin")
    for given in (True, False):
        types = dict.fromkeys(states, "*bf16") | {"eps": "fp32"}
        yield f"norm {given}", compiled(layer._norm, "bf16", types, ADD=given, BLOCK=2048)
        yield f"turn {given}", compiled(layer._turn, "bf16", types, NORMED=given, SIZE=80, LANES=128, HEADS=8)
    yield "gated", compiled(layer._gated, "bf16", types, BLOCK=1024)
    whole = dict.fromkeys(("seeds", "counters"), "*i64")
    yield "uniforms", compiled(uniforms._uniforms, "bf16", whole | {"out": "*fp64"}, BLOCK=256)
    yield "digest", compiled(uniforms._digest, "bf16", whole | {"out": "*i64"}, BLOCK=256)


if __name__ == "__main__":
    for kernels in (loss_kernels(), verify_kernels(), draw_kernels(), layer_kernels()):
        for name, ptx in kernels:
            sys.stdout.write(f"{name}: {len(ptx.splitlines())} lines\n")
