"""Malformed completions of every kind leave the state as it was."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from helios_jax.errors import InvariantError
from helios_jax.scheduler import (
    CompletionRecord,
    FinishReason,
    GeneratedToken,
    RequestFinished,
    RequestHandle,
    ScheduledPlan,
    State,
    check_invariants,
    commit,
    complete,
    plan_next,
    state_digest,
)
from tests.unit.scheduler_toy import admitted, decoding_state, records_of, request, small_state, step, timing


def in_flight(kind: str) -> tuple[State, ScheduledPlan]:
    """A state with a frame of two lanes of the wanted kind in flight."""
    if kind == "decode":
        state, _ = decoding_state(2)
    else:
        state, _ = admitted(small_state(), request(3), request(4))
        if kind == "prefill":
            state, _, _ = step(state)
    plan = plan_next(state)
    assert plan is not None
    assert str(plan.shape.kind) == kind
    assert len(plan.lanes) == 2
    return commit(state, plan, state.last_fence + 1), plan


BROKEN_FIELDS = [
    {"handle": RequestHandle(0, 9)},
    {"handle": RequestHandle(3, 1)},
    {"handle": RequestHandle(-1, 1)},
    {"consumed": -1},
    {"consumed": 99},
    {"consumed": True},
    {"consumed": 1.0},
    {"consumed": math.nan},
    {"consumed": None},
    {"committed_len": -1},
    {"committed_len": 10**9},
    {"committed_len": 0.5},
    {"tokens": (1, 2)},
    {"tokens": (-1,)},
    {"tokens": (2**31,)},
    {"tokens": (1.5,)},
    {"tokens": (None,)},
    {"tokens": (True,)},
    {"valid": None},
    {"valid": 1},
]


@pytest.mark.parametrize("kind", ["initialize", "prefill", "decode"])
@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("broken", BROKEN_FIELDS, ids=str)
def test_a_broken_lane_changes_nothing(kind: str, lane: int, broken: dict[str, Any]) -> None:
    state, plan = in_flight(kind)
    before, records = state_digest(state), list(records_of(plan))
    records[lane] = dataclasses.replace(records[lane], **broken)
    with pytest.raises(InvariantError, match="fence"):
        complete(state, state.last_fence, records, timing())
    assert state_digest(state) == before
    after, _ = complete(state, state.last_fence, records_of(plan), timing())  # and the true one still counts
    check_invariants(after)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_missing_tokens_are_malformed(kind: str) -> None:
    state, plan = in_flight(kind)
    records = [dataclasses.replace(record, tokens=()) for record in records_of(plan)]
    with pytest.raises(InvariantError, match="sampled 0 tokens, expected 1"):
        complete(state, state.last_fence, records, timing())


@pytest.mark.parametrize("change", ["missing", "empty", "duplicate", "extra"])
def test_wrong_sets_of_lanes_are_malformed(change: str) -> None:
    state, plan = in_flight("decode")
    before, records = state_digest(state), records_of(plan)
    stranger = CompletionRecord(RequestHandle(2, 1), 1, (1,), 6)
    wrong = {"missing": records[:1], "empty": (), "duplicate": (records[0],) * 2, "extra": (*records, stranger)}
    with pytest.raises(InvariantError, match="lanes"):
        complete(state, state.last_fence, wrong[change], timing())
    assert state_digest(state) == before


@pytest.mark.parametrize(
    "change",
    [
        {"wall_ns": -1},
        {"wall_ns": 1.5},
        {"wall_ns": math.nan},
        {"embedding_delay_ns": -1},
        {"device_ns": (1.0,)},
        {"device_ns": (None,)},
        {"device_ns": (2**62,)},
    ],
    ids=str,
)
def test_malformed_times_change_nothing(change: dict[str, Any]) -> None:
    state, plan = in_flight("decode")
    before = state_digest(state)
    with pytest.raises(InvariantError, match=r"execution times|wall time"):
        complete(state, state.last_fence, records_of(plan), dataclasses.replace(timing(), **change))
    assert state_digest(state) == before


@pytest.mark.parametrize("fence", [0, -1, 1, 10**6])
def test_a_completion_of_an_unknown_fence_is_ignored_and_counted(fence: int) -> None:
    state, plan = in_flight("decode")
    after, events = complete(state, fence, records_of(plan), timing())
    assert events == ()
    assert after.counters.ignored_completions == 1
    assert dataclasses.replace(after, counters=state.counters) == state


def test_a_fence_completes_once() -> None:
    state, plan = in_flight("decode")
    once, _ = complete(state, state.last_fence, records_of(plan), timing())
    twice, events = complete(once, state.last_fence, records_of(plan), timing())
    assert events == ()
    assert twice.counters.ignored_completions == 1


def test_records_may_come_in_any_order_and_as_numpy_integers() -> None:
    state, plan = in_flight("decode")
    expected, _ = complete(state, state.last_fence, records_of(plan), timing())
    records = [
        CompletionRecord(r.handle, np.int32(r.consumed), tuple(map(np.int32, r.tokens)), np.int64(r.committed_len))
        for r in reversed(records_of(plan))
    ]
    after, events = complete(state, state.last_fence, records, timing())
    assert after == expected
    assert [event.handle for event in events] == [lane.handle for lane in plan.lanes]
    assert all(type(event.token) is int for event in events if isinstance(event, GeneratedToken))


def test_a_lane_with_invalid_logits_fails_alone() -> None:
    state, plan = in_flight("decode")
    records = list(records_of(plan))
    records[0] = dataclasses.replace(records[0], valid=False, tokens=())
    after, events = complete(state, state.last_fence, records, timing())
    check_invariants(after)
    assert events[0] == RequestFinished(plan.lanes[0].handle, FinishReason.ERROR)
    assert [type(event) for event in events[1:]] == [GeneratedToken]
