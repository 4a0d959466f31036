"""Funded timing refresh in the life of plans: who is probed, when, who pays, what an attempt changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helios_jax.errors import StalePlanError
from helios_jax.scheduler import (
    Catalog,
    ExecutionTiming,
    ProgramKind,
    ProgramShape,
    ScheduledPlan,
    SelectionReason,
    State,
    advance_to,
    cancel,
    check_invariants,
    commit,
    complete,
    new_state,
    plan_next,
)
from helios_jax.scheduler.catalog import ProposalSource
from helios_jax.scheduler.counters import snapshot_counters
from helios_jax.scheduler.refresh import credit, is_funded
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_toy import (
    DECODE,
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
)

REFRESH, LEARNING, ORDINARY = (
    SelectionReason.TIMING_REFRESH,
    SelectionReason.ACCEPTANCE_LEARNING,
    SelectionReason.ORDINARY,
)
TTL = 30_000_000_000


def funded(state: State, ordinary_ns: int = 10**10) -> State:
    """The state after so much ordinary execution time."""
    executed = dataclasses.replace(state.counters, execution_ns=(ordinary_ns, *state.counters.execution_ns[1:]))
    return dataclasses.replace(state, counters=executed, ledgers=credit(state.ledgers, ordinary_ns))


def observed(state: State, shape: ProgramShape, age_ns: int) -> State:
    """The program's last observation was so long ago; later than any attempt."""
    column = state.costs.observed_ns.copy()
    column[state.catalog.shapes.index(shape)] = state.now_ns - age_ns
    column.setflags(write=False)
    return dataclasses.replace(state, costs=dataclasses.replace(state.costs, observed_ns=column))


def decode(rows: int) -> ProgramShape:
    return ProgramShape(DECODE, rows, 1)


def later(state: State, duration_ns: int) -> State:
    """Time passes; every stream has just had an output."""
    state = advance_to(state, state.now_ns + duration_ns)
    requests = state.requests.draft()
    requests.visible_ns[requests.phase == Phase.DECODE] = state.now_ns
    return dataclasses.replace(state, requests=requests.sealed())


def three_decoders(other_ms: int = 4) -> State:
    """Three streams, decode programs of one, two and four rows; four rows win by far."""
    state, _ = decoding_state(3, max_tokens=40)
    decode_ms = {1: 4, 2: 5, 4: 6}
    state = measured(state, lambda s: (decode_ms[s.batch_capacity] if s.kind is DECODE else other_ms) * MS)
    state = later(state, 10 * TTL)
    for shape in state.catalog:
        state = observed(state, shape, 0)
    return state


def planned(state: State) -> ScheduledPlan:
    plan = plan_next(state)
    assert plan is not None
    return plan


def run(state: State, timing: ExecutionTiming | None = None) -> tuple[State, ScheduledPlan]:
    plan = planned(state)
    estimate = plan.estimated_duration_ns
    state = commit(state, plan, state.last_fence + 1)
    check_invariants(state)
    state = advance_to(state, state.now_ns + estimate)
    state, _ = complete(state, state.last_fence, records_of(plan), timing or ExecutionTiming((estimate,), estimate))
    check_invariants(state)
    return state, plan


