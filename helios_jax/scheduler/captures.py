"""Captures of a request's state: cuts, destinations, publication, terminal snapshots, restores.

Joins the arithmetic of `cuts` and the rows of `row_allocator` to the slots of a state;
`lifecycle`, `completion` and `retirement` call the steps below on a `Draft` and seal it.

The captures of a request:

1. `admit` plans its cuts, pins the checkpoint that it is restored from, and reserves a private
   row if its images need several windows.
2. `prepare` when it is ready to prefill: a row is armed for its next cut. Not earlier, because
   the row may be another one's checkpoint, which a request admitted next may ask for.
3. `reach` when a prefill has stopped: a due cut blocks the request until it is copied; one that
   is not due any more gives its row back. The next cut is armed.
4. `begin_copies` at commit, `end_copy` at completion: published, or dropped when it failed.
5. Module `terminal` decides whether a request that ended waits for a last one.
6. `release` when its slot is freed: all that it still holds goes back.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from helios_jax.errors import InvariantError, RequestError
from helios_jax.scheduler import checkpoints as library
from helios_jax.scheduler import row_allocator, state_rows
from helios_jax.scheduler.capture_draft import Draft, cut_costs, snapshot_ns
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.checkpoints import Claim
from helios_jax.scheduler.cuts import anchor_ahead, copy_is_due, plan_cuts
from helios_jax.scheduler.page_pressure import follow
from helios_jax.scheduler.resources import shared_pages
from helios_jax.scheduler.retention import Retention
from helios_jax.scheduler.stages import window_end
from helios_jax.scheduler.state import RETIRING, TERMINAL, Requests, State
from helios_jax.scheduler.state_rows import Role, RowUse
from helios_jax.scheduler.types import (
    CheckpointPublished,
    CompletionRecord,
    Fence,
    Lane,
    LaneRole,
    Limits,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
)


def check_source(checkpoints: library.Checkpoints, spec: RequestSpec, limits: Limits) -> None:
    """Refuse a request whose source of restoration is not what it says.

    Raises:
        RequestError: The checkpoint is gone (match the prompt again), or covers another length; where parts are
            shared, the part is not whole pages of it.
    """
    if not spec.restore_from:
        return
    if not library.is_published(checkpoints, spec.restore_from):
        message = f"checkpoint {spec.restore_from} is not published (any more); match the prompt again"
        raise RequestError(message, param="restore_from", code="checkpoint_gone")
    endpoint = int(checkpoints.endpoints[library.index_of(checkpoints, spec.restore_from)])
    is_part = 0 < spec.restored_len < endpoint and spec.restored_len % limits.page_size == 0
    if endpoint != spec.restored_len and not (limits.shares_parts and is_part):
        message = f"checkpoint {spec.restore_from} covers {endpoint} tokens, restored_len says {spec.restored_len}"
        raise RequestError(message, param="restored_len", code="invalid_value")


def takes_part(checkpoints: library.Checkpoints, spec: RequestSpec) -> bool:
    """Whether a request that was accepted begins with pages of a checkpoint, and not with its state."""
    if not spec.restore_from:
        return False
    return spec.restored_len < int(checkpoints.endpoints[library.index_of(checkpoints, spec.restore_from)])


def needs_private_row(spec: RequestSpec, feature_tokens: int) -> bool:
    """Whether the images that a request still has to encode need more than one window."""
    ahead = [span for span in spec.image_spans if span.end > spec.restored_len]
    return sum(span.end - span.start for span in ahead) > feature_tokens


def private_row_obtainable(state: State, spec: RequestSpec) -> bool:
    """Whether `admit` would find the private row that the request cannot do without, if any."""
    if not needs_private_row(spec, state.limits.feature_tokens):
        return True
    kept = state.retention
    pinned = library.pin(kept.checkpoints, spec.restore_from) if spec.restore_from else kept.checkpoints
    return row_allocator.reserve_private(kept.rows, pinned, RequestHandle(0, 0)) is not None


def admit(draft: Draft, requests: Requests, handle: RequestHandle, spec: RequestSpec, now_ns: int) -> int:
    """Plan the captures of a request whose columns were just set up; returns its first cut, 0 without one.

    The checkpoint that it is restored from stays pinned until its restore is complete. One that it shares
    pages with is neither read nor in demand: the pages are the request's own from now on, and what is
    behind them was not asked for.
    """
    slot = handle.slot
    draft.demand_ns[slot], draft.captured_len[slot] = now_ns, spec.restored_len
    if spec.restore_from and not takes_part(draft.checkpoints, spec):
        draft.checkpoints = library.pin(library.touch(draft.checkpoints, spec.restore_from, now_ns), spec.restore_from)
        draft.pinned[slot], draft.used[slot] = spec.restore_from, (spec.restore_from,)
        place = library.index_of(draft.checkpoints, spec.restore_from)
        requests.restore_row[slot] = draft.checkpoints.rows[place]
    if needs_private_row(spec, draft.state.limits.feature_tokens):
        granted = row_allocator.reserve_private(draft.rows, draft.checkpoints, handle, draft.in_use)
        assert granted is not None  # `can_admit` has asked
        requests.private_row[slot] = draft.accept(granted)
    if not draft.enabled:
        return 0
    plan = plan_cuts(
        prompt_len=len(spec.prompt),
        restored_len=spec.restored_len,
        message_ends=[end for end in spec.message_ends if not _splits_image(spec, end)],
        mandatory=(spec.system_end, *_window_starts(spec, draft.state.limits)),
        costs=cut_costs(draft.state, scored=spec.scored),
        fraction=draft.state.policy.checkpoint_extra_work_fraction,
    )
    draft.count("planned", len(plan.cuts) + plan.over_allowance + plan.unknown_cost)
    draft.skip("allowance", plan.over_allowance)
    draft.skip("unknown_cost", plan.unknown_cost)
    draft.cuts[slot] = plan.cuts
    return plan.cuts[0].endpoint


def armed_row(draft: Draft, handle: RequestHandle) -> int:
    """The row that is armed or being written for a request's next capture, 0 if there is none."""
    rows = state_rows.rows_of(draft.rows, handle, RowUse.ARMED, RowUse.COPYING)
    return rows[0] if rows else 0


