"""Plans into control vectors and back, checked field by field against the layouts' documentation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helios_jax.aot.abi import MAX_LOGIT_BIAS, completion_layout, control_layout
from helios_jax.engine.frames import FrameBuilder
from helios_jax.errors import InvariantError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from helios_jax.scheduler.types import Lane, LaneRole, RequestHandle, ScheduledPlan, SelectionReason
from helios_jax.testing import EngineRig

INITIALIZE = ProgramShape(ProgramKind.INITIALIZE, 4, 0)
PREFILL = ProgramShape(ProgramKind.PREFILL, 4, 64)
SCORED = ProgramShape(ProgramKind.SCORED_PREFILL, 1, 64)
DECODE = ProgramShape(ProgramKind.DECODE, 4, 1)


def plan_of(shape: ProgramShape, *lanes: Lane) -> ScheduledPlan:
    return ScheduledPlan(shape, lanes, (0,) * len(lanes), 0, 0.0, 0.0, SelectionReason.ORDINARY, True)


@pytest.fixture
def rig():
    rig = EngineRig(start=False, max_slots=4, max_context=64, page_size=16)
    yield rig
    rig.core.close()


def sequence(rig: EngineRig, prompt: list[int], **params):
    rig.submit(prompt, **params)
    (_, request) = rig.engine.board.take()[-1]
    return request.sequences[0]


def build(rig: EngineRig, plan: ScheduledPlan, sequences: dict, tables: dict | None = None) -> dict[str, np.ndarray]:
    builder = FrameBuilder(rig.core.dims)
    ints, floats = builder.control(plan, sequences, lambda handle: np.array((tables or {})[handle], np.int32))
    return control_layout(plan.shape, rig.core.dims).split(ints, floats)


def test_initialize_writes_settings_and_neutral_inactive_rows(rig: EngineRig) -> None:
    handle = RequestHandle(2, 7)
    params = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 10**6, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -1.0, "frequency_penalty": 2.0, "seed": 2**63 + 5, "logit_bias": {3: 100.0, 9: -1.0},
    }  # fmt: skip
    fields = build(
        rig,
        plan_of(INITIALIZE, Lane(handle, LaneRole.INITIALIZE, 0, 0, False)),
        {handle: sequence(rig, [1, 2, 3], **params)},
    )
    assert fields["slot"].tolist() == [2, 4, 4, 4]
    assert fields["prompt_len"][0] == 3
    assert fields["seed"][0].view(np.uint32).tolist() == [2**31, 5]
    assert fields["top_k"][0] == rig.core.dims.vocab_size
    assert [float(fields[name][0]) for name in ("temperature", "top_p", "min_p")] == [0.5, 0.25, 0.125]
    assert [float(fields[f"{n}_penalty"][0]) for n in ("repetition", "presence", "frequency")] == [1.5, -1.0, 2.0]
    assert fields["bias_ids"][0].tolist() == [3, 9] + [-1] * (MAX_LOGIT_BIAS - 2)
    assert fields["bias_values"][0, :3].tolist() == [100.0, -1.0, 0.0]
    assert (fields["bias_ids"][1:] == -1).all()
    assert (fields["top_p"][1:] == 1).all()
    assert (fields["repetition_penalty"][1:] == 1).all()


def test_prefill_packs_rows_one_after_the_other(rig: EngineRig) -> None:
    a, b = RequestHandle(1, 1), RequestHandle(3, 1)
    plan = plan_of(PREFILL, Lane(a, LaneRole.PROMPT, 16, 4, True), Lane(b, LaneRole.PROMPT, 0, 17, False))
    sequences = {a: sequence(rig, list(range(20))), b: sequence(rig, list(range(100, 150)))}
    fields = build(rig, plan, sequences, {a: [5, 6], b: [9, 2]})
    assert fields["slot"].tolist() == [1, 3, 4, 4]
    assert fields["query_len"].tolist() == [4, 17, 0, 0]
    assert fields["start"].tolist() == [16, 0, 0, 0]
    assert fields["sample"].tolist() == [1, 0, 0, 0]
    assert fields["tokens"].tolist() == list(range(16, 20)) + list(range(100, 117)) + [0] * 43
    assert fields["page_table"].tolist() == [[5, 6, 0, 0], [9, 2, 0, 0], [0] * 4, [0] * 4]
    assert fields["want_logprobs"].tolist() == [0]


@pytest.mark.parametrize(("start", "length", "targets"), [(0, 3, [11, 12, 13]), (3, 2, [14, -1])])
def test_scored_prefill_targets_are_the_next_prompt_tokens(rig, start, length, targets) -> None:
    handle = RequestHandle(0, 1)
    lane = Lane(handle, LaneRole.PROMPT, start, length, start + length == 5)
    item = sequence(rig, [10, 11, 12, 13, 14], prompt_logprobs=1, logprobs=0)
    fields = build(rig, plan_of(SCORED, lane), {handle: item}, {handle: [1]})
    assert fields["target"].tolist() == targets + [-1] * (64 - length)
    assert fields["want_logprobs"].tolist() == [int(lane.emits)]


def test_decode_control_and_completion(rig: EngineRig) -> None:
    handle = RequestHandle(2, 1)
    plan = plan_of(DECODE, Lane(handle, LaneRole.DECODE, 17, 1, True))
    fields = build(rig, plan, {handle: sequence(rig, [1])}, {handle: [7, 8]})
    assert fields["slot"].tolist() == [2, 4, 4, 4]
    assert fields["page_table"][0].tolist() == [7, 8, 0, 0]
    ints, floats, out = completion_layout(DECODE, rig.core.dims).new()
    out["slot"][:], out["token"][:], out["committed_len"][0] = [2, 4, 4, 4], [65, -1, -1, -1], 18
    (record,), _ = FrameBuilder(rig.core.dims).completion(plan, ints, floats)
    assert (record.handle, record.consumed, record.tokens, record.committed_len) == (handle, 1, (65,), 18)
    assert record.valid
    out["status"][0] = 1
    (record,), _ = FrameBuilder(rig.core.dims).completion(plan, ints, floats)
    assert (record.valid, record.tokens) == (False, ())


@pytest.mark.parametrize(("field", "value"), [("slot", 1), ("token", -1), ("token", 260)])
def test_impossible_completions_are_our_bug(rig: EngineRig, field: str, value: int) -> None:
    plan = plan_of(DECODE, Lane(RequestHandle(2, 1), LaneRole.DECODE, 17, 1, True))
    ints, floats, out = completion_layout(DECODE, rig.core.dims).new()
    out["slot"][0], out["token"][0], out["committed_len"][0] = 2, 65, 18
    out[field][0] = value
    with pytest.raises(InvariantError):
        FrameBuilder(rig.core.dims).completion(plan, ints, floats)


def test_vectors_of_successive_frames_are_not_shared(rig: EngineRig) -> None:
    """The device may still read the first when the second is packed."""
    handle, builder = RequestHandle(0, 1), FrameBuilder(rig.core.dims)
    item = sequence(rig, list(range(40)))
    plan = plan_of(PREFILL, Lane(handle, LaneRole.PROMPT, 0, 20, False))
    first, _ = builder.control(plan, {handle: item}, lambda h: np.array([1, 2]))
    kept = first.copy()
    lane = Lane(handle, LaneRole.PROMPT, 20, 20, True)
    builder.control(dataclasses.replace(plan, lanes=(lane,)), {handle: item}, lambda h: np.array([1, 2, 3]))
    assert (first == kept).all()
