"""Events of a request's life as pure functions: state in, new state out, or an error.

1. `admit` takes a slot and reserves worst-case pages, or says why it cannot.
2. `commit` checks a plan against the present and owns what it needs until its fence completes.
3. `complete` (module `completion`) validates every lane, then accounts for all of them.
4. `published_output` corrects the last interval once visible output has left the host.
5. `cancel`, `finish` and `preempt` stop selection at once; slot and pages stay owned through
   the last submitted fence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from helios_jax.errors import CapacityError, InvariantError, RequestError, StalePlanError
from helios_jax.scheduler import captures
from helios_jax.scheduler.capture_draft import Draft
from helios_jax.scheduler.cost import attempt
from helios_jax.scheduler.programs import KINDS, index_of, lane_width, misfit, physical_tokens
from helios_jax.scheduler.queue import closed, expected_service, may_be_over, needs_feedback, project
from helios_jax.scheduler.refresh import PROBES, dispatched, is_funded, watch_idle
from helios_jax.scheduler.resources import PagePool, pages_for, take
from helios_jax.scheduler.retirement import retire
from helios_jax.scheduler.service import corrected_deliveries, current_rates
from helios_jax.scheduler.speculation import reset_slots
from helios_jax.scheduler.stages import check_images, first_stage, set_bounds
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
from helios_jax.scheduler.types import (
    Fence,
    FinishReason,
    LaneRole,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
)


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


def can_admit(state: State, spec: RequestSpec) -> bool:
    """Whether a slot and the worst-case pages of `spec` are free now.

    Raises:
        RequestError: It can never fit.
    """
    needed = required_pages(state, spec)
    promised = int(state.requests.reserved_pages.sum())
    room = bool((state.requests.phase == FREE).any()) and promised + needed <= state.limits.pages
    return room and captures.private_row_obtainable(state, spec)


def required_pages(state: State, spec: RequestSpec) -> int:
    """Worst-case pages of a request, prompt and all output.

    Raises:
        RequestError: The request is malformed or can never fit; the message has the numbers.
    """
    prompt_len, limits = len(spec.prompt), state.limits
    if np.ndim(spec.prompt) != 1 or prompt_len < 1:
        raise RequestError("the prompt must hold at least one token", param="prompt", code="invalid_value")
    if spec.max_tokens < 0 or (spec.max_tokens == 0 and not spec.scored):
        message = f"max_tokens must be at least 1 (0 only for a scored prompt), got {spec.max_tokens}"
        raise RequestError(message, param="max_tokens", code="invalid_value")
    if not 0 <= spec.output_len < prompt_len:
        message = f"output_len must be 0 to {prompt_len - 1}, got {spec.output_len}"
        raise RequestError(message, param="output_len", code="invalid_value")
    if spec.scored and not len(state.programs.scored_prefill):
        raise RequestError("this core has no scored prefill programs", param="prompt_logprobs", code="unsupported")
    _check_stages(state, spec)
    total = prompt_len + spec.max_tokens
    if total > limits.max_context:
        message = (
            f"{prompt_len} prompt tokens and max_tokens {spec.max_tokens} need {total} tokens of context, "
            f"the limit is {limits.max_context}; shorten the prompt or lower max_tokens"
        )
        raise RequestError(message, param="prompt", code="context_length_exceeded")
    needed = pages_for(total + limits.draft_extent, limits.page_size)
    if needed > limits.pages:
        message = (
            f"{prompt_len} prompt tokens and max_tokens {spec.max_tokens} need {needed} pages of "
            f"{limits.page_size} tokens, the cache has {limits.pages}; shorten the prompt or lower max_tokens"
        )
        raise RequestError(message, param="max_tokens", code="context_length_exceeded")
    return needed


def _check_stages(state: State, spec: RequestSpec) -> None:
    """Whether the catalogue has the programs that the request's stages need."""
    programs = state.programs
    rows = programs.scored_prefill if spec.scored else programs.prefill
    largest_image = int(programs.tokens[programs.vision].max(initial=0))
    check_images(spec, state.limits, int(programs.tokens[rows].max(initial=0)), largest_image)
    if spec.restored_len and not len(programs.restore):
        raise RequestError("this core has no restore programs", param="restored_len", code="unsupported")
    if spec.external and not spec.restored_len:
        raise RequestError("external state needs its length", param="restored_len", code="invalid_value")
    captures.check_source(state.retention.checkpoints, spec)
    windows = state.limits.state_rows and len(programs.snapshot) and len(programs.restore)
    if captures.needs_private_row(spec, state.limits.feature_tokens) and not windows:
        message = (
            f"the images have more features than the storage holds ({state.limits.feature_tokens}), and this core "
            "has no state rows, snapshot and restore programs to work in windows"
        )
        raise RequestError(message, param="image_spans", code="unsupported")