def armed_endpoint(draft: Draft, handle: RequestHandle) -> int:
    row = armed_row(draft, handle)
    return int(draft.rows.endpoint[row - 1]) if row else 0


def prepare(draft: Draft, requests: Requests, handle: RequestHandle) -> int:
    """The request is ready to prefill: arm its next cut if none is armed; the endpoint, 0 without one."""
    return armed_endpoint(draft, handle) or arm_next(draft, requests, handle)


def arm_next(draft: Draft, requests: Requests, handle: RequestHandle) -> int:
    """Arm a row for the next cut that can have one; its endpoint, 0 without one.

    An extra is decided once: without a destination, or with an unknown cost, it is given up. An
    anchor is asked for again after every prefill, until it is passed.
    """
    slot = handle.slot
    while draft.cuts[slot]:
        cut, *later = draft.cuts[slot]
        due = copy_is_due(cut.role, snapshot_ns(draft.state))
        ahead = anchor_ahead(draft.cuts[slot], int(requests.consumed_len[slot]))
        claim = Claim(int(draft.demand_ns[slot]), cut.role, cut.endpoint)
        granted = None
        if due:
            use = draft.in_use
            granted = row_allocator.arm(draft.rows, draft.checkpoints, handle, claim, anchor=ahead, in_use=use)
        if granted is not None:
            draft.accept(granted)
            return cut.endpoint
        if cut.role is Role.ANCHOR:
            return 0
        draft.skip("no_row" if due else "expired_cost")
        draft.cuts[slot] = tuple(later)
    return 0


def reach(draft: Draft, requests: Requests, handle: RequestHandle) -> tuple[bool, int]:
    """The prompt has consumed up to `consumed_len`: is a copy due here, and where is the armed cut?

    A due one puts its row into `state_row`. A copy whose cost has expired since its split was
    dispatched is skipped.
    """
    if not draft.enabled:
        return False, 0
    slot, consumed, row = handle.slot, int(requests.consumed_len[handle.slot]), armed_row(draft, handle)
    armed = int(draft.rows.endpoint[row - 1]) if row else 0
    ahead = tuple(cut for cut in draft.cuts[slot] if cut.endpoint > consumed or cut.endpoint == armed)
    draft.skip("no_row", len(draft.cuts[slot]) - len(ahead))
    draft.cuts[slot] = ahead
    if armed != consumed:
        return False, armed or arm_next(draft, requests, handle)
    if copy_is_due(ahead[0].role, snapshot_ns(draft.state)):
        requests.state_row[slot] = row
        return True, 0
    draft.rows = state_rows.disarm(draft.rows, row)
    draft.skip("expired_cost")
    draft.cuts[slot] = ahead[1:]
    return False, arm_next(draft, requests, handle)


