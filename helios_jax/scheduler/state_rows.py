"""The pool of state rows: which snapshot row is used for what, and by whom.

A state row holds one complete recurrent state on the device: what a snapshot program writes and
a restore program reads. Rows are numbered 1 to `num_rows`; 0 stands for no row. This module
knows neither prices nor prefixes: who may take a row from whom is decided in `checkpoints`.

The life of a row:

1. FREE. Nobody's.
2. GUARDED: reserved for the later anchor of a request; nothing runs towards it yet.
3. ARMED: the destination of a request's next capture. The prefill that ends at its endpoint may
   be in flight already, so cancellation leaves it armed until the request's slot is released.
4. COPYING: a submitted fence writes it. It leaves this use by that fence's completion only.
5. PUBLISHED: checkpoints that others may restore name it; its request is forgotten. A free row becomes it
   at once when a state comes from outside (`adoption`).
6. PRIVATE instead of 2 to 5: the image windows of one request, until that request retires. A
   submitted window snapshot sets its fence; it is never published.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from typing import Any

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler.types import CheckpointRole as Role
from helios_jax.scheduler.types import Fence, RequestHandle


class RowUse(enum.IntEnum):
    """The one use that a row has."""

    FREE = 0
    GUARDED = 1
    ARMED = 2
    COPYING = 3
    PRIVATE = 4
    PUBLISHED = 5


_OF_A_REQUEST = (RowUse.GUARDED, RowUse.ARMED, RowUse.COPYING, RowUse.PRIVATE)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Read-only int64 columns [num_rows]; entry 0 is row 1.

    Attributes:
        use: A `RowUse`.
        slot, generation: Handle of the request that a guarded, armed, copying or private row
            belongs to; 0 and 0 otherwise.
        endpoint: Tokens that the state covers, of a guarded, armed or copying row; else 0.
        role: A `Role` of an armed or copying row (ANCHOR of a guarded one); else 0.
        fence: The submitted fence that writes the row; 0 when none does.
    """

    use: np.ndarray
    slot: np.ndarray
    generation: np.ndarray
    endpoint: np.ndarray
    role: np.ndarray
    fence: np.ndarray

    def __len__(self) -> int:
        return len(self.use)

    def handle(self, row: int) -> RequestHandle:
        """Owner of a row; generation 0 when it has none."""
        return RequestHandle(int(self.slot[row - 1]), int(self.generation[row - 1]))

    def use_of(self, row: int) -> RowUse:
        return RowUse(int(self.use[row - 1]))


COLUMNS = tuple(field.name for field in dataclasses.fields(Rows))
_VALUES = operator.attrgetter(*COLUMNS)
_BLANK = dict.fromkeys(COLUMNS, 0)


def new_rows(num_rows: int) -> Rows:
    """A pool of free rows.

    Raises:
        InvariantError: A negative number of rows.
    """
    if num_rows < 0:
        raise InvariantError(f"a pool of {num_rows} state rows is impossible")
    columns = np.zeros((len(COLUMNS), num_rows), np.int64)
    columns.setflags(write=False)
    return Rows(*columns)


def free_row(rows: Rows) -> int:
    """The lowest free row, 0 when there is none."""
    free = np.flatnonzero(rows.use == RowUse.FREE)
    return int(free[0]) + 1 if len(free) else 0


def rows_of(rows: Rows, handle: RequestHandle, *uses: RowUse) -> list[int]:
    """Rows of a request, lowest first, in any of `uses` (all when none is named)."""
    mine = np.flatnonzero((rows.generation == handle.generation) & (rows.slot == handle.slot))
    wanted = uses or _OF_A_REQUEST  # a request has a row or two, seldom more: no array is worth it
    return [row + 1 for row, use in zip(mine.tolist(), rows.use[mine].tolist(), strict=True) if use in wanted]


def guard(rows: Rows, row: int, handle: RequestHandle, endpoint: int) -> Rows:
    """Reserve a free row for the anchor of a request at `endpoint`."""
    _expect(rows, row, "guard", RowUse.FREE)
    return _changed(rows, row, use=RowUse.GUARDED, endpoint=endpoint, role=Role.ANCHOR, **handle._asdict())


def revoke(rows: Rows, row: int) -> Rows:
    """Take an unused guard away; its request may still get a row when it reaches the anchor."""
    _expect(rows, row, "revoke", RowUse.GUARDED)
    return _changed(rows, row, **_BLANK)


