"""Checkpoints from outside: which row and pages they get, what gives way, and what is as it was when nothing can."""

from __future__ import annotations

import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import Scheduler, State, check_invariants, snapshot_counters
from helios_jax.scheduler.adoption import Place, adopt_checkpoint, withdraw_checkpoint
from tests.unit.checkpoint_toy import asked, finish_frame, hybrid_state, occupied, run, submit, uses
from tests.unit.test_scheduler_restores import PUBLISHED, library

PAGE = 4


def adopted(state: State, endpoint: int, shared: tuple[int, ...] = (), key: object = "host") -> tuple[State, Place]:
    state, place = adopt_checkpoint(state, key, endpoint, shared)
    assert place is not None
    check_invariants(state)
    return state, place


def test_a_request_begins_behind_it() -> None:
    state, place = adopted(hybrid_state(2), 10)
    assert (place.checkpoint, place.row, len(set(place.pages))) == (1, 1, 10 // PAGE)
    counters = snapshot_counters(state)
    assert (counters["checkpoints_published"], counters["state_rows_free"], counters["pages_kept"]) == (1, 1, 2)
    state, handle = asked(state, 12, 2, restore_from=place.checkpoint, restored_len=10)
    assert state.pool.tables[handle.slot].tolist() == list(place.pages)
    state, plan, fence = submit(state)
    assert [lane.row for lane in plan.lanes] == [place.row]
    state, _ = finish_frame(state, plan, fence)
    assert state.requests.consumed_len[handle.slot] == 10
    state, _, _ = run(state)
    assert state.pool.used == 0


def test_pages_of_the_prefix_that_are_here_are_shared() -> None:
    state = library(3)  # 8 and 10 tokens: two whole pages each
    first = state.retention.checkpoints.pages[0]
    free = state.pool.num_free
    state, place = adopted(state, 17, shared=first)
    assert place.pages[:2] == first
    assert len(place.pages) == 4
    assert state.pool.num_free == free - 2


def test_the_least_protected_row_gives_way() -> None:
    state = library(2)
    state, place = adopted(state, 9)
    assert place.row == 1
    assert state.retention.checkpoints.endpoints.tolist() == [10, 9]
    assert snapshot_counters(state)["checkpoints_evicted"] == 1


def test_checkpoints_give_way_for_pages() -> None:
    """64 pages, of which a request holds some and two checkpoints keep 4: for 61 both must go."""
    state = library(3)
    state, place = adopted(state, 60 * PAGE + 1, key="long")
    assert state.retention.checkpoints.endpoints.tolist() == [8, 10, 241]
    state = library(3)
    state, place = adopted(state, 61 * PAGE + 1, key="long")
    assert state.retention.checkpoints.endpoints.tolist() == [10, 245]
    assert len(place.pages) == 61
    same, nothing = adopt_checkpoint(library(3), "long", 65 * PAGE, ())
    assert nothing is None
    assert len(same.retention.checkpoints) == 2


def test_without_a_place_nothing_changes() -> None:
    none = hybrid_state(0)
    assert adopt_checkpoint(none, "host", 9) == (none, None)
    busy = occupied(hybrid_state(1))
    assert adopt_checkpoint(busy, "host", 9) == (busy, None)
    # The only row that can go keeps the pages that were to be shared.
    full = library(2)
    full, _ = asked(full, 12, 2, restore_from=2, restored_len=10)
    shared = full.retention.checkpoints.pages[0]
    assert adopt_checkpoint(full, "host", 17, shared) == (full, None)


def test_a_resident_request_keeps_its_promise_of_pages() -> None:
    """What it was promised and has not taken yet can be had although an adopted checkpoint fills the pool."""
    state, _ = asked(hybrid_state(2), 40, 20)
    state, _ = adopted(state, 64 * PAGE - 1)
    assert state.pool.num_free == 1
    state, _, plans = run(state)
    assert plans
    assert not len(state.retention.checkpoints) or state.retention.checkpoints.endpoints.max() < 64 * PAGE - 1
    assert snapshot_counters(state)["requests_preempted"] == 0
    assert uses(state).count(PUBLISHED) == len(set(state.retention.checkpoints.rows.tolist()))


def test_wrong_calls_are_found() -> None:
    state, place = adopted(hybrid_state(2), 10)
    with pytest.raises(InvariantError, match="is published already"):
        adopt_checkpoint(state, "host", 10)
    with pytest.raises(InvariantError, match="of which checkpoints keep only some"):
        adopt_checkpoint(state, "other", 10, (place.pages[0], 60))
    scheduler = Scheduler.from_state(state)
    assert scheduler.adopt_checkpoint("other", 10, place.pages) == Place(2, 2, place.pages)


def test_a_state_that_could_not_be_written_is_withdrawn() -> None:
    state = library(3)
    before, first = state, state.retention.checkpoints.pages[0]
    state, place = adopted(state, 17, shared=first)
    state = withdraw_checkpoint(state, place.checkpoint)
    check_invariants(state)
    assert state.pool.rows == before.pool.rows
    assert state.pool.num_free == before.pool.num_free
    assert state.retention.checkpoints.endpoints.tolist() == [8, 10]
    state, place = adopted(state, 17, shared=first)
    waiting, _ = asked(state, 20, 2, restore_from=place.checkpoint, restored_len=17)
    with pytest.raises(InvariantError, match="is being restored"):
        withdraw_checkpoint(waiting, place.checkpoint)
    scheduler = Scheduler.from_state(state)
    scheduler.withdraw_checkpoint(place.checkpoint)
    assert len(scheduler.state.retention.checkpoints) == 2
