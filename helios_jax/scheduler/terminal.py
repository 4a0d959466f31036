"""Terminal captures: what decode earns, and whether an ended request waits for a snapshot.

1. `earn` after every productive decode.
2. `wait_for_terminal` when the request ends well or is preempted: TERMINAL, with an armed row.
3. `captures.end_copy` publishes it; `captures.drop_lane` gives up if queued work moved the state on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from helios_jax.scheduler import row_allocator
from helios_jax.scheduler.capture_draft import Draft, snapshot_ns
from helios_jax.scheduler.captures import armed_row
from helios_jax.scheduler.checkpoints import Claim
from helios_jax.scheduler.cuts import earned_ns, terminal_is_due
from helios_jax.scheduler.state import Requests
from helios_jax.scheduler.state_rows import Role, RowUse
from helios_jax.scheduler.types import Lane, LaneRole, RequestHandle


def earn(draft: Draft, lanes: tuple[Lane, ...], served: np.ndarray, execution_ns: int) -> None:
    """Requests whose decode was productive earn their fraction of a measured execution.

    Args:
        served: int64 [slots], tokens that the execution served.
    """
    slots = [lane.handle.slot for lane in lanes if lane.role is LaneRole.DECODE] if draft.enabled else []
    if slots:
        slots = [slot for slot in slots if served[slot] > 0]
        fraction = draft.state.policy.checkpoint_extra_work_fraction
        draft.credit_ns[slots] = earned_ns(draft.credit_ns[slots], execution_ns, fraction)


def wait_for_terminal(draft: Draft, requests: Requests, handle: RequestHandle, *, ahead: Sequence[Lane]) -> bool:
    """Whether a request that ended well, or is preempted, waits for a snapshot of its last state.

    A copy that was armed for exactly this state, or is in flight, becomes its terminal one.

    Args:
        ahead: Lanes of submitted programs that name the request. They move the state on, unless the device
            stops by itself, which its record will show (`drop_lane`). A single step of decode consumes the pending
            token and nothing else: the state that it leaves is that of one token more, and as good.
    """
    if not draft.enabled:
        return False
    drained = not ahead
    slot, committed, row = handle.slot, int(requests.committed_len[handle.slot]), armed_row(draft, handle)
    if row and (draft.rows.use_of(row) is RowUse.COPYING or (drained and draft.rows.endpoint[row - 1] == committed)):
        requests.state_row[slot] = row
        return True
    if row or not terminal_is_due(
        credit_ns=float(draft.credit_ns[slot]),
        snapshot_ns=snapshot_ns(draft.state, fresh=False),
        committed_len=committed,
        captured_len=int(draft.captured_len[slot]),
    ):
        return False
    if not (drained or draft.state.limits.stops_on_device or consumes_pending(ahead)):
        draft.skip("terminal_overrun")
        return False
    claim = Claim(int(draft.demand_ns[slot]), Role.TERMINAL, committed)
    granted = row_allocator.arm(draft.rows, draft.checkpoints, handle, claim, in_use=draft.in_use)
    if granted is None:
        draft.skip("terminal_no_row")
        return False
    requests.state_row[slot] = draft.accept(granted)
    return True


def consumes_pending(ahead: Sequence[Lane]) -> bool:
    """Whether all that is still to come is the pending token of one plain step."""
    return len(ahead) == 1 and ahead[0].role is LaneRole.DECODE and ahead[0].length == 1
