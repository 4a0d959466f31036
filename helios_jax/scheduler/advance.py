"""What a completed lane changes: its position, its stage, its output.

Works in place on writable columns; the records have been validated. Rounds, which are nearly
all lanes, are taken together: a loop over their tokens and one write a column.
"""

from __future__ import annotations

from collections.abc import Sequence

from helios_jax.scheduler import captures
from helios_jax.scheduler.capture_draft import Draft
from helios_jax.scheduler.stages import arrive, enter, open_window, set_bounds
from helios_jax.scheduler.state import PROMPT, RESTORE, RETIRING, TERMINAL, Requests
from helios_jax.scheduler.types import (
    CompletionRecord,
    Event,
    Fence,
    FinishReason,
    GeneratedToken,
    Lane,
    LaneRole,
    RequestFinished,
    RequestHandle,
    RequestRebound,
    RequestSpec,
)

_ERROR, _STOP, _LENGTH = FinishReason.ERROR, FinishReason.STOP, FinishReason.LENGTH


def advance_rounds(
    draft: Draft, requests: Requests, lanes: Sequence[tuple[Lane, CompletionRecord]], events: list[Event]
) -> list[tuple[int, FinishReason]]:
    """Commit the tokens of decoding lanes, each up to the first one that ends the output.

    Returns:
        (slot, reason) of the requests that ended, in lane order.
    """
    specs, ended = draft.state.specs, []
    slots = [lane.handle.slot for lane, _ in lanes]
    before = requests.output_len[slots]
    counts = before.tolist()
    for number, (lane, record) in enumerate(lanes):
        spec = specs[lane.handle.slot]
        assert spec is not None  # an occupied slot has its spec: invariant 4
        if record.valid:
            counts[number], reason = emit(lane.handle, record.tokens, counts[number], spec, events)
        else:
            reason = _ERROR
            events.append(RequestFinished(lane.handle, _ERROR))
        if reason is not None:
            ended.append((lane.handle.slot, reason))
    requests.epoch[slots] += 1
    requests.proposals[slots] = 0  # a copy was offered to continue the context of before
    requests.output_len[slots] = counts
    requests.committed_len[slots] += requests.output_len[slots] - before
    return ended


def emit(
    handle: RequestHandle, tokens: Sequence[int], count: int, spec: RequestSpec, events: list[Event]
) -> tuple[int, FinishReason | None]:
    """The events of sampled tokens after `count` earlier ones, later than the end censored.

    Returns:
        The output count after them, and why the output ended if it did.
    """
    stops, most, first = spec.stop_token_ids, spec.max_tokens, spec.output_len
    for token in tokens:
        token = int(token)
        events.append(GeneratedToken(handle, token, first + count))
        count += 1
        if token in stops:
            events.append(RequestFinished(handle, _STOP, token))
            return count, _STOP
        if count >= most:
            events.append(RequestFinished(handle, _LENGTH))
            return count, _LENGTH
    return count, None


def advance_lane(
    draft: Draft, requests: Requests, lane: Lane, record: CompletionRecord, events: list[Event], fence: Fence
) -> FinishReason | None:
    """Advance the columns of a lane that does not decode, and emit its events; the reason if its request ended."""
    state, slot, spec = draft.state, lane.handle.slot, draft.state.specs[lane.handle.slot]
    assert spec is not None  # an occupied slot has its spec: invariant 4
    requests.epoch[slot] += 1
    if lane.role is LaneRole.SNAPSHOT:
        published = captures.end_copy(draft, lane, fence, valid=record.valid)
        events.extend([published] if published else [])
        if lane.row == requests.state_row[slot]:
            _captured(draft, requests, lane.handle, spec)  # a failed copy never fails the request
            return None
    if not record.valid:
        events.append(RequestFinished(lane.handle, _ERROR))
        return _ERROR
    if lane.role is not LaneRole.PROMPT:
        _pass_stage(draft, requests, lane, spec, events)
        return None
    requests.committed_len[slot] += lane.length
    requests.consumed_len[slot] += lane.length
    due, cut = captures.reach(draft, requests, lane.handle)
    set_bounds(requests, slot, spec, cut)
    arrive(requests, slot, spec, due=due)
    if requests.consumed_len[slot] < len(spec.prompt):
        return None
    requests.visible_ns[slot] = state.now_ns
    if not lane.emits:  # a scored prompt without output
        events.append(RequestFinished(lane.handle, _LENGTH))
        return _LENGTH
    requests.proposals[slot] = 0  # an offer ends with the next output, the first one included
    requests.output_len[slot], reason = emit(lane.handle, record.tokens, int(requests.output_len[slot]), spec, events)
    return reason


def _captured(draft: Draft, requests: Requests, handle: RequestHandle, spec: RequestSpec) -> None:
    """The armed row holds the state, or the copy failed: go on either way."""
    slot = handle.slot
    requests.state_row[slot] = 0
    if requests.phase[slot] == TERMINAL:
        requests.phase[slot] = RETIRING
        return
    set_bounds(requests, slot, spec, captures.arm_next(draft, requests, handle))
    arrive(requests, slot, spec, due=False)


def _pass_stage(draft: Draft, requests: Requests, lane: Lane, spec: RequestSpec, events: list[Event]) -> None:
    """A prerequisite other than an optional snapshot is over."""
    slot = lane.handle.slot
    if lane.role is LaneRole.RESTORE:
        captures.end_restore(draft, lane.handle)
    if lane.role is LaneRole.SNAPSHOT:  # the private row at the end of an image window
        requests.restore_row[slot], requests.phase[slot] = requests.private_row[slot], RESTORE
        return
    if lane.role is LaneRole.VISION:
        requests.images_done[slot] += 1
    elif lane.role is LaneRole.RESTORE and lane.row and lane.row == requests.private_row[slot]:
        requests.generation[slot] += 1
        requests.restore_row[slot] = 0
        open_window(requests, slot, spec, draft.state.limits)
        last = requests.window_images[slot] == len(spec.image_spans)
        set_bounds(requests, slot, spec, captures.rebind(draft, requests, lane.handle, last_window=last))
        events.append(RequestRebound(lane.handle, RequestHandle(slot, int(requests.generation[slot]))))
    enter(requests, slot, spec)
    if requests.phase[slot] == PROMPT:
        handle = RequestHandle(slot, int(requests.generation[slot]))
        set_bounds(requests, slot, spec, captures.prepare(draft, requests, handle))
