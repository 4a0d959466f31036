"""What a completion of every kind leaves behind, in small: cases that the state machine has found, kept as examples."""

from __future__ import annotations

import dataclasses

import pytest

from helios_jax.scheduler import (
    ExecutionTiming,
    GeneratedToken,
    RequestFinished,
    RequestHandle,
    complete,
    offer_copy,
    snapshot_counters,
)
from helios_jax.scheduler.queue import project
from helios_jax.scheduler.types import Lane, LaneRole, RequestRebound
from tests.unit.every_kind_toy import (
    IN_FLIGHT,
    SHAPES,
    decode_lanes,
    decoders,
    every_kind_state,
    fly,
    healthy,
    in_phase,
    run_until,
)
from tests.unit.scheduler_toy import MS, Phase, admitted, records_of, request


def test_the_interval_of_a_window_restore_is_charged_to_the_request_that_it_rebinds() -> None:
    """Its handle is new, its service history is not: an interval without tokens raises the price."""
    state = IN_FLIGHT["restore_window"]()
    frame = state.frames[0]
    before, n = float(state.requests.token_r[0]), float(frame.token_n[0])
    after, events = complete(state, frame.fence, records_of(frame.plan), ExecutionTiming((3 * MS,), 3 * MS))
    assert events == (RequestRebound(RequestHandle(0, 1), RequestHandle(0, 2)),)
    assert after.requests.token_r[0] == pytest.approx(before + 3.0 / (n * state.policy.adaptation_ms))


def test_an_offer_of_copies_ends_with_the_first_output() -> None:
    """The prompt's last token is the host's context no longer; what was offered before does not continue it."""
    state, (handle,) = admitted(every_kind_state(state_rows=0), request(4, 9))
    state = run_until(state, in_phase(Phase.PROMPT, handle))
    state = offer_copy(state, handle, 2)
    state = healthy(fly(state, "prefill_row", Lane(handle, LaneRole.PROMPT, 0, 4, True)))
    assert state.requests.phase[handle.slot] == Phase.DECODE
    assert state.requests.proposals[handle.slot] == 0


def test_the_longest_durations_can_be_queued() -> None:
    """Whatever a completion may report, the expected end of two frames is a number that columns hold."""
    state, handles = decoders(2)
    for ahead in (0, 1):
        lanes = [lane._replace(start=lane.start + ahead) for lane in decode_lanes(state, handles, 1, 1)]
        state = fly(state, "decode", *lanes, estimate_ns=2**60 - 1)
    assert project(state).requests.visible_ns[0] == state.now_ns + 2 * (2**60 - 1)


def test_ceilings_above_the_target_rows_are_no_negative_padding() -> None:
    """Ceilings of 4, 3 and 4 rows share 6: all of them count as used, none as padded."""
    state = IN_FLIGHT["ragged_device"]()
    counted = snapshot_counters(state)
    assert counted["used_tokens_by_kind"]["speculative"] == SHAPES["ragged_device"].packed_capacity  # type: ignore[index]
    assert counted["padded_tokens_by_kind"]["speculative"] == 0  # type: ignore[index]


def test_events_of_a_mixed_frame_come_in_lane_order() -> None:
    """The prompt row may stand anywhere among the decoding rows, and rounds are committed together."""
    state, (decoder,) = decoders(1)
    state, (prompt,) = admitted(state, request(4, 1))
    state = healthy(fly(state, "initialize", Lane(prompt, LaneRole.INITIALIZE, 0, 0, False)))
    lanes = (Lane(prompt, LaneRole.PROMPT, 0, 4, True), *decode_lanes(state, [decoder], 2))
    for order in (lanes, lanes[::-1]):
        flying = fly(state, "mixed", *order, prompt_row=[lane.role for lane in order].index(LaneRole.PROMPT))
        records = [dataclasses.replace(record) for record in reversed(records_of(flying.frames[0].plan))]
        _, events = complete(flying, flying.last_fence, records, ExecutionTiming((MS,), MS))
        expected = {prompt: [GeneratedToken(prompt, 7, 0), RequestFinished(prompt, "length")],
                    decoder: [GeneratedToken(decoder, 7, 1)]}  # fmt: skip
        assert list(events) == [event for lane in order for event in expected[lane.handle]]
