"""The page pool: which KV page belongs to whom.

Pages are numbered 1 to `num_pages` (page 0 of the device pool is scratch). A page is free, or
held: by the tables of slots, by the published state rows whose prefix it is part of, or by several
of them. Full pages of a prefix are shared by reference; nobody writes to a page that has another
holder, because a request goes on behind the pages that it shares (`shared_pages`).

Admission only promises; pages are taken when a frame that writes them is committed, and go back when
the slot's last submitted fence is complete (`lifecycle` decides when; this module does not know
fences). What only state rows keep goes back when their checkpoints give way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from helios_jax.errors import InvariantError


@dataclasses.dataclass(frozen=True, eq=False)
class PagePool:
    """Immutable ledger of pages.

    Attributes:
        free: int32 [num_pages], a stack; the free pages are `free[:num_free]`.
        num_free: Height of the stack. Entries above it are leftovers without meaning.
        tables: One int32 array a slot, the pages it holds, in position order.
        held: int64 [slots], lengths of `tables`.
        users: int32 [num_pages + 1], how many tables a page is in.
        used: Pages that are in a table at all.
        rows: One tuple a state row, the pages that its checkpoints keep; entry 0 is row 1.
        keepers: int32 [num_pages + 1], how many state rows keep a page.
    """

    free: np.ndarray
    num_free: int
    tables: tuple[np.ndarray, ...]
    held: np.ndarray
    users: np.ndarray
    used: int
    rows: tuple[tuple[int, ...], ...]
    keepers: np.ndarray

    @property
    def num_pages(self) -> int:
        return len(self.free)

    @property
    def num_kept(self) -> int:
        """Pages that state rows alone hold: free as soon as their checkpoints give way."""
        return self.num_pages - self.num_free - self.used


_NO_PAGES = np.zeros(0, np.int32)
_NO_PAGES.setflags(write=False)


def new_pool(num_pages: int, slots: int, state_rows: int = 0) -> PagePool:
    """A pool of free pages, the lowest number on top of the stack."""
    free = np.arange(num_pages, 0, -1, dtype=np.int32)
    held, users = np.zeros(slots, np.int64), np.zeros(num_pages + 1, np.int32)
    for column in (free, held, users):
        column.setflags(write=False)
    nothing: tuple[tuple[int, ...], ...] = ((),) * state_rows
    return PagePool(free, num_pages, (_NO_PAGES,) * slots, held, users, 0, nothing, users)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def shared_pages(endpoint: int, page_size: int, draft_extent: int) -> int:
    """Pages of a state of `endpoint` tokens that are shared; the one behind them is copied with the state.

    Whole pages are. With a draft context the last page is not, be it full: a draft writes its row of the last
    position once it knows the token behind it, and requests go on differently.
    """
    return (endpoint - (draft_extent > 0)) // page_size


def take(pool: PagePool, needs: Iterable[tuple[int, int]]) -> PagePool:
    """Give every (slot, more pages) of `needs` its pages; slots are distinct.

    Raises:
        InvariantError: Fewer free pages than needed; promises (`reservation`) make that impossible.
    """
    tables, held, users, num_free = list(pool.tables), pool.held.copy(), pool.users.copy(), pool.num_free
    for slot, count in needs:
        if count > num_free:
            raise InvariantError(f"slot {slot} needs {count} pages, {num_free} are free: promises were broken")
        pages = pool.free[num_free - count : num_free][::-1]
        table = np.concatenate([tables[slot], pages])
        table.setflags(write=False)
        tables[slot], num_free = table, num_free - count
        held[slot] += count
        users[pages] = 1
    for column in (held, users):
        column.setflags(write=False)
    used = pool.used + pool.num_free - num_free
    return dataclasses.replace(pool, num_free=num_free, tables=tuple(tables), held=held, users=users, used=used)


def share(pool: PagePool, slot: int, pages: Sequence[int]) -> PagePool:
    """Begin the empty table of a slot with pages that state rows keep.

    Raises:
        InvariantError: The table is not empty, or no row keeps one of them.
    """
    table = np.array(pages, np.int32)
    if pool.held[slot] or not pool.keepers[table].all():
        raise InvariantError(f"slot {slot} cannot share pages {table.tolist()}: it holds {pool.tables[slot].tolist()}")
    held, users = pool.held.copy(), pool.users.copy()
    fresh = int(np.count_nonzero(users[table] == 0))
    held[slot] = len(table)
    users[table] += 1
    for column in (table, held, users):
        column.setflags(write=False)
    tables = (*pool.tables[:slot], table, *pool.tables[slot + 1 :])
    return dataclasses.replace(pool, tables=tables, held=held, users=users, used=pool.used + fresh)


def give_back(pool: PagePool, slots: Iterable[int]) -> PagePool:
    """Empty the tables of `slots`; pages that nobody else holds are free. O(num_pages), only when a request retires."""
    free, tables, held, users = pool.free.copy(), list(pool.tables), pool.held.copy(), pool.users.copy()
    num_free, used = pool.num_free, pool.used
    for slot in slots:
        table = tables[slot]
        users[table] -= 1
        left = table[users[table] == 0]
        used -= len(left)
        num_free = _push(free, num_free, left[pool.keepers[left] == 0])
        tables[slot], held[slot] = _NO_PAGES, 0
    for column in (free, held, users):
        column.setflags(write=False)
    return dataclasses.replace(
        pool, free=free, num_free=num_free, tables=tuple(tables), held=held, users=users, used=used
    )


def keep(pool: PagePool, wanted: dict[int, tuple[int, ...]]) -> PagePool:
    """Let state rows keep exactly `wanted`, pages by row; rows that are not named keep none.

    Raises:
        InvariantError: A row is to keep a page that is free.
    """
    after = tuple(wanted.get(row, ()) for row in range(1, len(pool.rows) + 1))
    changed = [(old, new) for old, new in zip(pool.rows, after, strict=True) if old != new]
    if not changed:
        return pool
    keepers = pool.keepers.copy()
    for _, new in changed:
        pages = np.array(new, np.int64)
        if not (pool.users[pages] + pool.keepers[pages]).all():
            raise InvariantError(f"a state row is to keep {new}, of which some are free")
        keepers[pages] += 1
    dropped = [np.array(old, np.int64) for old, _ in changed]
    for pages in dropped:
        keepers[pages] -= 1
    candidates = np.unique(np.concatenate(dropped))
    left = candidates[(keepers[candidates] == 0) & (pool.users[candidates] == 0)]
    free = pool.free.copy()
    num_free = _push(free, pool.num_free, left)
    for column in (free, keepers):
        column.setflags(write=False)
    return dataclasses.replace(pool, free=free, num_free=num_free, rows=after, keepers=keepers)


def give_to_row(pool: PagePool, row: int, shared: Sequence[int], count: int) -> PagePool:
    """Let a state row that keeps nothing keep held pages, and behind them `count` free ones.

    Raises:
        InvariantError: The row keeps pages, a shared page is free, or too few others are.
    """
    held = np.array(shared, np.int64)
    if pool.rows[row - 1] or count > pool.num_free or not (pool.users[held] + pool.keepers[held]).all():
        keeps = pool.rows[row - 1]
        raise InvariantError(f"row {row} keeps {keeps}: not {tuple(shared)} and {count} of {pool.num_free} pages too")
    num_free = pool.num_free - count
    pages = np.concatenate([held, pool.free[num_free : pool.num_free][::-1]])
    keepers = pool.keepers.copy()
    keepers[pages] += 1
    keepers.setflags(write=False)
    rows = (*pool.rows[: row - 1], tuple(pages.tolist()), *pool.rows[row:])
    return dataclasses.replace(pool, num_free=num_free, rows=rows, keepers=keepers)


def _push(free: np.ndarray, num_free: int, pages: np.ndarray) -> int:
    """Put pages on the stack, in place, the first of them on top; the new height."""
    free[num_free : num_free + len(pages)] = pages[::-1]
    return num_free + len(pages)
