# mypy: disable-error-code="untyped-decorator"
"""Attention over pages in one Triton kernel, for few new queries and for many (``kernels/paged_attention.py``).

The grid is (B * tiles, Hkv, splits). Heads that share keys and values form a group; its n queries make n * group rows.
A tile holds at most ``ROWS`` of them, padded to 16, the minimum for tensor cores. So a page is read once for all of
them.

The entries of a row are split into spans, one a program, so that one long row keeps the whole device busy. The spans
follow from sizes that the host knows, and a launch in a CUDA graph stays the same. A program ends at once if its span
begins after the last entry that its tile sees. The others leave unnormalised sums with their maximum and their mass. By
an atomic counter the last program to arrive knows that it is the last. It adds the sums up, and sets the counter to 0
for the next launch. Launches of one device share the counters, so they have to be on one stream.

Scores, softmax and sums are in fp32. Weights are rounded to the type of the values before the second product, as other
fused kernels do. The numbers of a row depend on its own entries and on the length of a span. That length follows from
the size of the batch, so a row may round otherwise in another batch.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Compiled for an H100 with D = 128: in bf16 a tile of 16 rows has up to 122 registers a thread and 39 KB of shared
# memory, in fp32 128 and 43 KB, so that four programs fit on a processor. Of 64 rows in bf16: 196 and 82 KB.
ROWS = 64  # of a tile, at most: at D = 256 their sums are 64 registers of each of 256 threads
# Of a tile's queries: 32 rows in fp32 at D = 256. With 64 a program took 102,664 bytes of shared memory, and cards of
# compute capability 8.6 and 8.9 have 101,376. With 32 it takes 67,720.
QUERY_BYTES = 32_768
TILE_BYTES = 16_384  # of a tile of keys
ENTRY_BYTES = 128  # of a tile's entries, a number of each: at 64 entries, full tiles in fp32 leave the registers
SPAN = 128  # entries of a program, at least: below, sums between programs cost more than the entries
SPLITS = 16  # at most, so that the last program has few sums to add: 8 heads of one row then fill 128 processors
STAGES = 3  # tiles of keys and values that are loaded ahead
SUMS = 8192  # that the last program loads at once
COUNTERS = 4096  # of tiles that are split; a launch with more tiles fills the device without splits
LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize=["used", "width", "nodes", "tiles", "pages"])  # they change from cycle to cycle
def _attend(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor, entries: tl.tensor, ways: tl.tensor,
    out: tl.tensor, sums: tl.tensor, marks: tl.tensor, counters: tl.tensor, used: tl.tensor, scale: tl.tensor,
    width: tl.tensor, nodes: tl.tensor, tiles: tl.tensor, pages: tl.tensor, span: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, query_token: tl.tensor, entries_row: tl.tensor,
    entries_token: tl.tensor,
    key_page: tl.tensor, key_head: tl.tensor, key_entry: tl.tensor,
    value_page: tl.tensor, value_head: tl.tensor, value_entry: tl.tensor,
    TREE: tl.constexpr, NODES: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the attention of one tile of rows of a kv head over one span of entries."""
    row = tl.program_id(0).to(tl.int64) // tiles
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    place = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)  # token by token, the heads of a group side by side
    token = place // GROUP
    real = token < width
    lanes = tl.arange(0, LANES)
    if TREE:
        first = tl.load(entries + row * entries_row)
        limit = tl.where(real, first, 0)  # entries that a row sees, up to this one
        end = tl.minimum(first + nodes, used)
        bits = _bits(ways + (row * width + token) * nodes, real, nodes, NODES)
    else:
        limit = tl.load(entries + row * entries_row + token * entries_token, mask=real, other=-1) + 1
        end = tl.minimum(tl.max(limit, 0), used)
    live = tl.maximum((end + span - 1) // span, 1)
    if split < live:
        heads = tl.num_programs(1) * GROUP
        own = row * query_row + (head * GROUP + place % GROUP) * query_head + token.to(tl.int64) * query_token
        inside = real[:, None] & (lanes[None, :] < SIZE)
        q = tl.load(query + own[:, None] + lanes[None, :], mask=inside, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, LANES], tl.float32)
        keys += head * key_head
        values += head * value_head
        start = split * span
        stop = tl.minimum(start + span, end)
        for begin in range(start, stop, BLOCK):
            # A tile of keys lies within a page, as BLOCK divides PAGE.
            page = tl.load(table + row * pages + begin // PAGE).to(tl.int64)
            entry = begin + tl.arange(0, BLOCK)
            offset = (entry % PAGE)[:, None]
            there = (entry < stop)[:, None] & (lanes[None, :] < SIZE)
            k = tl.load(keys + page * key_page + offset * key_entry + lanes[None, :], mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = entry[None, :] < limit[:, None]
            if TREE:
                drafted = (entry - first).to(tl.int64)
                bit = (bits[:, None] >> tl.maximum(drafted, 0)[None, :]) & 1
                seen = seen | ((bit != 0) & (drafted >= 0)[None, :])
            scores = tl.where(seen & (entry < stop)[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing of a span
            weights = tl.exp2(scores - level[:, None])
            fade = tl.exp2(top - level)
            v = tl.load(values + page * value_page + offset * value_entry + lanes[None, :], mask=there, other=0.0)
            mass = mass * fade + tl.sum(weights, 1)
            total = total * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = higher
        answer = out + ((row * width + token) * heads + head * GROUP + place % GROUP) * SIZE
        if live == 1:
            result = (total / tl.where(real, mass, 1.0)[:, None]).to(out.dtype.element_ty)
            tl.store(answer[:, None] + lanes[None, :], result, mask=inside)
        elif SPLITS > 1:
            tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
            rows = (tile * SPLITS + split) * ROWS + tl.arange(0, ROWS)
            tl.store(marks + rows * 2, top)
            tl.store(marks + rows * 2 + 1, mass)
            tl.store(sums + rows[:, None] * LANES + lanes[None, :], total)
            # All threads have written before one of them says so, as in PyTorch's reductions across programs.
            tl.debug_barrier()
            if tl.atomic_add(counters + tile, 1, sem="acq_rel") == live - 1:
                tl.debug_barrier()
                tl.store(counters + tile, 0)
                _add_up(sums, marks, answer, tile, live, real, SPLITS, ROWS, LANES, SIZE, CHUNK)


@triton.jit
def _bits(ways: tl.tensor, real: tl.tensor, nodes: tl.tensor, NODES: tl.constexpr) -> tl.tensor:
    """Return the nodes that each row sees as the bits of one integer.

    Loads within the loop would need more registers than there are.
    """
    node = tl.arange(0, NODES)
    way = tl.load(ways[:, None] + node[None, :], mask=real[:, None] & (node < nodes)[None, :], other=0)
    return tl.sum((way != 0).to(tl.int64) << node[None, :], 1)


@triton.jit
def _add_up(
    sums: tl.tensor, marks: tl.tensor, answer: tl.tensor, tile: tl.tensor, live: tl.tensor, real: tl.tensor,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Add up the partial sums of the ``live`` programs of a tile; all loads of a chunk are in flight at once."""
    split = tl.arange(0, SPLITS)
    rows = (tile * SPLITS + split[:, None]) * ROWS + tl.arange(0, ROWS)[None, :]
    known = (split < live)[:, None] & real[None, :]
    # What another processor wrote is read from the cache that all share.
    top = tl.load(marks + rows * 2, mask=known, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(marks + rows * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
    highest = tl.max(top, 0)
    share = tl.exp2(top - tl.where(real, highest, 0.0)[None, :])
    whole = tl.where(real, tl.sum(share * mass, 0), 1.0)
    for chunk in tl.static_range(LANES // CHUNK):
        lanes = chunk * CHUNK + tl.arange(0, CHUNK)
        part = tl.load(
            sums + rows[:, :, None] * LANES + lanes[None, None, :], mask=known[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        result = tl.sum(part * share[:, :, None], 0) / whole[:, None]
        tl.store(
            answer[:, None] + lanes[None, :],
            result.to(answer.dtype.element_ty),
            mask=real[:, None] & (lanes[None, :] < SIZE),
        )


def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    entries: Tensor,
    used: int,
    scaling: float,
    ways: Tensor | None = None,
    splits: int = 0,
) -> Tensor:
    """Compute ``paged_attention`` in Triton; the arguments are the same.

    ``splits``: programs that share the entries of a row; 0: as many as fill the device.

    Raises:
        UserError: The type of ``query`` is none of ``DTYPES``.
    """
    batch, heads, width, size = query.shape
    kv_heads, page = keys.shape[1:3]
    if query.dtype not in DTYPES:
        raise UserError(f"attention over pages is computed in float32, bfloat16 and float16, not in {query.dtype}")
    assert keys.dtype == values.dtype == query.dtype, "one type for queries, keys and values"
    assert query.stride(3) == keys.stride(3) == values.stride(3) == 1, "the numbers of a head lie side by side"
    assert used > 0, "every query sees an entry, its own"
    assert page % 16 == 0, "a page holds a multiple of 16 entries: a product takes no fewer"
    group, nodes = heads // kv_heads, 0 if ways is None else ways.shape[2]
    tile = tile_of(width, group, size, page, query.element_size(), nodes)
    rows, lanes, block = (tile[name] for name in ("ROWS", "LANES", "BLOCK"))
    tiles = triton.cdiv(width * group, rows)
    splits = splits or _splits(batch * tiles * kv_heads, used, query.device)
    span = triton.cdiv(triton.cdiv(used, splits), block) * block
    splits = triton.cdiv(used, span)
    parts = parts_of(splits, rows, lanes)
    out = torch.empty(batch, width, heads, size, dtype=query.dtype, device=query.device)
    sums = marks = counters = out  # not read
    if splits > 1:
        programs = batch * tiles * kv_heads
        assert programs <= COUNTERS, f"{programs} tiles are split; there are {COUNTERS} counters"
        sums, marks = (
            torch.empty(programs * parts["SPLITS"] * rows * count, dtype=torch.float32, device=query.device)
            for count in (lanes, 2)
        )
        counters = _counters(query.device)
    seen = entries if ways is None else ways.contiguous().view(torch.uint8)  # not read in a chain
    if batch:
        _attend[(batch * tiles, kv_heads, splits)](
            query, keys, values, table, entries, seen, out, sums, marks, counters, used, scaling * LOG2E,
            width, nodes, tiles, table.stride(0), span,
            *query.stride()[:3], *entries.stride(), *keys.stride()[:3], *values.stride()[:3],
            **tile, **parts, num_warps=warps_of(rows), num_stages=STAGES,
        )  # fmt: skip
    return out


def tile_of(width: int, group: int, size: int, page: int, item: int, nodes: int) -> dict[str, int | bool]:
    """Return the compile-time constants of a kernel that depend on the shapes.

    Arguments: queries of a row, heads of a group, D, E, bytes of a number, and nodes of a tree (0: none).
    """
    lanes = max(16, triton.next_power_of_2(size))
    most = min(ROWS, QUERY_BYTES // (lanes * item))
    return {
        "TREE": nodes > 0, "NODES": triton.next_power_of_2(max(nodes, 1)), "GROUP": group, "SIZE": size, "PAGE": page,
        "ROWS": max(16, min(most, triton.next_power_of_2(width * group))), "LANES": lanes,
        "BLOCK": min(ENTRY_BYTES // item, TILE_BYTES // (lanes * item), page & -page),
    }  # fmt: skip


def parts_of(splits: int, rows: int, lanes: int) -> dict[str, int]:
    """Return the constants for ``splits`` partial sums: SPLITS, a power of two, and CHUNK, lanes added at a time."""
    room = triton.next_power_of_2(splits)
    return {"SPLITS": room, "CHUNK": max(1, min(lanes, SUMS // (room * rows)))}


def warps_of(rows: int) -> int:
    """Return the warps of a program; with fewer, the sums of a full tile do not fit into registers."""
    return 4 if rows == 16 else 8


def _splits(programs: int, used: int, device: torch.device) -> int:
    """Return how many programs share the entries of a row: the smallest power of two that gives each processor one."""
    wanted = triton.next_power_of_2(triton.cdiv(_processors(device), programs))
    return max(1, min(SPLITS, wanted, triton.next_power_of_2(triton.cdiv(used, SPAN))))


@cache
def _processors(device: torch.device) -> int:
    """Return the multiprocessors of a device; 1 for a CPU, where Triton's interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of a device, all 0 between launches; the first cycle makes them, before any graph capture."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
