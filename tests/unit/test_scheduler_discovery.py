"""Indeterminate programs, exclusion of larger ones, dominance, ties, dispatch rules of stale programs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helios_jax.scheduler import (
    PolicyConfig,
    ProgramShape,
    RequestSpec,
    SelectionReason,
    State,
    advance_to,
    new_state,
    plan_next,
)
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.utility import undominated
from tests.unit.scheduler_toy import (
    DECODE,
    INITIALIZE,
    MS,
    PREFILL,
    admitted,
    decoding_state,
    measured,
    request,
    small_catalog,
    small_limits,
    step,
)


def ready(spec: RequestSpec, prefill: list[tuple[int, int]], known: dict[tuple[int, int], int] | None = None) -> State:
    """One request that is initialised; prefill programs in `known` (rows, tokens) have a duration in ms."""
    state = new_state(small_catalog(prefill=prefill), small_limits(max_context=2000, pages=600))
    state, _ = admitted(state, spec)
    state, _, _ = step(state)

    def duration(shape: ProgramShape) -> int:
        return (known or {}).get((shape.batch_capacity, shape.token_capacity), 0) * MS if shape.kind is PREFILL else 0

    return measured(state, duration)


def chosen_tokens(state: State) -> int:
    plan = plan_next(state)
    assert plan is not None
    assert plan.shape.kind is PREFILL
    return plan.shape.token_capacity


def test_a_lone_cold_request_tries_its_largest_useful_prefill() -> None:
    capacities = [(1, 64), (1, 128), (1, 512)]
    assert chosen_tokens(ready(request(400), capacities)) == 512
    assert chosen_tokens(ready(request(100), capacities)) == 128
    assert chosen_tokens(ready(request(64), capacities)) == 64
    assert chosen_tokens(ready(request(1500), capacities)) == 512


def test_larger_unmeasured_prefill_is_excluded_up_to_the_next_endpoint() -> None:
    """A message end at 50: the prepared 64 consumes the same tokens up to it, measured or not."""
    spec = request(400, message_ends=(50, 300))
    capacities = [(1, 64), (1, 128), (1, 512)]
    assert chosen_tokens(ready(spec, capacities)) == 64
    assert chosen_tokens(ready(spec, capacities, {(1, 64): 5})) == 64
    # Measured programs remain eligible by their cost: 400 tokens in 6 ms beat 64 in 5.
    assert chosen_tokens(ready(spec, capacities, {(1, 64): 5, (1, 512): 6})) == 512


def test_an_indeterminate_program_wins_over_a_determinate_one() -> None:
    state = ready(request(400), [(1, 64), (1, 512)], {(1, 64): 1})
    plan = plan_next(state)
    assert plan is not None
    assert (plan.shape.token_capacity, plan.reason, plan.estimated_duration_ns) == (512, SelectionReason.DISCOVERY, 0)
    assert plan.required_empty_queue


def test_no_smallest_fitting_filter() -> None:
    """A larger program wins a tail when it is measured to pay: 70 tokens, 64 in 5 ms or 70 in 5.2 ms."""
    state = ready(request(70), [(1, 64), (1, 128)], {(1, 64): 5, (1, 128): 5})
    assert chosen_tokens(state) == 128
    assert chosen_tokens(ready(request(70), [(1, 64), (1, 128)], {(1, 64): 5, (1, 128): 50})) == 64


def test_redundant_padding_loses_even_where_it_measures_faster() -> None:
    """A tail of 60 tokens: the 128 consumes the same and is dropped whatever its duration."""
    assert chosen_tokens(ready(request(60), [(1, 64), (1, 128)], {(1, 64): 50, (1, 128): 1})) == 64
    state, _ = decoding_state(3, max_tokens=40)
    state = measured(state, lambda shape: {1: 9, 2: 9, 4: 9}.get(shape.batch_capacity, 1) * MS)
    plan = plan_next(state)
    assert plan is not None
    assert plan.shape.batch_capacity == 4


def test_undominated_needs_every_capacity_at_least_as_large() -> None:
    cohorts = np.array([[1, 0], [1, 0], [1, 0], [0, 1]])
    capacities = np.array([[1, 8], [2, 4], [2, 8], [4, 9]])
    assert undominated(cohorts, capacities).tolist() == [True, True, False, True]


def test_batch_four_with_three_requests_competes_with_batch_two() -> None:
    state, _ = decoding_state(3, max_tokens=40)
    slow = measured(state, lambda s: {1: 4, 2: 5, 4: 30}[s.batch_capacity] * MS if s.kind is DECODE else MS)
    fast = measured(state, lambda s: {1: 4, 2: 5, 4: 6}[s.batch_capacity] * MS if s.kind is DECODE else MS)
    plans = [plan_next(slow), plan_next(fast)]
    assert [(p.shape.batch_capacity, len(p.lanes)) for p in plans if p] == [(2, 2), (4, 3)]


def test_equal_values_serve_the_least_recently_used_request() -> None:
    """Without preferences every score is zero; ties rotate through the requests."""
    policy = PolicyConfig(output_token_value=0, token_fairness=0, delivery_fairness=0, decode_age_price=0)
    state, _ = decoding_state(4, max_tokens=40, policy=policy)
    state = measured(state, lambda _: 3 * MS)
    order = []
    for _ in range(8):
        state, plan, _ = step(state)
        assert plan.shape.kind is DECODE
        order.append([lane.handle.slot for lane in plan.lanes])
    assert [slots for slots in order if len(slots) == 4] == order  # equal time: more served requests


def test_equal_values_prefer_shorter_time_then_less_recent_use() -> None:
    policy = PolicyConfig(output_token_value=0, token_fairness=0, delivery_fairness=0, decode_age_price=0)
    state, _ = decoding_state(4, max_tokens=40, policy=policy)
    state = measured(state, lambda shape: shape.batch_capacity * MS)
    order = []
    for _ in range(8):
        state, plan, _ = step(state, device_ms=1.0)
        order += [lane.handle.slot for lane in plan.lanes]
        assert plan.shape.batch_capacity == 1
    assert sorted(order[:4]) == [0, 1, 2, 3]
    assert order[:4] == order[4:]


def test_stale_dispatch_keeps_its_cost_and_needs_feedback() -> None:
    state, _ = decoding_state(2, max_tokens=40)
    state = measured(state, lambda _: 2 * MS)
    ttl = state.policy.estimate_ttl_ns
    fresh, stale = (
        plan_next(advance_to(state, state.now_ns + ttl)),
        plan_next(advance_to(state, state.now_ns + ttl + 1)),
    )
    assert fresh is not None
    assert stale is not None
    assert (fresh.required_empty_queue, stale.required_empty_queue) == (False, True)
    assert fresh.estimated_duration_ns == stale.estimated_duration_ns == 2 * MS
    assert stale.reason is SelectionReason.ORDINARY


def test_only_decode_may_queue() -> None:
    state = ready(request(8), [(1, 8)], {(1, 8): 2})
    plan = plan_next(state)
    assert plan is not None
    assert plan.required_empty_queue


@pytest.mark.parametrize("cheap", [True, False])
def test_initialisation_competes_by_the_whole_sequence(cheap: bool) -> None:
    """A newcomer's pair wins over decoding when T + F is short, and loses when it is long."""
    state, _ = decoding_state(2, max_tokens=40)
    requests = state.requests.draft()
    requests.token_r[:2], requests.delivery_r[:2] = 5.0, 5.0
    state, _ = admitted(dataclasses.replace(state, requests=requests.sealed()), request(8))
    state = measured(
        state,
        lambda s: {INITIALIZE: 1, PREFILL: 2 if cheap else 4000, DECODE: 5}.get(s.kind, 1) * MS,
    )
    plan = plan_next(state)
    assert plan is not None
    assert plan.shape.kind is (INITIALIZE if cheap else DECODE)
    assert plan.estimated_duration_ns == (1 if cheap else 5) * MS


def test_unused_prerequisite_rows_advance_more_requests() -> None:
    state = new_state(small_catalog(initialize=(4,), prefill=[(1, 8)]), small_limits())
    state, _ = admitted(state, request(8), request(8), request(8))
    plan = plan_next(measured(state, lambda _: 2 * MS))
    assert plan is not None
    assert (plan.shape.kind, len(plan.lanes)) == (INITIALIZE, 3)


def test_first_output_of_a_prompt_starts_its_age() -> None:
    """The age runs from the end of the prompt until something is visible."""
    state, (handle,) = decoding_state(1)
    assert state.requests.phase[handle.slot] == Phase.DECODE
    assert state.requests.visible_ns[handle.slot] == state.now_ns