def test_full_credit_lets_one_stale_alternative_displace_the_winner() -> None:
    state = observed(three_decoders(), decode(2), TTL + 1)
    plan = planned(state)
    assert (plan.shape, plan.reason, plan.exploration_credit_ns) == (decode(4), ORDINARY, 0)
    almost = funded(state, 2_495_000_000 - 1)
    assert planned(almost).reason is ORDINARY
    full = funded(state, 2_495_000_000)
    plan = planned(full)
    assert (plan.shape, plan.reason, plan.required_empty_queue) == (decode(2), REFRESH, True)
    assert plan.exploration_credit_ns == 5 * MS
    assert plan.observation_age_ns == TTL + 1
    state, _ = run(full, ExecutionTiming((7 * MS,), 9 * MS))
    assert state.ledgers.refresh.balance_ns == -4 * MS  # the whole isolated execution, paid once
    assert state.ledgers.learning.balance_ns == 5 * MS
    assert state.costs.estimate_ns[state.catalog.shapes.index(decode(2))] == 7 * MS  # replaced, not averaged
    counted = snapshot_counters(state)["flare_scheduler_execution_nanoseconds_total"]
    assert isinstance(counted, dict)
    assert counted["timing_refresh"] == 9 * MS
    balances = snapshot_counters(state)["exploration_credit_nanoseconds"]
    assert balances == {"timing_refresh": -4 * MS, "acceptance_learning": 5 * MS}
    assert planned(state).reason is ORDINARY


def test_the_longest_untouched_program_is_probed_first() -> None:
    state = funded(observed(observed(three_decoders(), decode(2), TTL + 1), decode(1), TTL + 2))
    assert planned(state).shape == decode(1)
    attempted = state.costs.attempted_ns.copy()
    attempted[state.catalog.shapes.index(decode(1))] = state.now_ns - TTL  # tried later than two rows were seen
    attempted.setflags(write=False)
    state = dataclasses.replace(state, costs=dataclasses.replace(state.costs, attempted_ns=attempted))
    assert planned(state).shape == decode(2)


def test_equally_old_alternatives_are_ranked_by_useful_value() -> None:
    state = funded(observed(observed(three_decoders(), decode(2), 2 * TTL), decode(1), 2 * TTL))
    assert planned(state).shape == decode(2)


def test_an_attempt_without_a_timing_pays_its_wall_time_and_waits_its_turn() -> None:
    state = funded(observed(observed(three_decoders(), decode(2), TTL + 1), decode(1), TTL + 2))
    estimate = state.costs.estimate_ns.tolist()
    state, plan = run(state, ExecutionTiming((0,), 3 * MS))
    assert plan.shape == decode(1)
    assert state.costs.estimate_ns.tolist() == estimate
    assert state.ledgers.refresh.balance_ns == 2 * MS
    assert state.ledgers.refresh.spent_ns == 3 * MS
    again = dataclasses.replace(state, ledgers=credit(state.ledgers, 0))
    assert planned(again).reason is ORDINARY
    refilled = funded(state, 10**10)
    assert planned(refilled).shape == decode(2)  # still stale, but the other one was not even tried


def test_the_winner_refreshes_itself_by_ordinary_service() -> None:
    state = funded(observed(three_decoders(), decode(4), TTL + 1))
    state, plan = run(state)
    assert (plan.shape, plan.reason) == (decode(4), ORDINARY)
    assert state.ledgers.refresh.spent_ns == 0
    assert state.ledgers.refresh.ordinary_ns == 10**10 + 6 * MS


def test_discovery_is_not_displaced_and_earns_nothing() -> None:
    state = observed(three_decoders(), decode(2), TTL + 1)
    costs = state.costs
    estimate = costs.estimate_ns.copy()
    samples, counts = costs.samples_ns.copy(), costs.num_samples.copy()
    index = state.catalog.shapes.index(decode(1))
    estimate[index], samples[index], counts[index] = 0, 0, 0
    for column in (estimate, samples, counts):
        column.setflags(write=False)
    unknown = dataclasses.replace(costs, estimate_ns=estimate, samples_ns=samples, num_samples=counts)
    state = funded(dataclasses.replace(state, costs=unknown))
    before = state.ledgers
    state, plan = run(state, ExecutionTiming((MS,), MS))
    assert (plan.shape, plan.reason, plan.observation_age_ns) == (decode(1), SelectionReason.DISCOVERY, None)
    assert state.ledgers == before


