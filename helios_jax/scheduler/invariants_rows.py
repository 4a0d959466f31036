"""Invariants of state rows, captures and published checkpoints, recounted (see `invariants`)."""

from __future__ import annotations

import numpy as np

from helios_jax.scheduler.checkpoints import MAX_ALIASES
from helios_jax.scheduler.retention import CUT_SKIPS, SKIPS, SLOT_COLUMNS
from helios_jax.scheduler.state import FREE, PROMPT, RESTORE, RETIRING, SNAPSHOT, TERMINAL, Phase, State
from helios_jax.scheduler.state_rows import COLUMNS, Role, RowUse, rows_of
from helios_jax.scheduler.types import LaneRole, RequestHandle


def row_uses(state: State) -> str | None:
    """Each row has one use: of a present request, of the checkpoints that name it, or none."""
    rows, requests = state.retention.rows, state.requests
    if len(rows) != state.limits.state_rows or any(getattr(rows, name).flags.writeable for name in COLUMNS):
        return f"{len(rows)} rows for {state.limits.state_rows}, or a writeable column"
    for row in range(1, len(rows) + 1):
        use, owner, values = int(rows.use[row - 1]), rows.handle(row), [int(getattr(rows, n)[row - 1]) for n in COLUMNS]
        if use not in set(RowUse):
            return f"row {row} has the unknown use {use}"
        if use in (RowUse.FREE, RowUse.PUBLISHED):
            if any(values[1:]):
                return f"{RowUse(use).name} row {row} kept {values}"
        elif owner.generation < 1 or requests.generation[owner.slot] != owner.generation:
            return f"row {row} belongs to {owner}, which lost its slot"
        elif requests.phase[owner.slot] == FREE:
            return f"row {row} belongs to the free slot of {owner}"
    held = set((np.flatnonzero(rows.use == RowUse.PUBLISHED) + 1).tolist())
    named = set(state.retention.checkpoints.rows.tolist())
    return f"rows {sorted(held)} are published, checkpoints name {sorted(named)}" if held != named else None


def row_fences(state: State) -> str | None:
    """The rows in copy are exactly the destinations of the snapshots in flight."""
    rows = state.retention.rows
    flying = {lane.row: (frame.fence, lane.handle) for frame in state.frames for lane in frame.plan.lanes
              if lane.role is LaneRole.SNAPSHOT}  # fmt: skip
    written = {row: (int(rows.fence[row - 1]), rows.handle(row)) for row in (np.flatnonzero(rows.fence) + 1).tolist()}
    if flying != written:
        return f"snapshots in flight write {flying}, rows say {written}"
    idle = np.flatnonzero((rows.use == RowUse.COPYING) & (rows.fence == 0)) + 1
    foreign = np.flatnonzero((rows.fence != 0) & (rows.use != RowUse.COPYING) & (rows.use != RowUse.PRIVATE)) + 1
    return f"rows {idle} and {foreign} disagree with their use" if len(idle) or len(foreign) else None


def row_columns(state: State) -> str | None:
    """A request has one destination at most; its columns name its own rows and a boundary stops there."""
    rows, requests = state.retention.rows, state.requests
    for slot in np.flatnonzero(requests.phase != FREE).tolist():
        handle = RequestHandle(slot, int(requests.generation[slot]))
        armed = rows_of(rows, handle, RowUse.ARMED, RowUse.COPYING)
        private, guards = rows_of(rows, handle, RowUse.PRIVATE), rows_of(rows, handle, RowUse.GUARDED)
        if len(armed) > 1 or len(guards) > 1 or private != [row for row in (int(requests.private_row[slot]),) if row]:
            return f"{handle} has rows {armed} armed, {guards} guarded, {private} private"
        due, consumed, phase = int(requests.state_row[slot]), int(requests.consumed_len[slot]), requests.phase[slot]
        if due and due not in armed:
            return f"{handle} is to write row {due}, armed is {armed}"
        if due and phase != RETIRING and rows.endpoint[due - 1] != requests.committed_len[slot]:
            return f"{handle} is to write {rows.endpoint[due - 1]} tokens at {requests.committed_len[slot]}"
        if (phase == TERMINAL and not due) or (due and phase not in _DUE):
            return f"{handle} in {Phase(phase).name} is to write row {due}"
        ahead = [int(rows.endpoint[row - 1]) for row in armed if not due]
        if phase == PROMPT and any(not requests.boundary[slot] <= end for end in ahead):
            return f"{handle} passes its cut at {ahead} on its way to {requests.boundary[slot]}"
        if phase != RETIRING and any(end <= consumed for end in ahead):
            return f"{handle} has a row armed at {ahead}, behind {consumed}"
    return None


