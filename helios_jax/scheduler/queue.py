"""The two-slot execution queue: what may be appended to it, and the state that it leads to.

The device works through its frames in order. While one runs, the next may be waiting behind
it, so that the device does not idle while the host plans. The life of an appended frame:

1. `closed` says whether anything may be appended at all: a slot of the window is free, no
   outstanding frame needs feedback, and none has overrun its expected end.
2. `project` gives the state that is expected when the outstanding frames are over. Selection
   runs on it with every candidate, those that could never be appended included.
3. The winner is appended if it needs no feedback (`needs_feedback`) and names no request that
   may be over by then (`may_be_over`). Otherwise nothing is submitted until the window drains:
   a lower-value queueable program does not displace it.
4. `commit` freezes what the frame is expected to serve, so the next projection can use it.

There is no limit in milliseconds on a frame or on the queue. Projection publishes nothing and
commits nothing: it is a copy that selection reads and drops.

Source: specification, "Planning and the execution queue".
"""

from __future__ import annotations

import dataclasses

import numpy as np

from helios_jax.scheduler.catalog import ProgramKind, ProposalSource, packed_rows
from helios_jax.scheduler.cost import NS_PER_MS, is_fresh
from helios_jax.scheduler.service import charge, corrected_deliveries
from helios_jax.scheduler.state import RETIRING, Frame, Requests, State
from helios_jax.scheduler.types import FEEDBACK, LaneRole, ScheduledPlan

_QUEUEABLE = (ProgramKind.DECODE, ProgramKind.SPECULATIVE)


def needs_feedback(state: State, index: int, slots: np.ndarray) -> bool:
    """Whether a program with these lanes must run alone and complete before anything else is submitted.

    Only ordinary decode and complete speculative rounds can do without, with a measured and
    fresh duration, and for lanes whose next input does not depend on the host seeing this output.
    Copied proposals do: the host finds them in the output so far, which is a history input.

    Args:
        index: Row of the program.
        slots: int [lanes] slots of its lanes.
    """
    shape = state.catalog.shapes[index]
    copies = shape.proposal_source is ProposalSource.COPY and shape.proposal_depth > 0
    if shape.kind not in _QUEUEABLE or copies:
        return True
    if not is_fresh(state.costs, index, state.now_ns, state.policy.estimate_ttl_ns):
        return True
    return bool((state.requests.constraints[slots] & int(FEEDBACK)).any())


def closed(state: State) -> str:
    """Why no frame may be submitted now; empty if one may."""
    frames = state.frames
    if len(frames) >= state.limits.frames:
        return f"the window of {state.limits.frames} frames is full"
    alone = next((frame.fence for frame in frames if frame.alone), None)
    if alone is not None:
        return f"fence {alone} is outstanding and needs completion feedback"
    if frames and state.now_ns > expected_end_ns(state):
        return f"fence {frames[-1].fence} has overrun its expected end"
    return ""


def expected_end_ns(state: State) -> int:
    """When the outstanding frames are expected to be over; the last completion without any.

    A frame starts at its dispatch or when the one before it is over, whichever is later.
    """
    end_ns = state.interval.completed_ns if state.interval else 0
    for frame in state.frames:
        end_ns = max(end_ns, frame.dispatched_ns) + frame.plan.estimated_duration_ns
    return end_ns


