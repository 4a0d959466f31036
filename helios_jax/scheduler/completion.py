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
from helios_jax.scheduler import cost
from helios_jax.scheduler.lifecycle import count_finish, next_endpoint, release
from helios_jax.scheduler.programs import index_of
from helios_jax.scheduler.service import charge_deliveries, charge_tokens
from helios_jax.scheduler.state import DECODE, PROMPT, REASONS, RETIRING, Counters, Frame, Interval, Requests, State
from helios_jax.scheduler.types import (
    CompletionRecord,
    Event,
    ExecutionTiming,
    Fence,
    FinishReason,
    GeneratedToken,
    Lane,
    LaneRole,
    RequestFinished,
)

_MAX_TOKEN = 2**31
_INTEGERS = (int, np.integer)
_ERROR, _STOP, _LENGTH = FinishReason.ERROR, FinishReason.STOP, FinishReason.LENGTH
_INITIALIZE, _PROMPT = LaneRole.INITIALIZE, LaneRole.PROMPT


def complete(
    state: State, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming
) -> tuple[State, tuple[Event, ...]]:
    """Account for a completed frame.

    Returns:
        The new state and the events in lane order; a request's tokens come before its end.

    Raises:
        InvariantError: The timing or a lane's record is malformed; the state is untouched.
    """
    frame = next((frame for frame in state.frames if frame.fence == fence), None)
    if frame is None:
        ignored = dataclasses.replace(state.counters, ignored_completions=state.counters.ignored_completions + 1)
        return dataclasses.replace(state, counters=ignored), ()
    _check_timing(timing)
    ordered = _checked_records(frame, records)
    requests, counters = state.requests.draft(), state.counters
    before = requests.consumed_len + requests.output_len
    visible_before = requests.delivery_r.copy()
    events: list[Event] = []
    ended: list[int] = []
    for lane, record in zip(frame.plan.lanes, ordered, strict=True):
        if requests.phase[lane.handle.slot] == RETIRING:
            continue  # cancelled while it ran: the device's work is dropped
        reason = _advance(state, requests, lane, record, events)
        if reason is not None:
            ended.append(lane.handle.slot)
            counters = count_finish(counters, reason)
    served = requests.consumed_len + requests.output_len - before
    raw, execution = cost.raw_device_ns(timing), cost.execution_ns(timing)
    duration_ms = execution / cost.NS_PER_MS if raw > 0 else 0.0
    if duration_ms > 0:
        _charge(state, requests, frame, duration_ms, served)
    interval = _interval(frame, duration_ms, requests, served, visible_before)
    requests.phase[ended] = RETIRING
    index = index_of(state.catalog, frame.plan.shape)
    completed = dataclasses.replace(
        state,
        requests=requests.sealed(),
        costs=cost.observe(state.costs, index, cost.sample_ns(timing), state.now_ns, state.policy.estimate_ttl_ns),
        frames=tuple(other for other in state.frames if other is not frame),
        interval=interval,
        counters=_count_execution(counters, frame, execution, measured=raw > 0),
    )
    return release(completed), tuple(events)


def _check_timing(timing: ExecutionTiming) -> None:
    values = (*timing.device_ns, timing.wall_ns, timing.embedding_delay_ns)
    if not all(_is_integer(value) for value in values):
        raise InvariantError(f"execution times must be integers of nanoseconds, got {timing}")
    if timing.wall_ns < 0 or timing.embedding_delay_ns < 0 or max(values) >= 2**62:
        raise InvariantError(
            f"wall time and embedding delay must be nonnegative and times below 2**62 ns, got {timing}"
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, _INTEGERS) and not isinstance(value, bool)


def _checked_records(frame: Frame, records: Sequence[CompletionRecord]) -> list[CompletionRecord]:
    """One valid record a lane, in lane order."""
    lanes = frame.plan.lanes
    by_handle = {record.handle: record for record in records}
    if len(records) != len(lanes) or len(by_handle) != len(lanes):
        raise InvariantError(f"fence {frame.fence} has {len(lanes)} lanes, its completion names {len(by_handle)} "
                             f"requests in {len(records)} records")  # fmt: skip
    ordered = []
    for lane in lanes:
        record = by_handle.get(lane.handle)
        if record is None:
            raise InvariantError(f"fence {frame.fence} completed without {lane.handle}")
        _check_lane(frame.fence, lane, record)
        ordered.append(record)
    return ordered


