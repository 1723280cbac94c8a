"""The engine's cache in pages: rows of all lengths share one pool, and rows with a common beginning share its pages.

A page holds E entries of one layer, and a pool is [P, Hkv, E, D] a layer. A page table [S, T] lists the pages of the
entries 0..E-1, E..2E-1, ... of each slot. The engine owns the table. It is the same for all caches, which have their
entries at the same places, and each cache has a pool of its own.

Page 0 belongs to no slot, and the table holds 0 where a slot has no page. Dead rows and padding write to it, and no
query sees its entries.
"""

import torch
from torch import Tensor

from bebop.kernels.paged_attention import paged_attention
from bebop.model.attention import SlotContext, Stores, Tree, seen_by
from bebop.model.ragged_attention import Ragged


class PagedContext(SlotContext):
    """A ``SlotContext`` whose slots hold pages of a pool: ``keys`` and ``values`` are [layers, P, Hkv, E, D].

    Passes of equal sizes are the same operations on the same tensors for any pages: a pass reads the table on the
    device, and writes by flat rows of a pool.
    """

    def __init__(
        self, layers: int, table: Tensor, pages: int, size: int, kv_heads: int, head_dim: int, like: Tensor
    ) -> None:
        """Allocate the pool.

        Args:
            table: [S, T] (int64), kept up to date by its owner.
            pages: P, including page 0.
            size: E.
        """
        super().__init__(layers, pages, size, kv_heads, head_dim, like)
        self.table, self.size = table, size
        self.rows: Tensor  # [B, T] of the table, those of a pass
        self._numbers = torch.arange(pages, device=like.device)[None]  # [1, P] of the pages
        # Rows that a pass writes, computed for its first layer: of [P * E] by token, and of [P * Hkv * E, D].
        self._packed: Tensor | None = None
        self._written: Tensor | None = None
        self.used = 0
        self.tree: Tree | None = None

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page of all layers, keys and values."""
        return 2 * self.keys[:, 0].nbytes

    def place(self, entries: Tensor, used: int, tree: Tree | None = None, ragged: Ragged | None = None) -> None:
        """Set the entries [B, n] that the next pass writes, as ``SlotContext`` does."""
        assert ragged is None or tree is None, "rows of chains alone are laid end to end"
        self.entries, self.used, self.tree, self.ragged = entries, used, tree, ragged
        self.rows = self.table[self.first_slot : self.first_slot + len(entries)]
        self._packed = self._written = None

    def seen(self) -> Tensor:
        """Return which entries each row of the pass sees [B, n, P] (bool)."""
        return seen_by(self.entries, self.used, self.tree)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Write the new entries of a layer and attend as ``place`` has set, [B, H, n, D] -> [B, n, H, D]."""
        if self.ragged is not None:
            return super().attend(layer, query, key, value, scaling)
        self.write(layer, key, value)
        return self.attend_stored(layer, query, scaling)

    def stores(self, layer: int) -> Stores:
        """Return where a kernel writes the new entries of a layer, as ``SlotContext`` does."""
        index = layer - self.first_layer
        pools = self.keys[index], self.values[index]
        if self.ragged is None:
            return pools, self.rows, self.entries
        if self._packed is None:
            pages = self.rows.gather(1, self.entries // self.size)
            self._packed = self.ragged.packed(pages * self.size + self.entries % self.size)[0]
        return pools, self._numbers.expand(len(self._packed), -1), self._packed

    def attend_stored(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attend once the new entries of the layer are written.

        The shapes are [B, H, n, D] -> [B, n, H, D], or [N, H, D] -> [N, H, D] for rows end to end.
        """
        if self.ragged is not None:
            side_by_side = self.ragged.padded(query[None]).transpose(1, 2)  # [R, H, W, D]
            return self.ragged.packed(self._read(layer, side_by_side, scaling))[0]
        return self._read(layer, query, scaling)

    def attend_end_to_end(self, layer: int, turned: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute ``attend`` for rows end to end.

        Queries and keys are one tensor [N, H + Hkv, D], values are [N, Hkv, D], and the result is [N, H, D].
        """
        assert self.ragged is not None
        query, key = turned.split_with_sizes([turned.shape[1] - value.shape[1], value.shape[1]], 1)
        self.write(layer, key, value)
        return self.attend_stored(layer, query, scaling)

    def held(self, layer: int, batch: int) -> tuple[Tensor, Tensor]:
        """Return a copy of the keys and values [B, Hkv, T * E, D] that the rows of a pass hold in a layer."""
        pages = self.table[self.first_slot : self.first_slot + batch]
        index = layer - self.first_layer
        keys, values = (store[index][pages].transpose(1, 2).flatten(2, 3) for store in (self.keys, self.values))
        return keys, values

    def compact(self, first: Tensor, kept: Tensor) -> None:
        """Move entries ``first`` [B] + ``kept`` [B, n] of rows 0..B-1 to ``first`` + 0, 1, ..., in all layers."""
        self.rows = self.table[: len(first)]
        steps = torch.arange(kept.shape[1], device=first.device)
        sources, places = (self._places(first[:, None] + numbers).flatten() for numbers in (kept, steps))
        for store in (self.keys, self.values):
            flat = store.flatten(1, 3)  # [layers, P * Hkv * E, D]
            flat[:, places] = flat[:, sources]

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages to others [n], in all layers."""
        for store in (self.keys, self.values):
            store[:, targets] = store[:, sources]

    def copy_slot(self, source: int, first: int, end: int, length: int) -> None:
        """Copy nothing: the table shares pages."""

    def snapshot(self, slot: int, length: int) -> tuple[Tensor, ...]:
        """Return nothing: the owner of the table keeps pages."""
        return ()

    def restore(self, slot: int, held: tuple[Tensor, ...], length: int) -> None:
        """Write nothing: the table has the pages."""

    def _places(self, entries: Tensor) -> Tensor:
        """Return the rows of [P * Hkv * E, D] that hold ``entries`` [B, n] of ``rows``: [B, Hkv, n]."""
        kv_heads = self.keys.shape[2]
        pages = self.rows.gather(1, entries // self.size)
        heads = pages[:, None] * kv_heads + torch.arange(kv_heads, device=entries.device)[:, None]
        return heads * self.size + (entries % self.size)[:, None]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values [B, Hkv, n, D], or [N, Hkv, D] of rows end to end, where ``place`` has set."""
        if self._written is None:
            places = self._places(self.entries)  # [B, Hkv, n]
            if self.ragged is not None:
                places = self.ragged.packed(places.transpose(1, 2))
            self._written = places.flatten()
        for store, new in ((self.keys, key), (self.values, value)):
            rows = store[layer - self.first_layer].view(-1, new.shape[-1])
            rows.index_copy_(0, self._written, new.reshape(-1, new.shape[-1]))

    def _read(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        index = layer - self.first_layer
        pools = self.keys[index], self.values[index]
        first, ways = (None, None) if self.tree is None else self.tree
        entries = self.entries if first is None else first[:, None]
        return paged_attention(query, *pools, self.rows, entries, self.used, scaling, ways)
