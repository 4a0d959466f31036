"""Restores from checkpoints, evictions, and the private rows of image windows."""

from __future__ import annotations

from typing import Any

import pytest

from helios_jax.errors import CapacityError, InvariantError, RequestError
from helios_jax.scheduler import (
    LaneRole,
    RequestFinished,
    RequestHandle,
    Scheduler,
    State,
    advance_to,
    can_admit,
    cancel,
    demand_checkpoint,
    identify_checkpoint,
    snapshot_counters,
)
from helios_jax.scheduler.checkpoints import ids_of
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.state_rows import RowUse
from helios_jax.scheduler.types import CheckpointPublished, CheckpointRole
from tests.unit.checkpoint_toy import (
    IMAGES,
    asked,
    finish_frame,
    hybrid_state,
    occupied,
    phase_of,
    ready,
    run,
    skipped,
    submit,
    uses,
)
from tests.unit.scheduler_toy import MS

FREE, ARMED, GUARDED, PUBLISHED = RowUse.FREE, RowUse.ARMED, RowUse.GUARDED, RowUse.PUBLISHED


def published(events: list[Any]) -> list[tuple[int, CheckpointRole]]:
    return [(event.endpoint, event.role) for event in events if isinstance(event, CheckpointPublished)]


def library(rows: int = 2) -> State:
    """In rows 1 and 2: checkpoint 1 of 8 tokens, checkpoint 2 of 10 tokens, asked for later."""
    state, _ = asked(hybrid_state(rows, fraction=0.0), 8, 1)
    state, _, _ = run(state)
    state, _ = asked(state, 10, 1)
    state, _, _ = run(state)
    assert state.retention.checkpoints.endpoints.tolist() == [8, 10]
    return state


def test_a_restore_pins_its_source_until_it_is_complete() -> None:
    state, handle = asked(library(), 12, 2, restore_from=1, restored_len=8)
    assert state.requests.restore_row[handle.slot] == 1
    assert state.retention.checkpoints.pins.tolist() == [1, 0]
    assert state.retention.checkpoints.demand_ns[0] == state.now_ns
    squeezed = occupied(state)
    assert uses(squeezed) == [PUBLISHED, RowUse.PRIVATE]
    with pytest.raises(CapacityError):
        occupied(squeezed)  # a pinned row is no victim
    state, plan, fence = submit(state)
    assert [(lane.role, lane.row) for lane in plan.lanes] == [(LaneRole.RESTORE, 1)]
    assert state.retention.checkpoints.pins.tolist() == [1, 0]
    for ended in (cancel(state, handle), state):
        ended, _ = finish_frame(ended, plan, fence)
        assert not ended.retention.checkpoints.pins.any()


def test_a_request_that_ends_before_its_restore_unpins_it() -> None:
    state, handle = asked(library(), 12, 2, restore_from=1, restored_len=8)
    state = cancel(state, handle)
    assert state.retention.checkpoints.pins.tolist() == [0, 0]
    assert not state.retention.pinned.any()


@pytest.mark.parametrize(
    ("changes", "code"), [({"restore_from": 9}, "checkpoint_gone"), ({"restored_len": 7}, "invalid_value")]
)
def test_a_source_that_is_gone_or_another_length_is_refused(changes: dict[str, int], code: str) -> None:
    with pytest.raises(RequestError) as error:
        asked(library(), 12, 2, **{"restore_from": 1, "restored_len": 8} | changes)
    assert error.value.code == code


def test_restored_tokens_are_neither_captured_nor_counted_again() -> None:
    state, handle = asked(library(), 12, 2, restore_from=1, restored_len=8, message_ends=(4, 8))
    assert [cut.endpoint for cut in state.retention.cuts[handle.slot]] == [12]
    assert state.retention.captured_len[handle.slot] == 8


def test_evictions_are_counted_by_what_they_free() -> None:
    state = ready(asked(library(), 9, 1)[0])
    counters = snapshot_counters(state)
    assert (counters["checkpoints_evicted"], counters["state_rows_evicted"]) == (1, 1)
    assert (counters["checkpoints_published"], counters["state_rows_free"]) == (1, 0)
    assert counters["snapshots"] == {"extra": 0, "prompt_end": 0, "terminal": 0, "anchor": 2}