def expected_service(plan: ScheduledPlan, num_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a generation program is to serve, [slots] each, read-only: `Frame.expected_tokens` and on."""
    tokens, most = np.zeros(num_slots), np.zeros(num_slots, np.int64)
    handles, roles, _, lengths, _, _ = zip(*plan.lanes, strict=True)
    rows = np.array([role is LaneRole.DECODE for role in roles])
    slots = np.array([slot for slot, _ in handles], np.int64)[rows]
    tokens[slots] = np.array(plan.expected_tokens)[rows] if plan.expected_tokens else 1.0
    most[slots] = np.minimum(np.array(lengths, np.int64)[rows], packed_rows(plan.shape))
    columns = tokens, (most > 0).astype(np.float64), most
    for column in columns:
        column.setflags(write=False)
    return columns


def project(state: State) -> State:
    """The state at the queue's expected end, for selection only.

    1. Prices: each frame's frozen expected service over its estimated duration, by the same
       update as measured service; participants without service count as well.
    2. Ages: a request with an expected delivery is as old as that delivery.
    3. Positions and output: the most that each queued lane can advance, min(ceiling, P). A
       request that is certainly over by then leaves. One that may be over or not stays, with
       its last row to go: what names it is visible, and needs feedback (`may_be_over`).
    4. Offers of copies stand for those to come, so that copy rounds stay visible: one that wins
       drains the window (`needs_feedback`), and the host offers anew before it is planned again.

    The window of the result is empty; without outstanding frames it is the state itself. A state
    is a value, so it is projected once: planning and committing share the result.
    """
    if not state.frames:
        return state
    known: State | None = vars(state).get(_MEMO)
    if known is None:
        known = vars(state)[_MEMO] = _projected(state)
    return known


_MEMO = "_projection"  # not a field: it takes no part in a state's value


def _projected(state: State) -> State:
    requests = _selection_copy(state.requests)
    end_ns = state.interval.completed_ns if state.interval else 0
    for frame in state.frames:
        end_ns = max(end_ns, frame.dispatched_ns) + frame.plan.estimated_duration_ns
        _serve(state, requests, frame, end_ns)
    _advance(state, requests)
    return dataclasses.replace(state, now_ns=max(end_ns, state.now_ns), requests=requests.sealed(), frames=())


def _selection_copy(requests: Requests) -> Requests:
    """The requests with writable copies of the columns that a projection moves."""
    moved = ("phase", "committed_len", "output_len", "visible_ns", "token_r", "delivery_r")
    return dataclasses.replace(requests, **{name: getattr(requests, name).copy() for name in moved})


def _serve(state: State, requests: Requests, frame: Frame, end_ns: int) -> None:
    """Apply one frame's expected service to the prices and ages, in place."""
    members = (frame.participants == requests.generation) & requests.active
    duration_ms, tau_ms = frame.plan.estimated_duration_ns / NS_PER_MS, state.policy.adaptation_ms
    if duration_ms <= 0:
        return  # discovery: it runs alone, and no projection is asked for
    delivered = members & (frame.expected_deliveries > 0)
    before = requests.delivery_r[delivered]
    charge(requests, frame, members, duration_ms, frame.expected_tokens, tau_ms)
    requests.delivery_r[delivered] = corrected_deliveries(before, duration_ms, frame.delivery_n[delivered], tau_ms)
    requests.visible_ns[delivered] = end_ns


def may_be_over(state: State) -> np.ndarray:
    """bool [slots], requests that the outstanding frames may or may not bring to their output limit.

    Whether such a request has a next step is known at completion only, so what names it needs
    feedback. Queueing programs without it instead costs it a frame for each of its last rounds:
    docs/LOG.md, "Requests that may be over".
    """
    requests = state.requests
    at_least, at_most = _progress(state)
    left = requests.max_tokens - requests.output_len
    return (at_most > 0) & requests.active & (at_least < left) & (left <= at_most)


def _progress(state: State) -> tuple[np.ndarray, np.ndarray]:
    """Fewest and most tokens that each request gets from the outstanding frames, int64 [slots] each."""
    at_least, at_most = np.zeros((2, state.limits.slots), np.int64)
    for frame in state.frames:
        at_least += frame.most_tokens > 0
        at_most += frame.most_tokens
    return at_least, at_most


def _advance(state: State, requests: Requests) -> None:
    """Move positions and outputs of the queued lanes to their bounds, in place."""
    at_least, at_most = _progress(state)
    left = requests.max_tokens - requests.output_len
    queued, over = (at_most > 0) & requests.active, at_least >= left
    moved = np.where(over, left, np.minimum(at_most, left - 1))[queued]
    requests.committed_len[queued] += moved
    requests.output_len[queued] += moved
    over &= queued
    requests.phase[over] = RETIRING
