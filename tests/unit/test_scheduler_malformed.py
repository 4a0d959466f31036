"""Malformed completions of every program kind: an InvariantError, and the state is what it was."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import (
    CompletionRecord,
    ExecutionTiming,
    LaneRole,
    ProgramKind,
    RequestHandle,
    State,
    check_invariants,
    complete,
    complete_packed_round,
    complete_with_survival,
    state_digest,
)
from helios_jax.scheduler.catalog import Allocation
from tests.unit.every_kind_toy import (
    DEPTH,
    IN_FLIGHT,
    SHAPES,
    complete_any,
    confidence_of,
    decode_lanes,
    decoders,
    fly,
    survival_of,
)
from tests.unit.scheduler_toy import MS, records_of

TIMING = ExecutionTiming((MS,), MS)
STATES = {name: build() for name, build in IN_FLIGHT.items()}  # values: nothing can spoil them for the next test
KINDS = list(STATES)
Records = list[CompletionRecord]


def healthy_records(state: State) -> Records:
    return list(records_of(state.frames[0].plan))


def sidecar(state: State) -> np.ndarray | None:
    """The confidence that the frame's program must come with, if any."""
    return confidence_of() if state.frames[0].plan.shape.allocation is Allocation.PREFIX_LIMIT else None


DIGESTS = {name: state_digest(state) for name, state in STATES.items()}


