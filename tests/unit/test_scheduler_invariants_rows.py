"""Planted corruptions of state rows, checkpoints and captures (see `test_scheduler_invariants`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import (
    Lane,
    LaneRole,
    ProgramKind,
    ProgramShape,
    RequestHandle,
    ScheduledPlan,
    SelectionReason,
    State,
    check_invariants,
    commit,
)
from helios_jax.scheduler.retention import CaptureCounts
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.state_rows import RowUse
from tests.unit.checkpoint_toy import SNAPSHOT, asked, captured, finish_frame, hybrid_state, phase_of, run, uses
from tests.unit.scheduler_toy import INITIALIZE
from tests.unit.test_scheduler_invariants import Corruption, column, counter, pool, sealed, table


def busy_rows() -> State:
    """Row by row, see the assertion: slot 0 copies, slot 1 has a guard and an armed row, row 1 is published.

    Slot 2 waits for its restore from the checkpoint in row 1.
    """
    state = hybrid_state(6)
    state, first = asked(state, 8, 1)
    state, _, _ = run(state)
    assert captured(state) == {"anchor": 1}
    assert phase_of(state, first) is Phase.FREE
    state, handle = asked(state, 10, 4)
    state, _, _ = run(state, lambda s: phase_of(s, handle) is Phase.SNAPSHOT)
    state, other = asked(state, 20, 4, message_ends=(5, 12))
    state, plan, fence = submitted(state, INITIALIZE, other)
    state, _ = finish_frame(state, plan, fence)
    state, _ = asked(state, 12, 4, restored_len=8, restore_from=1)
    state, _, _ = submitted(state, SNAPSHOT, handle)
    assert uses(state) == [
        RowUse.PUBLISHED, RowUse.COPYING, RowUse.GUARDED, RowUse.ARMED, RowUse.FREE, RowUse.FREE,
    ]  # fmt: skip
    return state


def submitted(state: State, kind: ProgramKind, handle: RequestHandle) -> tuple[State, ScheduledPlan, int]:
    """Commit a state operation of one request, whatever selection would prefer now."""
    slot = handle.slot
    start, row = int(state.requests.committed_len[slot]), int(state.requests.state_row[slot])
    plan = ScheduledPlan(
        shape=ProgramShape(kind, 1, 0), lanes=(Lane(handle, LaneRole(kind.value), start, 0, False, row),),
        epochs=(int(state.requests.epoch[slot]),), estimated_duration_ns=1, value_rate=1.0, log_scale=0.0,
        reason=SelectionReason.ORDINARY, required_empty_queue=True,
    )  # fmt: skip
    fence = state.last_fence + 1
    return commit(state, plan, fence), plan, fence


def kept(**changes: Any) -> Corruption:
    return lambda state: dataclasses.replace(state, retention=dataclasses.replace(state.retention, **changes))


def row(number: int, **values: int) -> Corruption:
    def corrupt(state: State) -> State:
        rows, changed = state.retention.rows, {}
        for name, value in values.items():
            changed[name] = getattr(rows, name).copy()
            changed[name][number - 1] = value
            changed[name].setflags(write=False)
        return kept(rows=dataclasses.replace(rows, **changed))(state)

    return corrupt


def library(**changes: Any) -> Corruption:
    def corrupt(state: State) -> State:
        values = {name: sealed(v) if isinstance(v, list) else v for name, v in changes.items()}
        return kept(checkpoints=dataclasses.replace(state.retention.checkpoints, **values))(state)

    return corrupt


def slot(name: str, number: int, value: float) -> Corruption:
    def corrupt(state: State) -> State:
        values = getattr(state.retention, name).copy()
        values[number] = value
        values.setflags(write=False)
        return kept(**{name: values})(state)

    return corrupt


def counts(**changes: Any) -> Corruption:
    return lambda state: kept(counts=dataclasses.replace(state.retention.counts, **changes))(state)


def twice(state: State) -> State:
    """The checkpoint of row 1 once more, under another id and the same key and role."""
    p = state.retention.checkpoints
    columns = {name: sealed(np.repeat(getattr(p, name), 2)) for name in ("endpoints", "roles", "rows", "demand_ns")}
    return library(ids=[1, 2], pins=[1, 0], keys=p.keys * 2, pages=p.pages * 2, last_id=2, **columns)(state)


def shorter_pages(state: State) -> State:
    """Checkpoint 1 and its row agree, but not with its length: one page is free that should be kept."""
    pages = state.retention.checkpoints.pages[0]
    kept_pages = (pages[:1], *state.pool.rows[1:])
    keepers = state.pool.keepers.copy()
    keepers[pages[1]] = 0
    keepers.setflags(write=False)
    return library(pages=(pages[:1],))(pool(rows=kept_pages, keepers=keepers)(state))


def write_a_shared_page(state: State) -> State:
    """Slot 0, of 10 tokens, has a page of checkpoint 1 in the place of its third, which is free."""
    own, theirs = int(state.pool.tables[0][2]), state.retention.checkpoints.pages[0][0]
    free = state.pool.free.copy()
    free[state.pool.num_free] = own
    free.setflags(write=False)
    changed = table(0, lambda pages: [*pages[:2], theirs])(state)
    return pool(free=free, num_free=state.pool.num_free + 1)(changed)


CORRUPTIONS: list[tuple[int, str, Callable[[State], State]]] = [
    (27, "a row keeps what no checkpoint names", library(pages=((),))),
    (27, "a shared page is written", write_a_shared_page),
    (27, "a checkpoint of other pages", shorter_pages),
    (17, "an unknown use", row(6, use=9)),
    (17, "a free row that kept an endpoint", row(6, endpoint=4)),
    (17, "a published row that kept an owner", row(1, slot=1, generation=1)),
    (17, "a row of a request that is gone", row(4, generation=7)),
    (17, "a row of a free slot", row(6, use=int(RowUse.PRIVATE), slot=3, generation=0)),
    (17, "a published row without checkpoint", row(6, use=int(RowUse.PUBLISHED))),
    (17, "a checkpoint without row", row(1, use=int(RowUse.FREE))),
    (17, "a pool of another size", lambda s: dataclasses.replace(
        s, limits=dataclasses.replace(s.limits, state_rows=5))),
    (18, "a copy forgotten", row(2, fence=0)),
    (18, "a copy of another fence", row(2, fence=77)),
    (18, "a copy that nobody runs", row(4, use=int(RowUse.COPYING), fence=1)),
    (18, "a row reused while it is written", row(2, slot=1, generation=1)),
    (18, "an armed row that is written", row(2, use=int(RowUse.ARMED))),
    (19, "two destinations", row(3, use=int(RowUse.ARMED))),
    (19, "a private row unknown to its request", row(6, use=int(RowUse.PRIVATE), slot=1, generation=1)),
    (19, "a destination that is not armed", column("state_row", 0, 6)),
    (19, "a copy of another length", row(2, endpoint=9)),
    (19, "a due copy while prompting", lambda s: column("state_row", 1, 4)(row(4, endpoint=0)(s))),
    (19, "a retirement that waits for nothing", lambda s: counter(finished=(1, 1, 0, 0))(
        column("phase", 1, int(Phase.TERMINAL))(s))),
    (19, "a boundary beyond the cut", lambda s: column("phase", 1, int(Phase.PROMPT))(column("boundary", 1, 20)(s))),
    (19, "a cut behind the state", row(4, endpoint=0)),
    (20, "an id that was not given", library(last_id=0)),
    (20, "a checkpoint published twice", twice),
    (20, "a prefix of no tokens", library(endpoints=[0])),
    (20, "a demand in the future", library(demand_ns=[2**60])),
    (20, "a pin lost", library(pins=[0])),
    (20, "a pin too many", library(pins=[2])),
    (20, "a restore from another row", column("restore_row", 2, 6)),
    (21, "a cut lost", lambda s: kept(cuts=((), *s.retention.cuts[1:]))(s)),
    (21, "a skip counted twice", lambda s: counts(skipped=(1,) * len(s.retention.counts.skipped))(s)),
    (21, "a free slot with credit", slot("credit_ns", 3, 1.0)),
    (21, "a free slot that uses a checkpoint", lambda s: kept(used=(*s.retention.used[:3], (1,)))(s)),
    (21, "a use of what was never given", lambda s: kept(used=((9,), *s.retention.used[1:]))(s)),
    (21, "an infinite credit", slot("credit_ns", 0, np.inf)),
    (21, "a capture of tokens to come", slot("captured_len", 0, 99)),
    (21, "cuts out of order", lambda s: kept(cuts=tuple(cuts[::-1] for cuts in s.retention.cuts))(s)),
    (21, "a demand after now", slot("demand_ns", 0, 2**60)),
]  # fmt: skip


def test_the_uncorrupted_state_passes() -> None:
    state = busy_rows()
    check_invariants(state)
    assert state.retention.counts != CaptureCounts()


@pytest.mark.parametrize(("number", "name", "corrupt"), CORRUPTIONS, ids=[f"{n}-{name}" for n, name, _ in CORRUPTIONS])
def test_planted_corruption_is_found(number: int, name: str, corrupt: Callable[[State], State]) -> None:
    with pytest.raises(InvariantError, match=f"invariant {number} "):
        check_invariants(corrupt(busy_rows()))