def _check_lane(fence: Fence, lane: Lane, record: CompletionRecord) -> None:
    """The device did exactly what the lane says; an invalid lane may lack its token."""
    end, tokens = lane.start + lane.length, record.tokens
    if not _is_integer(record.consumed) or record.consumed != lane.length:
        problem = f"consumed {record.consumed!r} tokens, {lane.length} were scheduled"
    elif not _is_integer(record.committed_len) or record.committed_len != end:
        problem = f"committed {record.committed_len!r}, expected {end}"
    elif not isinstance(record.valid, (bool, np.bool_)):
        problem = f"valid must be a boolean, got {record.valid!r}"
    elif len(tokens) != lane.emits and (record.valid or len(tokens)):
        problem = f"sampled {len(tokens)} tokens, expected {int(lane.emits)}"
    elif record.valid and not all(_is_integer(token) and 0 <= token < _MAX_TOKEN for token in tokens):
        problem = f"{tokens!r} are not token ids"
    else:
        return
    raise InvariantError(f"fence {fence}, {lane.handle}: {problem}")


def _advance(
    state: State, requests: Requests, lane: Lane, record: CompletionRecord, events: list[Event]
) -> FinishReason | None:
    """Advance one lane's columns and emit its events; the reason if its request ended."""
    slot, spec = lane.handle.slot, state.specs[lane.handle.slot]
    assert spec is not None  # an occupied slot has its spec: invariant 4
    requests.epoch[slot] += 1
    if not record.valid:
        events.append(RequestFinished(lane.handle, _ERROR))
        return _ERROR
    if lane.role is _INITIALIZE:
        requests.phase[slot] = PROMPT
        return None
    requests.committed_len[slot] += lane.length
    if lane.role is _PROMPT:
        consumed = int(requests.consumed_len[slot]) + lane.length
        requests.consumed_len[slot] = consumed
        if consumed < len(spec.prompt):
            requests.endpoint[slot] = next_endpoint(spec, consumed)
            return None
        requests.phase[slot] = DECODE
        requests.visible_ns[slot] = state.now_ns
        if not lane.emits:  # a scored prompt without output
            events.append(RequestFinished(lane.handle, _LENGTH))
            return _LENGTH
    return _append_token(requests, lane, int(record.tokens[0]), spec.stop_token_ids, spec.output_len, events)


def _append_token(
    requests: Requests, lane: Lane, token: int, stops: frozenset[int], earlier: int, events: list[Event]
) -> FinishReason | None:
    slot = lane.handle.slot
    count = int(requests.output_len[slot]) + 1
    requests.output_len[slot] = count
    events.append(GeneratedToken(lane.handle, token, earlier + count - 1))
    if token in stops:
        events.append(RequestFinished(lane.handle, _STOP, token))
        return _STOP
    if count >= requests.max_tokens[slot]:
        events.append(RequestFinished(lane.handle, _LENGTH))
        return _LENGTH
    return None


def _members(requests: Requests, frame: Frame) -> np.ndarray:
    """bool [slots]: participants of the interval that still run; one that was freed meanwhile has no history."""
    return (frame.participants == requests.generation) & requests.runnable


def _charge(state: State, requests: Requests, frame: Frame, duration_ms: float, served: np.ndarray) -> None:
    """Charge one measured interval to the histories of its participants, in place."""
    members, tau = _members(requests, frame), state.policy.adaptation_ms
    requests.token_r[:] = charge_tokens(
        requests.token_r, frame.first_token_r, members, duration_ms, served.astype(np.float64), frame.token_n, tau
    )
    requests.delivery_r[:] = charge_deliveries(requests.delivery_r, members, duration_ms, frame.delivery_n, tau)


def _interval(
    frame: Frame, duration_ms: float, requests: Requests, served: np.ndarray, delivery_r: np.ndarray
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
    return Interval(frame.fence, duration_ms, emitted, frame.delivery_n, delivery_r, published)


def _count_execution(counters: Counters, frame: Frame, execution_ns: int, *, measured: bool) -> Counters:
    reason = REASONS.index(frame.plan.reason)
    executions, nanoseconds = list(counters.executions), list(counters.execution_ns)
    executions[reason] += 1
    nanoseconds[reason] += execution_ns
    return dataclasses.replace(
        counters,
        executions=tuple(executions),
        execution_ns=tuple(nanoseconds),
        unmeasured_frames=counters.unmeasured_frames + (not measured),
    )