@pytest.fixture(autouse=True)
def untouched(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test of a kind its state has the digest of before."""
    yield
    callspec = getattr(request.node, "callspec", None)
    for kind in [callspec.params["kind"]] if callspec else KINDS:
        assert state_digest(STATES[kind]) == DIGESTS[kind]


def refused(attempt: Callable[..., object], *args: Any) -> str:
    """The message of the refusal."""
    with pytest.raises(InvariantError) as caught:
        attempt(*args)
    return str(caught.value)


def lane_problems(state: State, row: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of one lane's healthy record, each of them malformed, with a part of the message."""
    lane, record = state.frames[0].plan.lanes[row], healthy_records(state)[row]
    for handle in (RequestHandle(lane.handle.slot, 9), RequestHandle(3, 7), RequestHandle(-1, 1), None):
        yield "completed without", {"handle": handle}
    for name in ("consumed", "committed_len", "offered", "accepted"):
        for value in (True, 1.0, math.nan, None, "1"):
            yield "must be integers", {name: value}
    for valid in (None, 1, "yes"):
        yield "must be a boolean", {"valid": valid}
    for token in (-1, 2**31, 1.5, None, True):
        yield "not token ids", {"tokens": (token,)}
    yield "not token ids", {"tokens": None}
    yield "not token ids", {"tokens": 7}
    if lane.role is LaneRole.DECODE:
        yield from _round_problems(state, row, record)
        return
    for wrong in (-1, record.consumed + 1, 99):
        yield "were scheduled", {"consumed": wrong}
    for wrong in (-1, record.committed_len + 1, 10**9):
        yield "expected", {"committed_len": wrong}
    yield "sampled", {"tokens": () if record.tokens else (7,)}
    yield "sampled", {"tokens": (7, 7)}
    for changes in ({"offered": 1}, {"offered": 1, "accepted": 1}, {"accepted": 1}):
        yield "proposals in a lane without any", changes


def _round_problems(state: State, row: int, record: CompletionRecord) -> Iterator[tuple[str, dict[str, Any]]]:
    ceiling = state.frames[0].plan.lanes[row].length
    many = (7,) * ceiling
    yield "proposals under", {"offered": ceiling}
    yield "proposals under", {"offered": ceiling, "accepted": ceiling, "tokens": (*many, 7), "consumed": ceiling + 1}
    yield "proposals under", {"offered": -1}
    yield "proposals under", {"accepted": -1}
    yield "proposals under", {"accepted": 1}
    yield "sampled 0 tokens", {"tokens": ()}
    yield "sampled 0 tokens", {"tokens": (), "consumed": 0, "committed_len": record.committed_len - 1}
    yield "sampled 2 tokens", {"tokens": (7, 7), "consumed": 2, "committed_len": record.committed_len + 1}
    for wrong in (-1, 0, 2, 99):
        yield "consumed", {"consumed": wrong}
    yield "in an invalid lane", {"valid": False}
    ended = state.requests.phase[state.frames[0].plan.lanes[row].handle.slot] > 6  # nobody knows where it ends
    if not ended:
        for wrong in (-1, record.committed_len - 1, record.committed_len + 1, 10**9):
            yield "expected", {"committed_len": wrong}
    if ceiling > 1:
        yield "consumed", {"offered": 1, "accepted": 1, "tokens": (7, 7)}
        if not ended:
            yield "nothing ended", {"offered": 1, "accepted": 1}
            yield "expected", {"offered": 1, "accepted": 1, "tokens": (7, 7), "consumed": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_lane_is_refused(kind: str) -> None:
    state = STATES[kind]
    for row in range(len(state.frames[0].plan.lanes)):
        for message, changes in lane_problems(state, row):
            records = healthy_records(state)
            records[row] = dataclasses.replace(records[row], **changes)
            said = refused(complete_any, state, state.last_fence, records, TIMING, sidecar(state))
            assert f"fence {state.last_fence}" in said
            assert message in said, (row, changes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_set_of_lanes_is_refused(kind: str) -> None:
    state = STATES[kind]
    records = healthy_records(state)
    stranger = dataclasses.replace(records[0], handle=RequestHandle(3, 5))
    sets = {"none": [], "one missing": records[1:], "one more": [*records, stranger],
            "one twice": [*records, records[0]], "a stranger instead": [*records[:-1], stranger]}  # fmt: skip
    if len(records) > 1:
        sets["a duplicate instead"] = [records[0], *records[:-1]]
    for wrong in sets.values():
        refused(complete_any, state, state.last_fence, wrong, TIMING, sidecar(state))


TIMES: list[dict[str, Any]] = [
    *[{name: value} for name in ("wall_ns", "embedding_delay_ns") for value in (-1, 2**60, 1.0, math.nan, None, True)],
    *[{"device_ns": value} for value in ((1.0,), (math.nan,), (None,), (True,), (2**60,), (MS, 1.5), None, MS)],
    {"queued": None},
    {"queued": 1},
]


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_times_are_refused(kind: str) -> None:
    state = STATES[kind]
    for changes in TIMES:
        timing = dataclasses.replace(TIMING, **changes)
        message = refused(complete_any, state, state.last_fence, healthy_records(state), timing, sidecar(state))
        assert "time" in message, changes


def spoiled(planes: np.ndarray, where: tuple[int, ...], value: float) -> np.ndarray:
    after = planes.copy()
    after[where] = value
    return after


def wrong_confidences(slot: int, depth: int) -> Iterator[Any]:
    right = confidence_of()
    yield from (right[0], right[:1], np.concatenate([right, right[:1]]), right[:, :3], np.concatenate([right] * 2, 1))
    yield from (right[:, :, : depth - 1], right[None], np.zeros((2, 0, 0)), 0.5, "confidence", [[1.0], [1.0, 2.0]])
    for plane in (0, 1):
        for value in (math.nan, math.inf, -math.inf, 1.01, -0.01):
            yield spoiled(right, (plane, slot, depth - 1), value)
    if depth > 1:
        yield spoiled(right, (1, slot, depth - 1), float(right[1, slot, depth - 2]) + 0.01)


def wrong_survivals(slot: int, offered: int) -> Iterator[Any]:
    right = survival_of()
    yield from (right[0], right[:3], np.concatenate([right, right]), right[None], 0.5, "survival", [[1.0], [1.0, 2.0]])
    yield right[:, : offered - 1]
    for value in (math.inf, -math.inf, 1.01, -0.01):
        yield spoiled(right, (slot, offered - 1), value)
    if offered > 1:
        yield spoiled(right, (slot, offered - 1), float(right[slot, offered - 2]) + 0.01)


PROPOSING = [kind for kind in KINDS if STATES[kind].frames[0].plan.shape.proposal_depth]


def judged(state: State) -> Records:
    """Healthy records in which the first lane that may offer proposals has offered all of them."""
    records = healthy_records(state)
    row = next(i for i, lane in enumerate(state.frames[0].plan.lanes) if lane.length > 1 and lane.role == "decode")
    records[row] = dataclasses.replace(records[row], offered=state.frames[0].plan.lanes[row].length - 1)
    return records


@pytest.mark.parametrize("kind", PROPOSING)
def test_a_malformed_confidence_is_refused(kind: str) -> None:
    state = STATES[kind]
    for row, lane in enumerate(state.frames[0].plan.lanes):
        if lane.role is not LaneRole.DECODE:
            continue
        for wrong in wrong_confidences(lane.handle.slot, state.frames[0].plan.shape.proposal_depth):
            for survival in (None, survival_of()):
                args = (state, state.last_fence, healthy_records(state), TIMING, wrong, survival)
                assert "confidence" in refused(complete_any, *args), (row, wrong)


@pytest.mark.parametrize("kind", PROPOSING)
def test_a_malformed_survival_is_refused(kind: str) -> None:
    state = STATES[kind]
    records = judged(state)
    record = next(record for record in records if record.offered)
    for wrong in wrong_survivals(record.handle.slot, record.offered):
        args = (state, state.last_fence, records, TIMING, sidecar(state), wrong)
        assert "survival" in refused(complete_any, *args), wrong


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PROPOSING])
def test_a_sidecar_of_a_program_without_proposals_is_refused(kind: str) -> None:
    state, records = STATES[kind], healthy_records(STATES[kind])
    for confidence, survival in ((confidence_of(), None), (None, survival_of()), (confidence_of(), survival_of())):
        args = (state, state.last_fence, records, TIMING, confidence, survival)
        assert "makes no proposals" in refused(complete_any, *args)


def test_a_device_allocated_round_needs_its_confidence() -> None:
    state, records = STATES["ragged_device"], healthy_records(STATES["ragged_device"])
    fence = state.last_fence
    assert "complete_packed_round" in refused(complete, state, fence, records, TIMING)
    said = refused(complete_with_survival, state, fence, records, TIMING, survival_of())
    assert "complete_packed_round" in said


def test_more_target_rows_than_the_program_has_are_refused() -> None:
    """Ceilings of a device-allocated round may sum above P, the rows that it verified may not."""
    state = STATES["ragged_device"]
    ceilings = [lane.length for lane in state.frames[0].plan.lanes]
    packed = SHAPES["ragged_device"].packed_capacity
    assert sum(ceilings) > packed
    for offered in ((3, 2, 3), (3, 1, 0), (1, 2, 1)):
        records = [dataclasses.replace(r, offered=n) for r, n in zip(healthy_records(state), offered, strict=True)]
        total = sum(offered) + len(offered)
        args = (state, state.last_fence, records, TIMING, confidence_of())
        if total > packed:
            assert f"verified {total} rows" in refused(complete_packed_round, *args)
        else:
            check_invariants(complete_packed_round(*args)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_true_completion_still_counts(kind: str) -> None:
    state = STATES[kind]
    after, _ = complete_any(state, state.last_fence, healthy_records(state), TIMING, sidecar(state))
    check_invariants(after)
    assert not after.frames


def test_a_queued_frame_completes_after_the_one_before_it() -> None:
    """Two rounds in flight: out of order, and records of the second that ignore what the first committed."""
    state, handles = decoders()
    state = fly(state, "rectangular", *decode_lanes(state, handles[:2], 3, 3))
    lanes = [lane._replace(start=lane.start + 3) for lane in state.frames[0].plan.lanes]
    state = fly(state, "rectangular", *lanes)
    first, second = (frame.fence for frame in state.frames)
    assert "serial" in refused(complete, state, second, list(records_of(state.frames[1].plan)), TIMING)
    after, _ = complete(state, first, healthy_records(state), TIMING)  # one token each, not three
    assert "committed" in refused(complete, after, second, list(records_of(after.frames[0].plan)), TIMING)
    true = [dataclasses.replace(record, committed_len=record.committed_len - 2) for record in healthy_records(after)]
    done, _ = complete(after, second, true, TIMING)
    check_invariants(done)


def test_every_kind_of_program_is_covered() -> None:
    flown = {state.frames[0].plan.shape for state in STATES.values()}
    assert flown == set(SHAPES.values())
    assert {shape.kind for shape in flown} == set(ProgramKind)
    assert DEPTH == 3
