"""Captures in the life of a request, sentence by sentence of the specification's checkpoint retention."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import (
    CompletionRecord,
    ExecutionTiming,
    FinishReason,
    GeneratedToken,
    LaneRole,
    RequestFinished,
    ScheduledPlan,
    State,
    advance_to,
    awaits_capture,
    cancel,
    complete,
    finish,
    preempt,
)
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.state_rows import RowUse
from helios_jax.scheduler.types import CheckpointPublished, CheckpointRole, ImageSpan
from tests.unit.checkpoint_toy import (
    SNAPSHOT,
    asked,
    captured,
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
from tests.unit.scheduler_toy import MS, records_of, small_catalog

FREE, ARMED, COPYING, GUARDED, PUBLISHED = (
    RowUse.FREE, RowUse.ARMED, RowUse.COPYING, RowUse.GUARDED, RowUse.PUBLISHED,
)  # fmt: skip
TTL = 30 * 10**9


def work(plans: list[ScheduledPlan]) -> list[tuple[str, int, int]]:
    return [(lane.role.value, lane.start, lane.length) for plan in plans for lane in plan.lanes]


def published(events: list[Any]) -> list[tuple[int, CheckpointRole]]:
    return [(event.endpoint, event.role) for event in events if isinstance(event, CheckpointPublished)]


def failing(record: CompletionRecord) -> CompletionRecord:
    return dataclasses.replace(record, valid=False, tokens=())


def test_the_anchor_is_captured_where_the_last_message_ends() -> None:
    state, _ = asked(hybrid_state(1, fraction=0.0), message_ends=(5, 12))
    state, events, plans = run(state)
    assert published(events) == [(12, CheckpointRole.ANCHOR)]
    assert ("snapshot", 12, 0) in work(plans)
    assert (captured(state), uses(state)) == ({"anchor": 1}, [PUBLISHED])
    assert state.retention.checkpoints.demand_ns.tolist() == [state.now_ns], "in demand until its request was gone"


def test_without_a_message_the_prompt_end_is_the_anchor() -> None:
    state, _ = asked(hybrid_state(1, fraction=0.0))
    state, events, plans = run(state)
    assert published(events) == [(20, CheckpointRole.ANCHOR)]
    steps = work(plans)
    assert steps[steps.index(("snapshot", 20, 0)) + 1] == ("decode", 20, 1), "the decoder waits for the copy"


def test_extras_are_captured_in_their_order_on_the_way() -> None:
    state, _ = asked(hybrid_state(5), message_ends=(5, 10, 15))
    state, events, _ = run(state, lambda s: s.requests.output_len[0] == 2)
    roles = CheckpointRole
    assert published(events) == [(5, roles.EXTRA), (10, roles.EXTRA), (15, roles.ANCHOR), (20, roles.PROMPT_END)]


def test_a_core_without_rows_or_snapshots_captures_nothing() -> None:
    for state in (hybrid_state(0), hybrid_state(3, catalog=small_catalog())):
        state, handle = asked(state, message_ends=(5, 10))
        state, events, plans = run(state)
        assert published(events) == []
        assert "snapshot" not in {role for role, _, _ in work(plans)}
        assert phase_of(state, handle) is Phase.FREE


def test_unknown_costs_disable_extras_and_keep_the_anchor() -> None:
    """The anchor's own copy then measures the snapshot: the next request has extras."""
    state, _ = asked(hybrid_state(4, snapshot_ms=0), message_ends=(5, 15))
    assert skipped(state) == {"unknown_cost": 2}
    state, events, _ = run(state)
    assert published(events)[0] == (15, CheckpointRole.ANCHOR)
    state, _ = asked(state, message_ends=(5, 15))
    assert [cut.endpoint for cut in state.retention.cuts[0]] == [5, 15, 20]


def test_extras_stay_within_the_allowance() -> None:
    """A prompt of 20 tokens takes 3 ms in 2 pieces of 5 and 15; at 5 percent no copy of 0.2 ms fits."""
    state, _ = asked(hybrid_state(4, fraction=0.05, snapshot_ms=0.2), message_ends=(5, 15))
    assert skipped(state) == {"allowance": 2}
    assert [cut.endpoint for cut in state.retention.cuts[0]] == [15]