def arm(rows: Rows, row: int, handle: RequestHandle, endpoint: int, role: Role) -> Rows:
    """Make a free row, or the request's own guarded one, the destination of its next capture.

    Raises:
        InvariantError: The row is used, or guarded for somebody else.
    """
    _expect(rows, row, "arm", RowUse.FREE, RowUse.GUARDED)
    if rows.use_of(row) is RowUse.GUARDED and rows.handle(row) != handle:
        raise InvariantError(f"row {row} is guarded for {rows.handle(row)}, {handle} cannot arm it")
    return _changed(rows, row, use=RowUse.ARMED, endpoint=endpoint, role=role, **handle._asdict())


def make_private(rows: Rows, row: int, handle: RequestHandle) -> Rows:
    """Give a free row to the image windows of a request."""
    _expect(rows, row, "make private", RowUse.FREE)
    return _changed(rows, row, use=RowUse.PRIVATE, **handle._asdict())


def begin_copy(rows: Rows, row: int, fence: Fence) -> Rows:
    """The snapshot into an armed or private row was submitted."""
    _expect(rows, row, "copy into", RowUse.ARMED, RowUse.PRIVATE)
    if fence < 1 or rows.fence[row - 1]:
        raise InvariantError(f"row {row} cannot be written by fence {fence} beside fence {rows.fence[row - 1]}")
    private = rows.use_of(row) is RowUse.PRIVATE
    return _changed(rows, row, fence=fence, use=RowUse.PRIVATE if private else RowUse.COPYING)


def finish_copy(rows: Rows, row: int, fence: Fence, *, publish: bool) -> Rows:
    """The fence that wrote the row is complete: it is published, or free when the copy is of no use.

    A private row stays private, whatever `publish` says.
    """
    _expect(rows, row, "finish the copy of", RowUse.COPYING, RowUse.PRIVATE)
    if fence < 1 or rows.fence[row - 1] != fence:
        raise InvariantError(f"row {row} is written by fence {rows.fence[row - 1]}, not by {fence}")
    if rows.use_of(row) is RowUse.PRIVATE:
        return _changed(rows, row, fence=0)
    return _changed(rows, row, **{**_BLANK, "use": RowUse.PUBLISHED if publish else RowUse.FREE})


def move_on(rows: Rows, row: int, endpoint: int) -> Rows:
    """The state that an armed row is to hold has moved on to `endpoint` before its copy was submitted."""
    _expect(rows, row, "move on", RowUse.ARMED)
    return _changed(rows, row, endpoint=endpoint)


def disarm(rows: Rows, row: int) -> Rows:
    """Free an armed row whose copy will not be submitted: skipped, or its request retired."""
    _expect(rows, row, "disarm", RowUse.ARMED)
    return _changed(rows, row, **_BLANK)


def adopt(rows: Rows, row: int) -> Rows:
    """A free row is to hold a state that comes from outside; checkpoints name it from now on."""
    _expect(rows, row, "adopt", RowUse.FREE)
    return _changed(rows, row, use=RowUse.PUBLISHED)


def free_published(rows: Rows, row: int) -> Rows:
    """The last checkpoint that named the row is gone."""
    _expect(rows, row, "evict", RowUse.PUBLISHED)
    return _changed(rows, row, **_BLANK)


def free_private(rows: Rows, row: int) -> Rows:
    """The request has no further image window."""
    _expect(rows, row, "free", RowUse.PRIVATE)
    if rows.fence[row - 1]:
        raise InvariantError(f"private row {row} is being written by fence {rows.fence[row - 1]}")
    return _changed(rows, row, **_BLANK)


def rebind(rows: Rows, old: RequestHandle, fresh: RequestHandle) -> Rows:
    """A request lives on under a fresh handle: its rows follow."""
    for row in rows_of(rows, old):
        rows = _changed(rows, row, **fresh._asdict())
    return rows


def release_handle(rows: Rows, handle: RequestHandle) -> Rows:
    """Return every row of a request whose last submitted fence is complete.

    Raises:
        InvariantError: A fence still writes one of them; release the slot after its completion.
    """
    for row in rows_of(rows, handle):
        if rows.fence[row - 1]:
            raise InvariantError(f"{handle} is released while fence {rows.fence[row - 1]} writes row {row}")
        rows = _changed(rows, row, **_BLANK)
    return rows


def _expect(rows: Rows, row: int, deed: str, *uses: RowUse) -> None:
    if not 1 <= row <= len(rows):
        raise InvariantError(f"cannot {deed} state row {row}, there are rows 1 to {len(rows)}")
    if rows.use_of(row) not in uses:
        raise InvariantError(f"cannot {deed} state row {row}, it is {rows.use_of(row).name}")


def _changed(rows: Rows, row: int, **values: Any) -> Rows:
    columns = [column.copy() for column in _VALUES(rows)]
    for name, column in zip(COLUMNS, columns, strict=True):
        if name in values:
            column[row - 1] = values[name]
        column.setflags(write=False)
    return Rows(*columns)
