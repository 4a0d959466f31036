"""The two-slot queue: what may be appended, drain, overrun, bounds of positions, fences under every ending."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from helios_jax.errors import InvariantError, StalePlanError
from helios_jax.scheduler import (
    Catalog,
    FinishReason,
    GeneratedToken,
    ProgramKind,
    ProgramShape,
    RequestFinished,
    RequestHandle,
    ScheduledPlan,
    State,
    advance_to,
    cancel,
    check_invariants,
    commit,
    complete,
    finish,
    new_state,
    offer_copy,
    plan_next,
    preempt,
)
from helios_jax.scheduler.catalog import ProposalSource
from helios_jax.scheduler.queue import closed, expected_end_ns, may_be_over, project
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.types import CompletionRecord, Constraint, ExecutionTiming, Lane, LaneRole
from tests.unit.scheduler_toy import (
    DECODE,
    MS,
    admitted,
    decoding_state,
    measured,
    records_of,
    request,
    small_catalog,
    small_limits,
    timing,
)

FREE, RETIRING = int(Phase.FREE), int(Phase.RETIRING)


def ready(num: int = 2, duration_ms: int = 2, **rest: int) -> tuple[State, list[RequestHandle]]:
    """Decoders on a measured catalogue."""
    state, handles = decoding_state(num, **rest)
    return measured(state, lambda _: duration_ms * MS), handles


def submit(state: State) -> tuple[State, ScheduledPlan]:
    plan = plan_next(state)
    assert plan is not None
    return commit(state, plan, state.last_fence + 1), plan


def finished(state: State, token: int = 7) -> tuple[State, tuple]:
    """Complete the oldest frame after its estimate."""
    frame = state.frames[0]
    state = advance_to(state, state.now_ns + frame.plan.estimated_duration_ns)
    return complete(state, frame.fence, records_of(frame.plan, token), timing(2))


def test_a_second_decode_queues_behind_the_first_and_starts_where_it_ends() -> None:
    state, handles = ready(2)
    state, first = submit(state)
    state, second = submit(state)
    check_invariants(state)
    assert [lane.handle for lane in second.lanes] == handles
    assert [lane.start for lane in second.lanes] == [lane.start + 1 for lane in first.lanes]
    assert "full" in closed(state)
    assert plan_next(state) is None
    with pytest.raises(StalePlanError, match="full"):
        commit(state, second, state.last_fence + 1)
    for expected in (1, 0):
        state, events = finished(state)
        assert len(events) == 2
        assert len(state.frames) == expected
        check_invariants(state)


def test_a_window_of_one_frame_queues_nothing() -> None:
    state, _ = ready(2)
    state, _ = submit(dataclasses.replace(state, limits=dataclasses.replace(state.limits, frames=1)))
    assert plan_next(state) is None


def test_a_queued_plan_is_obsolete_once_the_frame_before_it_completes() -> None:
    state, _ = ready(1)
    state, _ = submit(state)
    saved = plan_next(state)
    assert saved is not None
    after, _ = finished(state)
    with pytest.raises(StalePlanError, match="plan again"):
        commit(after, saved, after.last_fence + 1)


@pytest.mark.parametrize("kind", ["initialize", "prefill", "discovery", "stale"])
def test_nothing_queues_behind_a_frame_that_needs_feedback(kind: str) -> None:
    state, _ = ready(2)
    if kind == "initialize":
        state, _ = admitted(state, request(8))
        state = measured(state, lambda s: 50 * MS if s.kind is DECODE else MS // 100)
    elif kind == "prefill":
        state, _ = admitted(state, request(4))
        requests = state.requests.draft()
        requests.phase[2] = Phase.PROMPT
        state = measured(
            dataclasses.replace(state, requests=requests.sealed()), lambda s: 50 * MS if s.kind is DECODE else 9
        )
    elif kind == "discovery":
        state = measured(state, lambda s: 0 if s.kind is DECODE else MS)
    else:
        state = advance_to(state, state.now_ns + state.policy.estimate_ttl_ns + 1)
    state, plan = submit(state)
    assert plan.required_empty_queue
    assert str(plan.shape.kind) == {"initialize": "initialize", "prefill": "prefill"}.get(kind, "decode")
    assert "feedback" in closed(state)
    assert plan_next(state) is None


def constrained(state: State, slot: int, constraint: Constraint) -> State:
    requests, spec = state.requests.draft(), state.specs[slot]
    requests.constraints[slot] = int(constraint)
    assert spec is not None
    specs = list(state.specs)
    specs[slot] = dataclasses.replace(spec, constraints=constraint)
    return dataclasses.replace(state, requests=requests.sealed(), specs=tuple(specs))


@pytest.mark.parametrize("constraint", list(Constraint.__members__.values()))
def test_constraints_of_selected_lanes_need_feedback(constraint: Constraint) -> None:
    state, _ = ready(2)
    state, _ = submit(constrained(state, 0, constraint))
    alone = bool(constraint & (Constraint.GRAMMAR | Constraint.HOST_STOPS | Constraint.HOST_FED | Constraint.HISTORY))
    assert bool(closed(state)) == alone
    assert (plan_next(state) is None) == alone


def test_only_the_selected_lanes_count() -> None:
    """One-row programs: the free request queues behind itself until the constrained one is worth more."""
    state = new_state(small_catalog(decode=(1,)), small_limits())
    state, _ = decoding_on(state, 2)
    state = measured(constrained(state, 1, Constraint.GRAMMAR), lambda _: 2 * MS)
    cases = [favoured(state, slot=0), favoured(state, slot=1)]
    plans = [plan_next(commit(case, free_plan(case), case.last_fence + 1)) for case in cases]
    assert [plan and [lane.handle.slot for lane in plan.lanes] for plan in plans] == [[0], None]


def decoding_on(state: State, num: int, max_tokens: int = 40) -> tuple[State, list[RequestHandle]]:
    state, handles = admitted(state, *[request(5, max_tokens)] * num)
    requests = state.requests.draft()
    for slot, _ in handles:
        requests.phase[slot], requests.consumed_len[slot], requests.committed_len[slot] = Phase.DECODE, 5, 5
        requests.written_len[slot], requests.output_len[slot] = 5, 1
        requests.token_r[slot], requests.delivery_r[slot] = 5.0, 5.0
    return dataclasses.replace(state, requests=requests.sealed()), handles


def favoured(state: State, slot: int) -> State:
    requests = state.requests.draft()
    requests.token_r[slot] = 1e5
    return dataclasses.replace(state, requests=requests.sealed())


def free_plan(state: State) -> ScheduledPlan:
    """A decode plan for slot 0, whoever would win."""
    shape = state.catalog.of_kind(DECODE)[0]
    lane = Lane(RequestHandle(0, 1), LaneRole.DECODE, int(state.requests.committed_len[0]), 1, True)
    winner = plan_next(state)
    assert winner is not None
    return dataclasses.replace(
        winner, shape=shape, lanes=(lane,), epochs=(int(state.requests.epoch[0]),), required_empty_queue=False
    )


def test_a_winner_that_needs_an_empty_window_makes_it_drain() -> None:
    """A newcomer's pair is worth more than a further decode: nothing is submitted, then the pair is."""
    state, _ = ready(2)
    state, _ = submit(state)
    assert plan_next(state) is not None
    state, _ = admitted(state, request(8))
    state = measured(state, lambda s: 2 * MS if s.kind is DECODE else MS // 100)
    assert not closed(state)
    assert plan_next(state) is None
    state, _ = finished(state)
    plan = plan_next(state)
    assert plan is not None
    assert plan.shape.kind is ProgramKind.INITIALIZE


def test_overrun_suspends_queueing_until_a_completion() -> None:
    state, _ = ready(2, duration_ms=3)
    state, _ = submit(state)
    end_ns = expected_end_ns(state)
    assert end_ns == state.now_ns + 3 * MS
    saved = plan_next(advance_to(state, end_ns))
    assert saved is not None
    late = advance_to(state, end_ns + 1)
    assert "overrun" in closed(late)
    assert plan_next(late) is None
    with pytest.raises(StalePlanError, match="overrun"):
        commit(late, saved, late.last_fence + 1)
    done, _ = complete(late, late.frames[0].fence, records_of(late.frames[0].plan), timing(3))
    assert plan_next(done) is not None  # the graph itself stays eligible


def test_the_end_of_a_queued_frame_counts_from_the_completion_before_it() -> None:
    state, _ = ready(2, duration_ms=3)
    start_ns = state.now_ns
    state, _ = submit(state)
    state = advance_to(state, start_ns + MS)
    state, _ = submit(state)
    assert expected_end_ns(state) == start_ns + 6 * MS
    state = advance_to(state, start_ns + 8 * MS)  # the first ran five milliseconds late
    state, _ = complete(state, state.frames[0].fence, records_of(state.frames[0].plan), timing(3, 8))
    assert expected_end_ns(state) == start_ns + 11 * MS
    assert not closed(state)


def test_a_request_that_may_finish_is_not_selected_again() -> None:
    state, _ = ready(2, max_tokens=20)
    requests = state.requests.draft()
    requests.output_len[0] = 19
    requests.committed_len[0] = requests.written_len[0] = 5 + 18
    state = dataclasses.replace(state, requests=requests.sealed())
    state, first = submit(state)
    state, second = submit(state)
    assert [len(first.lanes), len(second.lanes)] == [2, 1]
    assert second.lanes[0].handle.slot == 1
    state, events = finished(state)
    assert RequestFinished(RequestHandle(0, 1), FinishReason.LENGTH) in events
    assert state.requests.phase[0] == FREE  # no later frame named it


def test_a_request_that_stops_in_the_first_frame_is_dropped_from_the_second() -> None:
    state, handles = decoding_state(2)
    specs = tuple(spec and dataclasses.replace(spec, stop_token_ids=frozenset({5})) for spec in state.specs)
    state = measured(dataclasses.replace(state, specs=specs), lambda _: 2 * MS)
    state, _ = submit(state)
    state, plan = submit(state)
    pages = state.pool.num_free
    state, events = finished(state, token=5)
    assert [event.reason for event in events if isinstance(event, RequestFinished)] == [FinishReason.STOP] * 2
    assert state.requests.phase[:2].tolist() == [RETIRING] * 2
    assert state.pool.num_free == pages
    check_invariants(state)
    state, events = finished(state, token=3)
    assert events == ()
    assert state.requests.phase[:2].tolist() == [FREE] * 2
    assert state.pool.num_free == state.limits.pages
    assert {lane.handle for lane in plan.lanes} == set(handles)


ENDINGS: list[Callable[[State, RequestHandle], State]] = [
    cancel, preempt, lambda state, handle: finish(state, handle, FinishReason.STOP),
]  # fmt: skip


@pytest.mark.parametrize("end", ENDINGS, ids=["cancel", "preempt", "finish"])
@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_fences_pin_pages_and_slot_through_the_last_one(end: Callable, when: int) -> None:
    """The request ends before, between and after the two submissions, and between the two completions."""
    state, (victim, other) = ready(2)
    for step in range(2):
        if when == step:
            state = end(state, victim)
        state, plan = submit(state)
        assert (victim in {lane.handle for lane in plan.lanes}) == (when > step)
    if when == 2:
        state = end(state, victim)
    named = [sum(lane.handle == victim for lane in frame.plan.lanes) for frame in state.frames]
    assert named == [when > 0, when > 1]
    tokens = 0
    for step in range(2):
        owned = any(named[step:])
        assert (state.requests.phase[victim.slot] != FREE) == owned
        assert (len(state.pool.tables[victim.slot]) > 0) == owned
        state, events = finished(state)
        check_invariants(state)
        tokens += sum(isinstance(event, GeneratedToken) and event.handle == victim for event in events)
        if when == 3 and step == 0:
            state = end(state, victim)
    assert state.requests.phase[victim.slot] == FREE
    assert tokens == (when == 3)  # nothing of an ended request is delivered
    assert state.requests.phase[other.slot] == Phase.DECODE


def test_a_new_occupant_is_not_reached_by_an_old_frame() -> None:
    state, (victim, _) = ready(2)
    state, _ = submit(state)
    state = cancel(state, victim)
    state, (fresh,) = admitted(state, request(5))
    assert fresh.slot != victim.slot  # the slot is pinned
    state, _ = finished(state)
    state, (later,) = admitted(state, request(5))
    assert later == RequestHandle(victim.slot, 2)
    check_invariants(state)


def test_frames_complete_in_order() -> None:
    state, _ = ready(2)
    state, _ = submit(state)
    state, plan = submit(state)
    with pytest.raises(InvariantError, match="before fence"):
        complete(state, state.last_fence, records_of(plan), timing(2))


# ---- speculative rounds

ROUND = ProgramShape(ProgramKind.SPECULATIVE, 2, 4, 3, 6, proposal_source=ProposalSource.LEARNED)


def speculating(max_tokens: int = 40) -> State:
    """Two decoders and a catalogue with a round of four rows a lane, six in all."""
    catalog = Catalog((*small_catalog(), ROUND))
    limits = dataclasses.replace(small_limits(max_context=128), draft_extent=3)
    state, _ = decoding_on(new_state(catalog, limits), 2, max_tokens)
    return measured(state, lambda _: 2 * MS)


def round_plan(state: State, ceilings: tuple[int, int], expected: tuple[float, ...] = ()) -> ScheduledPlan:
    """A round for both requests at the projected positions, whoever would win."""
    requests = project(state).requests
    lanes = tuple(
        Lane(RequestHandle(slot, 1), LaneRole.DECODE, int(requests.committed_len[slot]), length, True)
        for slot, length in enumerate(ceilings)
    )
    template = plan_next(dataclasses.replace(state, frames=()))
    assert template is not None
    return dataclasses.replace(
        template, shape=ROUND, lanes=lanes, epochs=tuple(state.requests.epoch[:2].tolist()), prompt_row=-1,
        estimated_duration_ns=2 * MS, required_empty_queue=False, expected_tokens=expected,
    )  # fmt: skip


def round_records(state: State, plan: ScheduledPlan, counts: tuple[int, ...]) -> tuple[CompletionRecord, ...]:
    return tuple(
        CompletionRecord(
            lane.handle, n, tuple(range(10, 10 + n)), int(state.requests.committed_len[lane.handle.slot]) + n,
            offered=lane.length - 1, accepted=n - 1,
        )
        for lane, n in zip(plan.lanes, counts, strict=True)
    )  # fmt: skip


def test_a_round_is_bounded_by_its_ceiling_and_its_pages_are_reserved() -> None:
    state = speculating()
    start = state.requests.committed_len[:2].tolist()
    state = commit(state, round_plan(state, (4, 2)), state.last_fence + 1)
    projected = project(state)
    assert (projected.requests.committed_len[:2] - state.requests.committed_len[:2]).tolist() == [4, 2]
    assert (projected.requests.output_len[:2] - state.requests.output_len[:2]).tolist() == [4, 2]
    queued = round_plan(state, (3, 3))
    state = commit(state, queued, state.last_fence + 1)
    check_invariants(state)
    extent, size = state.limits.draft_extent, state.limits.page_size
    ends = [start[0] + 4 + 3 + extent, start[1] + 2 + 3 + extent]
    assert state.pool.held[:2].tolist() == [-(-end // size) for end in ends]
    first, second = state.frames
    state, events = complete(state, first.fence, round_records(state, first.plan, (2, 1)), timing(2))
    assert sum(isinstance(event, GeneratedToken) for event in events) == 3
    check_invariants(state)
    # Useful service is a difference against the counters of this moment, not of the plan.
    assert [lane.start for lane in second.plan.lanes] != state.requests.committed_len[:2].tolist()
    state, events = complete(state, second.fence, round_records(state, second.plan, (3, 2)), timing(2))
    assert sum(isinstance(event, GeneratedToken) for event in events) == 5
    assert state.requests.committed_len[:2].tolist() == [start[0] + 5, start[1] + 3]
    check_invariants(state)


def test_a_request_that_may_be_over_is_worth_draining_for() -> None:
    """Three rows left and a round of three: whether there is a next step is known at completion only."""
    state = speculating(max_tokens=6)
    assert state.requests.output_len[:2].tolist() == [1, 1]
    requests = state.requests.draft()
    requests.output_len[0], requests.committed_len[0], requests.written_len[0] = 3, 7, 7
    state = dataclasses.replace(state, requests=requests.sealed())
    busy = commit(state, round_plan(state, (3, 2)), state.last_fence + 1)
    assert may_be_over(busy)[:2].tolist() == [True, False]
    assert (project(busy).requests.max_tokens - project(busy).requests.output_len)[0] == 1
    assert plan_next(busy) is None
    both = round_plan(busy, (1, 1))
    with pytest.raises(StalePlanError, match="feedback"):
        commit(busy, both, busy.last_fence + 1)
    other = dataclasses.replace(both, lanes=both.lanes[1:], epochs=both.epochs[1:])
    check_invariants(commit(busy, other, busy.last_fence + 1))
    certain = commit(state, round_plan(state, (2, 2)), state.last_fence + 1)
    assert not may_be_over(certain).any()
    assert plan_next(certain) is not None


def test_expected_service_moves_projected_prices_and_ages() -> None:
    """More expected tokens make a lower projected token price; everybody else ages."""
    state = speculating()
    prices = []
    for expected in ((1.0, 1.0), (3.5, 1.0)):
        busy = commit(state, round_plan(state, (4, 2), expected), state.last_fence + 1)
        projected = project(busy)
        assert busy.frames[0].expected_tokens[:2].tolist() == list(expected)
        assert (projected.requests.visible_ns[:2] == expected_end_ns(busy)).all()
        assert projected.now_ns == expected_end_ns(busy) == busy.now_ns + 2 * MS
        prices.append(projected.requests.token_r[:2].tolist())
    assert prices[1][0] < prices[0][0]
    assert prices[1][1] == prices[0][1]
    assert np.array_equal(busy.requests.token_r, state.requests.token_r, equal_nan=True)  # projection is a copy


def copying(offers: int) -> State:
    """Two decoders that may copy, with measured acceptance: a round of copies is worth more than plain decode."""
    catalog = Catalog((*small_catalog(), dataclasses.replace(ROUND, proposal_source=ProposalSource.COPY)))
    state, _ = decoding_on(new_state(catalog, small_limits(max_context=128)), 2, 40)
    state = measured(state, lambda _: 2 * MS)
    for slot in range(2):
        state = offer_copy(state, RequestHandle(slot, 1), offers)
    return state


def test_a_round_of_copies_runs_alone_and_plain_decode_does_not_displace_it() -> None:
    """What the host supplies depends on the output so far: it must have seen all of it."""
    state = copying(3)
    copies = plan_next(state)
    assert copies is not None
    assert copies.shape.proposal_source is ProposalSource.COPY
    assert copies.required_empty_queue
    busy, _ = submit(state)
    assert "needs completion feedback" in closed(busy)

    plain = copying(0)
    busy, first = submit(plain)
    assert first.shape.kind is DECODE
    assert plan_next(busy) is not None
    for slot in range(2):  # a copy was found meanwhile: the window drains for it
        busy = offer_copy(busy, RequestHandle(slot, 1), 3)
    assert project(busy).requests.proposals[:2].tolist() == [3, 3]
    assert plan_next(busy) is None
    saved = dataclasses.replace(copies, lanes=tuple(lane._replace(start=lane.start + 1) for lane in copies.lanes),
                                epochs=tuple(busy.requests.epoch[:2].tolist()))  # fmt: skip
    with pytest.raises(StalePlanError, match="needs completion feedback"):
        commit(busy, saved, busy.last_fence + 1)
    after, _ = finished(busy)
    assert after.requests.proposals[:2].tolist() == [0, 0]  # the host looks again, and offers again
    assert plan_next(after) is not None


def test_an_unmeasured_queued_timing_charges_no_service() -> None:
    state, _ = ready(2)
    state, _ = submit(state)
    state, _ = submit(state)
    before = state.requests.token_r.copy()
    bad = ExecutionTiming((0,), 5 * MS, queued=True)
    state, _ = complete(state, state.frames[0].fence, records_of(state.frames[0].plan), bad)
    assert np.array_equal(state.requests.token_r, before, equal_nan=True)
    assert state.interval is not None
    assert state.interval.duration_ms == 0.0