def begin_copies(kept: Retention, plan: ScheduledPlan, fence: Fence) -> Retention:
    """The snapshots of a plan were submitted: their rows are written until the fence completes."""
    if plan.shape.kind is not ProgramKind.SNAPSHOT:
        return kept
    rows = kept.rows
    for lane in plan.lanes:
        rows = state_rows.begin_copy(rows, lane.row, fence)
    return dataclasses.replace(kept, rows=rows)


def end_copy(draft: Draft, lane: Lane, fence: Fence, *, valid: bool) -> CheckpointPublished | None:
    """A snapshot is complete: publish the row, or give it back if the copy failed.

    It is published under a key of its own until `identify_checkpoint` knows the tokens. The copy
    of a private row publishes nothing.
    """
    slot, row = lane.handle.slot, lane.row
    if draft.rows.use_of(row) is RowUse.PRIVATE:
        draft.rows = state_rows.finish_copy(draft.rows, row, fence, publish=False)
        draft.count("windows", int(valid))
        return None
    role, endpoint = Role(int(draft.rows.role[row - 1])), int(draft.rows.endpoint[row - 1])
    draft.cuts[slot] = tuple(cut for cut in draft.cuts[slot] if cut.endpoint != endpoint)
    draft.rows = state_rows.finish_copy(draft.rows, row, fence, publish=valid)
    if not valid:
        draft.skip("terminal_failed" if role is Role.TERMINAL else "failed")
        return None
    key, demand_ns = ("capture", *lane.handle, endpoint), int(draft.demand_ns[slot])
    limits = draft.state.limits
    shared = shared_pages(endpoint, limits.page_size, limits.draft_extent)
    result = library.publish(
        draft.checkpoints,
        key=key,
        endpoint=endpoint,
        role=role,
        row=row,
        demand_ns=demand_ns,
        pages=tuple(draft.state.pool.tables[slot][:shared].tolist()),
    )
    draft.checkpoints = result.checkpoints
    draft.captured_len[slot] = max(int(draft.captured_len[slot]), endpoint)
    draft.used[slot] = (*draft.used[slot], result.checkpoint)
    draft.count_captured(role)
    return CheckpointPublished(lane.handle, result.checkpoint, endpoint, role)


def drop_lane(draft: Draft, requests: Requests, lane: Lane, record: CompletionRecord, fence: Fence) -> None:
    """The request of a lane ended before its frame completed: nothing of it is published.

    The row of a snapshot goes back. A request that waits for its terminal snapshot takes the state that one plain
    step leaves, which has consumed the pending token, and gives up if the lane has moved it on in any other way.
    """
    slot = lane.handle.slot
    if lane.role is LaneRole.SNAPSHOT:
        draft.rows = state_rows.finish_copy(draft.rows, lane.row, fence, publish=False)
        return
    if requests.phase[slot] != TERMINAL:
        return
    moved = record.committed_len - int(requests.committed_len[slot])
    if record.valid and moved == 1 and lane.length == 1 and not draft.state.limits.stops_on_device:
        requests.committed_len[slot] += 1
        draft.rows = state_rows.move_on(draft.rows, int(requests.state_row[slot]), record.committed_len)
    elif moved or not record.valid:
        draft.rows = state_rows.disarm(draft.rows, int(requests.state_row[slot]))
        draft.skip("terminal_overrun")
        requests.state_row[slot], requests.phase[slot] = 0, RETIRING


def end_restore(draft: Draft, handle: RequestHandle) -> None:
    """The restore of a request is complete, or will not run: its source may be evicted again."""
    pinned = int(draft.pinned[handle.slot])
    if pinned:
        draft.checkpoints = library.unpin(draft.checkpoints, pinned)
        draft.pinned[handle.slot] = 0


