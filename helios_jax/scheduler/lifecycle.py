"""Events of a request's life as pure functions: state in, new state out, or an error.

1. `admit` (module `admission`) takes a slot and is promised pages, or says why it cannot.
2. `commit` checks a plan against the present and owns what it needs until its fence completes.
3. `complete` (module `completion`) validates every lane, then accounts for all of them.
4. `published_output` (module `publication`) corrects the last interval once output is visible.
5. `cancel`, `finish` and `preempt` stop selection at once; slot and pages stay owned through
   the last submitted fence.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from helios_jax.errors import InvariantError, StalePlanError
from helios_jax.scheduler import captures
from helios_jax.scheduler.catalog import ProgramKind, ProposalSource, lane_width, physical_tokens
from helios_jax.scheduler.cost import attempt
from helios_jax.scheduler.page_pressure import make_room
from helios_jax.scheduler.programs import KINDS, index_of, misfit
from helios_jax.scheduler.queue import closed, expected_service, may_be_over, needs_feedback, project
from helios_jax.scheduler.refresh import PROBES, dispatched, is_funded, watch_idle
from helios_jax.scheduler.reservation import spare_pages
from helios_jax.scheduler.resources import PagePool, take
from helios_jax.scheduler.retirement import retire
from helios_jax.scheduler.service import current_rates
from helios_jax.scheduler.state import (
    DECODE,
    EXTERNAL,
    FINISHES,
    FREE,
    INITIALIZE,
    PROMPT,
    RESTORE,
    SNAPSHOT,
    TERMINAL,
    VISION,
    Counters,
    Frame,
    Requests,
    State,
)
from helios_jax.scheduler.types import Fence, FinishReason, LaneRole, RequestHandle, ScheduledPlan


def advance_to(state: State, now_ns: int) -> State:
    """Move the clock forward.

    Two calls in a row that find nothing outstanding and nothing runnable mean an idle device:
    exploration credit is discarded. One is not enough: it comes between the last completion
    and the admission of those who waited for it.

    Raises:
        InvariantError: The time runs backwards; feed a monotonic clock.
    """
    if now_ns < state.now_ns:
        raise InvariantError(f"advance_to({now_ns}) runs backwards from {state.now_ns}")
    is_empty = not state.frames and not state.requests.runnable.any()
    return dataclasses.replace(state, now_ns=int(now_ns), ledgers=watch_idle(state.ledgers, is_empty=is_empty))


def external_ready(state: State, handle: RequestHandle) -> State:
    """The external state of a request has arrived: its restore may be selected from now on."""
    if not _holds(state, handle) or state.requests.phase[handle.slot] != EXTERNAL:
        return state
    requests = state.requests.draft()
    requests.phase[handle.slot] = RESTORE
    requests.epoch[handle.slot] += 1
    return dataclasses.replace(state, requests=requests.sealed())


def offer_copy(state: State, handle: RequestHandle, proposals: int) -> State:
    """The host can supply `proposals` copied tokens for the next round of a decoding request.

    The offer ends with the request's next output: the host looks again, and offers again. A smaller
    offer makes a plan stale that was made for more.

    Raises:
        InvariantError: Not an integer of 0 up to the context, or a handle that was never given out.
    """
    number = isinstance(proposals, (int, np.integer)) and not isinstance(proposals, bool)
    if not number or not 0 <= proposals <= state.limits.max_context:
        message = f"{handle} offers {proposals!r} proposals, an integer of 0 to {state.limits.max_context} is possible"
        raise InvariantError(message)
    if not _holds(state, handle) or state.requests.proposals[handle.slot] == proposals:
        return state
    offered = state.requests.proposals.copy()
    offered[handle.slot] = proposals
    offered.setflags(write=False)
    return dataclasses.replace(state, requests=dataclasses.replace(state.requests, proposals=offered))


def commit(state: State, plan: ScheduledPlan, fence: Fence) -> State:
    """Take ownership for a plan that is about to be submitted; selection is not rerun.

    Freezes the interval's participants with their normalisers, and gives every lane the pages
    that it writes. Freshness is checked again: a saved plan can outlive its estimate.

    Raises:
        StalePlanError: A lane's request changed since the plan was made, the window is not free, or
            the pages that it needs were promised to others; plan again.
        InvariantError: The fence does not grow, or the program is not in the catalogue.
    """
    index = index_of(state.catalog, plan.shape)
    if fence <= state.last_fence:
        raise InvariantError(f"fence {fence} does not follow {state.last_fence}")
    problem = closed(state)
    if plan.reason in PROBES and not is_funded(state.ledgers, plan.reason):
        problem = f"no {plan.reason} episode is funded"
    if problem:
        raise StalePlanError(f"{plan.shape.name} cannot be submitted: {problem}")
    slots = _checked_lanes(state, plan)
    alone = plan.required_empty_queue or needs_feedback(state, index, slots)
    if state.frames and (alone or may_be_over(state)[slots].any()):
        raise StalePlanError(f"{plan.shape.name} needs completion feedback, fence {state.last_fence} is outstanding")
    frame = _frozen(state, plan, fence, alone)
    requests = state.requests.draft()
    requests.last_fence[slots], requests.last_use_ns[slots] = fence, state.now_ns
    requests.epoch[slots] += 1
    _extend_written(requests, slots, plan, state.limits.draft_extent)
    _extend_promises(state, requests, slots, plan)
    needs = _missing_pages(state.pool, requests, slots, state.limits.page_size)
    kept, pool = make_room(state.retention, state.pool, sum(more for _, more in needs))
    return dataclasses.replace(
        state,
        requests=requests.sealed(),
        pool=take(pool, needs) if needs else pool,
        frames=(*state.frames, frame),
        last_fence=fence,
        costs=attempt(state.costs, index, state.now_ns),
        retention=captures.begin_copies(kept, plan, fence),
        ledgers=dispatched(state.ledgers, plan.reason, fence),
        counters=_count_tokens(state.counters, plan),
    )


def _frozen(state: State, plan: ScheduledPlan, fence: Fence, alone: bool) -> Frame:
    """The frame of a plan with its participants, normalisers and expected service of this moment."""
    rates = current_rates(state)
    participants = np.where(state.requests.active, state.requests.generation, 0)
    columns = (participants, rates.token_n, rates.delivery_n, rates.token_r)
    for column in columns:
        column.setflags(write=False)
    return Frame(fence, plan, state.now_ns, *columns, *expected_service(plan, state.limits.slots), alone)


def _extend_written(requests: Requests, slots: np.ndarray, plan: ScheduledPlan, draft_extent: int) -> None:
    """Note how far the program may write: the whole ceiling, and the declared draft storage."""
    starts, lengths = (np.array(column, np.int64) for column in list(zip(*plan.lanes, strict=True))[2:4])
    ends = starts if plan.shape.kind is ProgramKind.VISION else starts + lengths  # features are no positions
    if lane_width(plan.shape) > 1:
        ends = ends + np.where(np.arange(len(ends)) == plan.prompt_row, 0, draft_extent)
    requests.written_len[slots] = np.maximum(requests.written_len[slots], ends)


def _extend_promises(state: State, requests: Requests, slots: np.ndarray, plan: ScheduledPlan) -> None:
    """Promise every lane the pages of what it may write, out of those that nobody was promised.

    Raises:
        StalePlanError: There are fewer: others were promised some since the plan was made.
    """
    needed = -(-requests.written_len[slots] // state.limits.page_size)
    more = np.maximum(needed - requests.reserved_pages[slots], 0)
    if more.sum() > spare_pages(state):
        message = f"{plan.shape.name} needs {more.sum()} pages beyond its promises, {spare_pages(state)} are free"
        raise StalePlanError(f"{message}; plan again")
    requests.reserved_pages[slots] += more


_PHASES_OF_ROLE = {
    LaneRole.INITIALIZE: (INITIALIZE,),
    LaneRole.RESTORE: (RESTORE,),
    LaneRole.VISION: (VISION,),
    LaneRole.SNAPSHOT: (SNAPSHOT, TERMINAL),
    LaneRole.PROMPT: (PROMPT,),
    LaneRole.DECODE: (DECODE,),
}


def _checked_lanes(state: State, plan: ScheduledPlan) -> np.ndarray:
    """Slots of the plan's lanes, every one still as it was when the plan was made.

    Behind outstanding frames a lane starts where their ceilings end at the latest.
    """
    requests, lanes = state.requests, plan.lanes
    problem = misfit(plan.shape, lanes, plan.prompt_row)
    if problem or len(lanes) != len(plan.epochs):
        raise StalePlanError(f"{plan.shape.name} cannot run {problem or f'{len(plan.epochs)} epochs'}")
    handles, roles, starts = list(zip(*lanes, strict=True))[:3]
    slots, generations = (np.array(column, np.int64) for column in zip(*handles, strict=True))
    if slots.min() < 0 or slots.max() >= state.limits.slots:
        raise StalePlanError(f"{plan.shape.name} names slots {slots}, there are {state.limits.slots}")
    current = (requests.generation[slots] == generations) & (requests.epoch[slots] == np.array(plan.epochs))
    projected = project(state).requests
    current &= (projected.committed_len[slots] == starts) & (projected.phase[slots] == requests.phase[slots])
    phases = requests.phase[slots].tolist()
    current &= [phase in _PHASES_OF_ROLE[role] for role, phase in zip(roles, phases, strict=True)]
    if not current.all():
        handle = lanes[int(np.flatnonzero(~current)[0])].handle
        raise StalePlanError(f"{handle} changed or lost its slot since the plan was made; plan again")
    if plan.shape.proposal_source is ProposalSource.COPY:
        _check_offers(projected, plan)
    return slots


def _check_offers(projected: Requests, plan: ScheduledPlan) -> None:
    """Every lane of a copy round has as many proposals at hand as its target rows count on.

    Raises:
        StalePlanError: An offer shrank since the plan was made.
    """
    for lane in plan.lanes:
        offered = int(projected.proposals[lane.handle.slot])
        if lane.role is LaneRole.DECODE and lane.length > 1 + offered:
            message = f"{lane.handle} counts on {lane.length - 1} copied proposals, {offered} are offered; plan again"
            raise StalePlanError(message)


def _missing_pages(pool: PagePool, requests: Requests, slots: np.ndarray, page_size: int) -> list[tuple[int, int]]:
    """(slot, pages) of the lanes that write beyond the pages that they hold."""
    missing = -(-requests.written_len[slots] // page_size) - pool.held[slots]
    return [(slot, more) for slot, more in zip(slots.tolist(), missing.tolist(), strict=True) if more > 0]


def _count_tokens(counters: Counters, plan: ScheduledPlan) -> Counters:
    kind, physical = KINDS.index(plan.shape.kind), physical_tokens(plan.shape)
    # Ceilings of a device-allocated round may sum above its rows; it never uses more than these.
    used = min(physical, sum([lane.length for lane in plan.lanes]))
    padded = physical - used
    return dataclasses.replace(
        counters,
        programs=_added(counters.programs, kind, 1),
        used_tokens=_added(counters.used_tokens, kind, used),
        padded_tokens=_added(counters.padded_tokens, kind, padded),
    )


def _added(totals: tuple[int, ...], index: int, amount: int) -> tuple[int, ...]:
    return (*totals[:index], totals[index] + amount, *totals[index + 1 :])


def cancel(state: State, handle: RequestHandle) -> State:
    """The client went away: stop selecting the request; a handle that has ended already changes nothing."""
    if not _is_running(state, handle):
        return state
    counters = dataclasses.replace(state.counters, cancelled=state.counters.cancelled + 1)
    return retire(dataclasses.replace(state, counters=counters), handle.slot, keep_state=False)


def preempt(state: State, handle: RequestHandle) -> State:
    """Retire the execution of a request without completing its response; it may be admitted again."""
    if not _is_running(state, handle):
        return state
    counters = dataclasses.replace(state.counters, preempted=state.counters.preempted + 1)
    return retire(dataclasses.replace(state, counters=counters), handle.slot, keep_state=True)


def finish(state: State, handle: RequestHandle, reason: FinishReason) -> State:
    """The host ended the output (a stop string, an error of its own)."""
    if not _is_running(state, handle):
        return state
    counted = dataclasses.replace(state, counters=count_finish(state.counters, reason))
    return retire(counted, handle.slot, keep_state=keeps_state(reason))


def count_finish(counters: Counters, reason: FinishReason) -> Counters:
    return dataclasses.replace(counters, finished=_added(counters.finished, FINISHES.index(reason), 1))


def keeps_state(reason: FinishReason) -> bool:
    """Whether a request that ended so may be captured: errors and aborts never are."""
    return reason in (FinishReason.STOP, FinishReason.LENGTH)


def _is_running(state: State, handle: RequestHandle) -> bool:
    """Whether the handle's request has not ended.

    Raises:
        InvariantError: The handle was never given out.
    """
    held = _holds(state, handle)
    return held and (bool(state.requests.active[handle.slot]) or state.requests.phase[handle.slot] == EXTERNAL)


def _holds(state: State, handle: RequestHandle) -> bool:
    """Whether the handle's generation is the slot's current one.

    Raises:
        InvariantError: The handle was never given out.
    """
    slot, generation = handle
    if not 0 <= slot < state.limits.slots or not 1 <= generation <= state.requests.generation[slot]:
        raise InvariantError(f"{handle} was never given out")
    return bool(state.requests.generation[slot] == generation and state.requests.phase[slot] != FREE)
