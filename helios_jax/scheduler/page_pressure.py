"""Checkpoints and the page pool: what rows keep, and which checkpoints give way for pages.

`follow` lets the pool keep what the published checkpoints share; whoever publishes, merges or evicts
calls it with the outcome. `make_room` is called before pages are taken.

Promises count pages in tables and pages promised beyond them (`reservation.spare_pages`); what
checkpoints alone keep is as good as free. A page that a request was promised can therefore always
be had: all that checkpoints keep beside the tables may go, a pinned one keeps nothing beside the table
of the request that restores it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from helios_jax.scheduler import state_rows
from helios_jax.scheduler.checkpoints import Checkpoints, freed_by, ranked_rows, without
from helios_jax.scheduler.resources import PagePool, keep
from helios_jax.scheduler.retention import Retention


def follow(pool: PagePool, checkpoints: Checkpoints) -> PagePool:
    """The pool whose state rows keep what the checkpoints that name them share."""
    return keep(pool, dict(zip(checkpoints.rows.tolist(), checkpoints.pages, strict=True)))


def make_room(kept: Retention, pool: PagePool, needed: int) -> tuple[Retention, PagePool]:
    """Evict the least protected checkpoints until `needed` pages are free, if they are not.

    Evicted are rows with all their aliases, in the order in which the row allocator would take them; of
    these the most protected ones are spared that turn out not to be needed.
    """
    if needed <= pool.num_free:
        return kept, pool
    in_use = {checkpoint for used in kept.used for checkpoint in used}
    rows = _victims(kept.checkpoints, pool, needed - pool.num_free, in_use)
    gone = np.flatnonzero(np.isin(kept.checkpoints.rows, rows)).tolist()
    freed = freed_by(kept.checkpoints, kept.checkpoints.ids[gone].tolist())
    checkpoints, uses = without(kept.checkpoints, gone), kept.rows
    for row in rows:
        uses = state_rows.free_published(uses, row)
    counts = dataclasses.replace(
        kept.counts,
        evicted=kept.counts.evicted + len(gone),
        evicted_rows=kept.counts.evicted_rows + len(freed.rows),
    )
    changed = dataclasses.replace(kept, rows=uses, checkpoints=checkpoints, counts=counts)
    return changed, follow(pool, checkpoints)


def _victims(checkpoints: Checkpoints, pool: PagePool, missing: int, in_use: Collection[int]) -> list[int]:
    """Rows whose eviction frees `missing` pages, or all that may go where that is less."""
    keepers, freed, chosen = pool.keepers.copy(), 0, []
    alone = pool.users == 0
    for row in ranked_rows(checkpoints, in_use)[0].tolist():
        pages = np.array(pool.rows[row - 1], np.int64)
        keepers[pages] -= 1
        freed += int(np.count_nonzero((keepers[pages] == 0) & alone[pages]))
        chosen.append(row)
        if freed >= missing:
            break
    for row in reversed(chosen[:-1]):
        pages = np.array(pool.rows[row - 1], np.int64)
        held = int(np.count_nonzero((keepers[pages] == 0) & alone[pages]))
        if freed - held >= missing:
            chosen.remove(row)
            keepers[pages] += 1
            freed -= held
    return chosen