def rebind(draft: Draft, requests: Requests, old: RequestHandle, *, last_window: bool) -> int:
    """A window restore gave the request a fresh generation: its rows follow, the last one frees the private row.

    Returns:
        The endpoint of the armed cut, 0 if there is none.
    """
    fresh = RequestHandle(old.slot, int(requests.generation[old.slot]))
    draft.rows = state_rows.rebind(draft.rows, old, fresh)
    if last_window:
        draft.rows = state_rows.free_private(draft.rows, int(requests.private_row[old.slot]))
        requests.private_row[old.slot] = 0
    return armed_endpoint(draft, fresh)


def release(draft: Draft, handle: RequestHandle) -> None:
    """The slot of a request is freed: return its rows, its pin and what was planned for it."""
    slot = handle.slot
    draft.skip("ended", len(draft.cuts[slot]))
    end_restore(draft, handle)
    draft.rows = state_rows.release_handle(draft.rows, handle)
    for checkpoint in draft.used[slot]:  # in demand until now
        if library.is_published(draft.checkpoints, checkpoint):
            draft.checkpoints = library.touch(draft.checkpoints, checkpoint, draft.state.now_ns)
    draft.cuts[slot] = draft.used[slot] = ()
    draft.credit_ns[slot], draft.captured_len[slot], draft.demand_ns[slot] = 0.0, 0, 0


def _window_starts(spec: RequestSpec, limits: Limits) -> list[int]:
    """Where the image windows after the first begin: the prefill stops there anyway."""
    first, starts = sum(span.end <= spec.restored_len for span in spec.image_spans), []
    while (first := window_end(spec, first, limits)) < len(spec.image_spans):
        starts.append(spec.image_spans[first].start)
    return starts


def _splits_image(spec: RequestSpec, end: int) -> bool:
    return any(span.start < end < span.end for span in spec.image_spans)


def identify_checkpoint(state: State, checkpoint: int, key: library.Key) -> State:
    """Tell the key of a published checkpoint's tokens; one that is known already makes its row surplus.

    One that has given way meanwhile, as it may in the completion that announced it, changes nothing.

    Raises:
        InvariantError: The key covers another length, or a restore reads the surplus row; identify
            a checkpoint when it is announced.
    """
    kept = state.retention
    if not library.is_published(kept.checkpoints, checkpoint):
        return state
    rows, checkpoints, merged = library.identify(kept.rows, kept.checkpoints, checkpoint, key)
    used = tuple(tuple(merged.get(identity, identity) for identity in ids) for ids in kept.used)
    changed = dataclasses.replace(kept, rows=rows, checkpoints=checkpoints, used=used)
    return dataclasses.replace(state, pool=follow(state.pool, checkpoints), retention=changed)


def demand_checkpoint(state: State, checkpoint: int) -> State:
    """A request asks for a checkpoint now, whether or not it restores it; one that is gone changes nothing."""
    kept = state.retention
    if not library.is_published(kept.checkpoints, checkpoint):
        return state
    checkpoints = library.touch(kept.checkpoints, checkpoint, state.now_ns)
    return dataclasses.replace(state, retention=dataclasses.replace(kept, checkpoints=checkpoints))


def drop_checkpoints(state: State) -> State:
    """The device lost its state: nothing that was published can be restored any more.

    Raises:
        InvariantError: Somebody waits for a restore of one; end it first.
    """
    kept = state.retention
    if kept.checkpoints.pins.any():
        raise InvariantError(f"{int(kept.checkpoints.pins.sum())} requests wait for restores of lost checkpoints")
    rows = kept.rows
    for row in np.flatnonzero(rows.use == RowUse.PUBLISHED).tolist():
        rows = state_rows.free_published(rows, row + 1)
    none = library.without(kept.checkpoints, list(range(len(kept.checkpoints))))
    counts = dataclasses.replace(
        kept.counts,
        evicted=kept.counts.evicted + len(kept.checkpoints),
        evicted_rows=kept.counts.evicted_rows + int(np.count_nonzero(kept.rows.use == RowUse.PUBLISHED)),
    )
    changed = dataclasses.replace(kept, rows=rows, checkpoints=none, counts=counts)
    return dataclasses.replace(state, pool=follow(state.pool, none), retention=changed)