@pytest.mark.parametrize(("system_end", "cost_ms"), [(0, 1.1), (5, 0.1)])
def test_a_cut_at_the_system_end_pays_its_copy_only(system_end: int, cost_ms: float) -> None:
    """Eight tokens are one program of 1 ms, in two pieces they are two; the prefill stops at the system end anyway."""
    state, handle = asked(hybrid_state(4), 12, message_ends=(5, 8), system_end=system_end)
    assert [cut.cost_ns for cut in state.retention.cuts[handle.slot]] == [cost_ms * MS, 0, 0.1 * MS]


def test_a_cut_at_a_window_pays_its_copy_only() -> None:
    """Images at 2 to 6 and 6 to 10 are two windows of 4 features, or one of 8 that the cut splits."""
    spans = (ImageSpan(2, 6), ImageSpan(6, 10))
    for features, cost_ms in ((4, 0.1), (8, 1.1)):
        state, handle = asked(hybrid_state(4, features=features), 16, message_ends=(6, 16), image_spans=spans)
        assert [cut.cost_ns for cut in state.retention.cuts[handle.slot]] == [cost_ms * MS, 0]


def test_an_extra_needs_a_row_beside_the_one_guarded_for_the_anchor() -> None:
    state = ready(asked(hybrid_state(1), message_ends=(5, 15))[0])
    assert uses(state) == [ARMED], "the anchor has the only row"
    assert skipped(state) == {"no_row": 1}
    state, events, _ = run(state)
    assert published(events)[0] == (15, CheckpointRole.ANCHOR)
    state = ready(asked(hybrid_state(2), message_ends=(5, 15))[0])
    assert sorted(uses(state)) == [GUARDED, ARMED]


def test_a_guard_protects_the_anchor_from_the_extras_of_others() -> None:
    state, _ = asked(hybrid_state(2), message_ends=(5, 15))
    state, other = asked(state, message_ends=(5, 15))
    assert uses(state) == [FREE, FREE], "not before they are ready to prefill"
    state = ready(state)
    assert skipped(state)["no_row"] == 1
    assert sorted(uses(state)) == [GUARDED, ARMED]
    state, events, _ = run(state)
    assert (15, CheckpointRole.ANCHOR) in published([event for event in events if event.handle != other])


def test_an_anchor_asks_again_until_it_is_passed() -> None:
    """The only row is armed for another one at first, which ends before the second reaches its anchor."""
    state, first = asked(hybrid_state(1, fraction=0.0))
    state, second = asked(state)
    state = ready(state)
    assert uses(state) == [ARMED]
    assert state.retention.rows.handle(1) == first
    assert state.retention.cuts[second.slot], "not given up"
    state = cancel(state, first)
    assert uses(state) == [FREE]
    state, events, _ = run(state)
    assert published(events) == [(20, CheckpointRole.ANCHOR)]


def test_a_passed_anchor_is_a_skip_and_no_failure() -> None:
    """Every row is in use: the request goes on without a copy."""
    state, handle = asked(occupied(hybrid_state(1, fraction=0.0)), 8, 4)
    state, events, _ = run(state)
    assert skipped(state) == {"no_row": 1}
    assert RequestFinished(handle, FinishReason.LENGTH) in events


def test_an_expired_cost_skips_the_copy_after_the_split() -> None:
    state, handle = asked(hybrid_state(4), message_ends=(5, 15))
    state, plan, fence = submit(state)
    while plan.lanes[0].role is not LaneRole.PROMPT:
        state, _ = finish_frame(state, plan, fence)
        state, plan, fence = submit(state)
    assert plan.lanes[0].length == 5, "the split is in flight"
    state = advance_to(state, state.now_ns + TTL)
    state, _ = finish_frame(state, plan, fence)
    assert phase_of(state, handle) is Phase.PROMPT
    assert skipped(state) == {"expired_cost": 1}
    assert sorted(uses(state))[:2] == [FREE, FREE]
    state, events, _ = run(state)
    assert published(events)[0] == (15, CheckpointRole.ANCHOR), "an anchor is copied at any cost"