def test_redundant_padding_is_no_alternative() -> None:
    """Two streams: four rows serve the same cohort as two and are not feasible, however stale."""
    state, _ = decoding_state(2, max_tokens=40)
    state = measured(state, lambda s: {1: 4, 2: 5, 4: 6}.get(s.batch_capacity, 4) * MS)
    state = advance_to(state, state.now_ns + 2 * TTL)
    for shape in state.catalog:
        state = observed(state, shape, TTL + 1 if shape == decode(4) else 0)
    assert planned(funded(state)).reason is ORDINARY


def test_a_probe_waits_for_the_window_to_drain() -> None:
    state = funded(observed(three_decoders(), decode(2), TTL + 1))
    empty = dataclasses.replace(state, ledgers=type(state.ledgers)())
    ordinary = planned(empty)
    busy = dataclasses.replace(commit(empty, ordinary, empty.last_fence + 1), ledgers=state.ledgers)
    assert plan_next(busy) is None
    busy = advance_to(busy, busy.now_ns + ordinary.estimated_duration_ns)
    timing = ExecutionTiming((6 * MS,), 6 * MS)
    drained, _ = complete(busy, busy.last_fence, records_of(ordinary), timing)
    assert planned(drained).reason is REFRESH


def test_a_saved_probe_is_stale_once_its_credit_is_gone() -> None:
    state = funded(observed(three_decoders(), decode(2), TTL + 1))
    probe = planned(state)
    poor = dataclasses.replace(state, ledgers=type(state.ledgers)())
    with pytest.raises(StalePlanError, match="funded"):
        commit(poor, probe, poor.last_fence + 1)


def test_a_cancelled_probe_still_pays_and_publishes_nothing() -> None:
    state = funded(observed(three_decoders(), decode(2), TTL + 1))
    plan = planned(state)
    state = commit(state, plan, state.last_fence + 1)
    for lane in plan.lanes:
        state = cancel(state, lane.handle)
    assert state.ledgers.refresh.episode == state.last_fence
    assert not is_funded(state.ledgers, LEARNING)  # one probe at a time, of either purpose
    state, events = complete(state, state.last_fence, records_of(plan), ExecutionTiming((0,), 4 * MS))
    check_invariants(state)
    assert events == ()
    assert state.ledgers.refresh.spent_ns == 4 * MS
    assert state.ledgers.refresh.episode == 0
    assert state.costs.observed_ns[state.catalog.shapes.index(decode(2))] < state.now_ns - TTL


def test_a_stale_prerequisite_is_probed_through_its_pair() -> None:
    state = three_decoders(other_ms=400)
    state, _ = admitted(state, request(8))
    state = observed(state, ProgramShape(INITIALIZE, 1, 0), TTL + 1)
    assert planned(state).shape.kind is not INITIALIZE
    plan = planned(funded(state))
    assert (plan.shape, plan.reason) == (ProgramShape(INITIALIZE, 1, 0), REFRESH)
    stale_follow = observed(state, ProgramShape(PREFILL, 1, 8), TTL + 1)
    stale_follow = observed(stale_follow, ProgramShape(INITIALIZE, 1, 0), 0)
    assert planned(funded(stale_follow)).reason is ORDINARY  # only what is submitted is refreshed


def test_an_idle_device_discards_credit() -> None:
    state, (handle,) = decoding_state(1)
    state = funded(state)
    state = cancel(state, handle)
    first = advance_to(state, state.now_ns + 1)
    assert first.ledgers.refresh.balance_ns == 5 * MS  # whoever waits for the slot is admitted now
    served, _ = admitted(first, request())
    assert advance_to(served, served.now_ns + 1).ledgers.refresh.balance_ns == 5 * MS
    idle = advance_to(first, first.now_ns + 1)
    assert (idle.ledgers.refresh.balance, idle.ledgers.learning.balance) == (0, 0)
    check_invariants(idle)


