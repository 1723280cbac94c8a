"""Compiles every Triton kernel for an H100; needs no GPU. Prints one line per kernel, with what it takes of the card.

The interpreter runs Python and forgives what the compiler refuses. ``python -m tests.kernels.compile_offline`` is a
process of its own because triton decides on import whether it interprets.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bebop.kernels import block_verify_triton as block
from bebop.kernels import draw_triton as draw
from bebop.kernels import layer_triton as layer
from bebop.kernels import paged_attention_triton as paged
from bebop.kernels import row_losses_triton as losses
from bebop.kernels import stats_triton as stats
from bebop.kernels import uniforms_triton as uniforms
from bebop.kernels import verify_triton as verify
from bebop.kernels.draft_losses_triton import TWINS

H100 = GPUTarget("cuda", 90, 32)
SHARED = 232_448  # bytes of shared memory that a program may have there
LEAST = 101_376  # the same on the cards with the least, compute capability 8.6 and 8.9
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FLOATS = dict.fromkeys(("scale", "slope", "eta"), "fp32")
SUMS = dict.fromkeys(("stats", "partial", "masses", "norms", "tops", "scales", "weights", "upstream"), "*fp32")
TOKENS = dict.fromkeys(("tokens", "lengths", "accepted"), "*i64")


def compiled(kernel: Any, dtype: str, types: dict[str, Any] | None = None, **constants: Any) -> str:
    """The resources of a kernel whose logits or distributions are of ``dtype``; what is not named is an i32."""
    distributions = dict.fromkeys(("draft", "target", "out", "q", "p"), f"*{dtype}")
    known = FLOATS | SUMS | TOKENS | distributions | {"u": "*fp64"} | (types or {})
    return built(kernel, known, constants, num_warps=8)


def built(
    kernel: Any,
    types: dict[str, Any],
    constants: dict[str, Any],
    aligned: tuple[str, ...] = (),
    most: int = SHARED,
    **options: int,
) -> str:
    """The resources of a kernel with arguments of ``types``, of which the ``aligned`` ones are multiples of 16.

    Raises:
        AssertionError: It takes more than ``most`` bytes of shared memory.
    """
    known, names = types | dict.fromkeys(constants, "constexpr"), kernel.arg_names
    signature = {name: known.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=values, attrs=attributes)
    program = triton.compile(source, target=H100, options=options)
    shared = program.metadata.shared
    assert shared <= most, f"{shared} bytes of shared memory; a card has {most}"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(program.asm["cubin"])
        shown = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf"{word}:(\d+)", shown) for word in ("REG", "STACK"))
    assert registers is not None and stack is not None, shown
    return f"{registers[1]} registers, {stack[1]} bytes spilled, {shared} bytes of shared memory"


def loss_kernels() -> Iterator[tuple[str, str]]:
    """(name, resources) of every kind."""
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
    """(name, resources) of chain and block verification and of the statistics."""
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
    """(name, resources) of drawing and verifying from logits, of three drafts and of one."""
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
    """(name, resources) of what lies between the products of a decoder layer, and of random numbers."""
    states = ("x", "more", "weight", "total", "query_weight", "key_weight", "cos", "sin")
    for given in (True, False):
        types = dict.fromkeys(states, "*bf16") | {"eps": "fp32"}
        yield f"norm {given}", compiled(layer._norm, "bf16", types, ADD=given, BLOCK=2048)
        sizes = {"SIZE": 80, "LANES": 128, "HEADS": 8}
        stores = {"keys": "*bf16", "values": "*bf16", "table": "*i64", "entries": "*i64"}
        for stored in (True, False):
            turn = compiled(layer._turn, "bf16", types | stores, NORMED=given, STORED=stored, **sizes)
            yield f"turn {given} {stored}", turn
    yield "gated", compiled(layer._gated, "bf16", types, BLOCK=1024)
    whole = dict.fromkeys(("seeds", "counters"), "*i64")
    yield "uniforms", compiled(uniforms._uniforms, "bf16", whole | {"out": "*fp64"}, BLOCK=256)
    yield "digest", compiled(uniforms._digest, "bf16", whole | {"out": "*i64"}, BLOCK=256)


def attention_kernels() -> Iterator[tuple[str, str]]:
    """(name, resources) of attention over pages as it is launched, of few rows and of full tiles, in parts and whole.

    Raises:
        AssertionError: One keeps sums in memory, as they are too many for registers.
    """
    pointers = ("query", "keys", "values", "out", "table", "entries", "ways", "sums", "marks", "counters")
    strides = [name for name in paged._attend.arg_names if name.startswith(("query_", "key_", "value_"))]
    types = {"table": "*i64", "entries": "*i64", "sums": "*fp32", "marks": "*fp32", "counters": "*i32"}
    for dtype, size, (rows, splits), tree in product(
        ("bf16", "fp32"), (64, 128, 256), ((16, 16), (64, 1)), (True, False)
    ):
        own = types | dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}") | {"scale": "fp32"}
        tile = paged.tile_of(rows // 2, 2, size, 64, 2 if dtype == "bf16" else 4, 8 * tree)
        constants = tile | paged.parts_of(splits, tile["ROWS"], size)
        options = {"most": LEAST, "num_warps": paged.warps_of(tile["ROWS"]), "num_stages": paged.STAGES}
        aligned = (*pointers, *dict.fromkeys(strides), "span")
        shown = built(paged._attend, own | {"ways": "*u8" if tree else "*i64"}, constants, aligned, **options)
        assert " 0 bytes spilled" in shown, shown
        yield f"attention {dtype} {size} {rows} {tree}", shown


if __name__ == "__main__":
    for kernels in (loss_kernels(), verify_kernels(), draw_kernels(), layer_kernels(), attention_kernels()):
        for name, resources in kernels:
            sys.stdout.write(f"{name}: {resources}\n")