def test_a_failed_copy_never_fails_the_request() -> None:
    state, handle = asked(hybrid_state(1, fraction=0.0), 8, 3)
    state, _, _ = run(state, lambda s: phase_of(s, handle) is Phase.SNAPSHOT)
    state, plan, fence = submit(state)
    assert plan.shape.kind is SNAPSHOT
    state, events = finish_frame(state, plan, fence, spoil=failing)
    assert events == ()
    assert (uses(state), skipped(state), len(state.retention.checkpoints)) == ([FREE], {"failed": 1}, 0)
    state, events, _ = run(state)
    assert RequestFinished(handle, FinishReason.LENGTH) in events


@pytest.mark.parametrize("end", [cancel, lambda s, h: finish(s, h, FinishReason.ERROR)])
def test_rows_stay_owned_through_gpu_completion_after_cancellation(end: Any) -> None:
    """Armed while its prefill runs, guarded beside it, in copy while its snapshot runs: none is free before."""
    state, handle = asked(hybrid_state(2), message_ends=(5, 15))
    state = ready(state)
    while phase_of(state, handle) is not Phase.SNAPSHOT:
        state, plan, fence = submit(state)
        ended = end(state, handle)
        assert sorted(uses(ended)) == [GUARDED, ARMED]
        ended, events = finish_frame(ended, plan, fence)
        assert (events, uses(ended)) == ((), [FREE, FREE])
        state, _ = finish_frame(state, plan, fence)
    assert uses(end(state, handle)) == [FREE, FREE], "nothing is submitted: free at once"
    state, plan, fence = submit(state)
    state = end(state, handle)
    assert sorted(uses(state)) == [GUARDED, COPYING]
    state, events = finish_frame(state, plan, fence)
    assert (events, uses(state), len(state.retention.checkpoints)) == ((), [FREE, FREE], 0)
    assert skipped(state)["ended"] == 3


def decoding(
    fraction: float = 0.05, snapshot_ms: float = 0.1, rows: int = 2, on_device: bool = False, **rest: Any
) -> tuple[State, Any]:
    """A request that has captured its prompt and produced one token, with 10 to go."""
    state = hybrid_state(rows, fraction=fraction, snapshot_ms=snapshot_ms, stops_on_device=on_device)
    state, handle = asked(state, 8, 11, **rest)
    state, _, _ = run(state, lambda s: phase_of(s, handle) is Phase.DECODE)
    return state, handle


def test_productive_decode_earns_its_fraction_of_measured_time() -> None:
    state, handle = decoding()
    state, _, _ = run(state, lambda s: s.requests.output_len[handle.slot] == 4, device_ms=1.5)
    assert state.retention.credit_ns[handle.slot] == pytest.approx(0.05 * 3 * 1.5 * MS)


def test_an_unmeasured_or_failed_decode_earns_nothing() -> None:
    state, handle = decoding()
    state, plan, fence = submit(state)
    state, _ = complete(state, fence, records_of(plan), ExecutionTiming((0,), 5 * MS))
    assert state.requests.output_len[handle.slot] == 2
    assert state.retention.credit_ns[handle.slot] == 0


@pytest.mark.parametrize(("fraction", "expected"), [(0.05, 1), (0.0101, 1), (0.0099, 0), (0.0, 0)])
def test_a_terminal_capture_is_earned(fraction: float, expected: int) -> None:
    """Ten decodes of 1 ms against a copy of 0.1 ms: one percent is just enough."""
    state, handle = decoding(fraction)
    state, events, plans = run(state, device_ms=1.0)
    assert captured(state).get("terminal", 0) == expected
    if expected:
        assert published(events) == [(18, CheckpointRole.TERMINAL)]
        assert work(plans)[-1] == ("snapshot", 18, 0)
        tokens = [i for i, event in enumerate(events) if isinstance(event, GeneratedToken | RequestFinished)]
        assert tokens[-1] < len(events) - 1, "the response is complete before the copy"
    assert phase_of(state, handle) is Phase.FREE