def test_a_demand_decides_the_next_victim() -> None:
    state = advance_to(library(), 10**9)
    assert occupied(state).retention.checkpoints.ids.tolist() == [2]
    assert occupied(demand_checkpoint(state, 1)).retention.checkpoints.ids.tolist() == [1]
    assert occupied(demand_checkpoint(state, 7)).retention.checkpoints.ids.tolist() == [2], "7 is gone or never was"


def test_an_identified_duplicate_frees_its_row() -> None:
    state = identify_checkpoint(library(), 1, b"eight tokens")
    assert ids_of(state.retention.checkpoints, b"eight tokens") == (1,)
    state, _ = asked(state, 8, 1)
    state, events, _ = run(state)
    assert published(events) == [(8, CheckpointRole.ANCHOR)]
    state = identify_checkpoint(identify_checkpoint(library(), 1, b"a"), 2, b"b")
    assert uses(state) == [PUBLISHED, PUBLISHED]
    assert identify_checkpoint(state, 9, b"c") is state, "gone, or never was"
    with pytest.raises(InvariantError, match="of tokens too"):
        identify_checkpoint(state, 2, b"a")


def windowed(rows: int = 2, **rest: Any) -> tuple[State, RequestHandle]:
    """Three windows: features for 4 tokens, images of 4, 4 and 2."""
    return asked(hybrid_state(rows, fraction=0.0), 18, 3, image_spans=IMAGES, **rest)


def test_image_windows_use_one_private_row_that_is_never_published() -> None:
    state, handle = windowed()
    private = int(state.requests.private_row[handle.slot])
    assert uses(state)[private - 1] is RowUse.PRIVATE
    state, events, plans = run(state)
    copies = [(lane.start, lane.row) for plan in plans for lane in plan.lanes if lane.role is LaneRole.SNAPSHOT]
    assert [copy for copy in copies if copy[1] == private] == [(8, private), (13, private)]
    restores = [(lane.start, lane.row) for plan in plans for lane in plan.lanes if lane.role is LaneRole.RESTORE]
    assert restores == [(8, private), (13, private)]
    assert published(events) == [(18, CheckpointRole.ANCHOR)]
    assert state.retention.counts.windows == 2
    state, _ = windowed()
    state, _, _ = run(state, lambda s: s.counters.rebound == 2)
    assert sorted(uses(state)) == [FREE, ARMED], "the private row is free once the last window has begun"


def test_rows_follow_a_request_to_its_fresh_generation() -> None:
    state, handle = windowed()
    state, _, _ = run(state, lambda s: s.counters.rebound == 1)
    rows = state.retention.rows
    assert {rows.handle(row) for row in (1, 2)} == {RequestHandle(handle.slot, handle.generation + 1)}


def test_a_cut_at_the_end_of_a_window_is_copied_beside_the_private_row() -> None:
    state, _ = windowed(message_ends=(8,))
    state, events, plans = run(state)
    copies = [lane.row for plan in plans for lane in plan.lanes if lane.role is LaneRole.SNAPSHOT and lane.start == 8]
    assert len(set(copies)) == 2
    assert published(events)[0] == (8, CheckpointRole.ANCHOR)


def test_a_message_end_inside_an_image_is_no_cut() -> None:
    state, handle = asked(hybrid_state(3), 18, 3, image_spans=IMAGES[:1], message_ends=(4, 7))
    assert [cut.endpoint for cut in state.retention.cuts[handle.slot]] == [7, 18]


def test_windows_wait_for_a_row_and_are_refused_without_any() -> None:
    state, first = windowed(1)
    spec = state.specs[first.slot]
    assert spec is not None
    assert not can_admit(state, spec)
    with pytest.raises(CapacityError, match="state row"):
        asked(state, 18, 3, image_spans=IMAGES)
    assert can_admit(cancel(state, first), spec)
    with pytest.raises(RequestError, match="state rows"):
        windowed(0)


def test_mandatory_windows_revoke_an_unused_guard() -> None:
    state, guarded = asked(hybrid_state(2), message_ends=(5, 15))
    state = ready(state)
    assert sorted(uses(state)) == [GUARDED, ARMED]
    state, handle = asked(state, 18, 3, image_spans=IMAGES)
    assert sorted(uses(state)) == [ARMED, RowUse.PRIVATE]
    state, events, _ = run(state)
    ends = [event.handle.slot for event in events if isinstance(event, RequestFinished)]
    assert sorted(ends) == [guarded.slot, handle.slot]


