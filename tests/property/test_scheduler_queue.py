"""Projection and the drain gate against what really comes, when every expectation comes true."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest

from helios_jax.scheduler import (
    ExecutionTiming,
    GeneratedToken,
    PolicyConfig,
    ScheduledPlan,
    State,
    advance_to,
    commit,
    complete,
    new_state,
    plan_next,
    published_outputs,
)
from helios_jax.scheduler.queue import project
from helios_jax.scheduler.state import FREE, RETIRING, Phase
from helios_jax.scheduler.types import Constraint
from tests.unit.scheduler_toy import DECODE, admitted, measured, records_of, request, small_catalog, small_limits

HOUR_NS = 3_600_000_000_000


def random_state(rng: random.Random) -> State:
    """Mostly decoders, a few prompts and newcomers; every program measured once, most of them fresh."""
    catalog = small_catalog(
        decode=sorted(rng.sample((1, 2, 3, 4, 6, 8), 3)), prefill=[(1, 4), (2, 8)], initialize=rng.sample((1, 2, 8), 2)
    )
    policy = PolicyConfig(
        token_fairness=rng.choice([0.25, 16.0]),
        delivery_fairness=rng.choice([0.0, 4.0]),
        decode_age_price=rng.choice([0.0, 0.1, 3.0]),
        estimate_ttl_ns=rng.choice([10**7, 30 * 10**9]),
    )
    state = dataclasses.replace(new_state(catalog, small_limits(slots=8), policy), now_ns=HOUR_NS)
    specs = [request(rng.randint(1, 9), rng.randint(2, 6)) for _ in range(rng.randint(1, 8))]
    state, handles = admitted(state, *specs)
    requests = state.requests.draft()
    specs_now = list(state.specs)
    for (slot, _), spec in zip(handles, specs, strict=True):
        requests.token_r[slot] = np.nan if rng.random() < 0.2 else 10 ** rng.uniform(-2, 3)
        requests.last_use_ns[slot] = rng.randint(0, HOUR_NS)
        kind = rng.random()
        if kind < 0.15:
            continue
        requests.phase[slot] = phase = Phase.PROMPT if kind < 0.25 else Phase.DECODE
        done = rng.randint(0, len(spec.prompt) - 1) if phase == Phase.PROMPT else len(spec.prompt)
        output = rng.randint(1, spec.max_tokens - 1) if phase == Phase.DECODE else 0
        requests.consumed_len[slot], requests.output_len[slot] = done, output
        requests.committed_len[slot] = requests.written_len[slot] = done + max(0, output - 1)
        if phase == Phase.DECODE:
            requests.delivery_r[slot] = np.nan if rng.random() < 0.2 else 10 ** rng.uniform(-2, 3)
            requests.visible_ns[slot] = HOUR_NS - rng.randint(0, 10**9)
            if rng.random() < 0.1:
                requests.constraints[slot] = int(Constraint.GRAMMAR)
                specs_now[slot] = dataclasses.replace(spec, constraints=Constraint.GRAMMAR)
    state = dataclasses.replace(state, requests=requests.sealed(), specs=tuple(specs_now))
    return measured(state, lambda _: 4 * rng.randint(10**5, 4 * 10**6))


def fly(state: State, plan: ScheduledPlan) -> State:
    return commit(state, plan, state.last_fence + 1)


def comes_true(state: State, *, queued: bool) -> State:
    """Complete the oldest frame exactly as expected, and publish everything."""
    frame = state.frames[0]
    end_ns = max(frame.dispatched_ns, state.interval.completed_ns if queued and state.interval else 0)
    state = advance_to(state, end_ns + frame.plan.estimated_duration_ns)
    estimate = frame.plan.estimated_duration_ns
    timing = ExecutionTiming((estimate,), estimate, queued=queued)
    state, events = complete(state, frame.fence, records_of(frame.plan), timing)
    named = {event.handle for event in events if isinstance(event, GeneratedToken)}
    return published_outputs(state, tuple(sorted(named)), frame.fence)


def same_requests(projected: State, real: State) -> None:
    """Everything that selection reads is equal, to the last bit; who is over is gone."""
    over = projected.requests.phase == RETIRING
    phase = np.where(over, FREE, projected.requests.phase)
    assert phase.tolist() == real.requests.phase.tolist()
    for name in ("consumed_len", "committed_len", "output_len", "visible_ns", "token_r", "delivery_r", "last_use_ns"):
        expected, got = getattr(projected.requests, name)[~over], getattr(real.requests, name)[~over]
        assert np.array_equal(expected, got, equal_nan=got.dtype == np.float64), name


def same_plan(a: ScheduledPlan | None, b: ScheduledPlan | None) -> None:
    """Equal but for the epochs, which a completion moves, and the age of an estimate that it renewed."""
    if a is None or b is None:
        assert a is b
        return
    assert dataclasses.replace(a, epochs=(), observation_age_ns=0) == dataclasses.replace(
        b, epochs=(), observation_age_ns=0
    )


def queueable(state: State) -> ScheduledPlan | None:
    plan = plan_next(state)
    return plan if plan is not None and plan.shape.kind is DECODE and not plan.required_empty_queue else None


def test_projection_is_the_state_that_comes_when_expectations_come_true() -> None:
    """One and two frames in flight: requests, prices, ages equal bit by bit, and so does the next plan."""
    seen: Counter[str] = Counter()
    for seed in range(400):
        state = random_state(random.Random(seed))
        first = queueable(state)
        if first is None:
            continue
        busy = fly(state, first)
        projected, real = project(busy), comes_true(busy, queued=False)
        same_requests(projected, real)
        following = plan_next(projected)
        if following is None or following.estimated_duration_ns:
            same_plan(following, plan_next(refreshed(real, busy)))
        second = plan_next(busy)
        seen["one"] += 1
        if second is None:
            continue
        both = fly(busy, second)
        projected, real = project(both), comes_true(comes_true(both, queued=False), queued=True)
        same_requests(projected, real)
        same_plan(plan_next(projected), plan_next(refreshed(real, both)))
        seen["two"] += 1
    assert seen["one"] > 100
    assert seen["two"] > 60


def refreshed(real: State, before: State) -> State:
    """The real state with the estimates' times of before: a completion renews one, a projection none."""
    return dataclasses.replace(real, costs=dataclasses.replace(real.costs, observed_ns=before.costs.observed_ns))