def test_work_without_a_pause_is_never_idle() -> None:
    """A commit and a completion between two looks at an empty state are no idle time."""
    state, (handle,) = decoding_state(1)
    state = advance_to(cancel(funded(state), handle), state.now_ns + 1)
    state, (handle,) = admitted(state, request())
    plan = planned(state)
    state = commit(state, plan, state.last_fence + 1)
    state, _ = complete(cancel(state, handle), state.last_fence, records_of(plan), ExecutionTiming((1,), 1))
    state = advance_to(state, state.now_ns + 1)
    assert state.ledgers.refresh.balance_ns == 5 * MS


ROUNDS = [
    ProgramShape(ProgramKind.SPECULATIVE, 2, w, w - 1, 2 * w, proposal_source=ProposalSource.LEARNED) for w in (2, 4)
]


def speculating() -> State:
    """Two decoders whose drafts are believed to fail, so that wide rounds are not chosen; little is known of them."""
    state = new_state(Catalog((*small_catalog(decode=(2,)), *ROUNDS)), small_limits(max_context=256, pages=256))
    state, handles = admitted(state, *[request(5, 100)] * 2)
    requests = state.requests.draft()
    for slot, _ in handles:
        requests.phase[slot], requests.consumed_len[slot], requests.committed_len[slot] = Phase.DECODE, 5, 5
        requests.written_len[slot], requests.output_len[slot] = 5, 1
        requests.token_r[slot] = requests.delivery_r[slot] = 5.0
    requests.visible_ns[:2] = state.now_ns
    state = measured(dataclasses.replace(state, requests=requests.sealed()), lambda s: (5 + s.token_capacity) * MS)
    acceptance = state.acceptance
    hopeless = np.full_like(acceptance.accept_mean, 0.01)
    hopeless.setflags(write=False)
    return dataclasses.replace(state, acceptance=dataclasses.replace(acceptance, accept_mean=hopeless))


def test_timing_refresh_goes_before_acceptance_learning() -> None:
    state = speculating()
    assert planned(state).shape == decode(2)
    learning = funded(state, 495_000_000)
    plan = planned(learning)
    assert (plan.shape.kind, plan.reason) == (ProgramKind.SPECULATIVE, LEARNING)
    assert plan.exploration_credit_ns == 5 * MS
    both = funded(later(state, TTL + 1))
    both = observed(both, decode(2), 0)
    assert planned(both).reason is REFRESH
    fresh = both
    for shape in both.catalog:
        fresh = observed(fresh, shape, 0)
    assert planned(fresh).reason is LEARNING


def test_an_acceptance_probe_pays_its_own_ledger_once() -> None:
    state = funded(speculating(), 495_000_000)
    state, plan = run(state, ExecutionTiming((8 * MS,), 9 * MS))
    assert plan.reason is LEARNING
    assert state.ledgers.learning.balance_ns == -4 * MS
    assert state.ledgers.refresh.spent_ns == 0
    assert state.ledgers.refresh.ordinary_ns == 495_000_000


@pytest.mark.parametrize(
    ("timing", "earned_ns"),
    [
        (ExecutionTiming((6 * MS, 7 * MS), 9 * MS), 9 * MS),  # isolated: the larger of device and wall
        (ExecutionTiming((7 * MS, 9 * MS), 8 * MS), 9 * MS),
        (ExecutionTiming((6 * MS, 7 * MS), 9 * MS, queued=True), 7 * MS),  # queued: the largest device interval
        (ExecutionTiming((7 * MS,), 7 * MS, embedding_delay_ns=5 * MS), 7 * MS),  # readiness stalls are physical time
        (ExecutionTiming((0, -5), 9 * MS), 0),  # no valid timing earns nothing
    ],
)
def test_ordinary_executions_earn_their_physical_time(timing: ExecutionTiming, earned_ns: int) -> None:
    state, plan = run(three_decoders(), timing)
    assert plan.reason is ORDINARY
    assert (state.ledgers.refresh.balance, state.ledgers.learning.balance) == (earned_ns, earned_ns)
