"""Small states with state rows, and a loop that runs them until something happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helios_jax.scheduler import (
    Catalog,
    Event,
    Limits,
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    RequestHandle,
    ScheduledPlan,
    State,
    admit,
    advance_to,
    check_invariants,
    commit,
    complete,
    new_state,
    plan_next,
)
from helios_jax.scheduler.retention import ROLES, SKIPS
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.state_rows import RowUse
from helios_jax.scheduler.types import CompletionRecord, ImageSpan
from tests.unit.scheduler_toy import MS, measured, records_of, request, small_catalog, timing

SNAPSHOT, RESTORE, VISION = ProgramKind.SNAPSHOT, ProgramKind.RESTORE, ProgramKind.VISION


def hybrid_catalog() -> Catalog:
    """The small catalogue with batched state operations and single images of up to 4 features."""
    state_programs = [ProgramShape(kind, b, 0) for kind in (SNAPSHOT, RESTORE) for b in (1, 4)]
    return Catalog((*small_catalog(), *state_programs, ProgramShape(VISION, 1, 4)))


def hybrid_state(
    rows: int, *, fraction: float = 1.0, snapshot_ms: float = 0.1, slots: int = 4, catalog: Catalog | None = None,
    features: int = 4, stops_on_device: bool = False, pages: int = 64, shares_parts: bool = False, **policy: Any,
) -> State:  # fmt: skip
    """A state whose programs take 1 ms, state copies `snapshot_ms` (0: never measured)."""
    limits = Limits(
        slots=slots, pages=pages, page_size=4, max_context=64, state_rows=rows, feature_tokens=features,
        stops_on_device=stops_on_device, shares_parts=shares_parts,
    )  # fmt: skip
    state = new_state(
        catalog or hybrid_catalog(), limits, PolicyConfig(checkpoint_extra_work_fraction=fraction, **policy)
    )
    return measured(state, lambda shape: int(snapshot_ms * MS) if shape.kind is SNAPSHOT else MS)


def asked(state: State, prompt_len: int = 20, max_tokens: int = 4, **rest: Any) -> tuple[State, RequestHandle]:
    return admit(state, request(prompt_len, max_tokens, **rest), state.now_ns)


def submit(state: State) -> tuple[State, ScheduledPlan, int]:
    plan = plan_next(state)
    assert plan is not None
    fence = state.last_fence + 1
    state = commit(state, plan, fence)
    check_invariants(state)
    return state, plan, fence


def finish_frame(
    state: State, plan: ScheduledPlan, fence: int, *, device_ms: float = 1.0, token: int = 7,
    spoil: Callable[[CompletionRecord], CompletionRecord] = lambda record: record,
) -> tuple[State, tuple[Event, ...]]:  # fmt: skip
    state = advance_to(state, state.now_ns + int(device_ms * MS))
    records = [spoil(record) for record in records_of(plan, token)]
    state, events = complete(state, fence, records, timing(device_ms))
    check_invariants(state)
    return state, events


def run(
    state: State, until: Callable[[State], bool] = lambda _: False, **frame: Any
) -> tuple[State, list[Event], list[ScheduledPlan]]:
    """Serve until the condition holds or nothing is left; invariants hold after every step."""
    events: list[Event] = []
    plans: list[ScheduledPlan] = []
    for _ in range(200):
        if until(state) or plan_next(state) is None:
            return state, events, plans
        state, plan, fence = submit(state)
        state, more = finish_frame(state, plan, fence, **frame)
        events += more
        plans.append(plan)
    raise AssertionError("the run did not end")


IMAGES = (ImageSpan(2, 6), ImageSpan(8, 12), ImageSpan(13, 15))  # three windows of 4 features


def occupied(state: State) -> State:
    """One row fewer: the private row of a request that waits for its state from outside."""
    return asked(state, 18, 3, image_spans=IMAGES, external=True, restored_len=1)[0]


def ready(state: State) -> State:
    """Run until nobody waits for its initialisation: the first destinations are armed."""
    return run(state, lambda s: not (s.requests.phase == Phase.INITIALIZE).any())[0]


def phase_of(state: State, handle: RequestHandle) -> Phase:
    return Phase(int(state.requests.phase[handle.slot]))


def uses(state: State) -> list[RowUse]:
    rows = state.retention.rows
    return [rows.use_of(row) for row in range(1, len(rows) + 1)]


def captured(state: State) -> dict[str, int]:
    return {role: n for role, n in zip(ROLES, state.retention.counts.captured, strict=True) if n}


def skipped(state: State) -> dict[str, int]:
    return {reason: n for reason, n in zip(SKIPS, state.retention.counts.skipped, strict=True) if n}
