"""Who gets a state row when none is free.

A request asks for a destination (`arm`) or, when it has several image windows, for a private row
(`reserve_private`). What it may take, in this order:

1. The row that is guarded for it, if it asks for its anchor.
2. The lowest free row.
3. The row of the least protected published checkpoint that no restore reads (`victim_row`),
   unless that one is more protected than the capture would be.
4. Only for private rows, which execution cannot do without: an unused guard.

An optional capture before the anchor gets a row only if another one stays guarded for the anchor.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from helios_jax.scheduler import state_rows
from helios_jax.scheduler.checkpoints import Checkpoints, Claim, victim_row, without
from helios_jax.scheduler.state_rows import Role, Rows, RowUse, free_row, rows_of
from helios_jax.scheduler.types import RequestHandle


class Grant(NamedTuple):
    """A row for somebody, and the ids of the checkpoints that were evicted for it."""

    rows: Rows
    checkpoints: Checkpoints
    row: int
    evicted: tuple[int, ...] = ()


def obtain(
    rows: Rows, checkpoints: Checkpoints, claim: Claim | None = None, in_use: Collection[int] = ()
) -> Grant | None:
    """A free row, or the victim's with all its aliases evicted; None when neither exists.

    Guarded, armed, copying and private rows, and rows of pinned checkpoints, are never taken.
    """
    row = free_row(rows)
    if row:
        return Grant(rows, checkpoints, row)
    row = victim_row(checkpoints, claim, in_use)
    if not row:
        return None
    aliases = np.flatnonzero(checkpoints.rows == row)
    evicted = tuple(checkpoints.ids[aliases].tolist())
    return Grant(state_rows.free_published(rows, row), without(checkpoints, aliases.tolist()), row, evicted)


def arm(
    rows: Rows,
    checkpoints: Checkpoints,
    handle: RequestHandle,
    claim: Claim,
    *,
    anchor: int = 0,
    in_use: Collection[int] = (),
) -> Grant | None:
    """Arm a destination for a request's capture, None when none is obtainable.

    Args:
        claim: What the capture would be worth.
        anchor: Endpoint of the request's anchor that is still ahead when an earlier, optional
            capture asks; that capture gets a row only if another one is guarded for the anchor.
        in_use: Checkpoints of resident requests (see `victim_order`).
    """
    guards = rows_of(rows, handle, RowUse.GUARDED)
    endpoint, role = claim.endpoint, claim.role
    if role is Role.ANCHOR and guards:
        return Grant(state_rows.arm(rows, guards[0], handle, endpoint, role), checkpoints, guards[0])
    evicted: tuple[int, ...] = ()
    if anchor > endpoint and not guards:
        guarded = obtain(rows, checkpoints, claim._replace(role=Role.ANCHOR, endpoint=anchor), in_use)
        if guarded is None:
            return None
        rows, checkpoints = state_rows.guard(guarded.rows, guarded.row, handle, anchor), guarded.checkpoints
        evicted = guarded.evicted
    granted = obtain(rows, checkpoints, claim, in_use)
    if granted is None:
        return None
    armed = state_rows.arm(granted.rows, granted.row, handle, endpoint, role)
    return Grant(armed, granted.checkpoints, granted.row, (*evicted, *granted.evicted))


def reserve_private(
    rows: Rows, checkpoints: Checkpoints, handle: RequestHandle, in_use: Collection[int] = ()
) -> Grant | None:
    """A private row for image windows, which are mandatory: an unused guard gives way if it must.

    A free row is preferred, then a victim, then the guard of the shortest anchor (the cheapest
    one to compute again; ties to the lowest row). None when every row is in use.
    """
    granted = obtain(rows, checkpoints, in_use=in_use)
    if granted is None:
        guards = np.flatnonzero(rows.use == RowUse.GUARDED)
        if not len(guards):
            return None
        row = int(guards[rows.endpoint[guards].argmin()]) + 1
        granted = Grant(state_rows.revoke(rows, row), checkpoints, row)
    return granted._replace(rows=state_rows.make_private(granted.rows, granted.row, handle))
