"""Admission, commit, cancellation, publication: ownership and refusals."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from helios_jax.errors import CapacityError, ConfigError, InvariantError, RequestError, StalePlanError
from helios_jax.scheduler import (
    Catalog,
    ExecutionTiming,
    FinishReason,
    GeneratedToken,
    LaneRole,
    RequestFinished,
    RequestHandle,
    Scheduler,
    admit,
    advance_to,
    can_admit,
    cancel,
    check_invariants,
    commit,
    complete,
    finish,
    new_state,
    plan_next,
    preempt,
    published_output,
    snapshot_counters,
    state_digest,
)
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_toy import (
    INITIALIZE,
    MS,
    PREFILL,
    admitted,
    decoding_state,
    measured,
    records_of,
    request,
    small_catalog,
    small_limits,
    small_state,
    step,
    timing,
)


def test_life_of_one_request() -> None:
    state, (handle,) = admitted(small_state(), request(prompt_len=10, max_tokens=3))
    kinds, tokens, ends = [], [], []
    for token in (1, 2, 3, 4, 5, 6):
        state, plan, events = step(state, token)
        check_invariants(state)
        kinds.append(str(plan.shape.kind))
        tokens += [(e.token, e.index) for e in events if isinstance(e, GeneratedToken)]
        ends += [e for e in events if isinstance(e, RequestFinished)]
        if ends:
            break
    assert kinds == ["initialize", "prefill", "prefill", "decode", "decode"]
    assert tokens == [(3, 0), (4, 1), (5, 2)]
    assert ends == [RequestFinished(handle, FinishReason.LENGTH)]
    assert state.pool.num_free == state.limits.pages
    assert plan_next(state) is None


def test_stop_token_ends_and_is_reported() -> None:
    state, (handle,) = admitted(small_state(), request(max_tokens=9, stop_token_ids=frozenset({42})))
    events: tuple = ()
    while not events:
        state, _, events = step(state, token=42)
    assert events == (GeneratedToken(handle, 42, 0), RequestFinished(handle, FinishReason.STOP, 42))


def test_scored_prompt_without_output_runs_scored_programs_only() -> None:
    state, _ = admitted(small_state(), request(prompt_len=12, max_tokens=0, scored=True), request(prompt_len=3))
    kinds, finished = set(), []
    for _ in range(20):
        if plan_next(state) is None:
            break
        state, plan, events = step(state)
        check_invariants(state)
        scored = {bool(spec.scored) for lane in plan.lanes if (spec := state.specs[lane.handle.slot]) is not None}
        if plan.lanes[0].role is LaneRole.PROMPT:
            assert len(scored) <= 1
            kinds.add(str(plan.shape.kind))
        finished += [e.reason for e in events if isinstance(e, RequestFinished)]
    assert kinds == {"prefill", "scored_prefill"}
    assert finished.count(FinishReason.LENGTH) == 2


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        (request(60, 5), ("60", "5", "65", "64")),
        (request(0, 5), ("at least one token",)),
        (request(5, 0), ("max_tokens", "0")),
        (request(5, -1), ("max_tokens", "-1")),
        (request(5, 5, output_len=5), ("output_len", "5")),
    ],
)
def test_impossible_requests_are_refused_with_numbers(spec: object, numbers: tuple[str, ...]) -> None:
    state = small_state()
    for function in (lambda: can_admit(state, spec), lambda: admit(state, spec, 0)):  # type: ignore[arg-type]
        with pytest.raises(RequestError) as error:
            function()
        assert all(number in str(error.value) for number in numbers)


def test_request_larger_than_the_cache_is_refused_with_numbers() -> None:
    with pytest.raises(RequestError, match="need 9 pages of 4 tokens, the cache has 8"):
        admit(small_state(pages=8), request(30, 5), 0)


def test_scored_request_needs_scored_programs() -> None:
    state = new_state(small_catalog(scored=()), small_limits())
    with pytest.raises(RequestError, match="no scored prefill"):
        admit(state, request(5, 0, scored=True), 0)


def test_full_slots_and_full_pages_wait() -> None:
    state, _ = admitted(small_state(slots=2), request(), request())
    assert not can_admit(state, request())
    with pytest.raises(CapacityError, match="0 slots"):
        admit(state, request(), 0)
    state, _ = admitted(small_state(pages=5), request(8, 4))  # 3 of 5 pages
    assert can_admit(state, request(4, 4))
    assert not can_admit(state, request(8, 4))
    with pytest.raises(CapacityError, match=r"3 pages.* 2 pages are free"):
        admit(state, request(8, 4), 0)


def test_context_and_cache_filled_exactly() -> None:
    state, _ = admitted(small_state(pages=16, slots=1), request(61, 3))
    while plan_next(state) is not None:
        state, _, _ = step(state)
        check_invariants(state)
    assert state.counters.finished[1] == 1


def test_new_state_refuses_impossible_limits() -> None:
    for bad in ({"slots": 0}, {"slots": 65}, {"pages": 0}, {"page_size": 0}, {"max_context": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            small_state(**bad)
    with pytest.raises(ConfigError, match="decode"):
        new_state(Catalog(tuple(s for s in small_catalog() if str(s.kind) != "decode")), small_limits())


def test_a_frame_that_needs_feedback_is_alone() -> None:
    state, _ = decoding_state(2)
    plan = plan_next(state)
    assert plan is not None
    busy = commit(state, plan, state.last_fence + 1)
    assert plan_next(busy) is None
    with pytest.raises(StalePlanError, match="outstanding"):
        commit(busy, plan, busy.last_fence + 1)


def test_fences_grow() -> None:
    state, _ = decoding_state(1)
    plan = plan_next(state)
    assert plan is not None
    with pytest.raises(InvariantError, match="does not follow"):
        commit(state, plan, state.last_fence)


def test_a_plan_outlived_by_its_requests_is_refused() -> None:
    state, handles = decoding_state(2)
    plan = plan_next(state)
    assert plan is not None
    digest = state_digest(state)
    for later in (cancel(state, handles[0]), preempt(state, handles[1]), step(state)[0]):
        with pytest.raises(StalePlanError, match="plan again"):
            commit(later, plan, later.last_fence + 1)
    reused, _ = admitted(cancel(state, handles[0]), request())
    with pytest.raises(StalePlanError):
        commit(reused, plan, reused.last_fence + 1)
    assert state_digest(state) == digest


def test_a_newcomer_does_not_invalidate_a_plan() -> None:
    state, _ = decoding_state(2)
    plan = plan_next(state)
    assert plan is not None
    later, _ = admitted(state, request())
    check_invariants(commit(later, plan, later.last_fence + 1))


def test_commit_checks_freshness_again() -> None:
    """A decode planned while fresh may not queue once its estimate is stale."""
    state, _ = decoding_state(2)
    state = measured(state, lambda _: 2 * MS)
    state = advance_to(state, state.now_ns + state.policy.estimate_ttl_ns)  # fresh for the last time
    plan = plan_next(state)
    assert plan is not None
    assert not plan.required_empty_queue
    other = dataclasses.replace(plan, lanes=plan.lanes[:1], epochs=plan.epochs[:1])
    rest = dataclasses.replace(plan, lanes=plan.lanes[1:], epochs=plan.epochs[1:])
    busy = commit(state, other, state.last_fence + 1)
    assert len(commit(busy, rest, busy.last_fence + 1).frames) == 2
    stale = advance_to(busy, busy.now_ns + 1)
    with pytest.raises(StalePlanError, match="completion feedback"):
        commit(stale, rest, stale.last_fence + 1)


def test_cancel_in_flight_keeps_pages_and_slot_until_the_fence() -> None:
    state, handles = decoding_state(2)
    plan = plan_next(state)
    assert plan is not None
    fence = state.last_fence + 1
    state = cancel(commit(state, plan, fence), handles[0])
    check_invariants(state)
    slot = handles[0].slot
    assert state.requests.phase[slot] == Phase.RETIRING
    assert len(state.pool.tables[slot]) > 0
    state, events = complete(state, fence, records_of(plan), timing())
    assert {event.handle for event in events} == {handles[1]}
    assert state.requests.phase[slot] == Phase.FREE
    assert len(state.pool.tables[slot]) == 0
    check_invariants(state)
    assert cancel(state, handles[0]) is state  # ended already


@pytest.mark.parametrize("moment", ["queued", "initialised", "prompt", "decoding"])
def test_cancel_between_frames_frees_at_once(moment: str) -> None:
    state, (handle,) = admitted(small_state(), request(prompt_len=10))
    for _ in range(["queued", "initialised", "prompt", "decoding"].index(moment)):
        state, _, _ = step(state)
    state = cancel(state, handle)
    check_invariants(state)
    assert state.pool.num_free == state.limits.pages
    assert plan_next(state) is None
    assert snapshot_counters(state)["requests_cancelled"] == 1


def test_every_ending_is_counted_once() -> None:
    state, handles = decoding_state(4)
    state = finish(state, handles[0], FinishReason.STOP)
    state = cancel(cancel(finish(state, handles[0], FinishReason.ABORT), handles[1]), handles[1])
    state = preempt(preempt(state, handles[2]), handles[1])
    check_invariants(state)
    counters = snapshot_counters(state)
    assert counters["requests_finished"] == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    assert (counters["requests_cancelled"], counters["requests_preempted"], counters["slots_used"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "handle", [RequestHandle(0, 99), RequestHandle(9, 1), RequestHandle(-1, 1), RequestHandle(3, 0)]
)
def test_a_handle_never_given_out_is_our_bug(handle: RequestHandle) -> None:
    state, _ = decoding_state(1)
    with pytest.raises(InvariantError, match="never given out"):
        cancel(state, handle)


def test_publication_sets_history_and_age_once() -> None:
    state, (handle, _) = decoding_state(2)
    slot = handle.slot
    assert np.isnan(state.requests.delivery_r[slot])
    state, _, _ = step(state, device_ms=4.0)
    fence = state.last_fence
    state = published_output(advance_to(state, state.now_ns + 5), handle, fence)
    assert state.requests.delivery_r[slot] == pytest.approx(4.0)
    assert state.requests.visible_ns[slot] == state.now_ns
    check_invariants(state)
    later = advance_to(state, state.now_ns + 7)
    assert published_output(later, handle, fence) is later  # the rest of the burst


def test_second_publication_is_computed_from_the_price_before_the_interval() -> None:
    state, (handle,) = decoding_state(1)
    state, _, _ = step(state, device_ms=4.0)
    state = published_output(state, handle, state.last_fence)
    before = state.requests.delivery_r[handle.slot]
    busy_plan = plan_next(state)
    assert busy_plan is not None
    state = commit(state, busy_plan, state.last_fence + 1)
    n = state.frames[0].delivery_n[handle.slot]
    assert n > 0
    state, _ = complete(state, state.last_fence, records_of(busy_plan), timing(6.0))
    starved = state.requests.delivery_r[handle.slot]
    assert starved == pytest.approx(before + 6.0 / (n * 100.0))
    a = 1 / (n * 100.0)
    state = published_output(state, handle, state.last_fence)
    expected = before * np.exp(-a) + 6.0 * -np.expm1(-a)
    assert state.requests.delivery_r[handle.slot] == pytest.approx(expected)


def test_publication_out_of_turn_is_our_bug() -> None:
    state, handles = decoding_state(2)
    state, _, _ = step(state)
    old = state.last_fence
    state, _, _ = step(state)
    with pytest.raises(InvariantError, match="after the completion"):
        published_output(state, handles[0], old)
    with pytest.raises(InvariantError, match="served no tokens"):
        published_output(state, RequestHandle(3, 1), state.last_fence)


def test_a_cancelled_handle_never_charges_the_next_occupant() -> None:
    """Cancelled after its completion, the slot reused at once: a late publication changes nothing."""
    state, handles = decoding_state(2)
    state, _, _ = step(state)
    fence = state.last_fence
    state, (newcomer,) = admitted(cancel(state, handles[0]), request())
    assert newcomer.slot == handles[0].slot
    assert published_output(state, handles[0], fence) is state


def test_a_request_admitted_in_flight_is_outside_the_interval() -> None:
    state, _ = decoding_state(2)
    state = measured(state, lambda _: 2 * MS)
    plan = plan_next(state)
    assert plan is not None
    state = commit(state, plan, state.last_fence + 1)
    state, (newcomer,) = admitted(state, request())
    state, _ = complete(state, state.last_fence, records_of(plan), timing(50.0))
    assert np.isnan(state.requests.token_r[newcomer.slot])
    state, _, _ = step(state)  # now it takes part: N = 3 participants, q = N at the start
    assert state.requests.token_r[newcomer.slot] > 0


def test_service_is_charged_to_all_participants() -> None:
    """Served: one token in D ms. Unserved: zero over the same D. Wall time counts when isolated."""
    state, _ = admitted(small_state(slots=4), request(prompt_len=5, max_tokens=9), request(prompt_len=4, max_tokens=9))
    while plan_next(state) is not None and (state.requests.phase[:2] != Phase.DECODE).any():
        state, _, _ = step(state)
    state = measured(state, lambda _: 2 * MS)
    plan = plan_next(state)
    assert plan is not None
    state = commit(state, plan, state.last_fence + 1)
    history = state.requests.token_r
    before = np.where(np.isnan(history), state.frames[0].first_token_r, history)
    n, members = state.frames[0].token_n, state.frames[0].participants > 0
    state, _ = complete(state, state.last_fence, records_of(plan), timing(device_ms=3.0, wall_ms=5.0))
    served = np.isin(np.arange(4), [lane.handle.slot for lane in plan.lanes])
    for slot in np.flatnonzero(members):
        a = 1 / (n[slot] * 100.0)
        expected = before[slot] * np.exp(-a) + 5.0 * -np.expm1(-a) if served[slot] else before[slot] + 5.0 * a
        assert state.requests.token_r[slot] == pytest.approx(expected)


def test_first_token_price_is_participants_over_normaliser() -> None:
    state, handles = admitted(small_state(), request(8, 4), request(4, 4))
    state = measured(state, lambda shape: 4 * MS if shape.kind is PREFILL else MS)
    plan = plan_next(state)
    assert plan is not None
    assert plan.shape.kind is INITIALIZE
    frame = commit(state, plan, 1).frames[0]
    # Usable tokens 8 and 4 in 4 ms, two participants: n = (8/4)/2 and (4/4)/2; r = N / n.
    np.testing.assert_allclose(frame.token_n[:2], [1.0, 0.5])
    np.testing.assert_allclose(frame.first_token_r[:2], [2.0, 4.0])
    after, _ = complete(commit(state, plan, 1), 1, records_of(plan), timing(10.0))
    np.testing.assert_allclose(after.requests.token_r[:2], [2.0 + 10 / 100.0, 4.0 + 10 / 50.0])
    assert handles[0].generation == 1


def test_time_never_runs_backwards() -> None:
    state = advance_to(small_state(), 10)
    assert advance_to(state, 10).now_ns == 10
    with pytest.raises(InvariantError, match="backwards"):
        advance_to(state, 9)


def test_states_are_values() -> None:
    state, _ = decoding_state(3)
    copy = pickle.loads(pickle.dumps(state))
    assert copy == state
    assert hash(copy) == hash(state)
    assert plan_next(copy) == plan_next(state)
    assert step(copy)[0] == step(state)[0]
    assert step(state)[0] != state


def test_what_is_kept_beside_the_fields_is_not_pickled() -> None:
    """Rates and projections are computed once for a state; a copy computes its own, and saves no room for them."""
    state, _ = decoding_state(3)
    fields, lean = {field.name for field in dataclasses.fields(state)}, pickle.dumps(state)
    plan = plan_next(state)
    assert set(vars(state)) > fields
    assert pickle.dumps(state) == lean
    copy = pickle.loads(lean)
    assert set(vars(copy)) == fields
    assert plan_next(copy) == plan


def test_scheduler_holds_the_state() -> None:
    scheduler = Scheduler(small_catalog(), small_limits())
    assert scheduler.can_admit(request())
    handle = scheduler.admit(request(prompt_len=9), 0)
    for fence in range(1, 4):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, fence)
        events = scheduler.complete(fence, records_of(plan), timing())
    scheduler.published_output(handle, 3)
    assert [type(event) for event in events] == [GeneratedToken]
    assert scheduler.page_table(handle).tolist() == [1, 2, 3]
    scheduler.cancel(handle)
    scheduler.finish(handle, FinishReason.STOP)
    scheduler.preempt(handle)
    scheduler.advance_to(9)
    counters = scheduler.snapshot_counters()
    executions = counters["flare_scheduler_executions_total"]
    nanoseconds = counters["flare_scheduler_execution_nanoseconds_total"]
    assert executions == {"ordinary": 0, "discovery": 3, "timing_refresh": 0, "acceptance_learning": 0}
    assert nanoseconds == {"ordinary": 0, "discovery": 6 * MS, "timing_refresh": 0, "acceptance_learning": 0}
    assert counters["used_tokens_by_kind"] == {"decode": 0, "initialize": 0, "prefill": 9, "scored_prefill": 0}
    assert counters["padded_tokens_by_kind"] == {"decode": 0, "initialize": 0, "prefill": 3, "scored_prefill": 0}
    assert (counters["pages_free"], counters["slots_used"]) == (64, 0)


def test_unmeasured_frames_count_but_teach_nothing() -> None:
    state, _ = admitted(small_state(), request())
    plan = plan_next(state)
    assert plan is not None
    state = commit(state, plan, 1)
    state, _ = complete(state, 1, records_of(plan), ExecutionTiming((0, -1), 9 * MS))
    assert not state.costs.estimate_ns.any()
    assert np.isnan(state.requests.token_r).all()
    assert (state.counters.unmeasured_frames, sum(state.counters.execution_ns)) == (1, 9 * MS)


def test_a_bystander_cancelled_in_flight_leaves_a_blank_slot() -> None:
    """It took part in the interval without a lane: its slot is free at once and the charge must miss it."""
    state, _ = decoding_state(2)
    state, (bystander,) = admitted(measured(state, lambda _: 2 * MS), request())
    requests = state.requests.draft()
    requests.visible_ns[:2] -= 10**10
    state = dataclasses.replace(state, requests=requests.sealed(), now_ns=state.now_ns + 10**10)
    plan = plan_next(state)
    assert plan is not None
    assert bystander not in {lane.handle for lane in plan.lanes}
    state = cancel(commit(state, plan, state.last_fence + 1), bystander)
    assert state.requests.phase[bystander.slot] == Phase.FREE
    state, _ = complete(state, state.last_fence, records_of(plan), timing(9.0))
    check_invariants(state)
    assert np.isnan(state.requests.token_r[bystander.slot])
