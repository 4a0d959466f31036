"""Checkpoints that come from outside: a row and pages for a state that somebody writes there.

The engine keeps states on the host that had to give way here. When a prompt begins with one, it asks for a place,
writes the state there ahead of every later frame, and admits the request as a restore from it.

A place is a row and pages that nobody uses, or that less protected checkpoints give up. Pages of the same prefix
that are here already are shared instead of written again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler import state_rows
from helios_jax.scheduler.capture_draft import Draft
from helios_jax.scheduler.checkpoints import Claim, Key
from helios_jax.scheduler.page_pressure import follow, make_room
from helios_jax.scheduler.resources import give_to_row, shared_pages
from helios_jax.scheduler.row_allocator import obtain
from helios_jax.scheduler.state import State
from helios_jax.scheduler.state_rows import Role


class Place(NamedTuple):
    """Where the state of an adopted checkpoint is to be written.

    Attributes:
        checkpoint: Its id; a request may be restored from it at once, if the state is written before its restore runs.
        row: State row.
        pages: All whole pages of its prefix; the ones that were shared come first.
    """

    checkpoint: int
    row: int
    pages: tuple[int, ...]


def adopt_checkpoint(
    state: State, key: Key, endpoint: int, shared: Sequence[int] = ()
) -> tuple[State, Place] | tuple[State, None]:
    """Publish a checkpoint whose state is not here yet, asked for now; no place leaves the state as it was.

    Args:
        key: As of any checkpoint; none is published under it.
        endpoint: Tokens that it covers.
        shared: Pages of the first tokens of its prefix that published checkpoints keep.

    Raises:
        InvariantError: The key is published, or nobody keeps one of the shared pages.
    """
    if library.ids_of(state.retention.checkpoints, key):
        raise InvariantError(f"a checkpoint of {endpoint} tokens under this key is published already")
    if not state.pool.keepers[np.array(shared, np.int64)].all():
        raise InvariantError(f"pages {tuple(shared)} are to be shared, of which checkpoints keep only some")
    draft, limits = Draft(state), state.limits
    count = shared_pages(endpoint, limits.page_size, limits.draft_extent) - len(shared)
    claim = Claim(state.now_ns, Role.ANCHOR, endpoint)
    granted = obtain(draft.rows, draft.checkpoints, claim, draft.in_use)
    if granted is None or count < 0:
        return state, None
    row = draft.accept(granted)
    kept, pool = make_room(draft.sealed(), follow(state.pool, draft.checkpoints), count)
    holders = pool.users + pool.keepers
    if pool.num_free < count or not holders[np.array(shared, np.int64)].all():
        return state, None  # what was to be shared gave way to it, or too little else could
    pool = give_to_row(pool, row, shared, count)
    pages = pool.rows[row - 1]
    published = library.publish(
        kept.checkpoints, key=key, endpoint=endpoint, role=Role.ANCHOR, row=row, demand_ns=state.now_ns, pages=pages
    )
    changed = dataclasses.replace(kept, rows=state_rows.adopt(kept.rows, row), checkpoints=published.checkpoints)
    place = Place(published.checkpoint, row, pages)
    return dataclasses.replace(state, pool=pool, retention=changed), place


def withdraw_checkpoint(state: State, checkpoint: int) -> State:
    """Take a checkpoint back whose state could not be written.

    Raises:
        InvariantError: It is not published, or a request waits to be restored from it.
    """
    kept = state.retention
    rows, checkpoints = library.evict(kept.rows, kept.checkpoints, checkpoint)
    changed = dataclasses.replace(kept, rows=rows, checkpoints=checkpoints)
    return dataclasses.replace(state, pool=follow(state.pool, checkpoints), retention=changed)
