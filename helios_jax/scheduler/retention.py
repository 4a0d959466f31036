"""What the scheduler keeps about captures of complete state, as one frozen value.

The steps that change it are in `captures`; the rows and the published checkpoints have modules
of their own.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from helios_jax.scheduler.checkpoints import Checkpoints, new_checkpoints
from helios_jax.scheduler.cuts import Cut
from helios_jax.scheduler.state_rows import Role, Rows, new_rows

ROLES = tuple(role.name.lower() for role in Role)
# Why a possible cut was not captured: no destination was obtainable; its time did not fit the
# allowance; a duration was unknown at admission; the cost of its copy expired; its request ended
# first; the device reported a failed copy. A terminal capture that was due may lack a row, or be
# overrun by a submitted program that moves the state on, or fail.
CUT_SKIPS = ("no_row", "allowance", "unknown_cost", "expired_cost", "ended", "failed")
SKIPS = (*CUT_SKIPS, "terminal_no_row", "terminal_overrun", "terminal_failed")
SLOT_COLUMNS = ("credit_ns", "captured_len", "demand_ns", "pinned")


@dataclasses.dataclass(frozen=True)
class CaptureCounts:
    """Totals since the start; tuples follow `ROLES` and `SKIPS`.

    Attributes:
        planned: Possible cuts of all requests: each is captured, skipped or still ahead.
        captured: Published captures by role.
        windows: Copies into private rows.
        skipped: Cuts and due terminal captures that were not taken, by reason.
        evicted: Checkpoints that gave way to others.
        evicted_rows: Rows that became free by it.
    """

    planned: int = 0
    captured: tuple[int, ...] = (0,) * len(ROLES)
    windows: int = 0
    skipped: tuple[int, ...] = (0,) * len(SKIPS)
    evicted: int = 0
    evicted_rows: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Retention:
    """Rows, checkpoints and the captures that the requests have ahead; columns are read-only [slots].

    Attributes:
        rows: Uses of the state rows.
        checkpoints: The published ones.
        cuts: Of each slot's request, those still ahead of it.
        used: Of each slot's request, the checkpoints that it was restored from or published; some
            may have given way to others since.
        credit_ns: float64, what its decode has earned for a terminal capture.
        captured_len: int64, longest prefix that it restored or captured.
        demand_ns: int64, when it was admitted.
        pinned: int64, checkpoint that it is being restored from, 0 if none.
        counts: Totals.
    """

    rows: Rows
    checkpoints: Checkpoints
    cuts: tuple[tuple[Cut, ...], ...]
    used: tuple[tuple[int, ...], ...]
    credit_ns: np.ndarray
    captured_len: np.ndarray
    demand_ns: np.ndarray
    pinned: np.ndarray
    counts: CaptureCounts


def new_retention(num_rows: int, slots: int) -> Retention:
    """Free rows, no checkpoint, nothing planned."""
    columns = [np.zeros(slots, np.float64 if name == "credit_ns" else np.int64) for name in SLOT_COLUMNS]
    for column in columns:
        column.setflags(write=False)
    credit, captured, demand, pinned = columns
    nothing: tuple[tuple[()], ...] = ((),) * slots
    rows, checkpoints = new_rows(num_rows), new_checkpoints()
    return Retention(rows, checkpoints, nothing, nothing, credit, captured, demand, pinned, CaptureCounts())
