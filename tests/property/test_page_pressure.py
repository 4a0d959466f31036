"""Pages under pressure: which checkpoints give way, against a naive count of who holds what."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler import page_pressure, state_rows
from helios_jax.scheduler.resources import PagePool, give_back, new_pool, share, take
from helios_jax.scheduler.retention import Retention, new_retention
from helios_jax.scheduler.state_rows import Role
from helios_jax.scheduler.types import RequestHandle

ROWS, PAGES, SLOTS = 5, 24, 4


@st.composite
def situations(draw: st.DrawFn) -> tuple[Retention, PagePool]:
    """Up to five rows, whose pages are prefixes of a few texts; some texts are in tables too."""
    pool = take(new_pool(PAGES, SLOTS, ROWS), [(0, 6), (1, 6)])
    texts = [pool.tables[slot].tolist() for slot in (0, 1)]
    kept = new_retention(ROWS, SLOTS)
    rows, known = kept.rows, kept.checkpoints
    for row in range(1, draw(st.integers(1, ROWS)) + 1):
        pages = tuple(draw(st.sampled_from(texts))[: draw(st.integers(0, 6))])
        rows = state_rows.arm(rows, row, RequestHandle(0, 1), 1, Role.ANCHOR)
        rows = state_rows.finish_copy(state_rows.begin_copy(rows, row, row), row, row, publish=True)
        known = library.publish(
            known, key=row, endpoint=row, role=draw(st.sampled_from(list(Role))), row=row,
            demand_ns=draw(st.integers(0, 3)), pages=pages,
        ).checkpoints  # fmt: skip
    pool = page_pressure.follow(pool, known)
    pool = give_back(pool, [0, 1])
    chosen = draw(st.sampled_from([0, *known.ids.tolist()]))
    if chosen:
        pool = share(pool, 2, known.pages[library.index_of(known, chosen)])
        if draw(st.booleans()):
            known = library.pin(known, chosen)
    return dataclasses.replace(kept, rows=rows, checkpoints=known), pool


def freed(known: library.Checkpoints, pool: PagePool, gone: set[int]) -> int:
    """Pages that nobody holds once some rows are gone, counted one by one."""
    held = {page for table in pool.tables for page in table.tolist()}
    for row, pages in zip(known.rows.tolist(), known.pages, strict=True):
        held |= set(pages) if row not in gone else set()
    return PAGES - len(held)


@settings(max_examples=200, deadline=None)
@given(situations(), st.integers(0, PAGES))
def test_enough_gives_way_and_nothing_that_need_not(situation: tuple[Retention, PagePool], needed: int) -> None:
    kept, pool = situation
    known = kept.checkpoints
    pinned = set(known.rows[known.pins > 0].tolist())
    rows = [int(row) for row in known.rows[library.victim_order(known)] if row not in pinned]
    after, room = page_pressure.make_room(kept, pool, needed)
    gone = set(known.rows.tolist()) - set(after.checkpoints.rows.tolist())
    assert room.num_free == freed(known, pool, gone)
    assert gone <= set(rows)
    most = freed(known, pool, set(rows))
    assert room.num_free >= min(needed, most)
    if most < needed:
        return
    for spared in gone:
        assert freed(known, pool, gone - {spared}) < needed  # nothing went in vain
    least = next(n for n in range(len(rows) + 1) if freed(known, pool, set(rows[:n])) >= needed)
    assert gone <= set(rows[:least])  # nobody more protected than the order asks for
    assert after.counts.evicted == len(gone)


@settings(max_examples=100, deadline=None)
@given(situations())
def test_pages_go_with_their_last_holder(situation: tuple[Retention, PagePool]) -> None:
    """In whatever order tables are emptied and checkpoints withdrawn, all pages are free in the end, none before."""
    kept, pool = situation
    for row in itertools.chain(kept.checkpoints.rows.tolist()):
        gone = [i for i, held in enumerate(kept.checkpoints.rows.tolist()) if held == row]
        left = library.without(kept.checkpoints, gone)
        pool = page_pressure.follow(pool, left)
        assert pool.num_free == freed(left, pool, set())
        kept = dataclasses.replace(kept, checkpoints=left)
    pool = give_back(pool, [2])
    assert (pool.num_free, pool.used, pool.num_kept) == (PAGES, 0, 0)
    assert sorted(pool.free.tolist()) == list(range(1, PAGES + 1))