def test_a_worse_queueable_program_never_displaces_a_winner_that_needs_feedback() -> None:
    """The gate: behind a frame the scheduler submits what it would choose after it, or nothing."""
    seen: Counter[str] = Counter()
    for seed in range(400):
        state = random_state(random.Random(seed))
        first = queueable(state)
        if first is None:
            continue
        busy = fly(state, first)
        after = plan_next(refreshed(comes_true(busy, queued=False), busy))
        now = plan_next(busy)
        if now is None:
            assert after is None or after.required_empty_queue
            seen["drained for " + (str(after.shape.kind) if after else "nothing")] += 1
        else:
            same_plan(now, after)
            assert now.shape.kind is DECODE
            assert not now.required_empty_queue
            seen["queued"] += 1
    assert seen["queued"] > 60
    assert seen["drained for initialize"] > 5
    assert seen["drained for prefill"] > 5
    assert seen["drained for decode"] > 5  # stale, or a lane with a grammar


@pytest.mark.parametrize("seed", range(30))
def test_the_gate_holds_for_discovery(seed: int) -> None:
    """An unmeasured program beats every measured one, also when only measured ones could queue."""
    rng = random.Random(seed)
    state = random_state(rng)
    first = queueable(state)
    if first is None:
        return
    busy = fly(state, first)
    costs = busy.costs
    estimate = costs.estimate_ns.copy()
    unknown = rng.choice([i for i, shape in enumerate(busy.catalog) if shape != first.shape])
    estimate[unknown] = 0
    estimate.setflags(write=False)
    busy = dataclasses.replace(busy, costs=dataclasses.replace(costs, estimate_ns=estimate))
    after = plan_next(dataclasses.replace(project(busy), frames=()))
    now = plan_next(busy)
    assert (now is None) == (after is None or after.required_empty_queue)
    assert now is None or (now.estimated_duration_ns > 0 and now == after)
