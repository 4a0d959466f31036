"""Validation of what a device reports: all of it, before anything changes.

Nothing here looks at prices or durations; a malformed report raises and the caller still has
the state that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler.catalog import Allocation, ProgramKind, packed_rows
from helios_jax.scheduler.state import RETIRING, TERMINAL, Frame, State
from helios_jax.scheduler.types import CompletionRecord, ExecutionTiming, Lane, LaneRole

_MAX_TOKEN = 2**31
_MAX_NS = 2**60  # 36 years: the ends of two queued frames are still int64
_INTEGERS = (int, np.integer)
_PROMPT, _DECODE = LaneRole.PROMPT, LaneRole.DECODE
_NUMBERS = attrgetter("consumed", "committed_len", "offered", "accepted")


def check_timing(timing: ExecutionTiming) -> None:
    """Raises InvariantError unless every time is an integer of nanoseconds in range."""
    if not isinstance(timing.device_ns, (tuple, list)) or not isinstance(timing.queued, (bool, np.bool_)):
        raise InvariantError(f"execution times are an interval of each rank and whether it was queued, got {timing}")
    values = (*timing.device_ns, timing.wall_ns, timing.embedding_delay_ns)
    if not all(_is_integer(value) for value in values):
        raise InvariantError(f"execution times must be integers of nanoseconds, got {timing}")
    if timing.wall_ns < 0 or timing.embedding_delay_ns < 0 or max(values) >= _MAX_NS:
        raise InvariantError(
            f"wall time and embedding delay must be nonnegative and times below 2**60 ns, got {timing}"
        )


def checked_records(state: State, frame: Frame, records: Sequence[CompletionRecord]) -> list[CompletionRecord]:
    """The records in lane order.

    Raises:
        InvariantError: A lane is missing, foreign, named twice, or did something else than planned.
    """
    lanes = frame.plan.lanes
    by_handle = {record.handle: record for record in records}
    if len(records) != len(lanes) or len(by_handle) != len(lanes):
        raise InvariantError(f"fence {frame.fence} has {len(lanes)} lanes, its completion names {len(by_handle)} "
                             f"requests in {len(records)} records")  # fmt: skip
    try:
        ordered = [by_handle[lane.handle] for lane in lanes]
    except KeyError as missing:
        raise InvariantError(f"fence {frame.fence} completed without {missing.args[0]}") from None
    committed, exact = state.requests.committed_len.tolist(), _are_exact(ordered)
    for lane, record in zip(lanes, ordered, strict=True):
        if exact and lane.role is _DECODE and _is_whole_round(lane, record, committed[lane.handle.slot]):
            continue
        problem = _problem(state, lane, record)
        if problem:
            raise InvariantError(f"fence {frame.fence}, {lane.handle}: {problem}")
    shape = frame.plan.shape
    if shape.kind in (ProgramKind.SPECULATIVE, ProgramKind.MIXED):
        judged = sum(1 + record.offered for lane, record in zip(lanes, ordered, strict=True) if lane.role is _DECODE)
        if judged > packed_rows(shape):
            raise InvariantError(f"fence {frame.fence} verified {judged} rows, {shape.name} has {packed_rows(shape)}")
    return ordered


def has_ended(phase: int, role: LaneRole) -> bool:
    """Whether a request in `phase` ended before this frame completed, so that the lane's work is dropped."""
    return phase == RETIRING or (phase == TERMINAL and role is not LaneRole.SNAPSHOT)


def needs_confidence(frame: Frame) -> bool:
    """Whether the frame's program allocated target rows itself, so that its sidecar must come back."""
    shape = frame.plan.shape
    return shape.allocation is Allocation.PREFIX_LIMIT and shape.proposal_depth > 0


def _is_integer(value: object) -> bool:
    return isinstance(value, _INTEGERS) and not isinstance(value, bool)