@pytest.mark.parametrize("stage", range(12))
def test_cancelling_a_windowed_request_at_every_stage_returns_its_rows(stage: int) -> None:
    state, handle = windowed()
    for _ in range(stage):
        state, plan, fence = submit(state)
        state, _ = finish_frame(state, plan, fence)
        handle = RequestHandle(handle.slot, int(state.requests.generation[handle.slot]))
    idle = cancel(state, handle)
    assert RowUse.PRIVATE not in uses(idle)
    state, plan, fence = submit(state)
    state = cancel(state, handle)
    assert RowUse.PRIVATE in uses(state) or stage > 8, "kept through GPU completion"
    state, _ = finish_frame(state, plan, fence)
    assert set(uses(state)) <= {FREE, PUBLISHED}


def test_the_holder_offers_the_same_events() -> None:
    scheduler = Scheduler.from_state(library())
    scheduler.demand_checkpoint(1)
    scheduler.identify_checkpoint(1, b"prefix")
    assert scheduler.state == identify_checkpoint(demand_checkpoint(library(), 1), 1, b"prefix")


def test_what_a_resident_request_uses_is_in_demand_until_it_is_gone() -> None:
    """Checkpoint 2 was asked for later, but a resident request was restored from checkpoint 1."""
    state, handle = asked(library(3), 12, 3, restore_from=1, restored_len=8)
    state, _, _ = run(state, lambda s: phase_of(s, handle) is Phase.PROMPT)
    state = demand_checkpoint(advance_to(state, state.now_ns + MS), 2)
    assert (state.retention.used[handle.slot], uses(state)) == ((1,), [PUBLISHED, PUBLISHED, ARMED])
    assert occupied(state).retention.checkpoints.ids.tolist() == [1]
    state = cancel(advance_to(state, state.now_ns + MS), handle)
    assert state.retention.used[handle.slot] == ()
    assert state.retention.checkpoints.demand_ns[0] == state.now_ns


def test_a_merged_capture_is_used_under_its_older_id() -> None:
    state, handle = asked(identify_checkpoint(library(3), 1, b"text"), 8, 3)
    state, events, _ = run(state, lambda s: phase_of(s, handle) is Phase.DECODE)
    (announced,) = [event.checkpoint for event in events if isinstance(event, CheckpointPublished)]
    state = identify_checkpoint(state, announced, b"text")
    assert (state.retention.used[handle.slot], uses(state)) == ((1,), [PUBLISHED, PUBLISHED, FREE])


def test_a_later_request_takes_the_row_of_an_earlier_resident_one() -> None:
    """Two rows: the second one's anchor takes the free row, its terminal state that of the first one's anchor."""
    state, first = asked(hybrid_state(2), 8, 40)
    state, _, _ = run(state, lambda s: phase_of(s, first) is Phase.DECODE)
    state, second = asked(state, 8, 4)
    state, events, _ = run(state, lambda s: phase_of(s, second) is Phase.FREE)
    mine = [event for event in events if event.handle == second]
    assert published(mine) == [(8, CheckpointRole.ANCHOR), (11, CheckpointRole.TERMINAL)]


def test_a_later_anchor_takes_the_only_row_of_an_earlier_resident_request() -> None:
    prompts_first = {"output_token_value": 0.0, "decode_age_price": 0.0, "delivery_fairness": 0.0}
    state, first = asked(advance_to(hybrid_state(1, fraction=0.0, **prompts_first), MS), 8, 40)
    state, _, _ = run(state, lambda s: phase_of(s, first) is Phase.DECODE)
    state, second = asked(state, 9, 2)
    state, events, _ = run(state, lambda s: phase_of(s, second) is Phase.DECODE)
    assert published(events) == [(9, CheckpointRole.ANCHOR)]
    assert phase_of(state, first) is Phase.DECODE


def test_a_later_capture_does_not_take_the_row_of_its_own_anchor() -> None:
    """One row: the prompt end and the terminal state give way to the anchor, which is kept."""
    state, _ = asked(hybrid_state(1), message_ends=(15,))
    state, events, _ = run(state)
    assert published(events) == [(15, CheckpointRole.ANCHOR)]
    assert skipped(state) == {"no_row": 1, "terminal_no_row": 1}