def test_publication_precedes_the_visible_completion() -> None:
    """From the last token on the completion is kept back, until the checkpoint is published."""
    state, handle = decoding()
    state, events, _ = run(state, lambda s: awaits_capture(s, handle))
    assert RequestFinished(handle, FinishReason.LENGTH) in events
    assert published(events) == []
    state, events, _ = run(state, lambda s: not awaits_capture(s, handle))
    assert published(events) == [(18, CheckpointRole.TERMINAL)]
    continuation, _ = asked(state, 20, 2, restore_from=2, restored_len=18)
    assert continuation.retention.checkpoints.pins.tolist()[-1] == 1


def test_a_stale_cost_is_still_a_measured_one() -> None:
    """Elapsed time alone never makes a measured program unknown: credit is compared with the last estimate."""
    state, handle = decoding()
    state, _, _ = run(state, lambda s: s.requests.output_len[handle.slot] == 8)
    state = finish(advance_to(state, state.now_ns + 2 * TTL), handle, FinishReason.STOP)
    assert phase_of(state, handle) is Phase.TERMINAL


def test_a_terminal_capture_needs_a_row() -> None:
    state, handle = decoding(rows=1)
    state, _, _ = run(occupied(state))
    assert skipped(state) == {"terminal_no_row": 1}
    assert (phase_of(state, handle), uses(state)) == (Phase.FREE, [RowUse.PRIVATE])


def test_a_terminal_endpoint_that_is_captured_already_is_not_copied_again() -> None:
    """A request preempted right after the copy of its prompt end has nothing new to keep."""
    state, handle = decoding(fraction=1.0)
    state = preempt(state, handle)
    assert phase_of(state, handle) is Phase.FREE
    assert captured(state) == {"anchor": 1}


def test_an_output_that_ends_at_the_prompt_end_uses_the_row_that_is_armed_for_it() -> None:
    state, handle = asked(hybrid_state(1, fraction=0.0), 8, 1)
    state, events, plans = run(state)
    assert [type(event) for event in events] == [GeneratedToken, RequestFinished, CheckpointPublished]
    assert published(events) == [(8, CheckpointRole.ANCHOR)]
    assert work(plans)[-1] == ("snapshot", 8, 0)
    assert (phase_of(state, handle), captured(state)) == (Phase.FREE, {"anchor": 1})


def test_preemption_tries_a_capture_and_its_age_starts_there() -> None:
    state, handle = decoding(fraction=1.0)
    state, _, _ = run(state, lambda s: s.requests.output_len[handle.slot] == 4)
    state = preempt(advance_to(state, state.now_ns + 5), handle)
    assert phase_of(state, handle) is Phase.TERMINAL
    assert state.requests.terminal_ns[handle.slot] == state.now_ns
    assert preempt(state, handle) is state
    assert cancel(state, handle) is state
    state, events, _ = run(state)
    assert published(events) == [(11, CheckpointRole.TERMINAL)]
    assert (phase_of(state, handle), state.counters.preempted) == (Phase.FREE, 1)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_errors_and_cancellations_never_capture(reason: FinishReason) -> None:
    state, handle = decoding(fraction=1.0)
    state, _, _ = run(state, lambda s: s.requests.output_len[handle.slot] == 4)
    assert phase_of(finish(state, handle, FinishReason.STOP), handle) is Phase.TERMINAL
    for ended in (cancel(state, handle), finish(state, handle, reason)):
        assert phase_of(ended, handle) is Phase.FREE
    state, plan, fence = submit(state)
    state, _ = finish_frame(state, plan, fence, spoil=failing)
    assert phase_of(state, handle) is Phase.FREE


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_behind_the_end_consumes_the_stop_token_and_the_state_is_captured_with_it(fails: bool) -> None:
    """With two frames in flight, the second consumes what the first one sampled; if it fails, nothing is exact."""
    state, handle = decoding(fraction=1.0, stop_token_ids=frozenset({5}))
    state, _, _ = run(state, lambda s: s.requests.output_len[handle.slot] == 4)
    state, first, fence = submit(state)
    state, second, _ = submit(state)
    assert {plan.lanes[0].role for plan in (first, second)} == {LaneRole.DECODE}
    state, events = finish_frame(state, first, fence, token=5)
    assert events[-1] == RequestFinished(handle, FinishReason.STOP, 5)
    assert phase_of(state, handle) is Phase.TERMINAL
    committed = int(state.requests.committed_len[handle.slot])
    state, _ = finish_frame(state, second, fence + 1, spoil=failing if fails else lambda record: record)
    assert phase_of(state, handle) is (Phase.FREE if fails else Phase.TERMINAL)
    assert skipped(state) == ({"terminal_overrun": 1} if fails else {})
    state, events, _ = run(state)
    assert published(events) == ([] if fails else [(committed + 1, CheckpointRole.TERMINAL)])
    assert skipped(state) == ({"terminal_overrun": 1} if fails else {})