def _are_exact(records: Sequence[CompletionRecord]) -> bool:
    """Whether all records are valid and of plain numbers and token ids, as nearly always: a look at whole columns."""
    numbers, tokens = chain.from_iterable(map(_NUMBERS, records)), [record.tokens for record in records]
    if set(map(type, tokens)) != {tuple} or not set(map(type, numbers)) <= {int}:
        return False
    ids = list(chain.from_iterable(tokens))
    if not set(map(type, ids)) <= {int} or (ids and not 0 <= min(ids) <= max(ids) < _MAX_TOKEN):
        return False
    return all(record.valid is True for record in records)


def _is_whole_round(lane: Lane, record: CompletionRecord, start: int) -> bool:
    """Whether an exact record commits the pending token and all accepted proposals, as nearly always."""
    count = record.accepted + 1
    return (
        0 < count <= record.offered + 1 <= lane.length
        and len(record.tokens) == record.consumed == count
        and record.committed_len == start + count
    )


def _problem(state: State, lane: Lane, record: CompletionRecord) -> str:
    """What is wrong with one lane's record, empty if nothing is; an invalid lane may lack its tokens."""
    tokens, numbers = record.tokens, (record.consumed, record.committed_len, record.offered, record.accepted)
    if not all(_is_integer(number) for number in numbers):
        return f"consumed, committed, offered and accepted must be integers, got {numbers!r}"
    if not isinstance(record.valid, (bool, np.bool_)):
        return f"valid must be a boolean, got {record.valid!r}"
    if not isinstance(tokens, (tuple, list)):
        return f"{tokens!r} are not token ids"
    if record.valid and not all(_is_integer(token) and 0 <= token < _MAX_TOKEN for token in tokens):
        return f"{tokens!r} are not token ids"
    if lane.role is _DECODE:
        return _round_problem(state, lane, record)
    length = lane.length if lane.role is _PROMPT else 0
    if record.consumed != length:
        return f"consumed {record.consumed!r} tokens, {length} were scheduled"
    if record.committed_len != lane.start + length:
        return f"committed {record.committed_len!r}, expected {lane.start + length}"
    if len(tokens) != lane.emits and (record.valid or len(tokens)):
        return f"sampled {len(tokens)} tokens, expected {int(lane.emits)}"
    return f"{record.offered} proposals in a lane without any" if record.offered or record.accepted else ""


def _round_problem(state: State, lane: Lane, record: CompletionRecord) -> str:
    """What is wrong with a decoding lane: it commits the pending token and the accepted prefix."""
    count = len(record.tokens)
    if not 0 <= record.accepted <= record.offered < lane.length:
        return f"accepted {record.accepted} of {record.offered} proposals under a ceiling of {lane.length} rows"
    slot = lane.handle.slot
    ended = has_ended(int(state.requests.phase[slot]), lane.role)
    if ended and record.valid and count == 0 and state.limits.stops_on_device:
        kept = (0, int(state.requests.committed_len[slot]))
        done = (record.consumed, record.committed_len)
        return "" if done == kept else f"consumed and committed {done} after its end, expected {kept}"
    if not record.valid:
        return f"sampled {count} tokens in an invalid lane" if count else ""
    if not 1 <= count <= record.accepted + 1:
        return f"sampled {count} tokens, expected {record.accepted + 1}"
    if record.consumed != count:
        return f"consumed {record.consumed} tokens for {count} emitted"
    if ended:
        return ""
    start, spec = int(state.requests.committed_len[slot]), state.specs[slot]
    assert spec is not None  # an occupied slot has its spec: invariant 4
    if record.committed_len != start + count:
        return f"committed {record.committed_len}, expected {start + count}"
    ends = record.tokens[-1] in spec.stop_token_ids
    if count < record.accepted + 1 and not ends and state.requests.output_len[slot] + count < spec.max_tokens:
        return f"sampled {count} tokens although {record.accepted} proposals were accepted and nothing ended"
    return ""