def admit(state: State, spec: RequestSpec, now_ns: int) -> tuple[State, RequestHandle]:
    """Give a request the lowest free slot; it takes part in the next plan.

    A request that is admitted while a frame runs is outside that frame's interval.

    Raises:
        RequestError: It can never fit.
        CapacityError: No slot, pages or private state row now; wait for a request to retire.
    """
    needed = required_pages(state, spec)
    if not can_admit(state, spec):
        free = state.limits.pages - int(state.requests.reserved_pages.sum())
        slots = int(np.count_nonzero(state.requests.phase == FREE))
        message = f"the request needs a slot and {needed} pages; {slots} slots and {free} pages are free"
        if not captures.private_row_obtainable(state, spec):
            message += "; its images need a state row, all are in use"
        raise CapacityError(message)
    slot = int(np.flatnonzero(state.requests.phase == FREE)[0])
    requests = state.requests.draft()
    requests.generation[slot] += 1
    requests.epoch[slot] += 1
    requests.prompt_len[slot], requests.max_tokens[slot] = len(spec.prompt), spec.max_tokens
    requests.scored[slot], requests.constraints[slot] = spec.scored, int(spec.constraints)
    first_stage(requests, slot, spec, state.limits)
    handle, draft = RequestHandle(slot, int(requests.generation[slot])), Draft(state)
    set_bounds(requests, slot, spec, captures.admit(draft, requests, handle, spec, now_ns))
    requests.reserved_pages[slot], requests.last_use_ns[slot] = needed, now_ns
    specs = (*state.specs[:slot], spec, *state.specs[slot + 1 :])
    counters = dataclasses.replace(state.counters, admitted=state.counters.admitted + 1)
    admitted = dataclasses.replace(
        state,
        now_ns=max(state.now_ns, int(now_ns)),
        requests=requests.sealed(),
        specs=specs,
        counters=counters,
        acceptance=reset_slots(state.acceptance, [slot]),
        retention=draft.sealed(),
    )
    return admitted, handle


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

    The offer ends with the request's next output: the host looks again, and offers again.

    Raises:
        InvariantError: A negative number, or a handle that was never given out.
    """
    if proposals < 0:
        raise InvariantError(f"{handle} offers {proposals} proposals")
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
        StalePlanError: A lane's request changed since the plan was made, or the window is
            not free; plan again.
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
    return dataclasses.replace(
        state,
        requests=requests.sealed(),
        pool=_take_pages(state.pool, requests, slots, state.limits.page_size),
        frames=(*state.frames, frame),
        last_fence=fence,
        costs=attempt(state.costs, index, state.now_ns),
        retention=captures.begin_copies(state.retention, plan.lanes, fence),
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
    draft = draft_extent if lane_width(plan.shape) > 1 else 0
    ends = [
        start + length + draft if role is LaneRole.DECODE else start + length if role is LaneRole.PROMPT else start
        for _, role, start, length, _, _ in plan.lanes  # other roles write no positions of their own
    ]
    requests.written_len[slots] = np.maximum(requests.written_len[slots], np.array(ends, np.int64))


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
    return slots


def _take_pages(pool: PagePool, requests: Requests, slots: np.ndarray, page_size: int) -> PagePool:
    missing = -(-requests.written_len[slots] // page_size) - pool.held[slots]
    needs = [(slot, more) for slot, more in zip(slots.tolist(), missing.tolist(), strict=True) if more > 0]
    return take(pool, needs) if needs else pool


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


def published_output(state: State, handle: RequestHandle, fence: Fence) -> State:
    """Report the first visible output of a request from the fence completed last; see `published_outputs`."""
    return published_outputs(state, (handle,), fence)


def published_outputs(state: State, handles: Sequence[RequestHandle], fence: Fence) -> State:
    """Report the first visible output of each of `handles` from the fence completed last.

    Replaces that interval's delivery update by one served delivery, computed from the price
    before the interval, and resets the output age to now. Later output of the same burst and
    a handle that no longer holds its slot change nothing.

    Raises:
        InvariantError: Another frame completed since, or the fence served no tokens to a
            handle; report publications before the next completion.
    """
    interval = state.interval
    if interval is None or interval.fence != fence:
        last = interval.fence if interval else "none"
        raise InvariantError(f"publication of fence {fence} reported after the completion of {last}")
    served = interval.served.tolist()
    for handle in handles:
        if not 0 <= handle.slot < state.limits.slots or served[handle.slot] != handle.generation:
            raise InvariantError(f"fence {fence} served no tokens to {handle}")
    named = np.array([handle.slot for handle in handles], np.int64)
    requests = state.requests
    current = (requests.generation[named] == interval.served[named]) & requests.streams[named]
    slots = named[current & ~interval.published[named]]
    if not len(slots):
        return state
    visible_ns, published, delivery_r = (
        column.copy() for column in (requests.visible_ns, interval.published, requests.delivery_r)
    )
    visible_ns[slots], published[slots] = state.now_ns, True
    if interval.duration_ms > 0:
        delivery_r[slots] = corrected_deliveries(
            interval.delivery_r[slots], interval.duration_ms, interval.delivery_n[slots], state.policy.adaptation_ms
        )
    for column in (visible_ns, published, delivery_r):
        column.setflags(write=False)
    return dataclasses.replace(
        state,
        requests=dataclasses.replace(requests, visible_ns=visible_ns, delivery_r=delivery_r),
        interval=dataclasses.replace(interval, published=published),
    )


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