def stopped(record: CompletionRecord) -> CompletionRecord:
    """What a device says of a row whose output has ended: nothing happened."""
    return dataclasses.replace(record, consumed=0, tokens=(), committed_len=record.committed_len - 1)


@pytest.mark.parametrize("report", [stopped, lambda record: record, lambda record: failing(stopped(record))])
def test_a_device_that_stops_by_itself_keeps_the_last_state(report: Any) -> None:
    """Its report decides: if the queued program moved the state on all the same, the capture is given up."""
    state, handle = decoding(fraction=1.0, stop_token_ids=frozenset({5}), on_device=True)
    state, _, _ = run(state, lambda s: s.requests.output_len[handle.slot] == 4)
    state, _, fence = submit(state)
    state, _, _ = submit(state)
    state, plan_events = finish_frame(state, state.frames[0].plan, fence, token=5)
    assert plan_events[-1] == RequestFinished(handle, FinishReason.STOP, 5)
    assert phase_of(state, handle) is Phase.TERMINAL
    state, events = finish_frame(state, state.frames[0].plan, fence + 1, spoil=report)
    stops = report is stopped
    assert events == ()
    assert phase_of(state, handle) is (Phase.TERMINAL if stops else Phase.FREE)
    assert skipped(state) == ({} if stops else {"terminal_overrun": 1})
    state, events, _ = run(state)
    assert published(events) == ([(12, CheckpointRole.TERMINAL)] if stops else [])


def test_a_stopped_row_reports_exactly_nothing() -> None:
    state, handle = decoding(fraction=1.0, stop_token_ids=frozenset({5}), on_device=True)
    state, _, fence = submit(state)
    state, _, _ = submit(state)
    state, _ = finish_frame(state, state.frames[0].plan, fence, token=5)
    plan = state.frames[0].plan
    for wrong in ({"consumed": 1}, {"committed_len": 7}):
        records = [dataclasses.replace(stopped(record), **wrong) for record in records_of(plan)]
        with pytest.raises(InvariantError, match="after its end"):
            complete(state, fence + 1, records, ExecutionTiming((MS,), MS))
    assert phase_of(state, handle) is Phase.TERMINAL


def test_preemption_keeps_a_copy_in_flight() -> None:
    state, handle = asked(hybrid_state(1, fraction=0.0), 8, 4)
    state, _, _ = run(state, lambda s: phase_of(s, handle) is Phase.SNAPSHOT)
    waiting = preempt(state, handle)
    assert phase_of(waiting, handle) is Phase.TERMINAL, "the state is exact and its row is armed"
    state, plan, fence = submit(state)
    state = preempt(state, handle)
    assert (phase_of(state, handle), uses(state)) == (Phase.TERMINAL, [COPYING])
    state, events = finish_frame(state, plan, fence)
    assert published(list(events)) == [(8, CheckpointRole.ANCHOR)]
    assert (phase_of(state, handle), uses(state)) == (Phase.FREE, [PUBLISHED])


def test_a_failed_terminal_copy_still_retires() -> None:
    state, handle = decoding(fraction=1.0)
    state, _, _ = run(state, lambda s: phase_of(s, handle) is Phase.TERMINAL)
    state, plan, fence = submit(state)
    assert awaits_capture(state, handle)
    state, events = finish_frame(state, plan, fence, spoil=failing)
    assert not awaits_capture(state, handle)
    assert (events, phase_of(state, handle), skipped(state)) == ((), Phase.FREE, {"terminal_failed": 1})
