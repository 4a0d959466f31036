"""`complete`: what the device reports becomes state, all lanes or none.

1. A completion for a fence that is not outstanding is counted and ignored.
2. The timing and every lane are validated against the frame; nothing has changed until then.
3. The program's duration estimate learns from the device interval.
4. Service: useful tokens are differences against the committed counters of this moment;
   every participant is charged one interval, unselected ones with zero.
5. Lanes advance, events are made, and slots whose last fence this was are freed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler import captures, cost, terminal
from helios_jax.scheduler.advance import advance_lane, advance_rounds
from helios_jax.scheduler.capture_draft import Draft
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.lifecycle import count_finish, keeps_state
from helios_jax.scheduler.page_pressure import follow
from helios_jax.scheduler.programs import index_of
from helios_jax.scheduler.records import check_timing, checked_records, has_ended
from helios_jax.scheduler.refresh import settle
from helios_jax.scheduler.retirement import end_request, release
from helios_jax.scheduler.service import charge
from helios_jax.scheduler.state import (
    REASONS,
    TERMINAL,
    Counters,
    Frame,
    Interval,
    Requests,
    State,
)
from helios_jax.scheduler.types import (
    CompletionRecord,
    Event,
    ExecutionTiming,
    Fence,
    FinishReason,
    Lane,
    LaneRole,
    RequestRebound,
)
from helios_jax.scheduler.verdicts import check_sidecars, learned


def complete(
    state: State, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming
) -> tuple[State, tuple[Event, ...]]:
    """Account for a completed frame.

    Returns:
        The new state and the events, in lane order: the order of the plan's lanes, the prompt row of
        a mixed frame among them; a request's tokens come before its end.

    Raises:
        InvariantError: The timing or a lane's record is malformed, or the program allocates its target
            rows itself (its confidence must come with it); the state is untouched.
    """
    return _complete(state, fence, records, timing)


def complete_with_survival(
    state: State, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming, survival: np.ndarray
) -> tuple[State, tuple[Event, ...]]:
    """`complete` with `completion_speculative_survival`: float [slots, draft], NaN where nothing was evaluated."""
    return _complete(state, fence, records, timing, survival=survival)


def complete_packed_round(
    state: State, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming, confidence: np.ndarray
) -> tuple[State, tuple[Event, ...]]:
    """`complete` of a program with a confidence sidecar, float32 [2, slots, draft].

    Plane 0 is the confidence of each proposal, plane 1 the joint probability of the prefix that it ends.
    """
    return _complete(state, fence, records, timing, confidence=confidence)


def complete_packed_round_with_survival(
    state: State, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming,
    confidence: np.ndarray, survival: np.ndarray,
) -> tuple[State, tuple[Event, ...]]:  # fmt: skip
    """`complete_packed_round` and `complete_with_survival` in one."""
    return _complete(state, fence, records, timing, confidence, survival)


def _complete(
    state: State, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming,
    confidence: np.ndarray | None = None, survival: np.ndarray | None = None,
) -> tuple[State, tuple[Event, ...]]:  # fmt: skip
    frame = next((frame for frame in state.frames if frame.fence == fence), None)
    if frame is None:
        ignored = dataclasses.replace(state.counters, ignored_completions=state.counters.ignored_completions + 1)
        return dataclasses.replace(state, counters=ignored), ()
    check_timing(timing)
    if frame is not state.frames[0]:
        raise InvariantError(f"fence {fence} completed before fence {state.frames[0].fence}; the device is serial")
    ordered = checked_records(state, frame, records)
    check_sidecars(state, frame, ordered, confidence, survival)
    requests, counters = state.requests.draft(), state.counters
    output_before = requests.output_len.copy()
    before = requests.consumed_len + output_before
    visible_before = requests.delivery_r.copy()
    draft, phases = Draft(state), state.requests.phase.tolist()
    events: list[Event] = []
    ended: list[tuple[int, FinishReason]] = []
    rounds: list[tuple[Lane, CompletionRecord]] = []
    for lane, record in zip(frame.plan.lanes, ordered, strict=True):
        if phases[lane.handle.slot] >= TERMINAL and has_ended(phases[lane.handle.slot], lane.role):
            # It was cancelled while it ran, or ended in the frame before.
            captures.drop_lane(draft, requests, lane, record, fence)
        elif lane.role is LaneRole.DECODE:
            rounds.append((lane, record))
        elif (reason := advance_lane(draft, requests, lane, record, events, fence)) is not None:
            ended.append((lane.handle.slot, reason))
    ended += advance_rounds(draft, requests, rounds, events)
    if 0 < len(rounds) < len(ordered):  # a mixed frame: its prompt row went first
        place = {lane.handle: row for row, lane in enumerate(frame.plan.lanes)}
        events.sort(key=lambda event: place[event.handle])
    rebound = _count_rebound(events) if frame.plan.shape.kind is ProgramKind.RESTORE else 0
    for _, reason in ended:
        counters = count_finish(counters, reason)
    served = requests.consumed_len + requests.output_len - before
    raw, execution = cost.raw_device_ns(timing), cost.execution_ns(timing)
    duration_ms = execution / cost.NS_PER_MS if raw > 0 else 0.0
    if duration_ms > 0:
        charge(requests, frame, _members(state, requests, frame), duration_ms, served, state.policy.adaptation_ms)
        terminal.earn(draft, frame.plan.lanes, served, execution)
    interval = _interval(frame, duration_ms, requests, served, visible_before, state.now_ns)
    frames = tuple(other for other in state.frames if other is not frame)
    for slot, reason in ended:
        end_request(draft, requests, slot, frames, keep_state=keeps_state(reason))
    index = index_of(state.catalog, frame.plan.shape)
    completed = dataclasses.replace(
        state,
        requests=requests.sealed(),
        costs=cost.observe(state.costs, index, cost.sample_ns(timing), state.now_ns, state.policy.estimate_ttl_ns),
        frames=frames,
        interval=interval,
        ledgers=settle(state.ledgers, frame.plan.reason, fence, execution, valid=raw > 0),
        counters=_count_execution(counters, frame, execution, measured=raw > 0, rebound=rebound),
        pool=follow(state.pool, draft.checkpoints),
        retention=draft.sealed(),
        acceptance=learned(state, frame, ordered, requests.output_len - output_before, confidence, survival),
    )
    return release(completed), tuple(events)


def _members(state: State, requests: Requests, frame: Frame) -> np.ndarray:
    """bool [slots]: participants of the interval that still run; one that was freed meanwhile has no history.

    A request that this frame rebound to a fresh generation took part as well.
    """
    return (frame.participants == state.requests.generation) & requests.active


def _interval(
    frame: Frame, duration_ms: float, requests: Requests, served: np.ndarray, delivery_r: np.ndarray, now_ns: int
) -> Interval:
    """What a publication of this fence may still correct.

    Only requests that got an output token can publish; a delivery normaliser counts for the
    ones that decoded when the interval began, and is unknown for a prompt.
    """
    emitted = np.zeros(len(served), np.int64)
    slots = [lane.handle.slot for lane in frame.plan.lanes if lane.emits]
    emitted[slots] = np.where(served[slots] > 0, requests.generation[slots], 0)
    published = np.zeros(len(served), np.bool_)
    for column in (emitted, delivery_r, published):
        column.setflags(write=False)
    return Interval(frame.fence, duration_ms, emitted, frame.delivery_n, delivery_r, published, now_ns)


def _count_rebound(events: list[Event]) -> int:
    return sum(isinstance(event, RequestRebound) for event in events)


def _count_execution(counters: Counters, frame: Frame, execution_ns: int, *, measured: bool, rebound: int) -> Counters:
    reason = REASONS.index(frame.plan.reason)
    executions, nanoseconds = list(counters.executions), list(counters.execution_ns)
    executions[reason] += 1
    nanoseconds[reason] += execution_ns
    return dataclasses.replace(
        counters,
        executions=tuple(executions),
        execution_ns=tuple(nanoseconds),
        rebound=counters.rebound + rebound,
        unmeasured_frames=counters.unmeasured_frames + (not measured),
    )
