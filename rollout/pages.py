"""The page table of the caches: it says which page holds which entries of a slot, and counts references on the host.

Slots and parked completions refer to pages. A page is free once nothing refers to it.

- Slots with a common beginning share its full pages. Each has a copy of the page that is not full, since it writes
  there. So a page with several references is never written.
- Nothing is copied when a request moves to another slot: its row of the table moves.
- The host gives out pages before a cycle is launched, and takes them back whenever a request has ended. A cycle in
  flight may still write to such a page. Its next owner writes later in the order of the stream.
- The device has a mirror of the table, always at the same address, since CUDA graphs hold it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bebop.model.paged_cache import PagedContext

PAGE, CPU_PAGE = 64, 16  # entries of a page: a tile of keys of the kernel on a GPU; little waste on a CPU
NOBODY = 0  # the page that dead rows and padding write to


def page_size(device: torch.device) -> int:
    """Return E, the number of entries of a page on a device."""
    return PAGE if device.type == "cuda" else CPU_PAGE


def pages_of(entries: int, size: int) -> int:
    """Return how many pages of ``size`` entries hold ``entries`` entries."""
    return -(-entries // size)


class Pages:
    """The pages of S slots, with their reference counts and the page table."""

    def __init__(self, slots: int, capacity: int, count: int, device: torch.device) -> None:
        """Make a table with all pages free.

        ``capacity`` is the most entries of a slot. ``count`` is the number of pages that may be given out, at least
        those of one slot.
        """
        self.size, self.count = page_size(device), count
        self.width = pages_of(capacity, self.size)  # T
        assert count >= self.width, "one request always fits"
        self.table = torch.zeros(slots, self.width, dtype=torch.long, device=device)
        self.pools: list[PagedContext] = []
        self.parked = 0  # pages that parked completions hold and no slot does
        self.held: list[list[int]] = [[] for _ in range(slots)]  # pages of each slot, in their order
        self._slots, self._kept = [0] * (count + 1), [0] * (count + 1)  # references of slots, and of what is parked
        self._free = [*range(count, NOBODY, -1)]  # the next to be given out is the last
        self._changed: set[int] = set()  # slots whose row of the device's table is an older one

    @property
    def free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    @property
    def bytes(self) -> int:
        """Return the bytes of a page in all pools."""
        return sum(pool.page_bytes for pool in self.pools)

    def pool(self, shape: tuple[int, int, int], like: Tensor, kind: type[PagedContext]) -> PagedContext:
        """Return a new cache over this table; ``shape``: layers, heads of keys and values, their size."""
        made = kind(shape[0], self.table, self.count + 1, self.size, *shape[1:], like)
        self.pools.append(made)
        return made

    # ---- slots

    def missing(self, slot: int, entries: int) -> int:
        """Return how many pages a slot lacks to hold ``entries``."""
        return max(0, pages_of(entries, self.size) - len(self.held[slot]))

    def reserve(self, slot: int, entries: int) -> None:
        """Give a slot the pages that it lacks to hold ``entries``; enough pages must be free."""
        if more := self.missing(slot, entries):
            self.held[slot] += [self._take() for _ in range(more)]
            self._changed.add(slot)

    def release(self, slot: int) -> None:
        """Take all pages from a slot."""
        for page in self.held[slot]:
            self._refer(page, -1, 0)
        self._put(slot, [])

    def move(self, source: int, target: int) -> None:
        """Give the pages of a slot to another one, which loses its own."""
        self.release(target)
        self._put(target, self.held[source])
        self._put(source, [])

    def share(self, source: int, first: int, end: int, length: int) -> None:
        """Let slots first..end-1 share the first ``length`` entries of slot ``source``, which may be one of them."""
        own = self.held[source]
        copies: list[tuple[int, int]] = []
        for slot in range(first, end):
            if slot != source:
                self.release(slot)
                self._put(slot, self._shared(own, length, copies))
        self._copy(copies)

    def restore(self, slot: int, held: Sequence[int], length: int) -> None:
        """Give a slot the first ``length`` entries of pages that ``hold`` returned."""
        copies: list[tuple[int, int]] = []
        self.release(slot)
        self._put(slot, self._shared(held, length, copies))
        self._copy(copies)

    # ---- parked completions

    def hold(self, slot: int, length: int) -> tuple[int, ...]:
        """Return the pages with the first ``length`` entries of a slot; they stay until ``drop``."""
        pages = tuple(self.held[slot][: pages_of(length, self.size)])
        for page in pages:
            self._refer(page, 0, 1)
        return pages

    def drop(self, held: Sequence[int]) -> None:
        """Release pages that ``hold`` returned."""
        for page in held:
            self._refer(page, 0, -1)

    # ---- the device

    def upload(self) -> None:
        """Copy the changed rows to the device's table, in one copy that the host does not wait for."""
        if not self._changed:
            return
        slots = sorted(self._changed)
        rows = torch.tensor([[*self.held[slot], *[NOBODY] * (self.width - len(self.held[slot]))] for slot in slots])
        self._changed.clear()
        numbers = torch.cat([torch.tensor(slots)[:, None], rows], 1)
        if self.table.device.type == "cuda":
            numbers = numbers.pin_memory().to(self.table.device, non_blocking=True)
        self.table[numbers[:, 0]] = numbers[:, 1:]

    # ---- references

    def _put(self, slot: int, pages: list[int]) -> None:
        self.held[slot] = pages
        self._changed.add(slot)

    def _take(self) -> int:
        assert self._free, "pages were given out that are not there"
        page = self._free.pop()
        self._slots[page] = 1
        return page

    def _shared(self, own: Sequence[int], length: int, copies: list[tuple[int, int]]) -> list[int]:
        """Return the full pages of ``own`` with one more reference each, and a new page for the rest of the entries."""
        full, rest = divmod(length, self.size)
        for page in own[:full]:
            self._refer(page, 1, 0)
        pages = list(own[:full])
        if rest:
            pages.append(self._take())
            copies.append((own[full], pages[-1]))
        return pages

    def _refer(self, page: int, slots: int, kept: int) -> None:
        """Change the reference counts of a page, and free it when both are 0."""
        before = not self._slots[page] and self._kept[page] > 0
        self._slots[page] += slots
        self._kept[page] += kept
        assert self._slots[page] >= 0 <= self._kept[page], "a page was given back twice"
        after = not self._slots[page] and self._kept[page] > 0
        self.parked += after - before
        if not self._slots[page] and not self._kept[page]:
            self._free.append(page)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            sources, targets = torch.tensor(copies, device=self.table.device).unbind(1)
            for pool in self.pools:
                pool.copy_pages(sources, targets)
