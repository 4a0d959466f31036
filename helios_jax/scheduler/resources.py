"""The page pool: which KV page belongs to whom.

Pages are numbered 1 to `num_pages` (page 0 of the device pool is scratch). A page is either
on the free stack or in exactly one slot's table. Admission only promises; pages are taken
when a frame that writes them is committed, and go back when the slot's last submitted fence
is complete (`lifecycle` decides when; this module does not know fences).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from helios_jax.errors import InvariantError


@dataclasses.dataclass(frozen=True, eq=False)
class PagePool:
    """Immutable ledger of pages.

    Attributes:
        free: int32 [num_pages], a stack; the free pages are `free[:num_free]`.
        num_free: Height of the stack. Entries above it are leftovers without meaning, so
            taking pages copies nothing.
        tables: One int32 array a slot, the pages it holds, in position order.
        held: int64 [slots], lengths of `tables`.
    """

    free: np.ndarray
    num_free: int
    tables: tuple[np.ndarray, ...]
    held: np.ndarray

    @property
    def num_pages(self) -> int:
        return len(self.free)


_NO_PAGES = np.zeros(0, np.int32)
_NO_PAGES.setflags(write=False)


def new_pool(num_pages: int, slots: int) -> PagePool:
    """A pool of free pages, the lowest number on top of the stack."""
    free = np.arange(num_pages, 0, -1, dtype=np.int32)
    held = np.zeros(slots, np.int64)
    for column in (free, held):
        column.setflags(write=False)
    return PagePool(free, num_pages, (_NO_PAGES,) * slots, held)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def take(pool: PagePool, needs: Iterable[tuple[int, int]]) -> PagePool:
    """Give every (slot, more pages) of `needs` its pages; slots are distinct.

    Raises:
        InvariantError: Fewer free pages than needed; promises (`reservation`) make that impossible.
    """
    tables, held, num_free = list(pool.tables), pool.held.copy(), pool.num_free
    for slot, count in needs:
        if count > num_free:
            raise InvariantError(f"slot {slot} needs {count} pages, {num_free} are free: promises were broken")
        table = np.concatenate([tables[slot], pool.free[num_free - count : num_free][::-1]])
        table.setflags(write=False)
        tables[slot], num_free = table, num_free - count
        held[slot] += count
    held.setflags(write=False)
    return PagePool(pool.free, num_free, tuple(tables), held)


def give_back(pool: PagePool, slots: Iterable[int]) -> PagePool:
    """Return all pages of `slots` to the free stack. O(num_pages), only when a request retires."""
    free, tables, held, num_free = pool.free.copy(), list(pool.tables), pool.held.copy(), pool.num_free
    for slot in slots:
        table = tables[slot]
        free[num_free : num_free + len(table)] = table[::-1]
        num_free += len(table)
        tables[slot], held[slot] = _NO_PAGES, 0
    for column in (free, held):
        column.setflags(write=False)
    return PagePool(free, num_free, tuple(tables), held)
