"""Small catalogues, states and completions for the scheduler's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from helios_jax.scheduler import (
    Catalog,
    CompletionRecord,
    ExecutionTiming,
    Lane,
    LaneRole,
    Limits,
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
    State,
    admit,
    advance_to,
    commit,
    complete,
    new_state,
    plan_next,
)
from helios_jax.scheduler.cost import new_costs, observe
from helios_jax.scheduler.state import Phase

MS = 1_000_000
DECODE = ProgramKind.DECODE
PREFILL = ProgramKind.PREFILL
SCORED = ProgramKind.SCORED_PREFILL
INITIALIZE = ProgramKind.INITIALIZE


def small_catalog(
    *, decode: Iterable[int] = (1, 2, 4), prefill: Iterable[tuple[int, int]] = ((1, 4), (1, 8), (4, 8)),
    scored: Iterable[tuple[int, int]] = ((1, 8),), initialize: Iterable[int] = (1, 4),
) -> Catalog:  # fmt: skip
    """A catalogue of (rows) and (rows, tokens) programs."""
    shapes = [ProgramShape(DECODE, b, 1) for b in decode] + [ProgramShape(INITIALIZE, b, 0) for b in initialize]
    shapes += [ProgramShape(PREFILL, b, t) for b, t in prefill] + [ProgramShape(SCORED, b, t) for b, t in scored]
    return Catalog(tuple(shapes))


def small_limits(slots: int = 4, pages: int = 64, page_size: int = 4, max_context: int = 64) -> Limits:
    return Limits(slots=slots, pages=pages, page_size=page_size, max_context=max_context)


def small_state(policy: PolicyConfig | None = None, **limits: int) -> State:
    return new_state(small_catalog(), small_limits(**limits), policy)


def request(prompt_len: int = 5, max_tokens: int = 4, **rest: object) -> RequestSpec:
    return RequestSpec(prompt=np.arange(prompt_len, dtype=np.int32), max_tokens=max_tokens, **rest)  # type: ignore[arg-type]


def measured(state: State, duration_ns: Callable[[ProgramShape], int]) -> State:
    """The state with exactly one observation of each program, made now; 0 leaves a program unmeasured."""
    costs = new_costs(len(state.catalog))
    for index, shape in enumerate(state.catalog):
        costs = observe(costs, index, duration_ns(shape), state.now_ns, state.policy.estimate_ttl_ns)
    return dataclasses.replace(state, costs=costs)


def records_of(plan: ScheduledPlan, token: int = 7) -> tuple[CompletionRecord, ...]:
    """What a healthy device reports of a plan; a round judges no proposal and emits one token."""

    def record(lane: Lane) -> CompletionRecord:
        consumed = {LaneRole.PROMPT: lane.length, LaneRole.DECODE: 1}.get(lane.role, 0)
        return CompletionRecord(lane.handle, consumed, (token,) if lane.emits else (), lane.start + consumed)

    return tuple(map(record, plan.lanes))


def timing(device_ms: float = 2.0, wall_ms: float | None = None) -> ExecutionTiming:
    wall = device_ms if wall_ms is None else wall_ms
    return ExecutionTiming((int(device_ms * MS),), int(wall * MS))


def step(state: State, token: int = 7, device_ms: float = 2.0) -> tuple[State, ScheduledPlan, tuple]:
    """Plan, commit and complete one frame."""
    plan = plan_next(state)
    assert plan is not None
    fence = state.last_fence + 1
    state = advance_to(commit(state, plan, fence), state.now_ns + int(device_ms * MS))
    state, events = complete(state, fence, records_of(plan, token), timing(device_ms))
    return state, plan, events


def admitted(state: State, *specs: RequestSpec) -> tuple[State, list[RequestHandle]]:
    handles = []
    for spec in specs:
        state, handle = admit(state, spec, state.now_ns)
        handles.append(handle)
    return state, handles


def decoding_state(
    num: int = 2, *, policy: PolicyConfig | None = None, max_tokens: int = 20, prompt_len: int = 5, **limits: int
) -> tuple[State, list[RequestHandle]]:
    """`num` requests that have their first token at least."""
    state, handles = admitted(small_state(policy, **limits), *[request(prompt_len, max_tokens)] * num)
    while any(state.requests.phase[handle.slot] != Phase.DECODE for handle in handles):
        state, _, _ = step(state)
    return state, handles