_DUE = (SNAPSHOT, TERMINAL, RETIRING)


def published(state: State) -> str | None:
    """Ids grow; equal keys, equal rows and equal lengths go together; pins are those of waiting restores."""
    p, kept = state.retention.checkpoints, state.retention
    ids, pinned = p.ids.tolist(), kept.pinned[kept.pinned > 0].tolist()
    if ids != sorted(set(ids)) or (ids and not 0 < ids[0] <= ids[-1] <= p.last_id):
        return f"ids {ids} after {p.last_id} were given"
    if len(set(zip(p.keys, p.roles.tolist(), strict=True))) != len(ids) or len(ids) > MAX_ALIASES * len(kept.rows):
        return f"{len(ids)} checkpoints of {len(kept.rows)} rows repeat a key and role"
    prefixes = set(zip(p.keys, p.rows.tolist(), p.endpoints.tolist(), strict=True))
    if not len(prefixes) == len(set(p.keys)) == len(set(p.rows.tolist())) or (p.endpoints < 1).any():
        return f"keys, rows and lengths do not go together: {prefixes}"
    if (p.demand_ns > state.now_ns).any():
        return f"a demand at {p.demand_ns.max()} lies after now, {state.now_ns}"
    if p.pins.tolist() != [pinned.count(identity) for identity in ids] or not set(pinned) <= set(ids):
        return f"pins {p.pins} of {ids}, restores wait for {pinned}"
    waiting = (state.requests.phase == RESTORE) & (kept.pinned > 0)
    sources = {int(i): int(row) for i, row in zip(p.ids, p.rows, strict=True)}
    chosen = state.requests.restore_row
    lost = [s for s in np.flatnonzero(waiting).tolist() if chosen[s] != sources[int(kept.pinned[s])]]
    return f"slots {lost} restore from rows that their checkpoints do not have" if lost else None


def captures(state: State) -> str | None:
    """Every possible cut is captured, skipped or ahead; what is kept of a slot belongs to its request."""
    kept, requests = state.retention, state.requests
    skipped = sum(n for name, n in zip(SKIPS, kept.counts.skipped, strict=True) if name in CUT_SKIPS)
    captured = sum(kept.counts.captured) - kept.counts.captured[Role.TERMINAL]
    ahead = sum(map(len, kept.cuts))
    if kept.counts.planned != captured + skipped + ahead:
        return f"{kept.counts.planned} cuts were possible; {captured} captured, {skipped} skipped, {ahead} ahead"
    for slot, cuts in enumerate(kept.cuts):
        if requests.phase[slot] == FREE and (
            cuts or kept.used[slot] or any(getattr(kept, name)[slot] for name in SLOT_COLUMNS)
        ):
            return f"free slot {slot} kept captures"
        if any(not 1 <= identity <= kept.checkpoints.last_id for identity in kept.used[slot]):
            return f"slot {slot} uses {kept.used[slot]}, {kept.checkpoints.last_id} were given"
        ends = [cut.endpoint for cut in cuts]
        if ends != sorted(set(ends)) or (cuts and ends[-1] > requests.prompt_len[slot]):
            return f"slot {slot} has cuts at {ends}"
        if not 0 <= kept.credit_ns[slot] < np.inf or kept.captured_len[slot] > requests.committed_len[slot]:
            return f"slot {slot} has a credit of {kept.credit_ns[slot]} ns, captured {kept.captured_len[slot]} tokens"
        if kept.demand_ns[slot] > state.now_ns:
            return f"slot {slot} was asked for after now, {state.now_ns}"
    return None
