"""A catalogue with a program of every kind, and a state with a frame of each kind in flight.

Plans are written by hand here: `commit` takes any plan that fits the present, whoever chose it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from helios_jax.scheduler import (
    Catalog,
    CompletionRecord,
    Event,
    ExecutionTiming,
    ImageSpan,
    Lane,
    LaneRole,
    Limits,
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    RequestHandle,
    ScheduledPlan,
    SelectionReason,
    State,
    advance_to,
    commit,
    complete,
    complete_packed_round,
    complete_packed_round_with_survival,
    complete_with_survival,
    new_state,
    plan_next,
    preempt,
)
from helios_jax.scheduler.catalog import Allocation, ProposalSource
from helios_jax.scheduler.state import Phase
from tests.unit.scheduler_toy import MS, admitted, measured, records_of, request

_K = ProgramKind
_LEARNED, _COPY = ProposalSource.LEARNED, ProposalSource.COPY
_HOST, _DEVICE = Allocation.QUERY_LENGTH, Allocation.PREFIX_LIMIT

# One shape of each kind, by the name that the tests use.
SHAPES = {
    "initialize": ProgramShape(_K.INITIALIZE, 4, 0),
    "restore": ProgramShape(_K.RESTORE, 2, 0),
    "snapshot": ProgramShape(_K.SNAPSHOT, 4, 0),
    "vision": ProgramShape(_K.VISION, 2, 4),
    "prefill_row": ProgramShape(_K.PREFILL, 1, 8),
    "prefill_packed": ProgramShape(_K.PREFILL, 3, 8),
    "scored": ProgramShape(_K.SCORED_PREFILL, 2, 8),
    "decode": ProgramShape(_K.DECODE, 4, 1),
    "width_one": ProgramShape(_K.SPECULATIVE, 4, 1, 0, 4, proposal_source=_LEARNED),
    "rectangular": ProgramShape(_K.SPECULATIVE, 2, 3, 2, 6, proposal_source=_LEARNED),
    "ragged_host": ProgramShape(_K.SPECULATIVE, 4, 4, 3, 7, 0, _LEARNED, _HOST),
    "ragged_device": ProgramShape(_K.SPECULATIVE, 4, 4, 3, 6, 0, _LEARNED, _DEVICE),
    "copy": ProgramShape(_K.SPECULATIVE, 2, 3, 2, 6, proposal_source=_COPY),
    "mixed": ProgramShape(_K.MIXED, 4, 2, 1, 14, 8, _LEARNED),
    "mixed_plain": ProgramShape(_K.MIXED, 2, 1, 0, 9, 8, _LEARNED),
}
DEPTH = max(shape.proposal_depth for shape in SHAPES.values())


def every_kind() -> Catalog:
    """The shapes above with smaller companions, so that something can be chosen."""
    more = [ProgramShape(_K.DECODE, b, 1) for b in (1, 2)]
    more += [ProgramShape(kind, 1, 0) for kind in (_K.INITIALIZE, _K.SNAPSHOT, _K.RESTORE)]
    more += [ProgramShape(_K.PREFILL, 1, 4), ProgramShape(_K.VISION, 1, 4)]
    more += [ProgramShape(_K.SPECULATIVE, 1, 2, 1, 2, proposal_source=_LEARNED)]
    return Catalog((*SHAPES.values(), *more), aligned=False)


def every_kind_state(**limits: int) -> State:
    """A state in which every program takes 1 ms, ready for windows of images and snapshots."""
    sizes = {"slots": 4, "pages": 64, "page_size": 4, "max_context": 48, "state_rows": 4, "feature_tokens": 4,
             "draft_extent": 2, **limits}  # fmt: skip
    policy = PolicyConfig(checkpoint_extra_work_fraction=1.0)
    return measured(new_state(every_kind(), Limits(**sizes), policy), lambda _: MS)


def fly(state: State, name: str, *lanes: Lane, prompt_row: int = -1, estimate_ns: int = MS) -> State:
    """Commit a hand-written plan."""
    shape = SHAPES[name]
    epochs = tuple(int(state.requests.epoch[lane.handle.slot]) for lane in lanes)
    queueable = shape.kind in (_K.DECODE, _K.SPECULATIVE)
    plan = ScheduledPlan(
        shape, lanes, epochs, estimate_ns, 1.0, 0.0, SelectionReason.ORDINARY, not queueable, prompt_row=prompt_row
    )
    return commit(state, plan, state.last_fence + 1)


def confidence_of(slots: int = 4, value: float = 0.5, depth: int = DEPTH) -> np.ndarray:
    """A valid sidecar: every proposal has the same confidence."""
    each = np.full((slots, depth), value, np.float32)
    return np.stack([each, np.cumprod(each, axis=1)])


def survival_of(slots: int = 4, value: float = 0.5, depth: int = DEPTH) -> np.ndarray:
    return np.cumprod(np.full((slots, depth), value), axis=1)


def complete_any(
    state: State, fence: int, records: list[CompletionRecord], timing: ExecutionTiming,
    confidence: np.ndarray | None = None, survival: np.ndarray | None = None,
) -> tuple[State, tuple[Event, ...]]:  # fmt: skip
    """The variant of `complete` that takes the sidecars at hand."""
    if confidence is not None and survival is not None:
        return complete_packed_round_with_survival(state, fence, records, timing, confidence, survival)
    if confidence is not None:
        return complete_packed_round(state, fence, records, timing, confidence)
    if survival is not None:
        return complete_with_survival(state, fence, records, timing, survival)
    return complete(state, fence, records, timing)


def healthy(state: State, *, device_ms: float = 1.0) -> State:
    """Complete the oldest frame as a healthy device would, with no proposal judged."""
    frame = state.frames[0]
    timing = ExecutionTiming((int(device_ms * MS),), int(device_ms * MS))
    device = frame.plan.shape.allocation is _DEVICE
    records = list(records_of(frame.plan))
    done = advance_to(state, state.now_ns + int(device_ms * MS))
    return complete_any(done, frame.fence, records, timing, confidence_of() if device else None)[0]


def run_until(state: State, done: Callable[[State], bool]) -> State:
    """Serve as the policy chooses until the condition holds."""
    for _ in range(100):
        if done(state):
            return state
        plan = plan_next(state)
        assert plan is not None
        state = healthy(commit(state, plan, state.last_fence + 1))
    raise AssertionError("the condition never held")


def in_phase(phase: Phase, *handles: RequestHandle) -> Callable[[State], bool]:
    return lambda state: all(state.requests.phase[handle.slot] == phase for handle in handles)


def decoders(num: int = 3, state: State | None = None) -> tuple[State, list[RequestHandle]]:
    """`num` streams with 12 tokens of output ahead at most, the last two of them with copies at hand."""
    base = every_kind_state(state_rows=0) if state is None else state
    base, handles = admitted(base, *[request(5, 13, stop_token_ids=frozenset({99}))] * num)
    base = run_until(base, in_phase(Phase.DECODE, *handles))
    requests = base.requests.draft()
    requests.proposals[:num] = 2
    return dataclasses.replace(base, requests=requests.sealed()), handles


def decode_lanes(state: State, handles: list[RequestHandle], *lengths: int) -> list[Lane]:
    starts = [int(state.requests.committed_len[handle.slot]) for handle in handles]
    return [
        Lane(handle, LaneRole.DECODE, start, n, True) for handle, start, n in zip(handles, starts, lengths, strict=True)
    ]


def _stage(name: str) -> State:
    """A frame of a state operation with two lanes."""
    state = every_kind_state()
    if name == "initialize":
        state, handles = admitted(state, request(5), request(6))
        return fly(state, name, *[Lane(handle, LaneRole.INITIALIZE, 0, 0, False) for handle in handles])
    if name == "restore":
        state, handles = admitted(state, *[request(9, restored_len=4)] * 2)
        return fly(state, name, *[Lane(handle, LaneRole.RESTORE, 4, 0, False) for handle in handles])
    if name == "vision":
        state, handles = admitted(state, *[request(9, image_spans=(ImageSpan(2, 5), ImageSpan(5, 6)))] * 2)
        state = run_until(state, in_phase(Phase.VISION, *handles))
        return fly(state, name, *[Lane(handle, LaneRole.VISION, 0, 3, False, 0) for handle in handles])
    state, handles = admitted(state, *[request(8)] * 2)
    state = run_until(state, in_phase(Phase.SNAPSHOT, *handles))
    rows = state.requests.state_row
    return fly(
        state, "snapshot", *[Lane(handle, LaneRole.SNAPSHOT, 8, 0, False, int(rows[handle.slot])) for handle in handles]
    )


def _window() -> State:
    """The private snapshot at the end of a window of images."""
    spans = (ImageSpan(0, 4), ImageSpan(4, 8))
    state, (handle,) = admitted(every_kind_state(), request(9, image_spans=spans))
    state = run_until(state, in_phase(Phase.SNAPSHOT, handle))
    row = int(state.requests.private_row[handle.slot])
    return fly(state, "snapshot", Lane(handle, LaneRole.SNAPSHOT, 4, 0, False, row))


def _window_restore() -> State:
    """The restore into a fresh generation that follows it."""
    state = healthy(_window())
    handle = RequestHandle(0, 1)
    row = int(state.requests.restore_row[0])
    return fly(state, "restore", Lane(handle, LaneRole.RESTORE, 4, 0, False, row))


def _terminal() -> State:
    """The snapshot of a request whose response is complete."""
    state, (handle,) = admitted(every_kind_state(), request(5, 9))
    state = run_until(state, lambda s: int(s.requests.output_len[0]) == 4 and s.requests.phase[0] == Phase.DECODE)
    state = preempt(state, handle)
    assert state.requests.phase[0] == Phase.TERMINAL
    at, row = int(state.requests.committed_len[0]), int(state.requests.state_row[0])
    return fly(state, "snapshot", Lane(handle, LaneRole.SNAPSHOT, at, 0, False, row))


def _prompts(name: str) -> State:
    scored = name == "scored"
    state, handles = admitted(every_kind_state(state_rows=0), *[request(n, scored=scored) for n in (3, 12)])
    state = run_until(state, in_phase(Phase.PROMPT, *handles))
    first = Lane(handles[0], LaneRole.PROMPT, 0, 3, True)
    return fly(state, name, first, *([] if name == "prefill_row" else [Lane(handles[1], LaneRole.PROMPT, 0, 5, False)]))


def _rounds(name: str) -> State:
    state, handles = decoders()
    ceilings = {"decode": (1, 1, 1), "width_one": (1, 1, 1), "rectangular": (3, 2), "ragged_host": (4, 2, 1),
                "ragged_device": (4, 3, 4), "copy": (3, 2)}[name]  # fmt: skip
    return fly(state, name, *decode_lanes(state, handles[: len(ceilings)], *ceilings))


def _mixed(name: str) -> State:
    prompting = name != "mixed_decoders"
    state, handles = decoders(1 if name == "mixed_plain" else 2)
    lanes = decode_lanes(state, handles, *([1] if name == "mixed_plain" else [2, 2]))
    if not prompting:
        return fly(state, "mixed", *lanes)
    state, (late,) = admitted(state, request(4))
    state = fly(state, "initialize", Lane(late, LaneRole.INITIALIZE, 0, 0, False))
    state = healthy(state)
    lanes = decode_lanes(state, handles, *[lane.length for lane in lanes])
    row = len(lanes)
    return fly(state, name, *lanes, Lane(late, LaneRole.PROMPT, 0, 4, True), prompt_row=row)


def ended_in_flight() -> State:
    """A round of three lanes whose first request was preempted while it ran."""
    state = _rounds("ragged_host")
    return preempt(state, state.frames[0].plan.lanes[0].handle)


IN_FLIGHT: dict[str, Callable[[], State]] = {
    **{name: (lambda name=name: _stage(name)) for name in ("initialize", "restore", "vision", "snapshot")},  # type: ignore[misc]
    "snapshot_window": _window,
    "restore_window": _window_restore,
    "snapshot_terminal": _terminal,
    **{name: (lambda name=name: _prompts(name)) for name in ("prefill_row", "prefill_packed", "scored")},  # type: ignore[misc]
    **{
        name: (lambda name=name: _rounds(name))  # type: ignore[misc]
        for name in ("decode", "width_one", "rectangular", "ragged_host", "ragged_device", "copy")
    },
    **{name: (lambda name=name: _mixed(name)) for name in ("mixed", "mixed_plain", "mixed_decoders")},  # type: ignore[misc]
    "ended_in_flight": ended_in_flight,
}
