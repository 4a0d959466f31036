"""Mixed frames in the engine: control vectors field by field, records, and what must not be believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios_jax.aot.abi import completion_layout, control_layout
from helios_jax.engine.drafting import Drafting
from helios_jax.engine.frames import FrameBuilder
from helios_jax.engine.request import Sequence
from helios_jax.errors import InvariantError
from helios_jax.scheduler.catalog import Catalog, ProgramKind, ProgramShape, ProposalSource
from helios_jax.scheduler.types import Lane, LaneRole, RequestHandle, ScheduledPlan, SelectionReason
from helios_jax.testing import EngineRig, FakeClock, FakeFrame, Gate

PLAIN = ProgramShape(ProgramKind.MIXED, 4, 1, 0, 67, 64)
COPY = ProgramShape(ProgramKind.MIXED, 4, 3, 2, 73, 64, ProposalSource.COPY)
PROMPT, STREAM, OTHER = RequestHandle(2, 7), RequestHandle(0, 3), RequestHandle(3, 1)
LANES = (
    Lane(STREAM, LaneRole.DECODE, 17, 3, True),
    Lane(PROMPT, LaneRole.PROMPT, 16, 4, True),
    Lane(OTHER, LaneRole.DECODE, 9, 1, True),
)
TABLES = {PROMPT: [5, 6], STREAM: [9, 2], OTHER: [3]}


def plan_of(shape: ProgramShape, lanes: tuple[Lane, ...] = LANES, prompt_row: int = 1) -> ScheduledPlan:
    epochs = (0,) * len(lanes)
    return ScheduledPlan(shape, lanes, epochs, 0, 0.0, 0.0, SelectionReason.ORDINARY, True, prompt_row=prompt_row)


@pytest.fixture
def rig() -> Iterator[EngineRig]:
    rig = EngineRig(start=False, max_slots=4, max_context=64, page_size=16)
    yield rig
    rig.core.close()


def sequences_of(rig: EngineRig) -> dict[RequestHandle, Sequence]:
    """A sequence for each of LANES; the stream repeats itself and has a pending token."""
    prompts = {PROMPT: list(range(100, 120)), STREAM: [1, 2, 3, 4, 1, 2, 3], OTHER: [50, 51, 52]}
    found = {}
    for handle, prompt in prompts.items():
        rig.submit(prompt)
        sequence = rig.engine.board.take()[-1][1].sequences[0]  # type: ignore[union-attr]
        sequence.handle = handle
        found[handle] = sequence
    found[STREAM].token_ids.append(4)
    found[OTHER].token_ids.append(53)
    return found


def control_of(rig: EngineRig, plan: ScheduledPlan, drafting: Drafting | None = None) -> dict[str, np.ndarray]:
    builder = FrameBuilder(rig.core.dims, drafting)
    ints, floats = builder.control(plan, sequences_of(rig), lambda handle: np.array(TABLES[handle], np.int32))
    return control_layout(plan.shape, rig.core.dims).split(ints, floats)


# ---- control vectors


def test_the_prompt_row_is_named_and_its_chunk_lies_at_the_beginning(rig: EngineRig) -> None:
    fields = control_of(rig, plan_of(PLAIN))
    assert fields["slot"].tolist() == [0, 2, 3, 4]  # 4 is the scratch slot
    assert fields["query_len"].tolist() == [3, 4, 1, 0]
    assert [fields[name].tolist() for name in ("prefill_row", "start", "sample")] == [[1], [16], [1]]
    assert fields["tokens"].tolist() == [116, 117, 118, 119] + [0] * 60
    assert fields["page_table"].tolist() == [[9, 2, 0, 0], [5, 6, 0, 0], [3, 0, 0, 0], [0] * 4]
    assert fields["want_logprobs"].tolist() == [0]
    assert "proposal" not in fields


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing(rig: EngineRig) -> None:
    lanes = (Lane(PROMPT, LaneRole.PROMPT, 0, 7, False),)
    fields = control_of(rig, plan_of(PLAIN, lanes, 0))
    assert [fields[name].tolist() for name in ("prefill_row", "start", "sample")] == [[0], [0], [0]]
    assert fields["tokens"][:8].tolist() == [*range(100, 107), 0]


def test_without_a_prompt_row(rig: EngineRig) -> None:
    fields = control_of(rig, plan_of(PLAIN, (LANES[0], LANES[2]), -1))
    assert fields["prefill_row"].tolist() == [-1]
    assert not fields["tokens"].any()
    assert fields["query_len"].tolist() == [3, 1, 0, 0]


def test_copies_are_supplied_to_decoding_rows_only(rig: EngineRig) -> None:
    drafting, told = Drafting(Catalog((COPY,))), {}
    sequences = sequences_of(rig)
    drafting.offer(sequences.values(), lambda handle, count: told.__setitem__(handle, count))
    builder = FrameBuilder(rig.core.dims, drafting)
    ints, floats = builder.control(plan_of(COPY), sequences, lambda handle: np.array(TABLES[handle], np.int32))
    fields = control_layout(COPY, rig.core.dims).split(ints, floats)
    assert told[STREAM] == 2
    assert fields["proposal"].tolist() == [[1, 2], [-1, -1], [-1, -1], [-1, -1]]
    assert (fields["confidence"][0] > 0).all()
    assert not fields["confidence"][1].any()
    assert fields["calibration"].tolist() == [1, 0]


# ---- completions


def completion_of(rig: EngineRig, shape: ProgramShape = COPY, **changes: Any) -> tuple[Any, Any]:
    """What the device answers to LANES: two tokens, the prompt's first one, and one; and changes by (row, value)."""
    ints, floats, out = completion_layout(shape, rig.core.dims).new()
    out["slot"][:] = [0, 2, 3, 4]
    out["tokens"][:] = -1
    out["tokens"][0, :2], out["tokens"][1, 0], out["tokens"][2, 0] = [61, 62], 63, 64
    out["num_tokens"][:3], out["committed_len"][:3] = [2, 1, 1], [19, 20, 10]
    out["offered"][0], out["accepted"][0] = 2, 1
    for name, (row, value) in changes.items():
        out[name][row] = value
    return ints, floats


def test_records_by_phase(rig: EngineRig) -> None:
    builder = FrameBuilder(rig.core.dims)
    stream, prompt, other = builder.completion(plan_of(COPY), *completion_of(rig))[0]
    assert (stream.handle, stream.consumed, stream.tokens, stream.committed_len) == (STREAM, 2, (61, 62), 19)
    assert (stream.offered, stream.accepted) == (2, 1)
    assert (prompt.handle, prompt.consumed, prompt.tokens, prompt.committed_len) == (PROMPT, 4, (63,), 20)
    assert (prompt.offered, prompt.accepted, prompt.valid) == (0, 0, True)
    assert (other.consumed, other.tokens, other.committed_len) == (1, (64,), 10)
    failed = builder.completion(plan_of(COPY), *completion_of(rig, status=(1, 1), num_tokens=(1, 0)))[0][1]
    assert (failed.valid, failed.tokens, failed.consumed) == (False, (), 4)


@pytest.mark.parametrize("change", [{"slot": (1, 3)}, {"tokens": (1, -1)}, {"tokens": (0, 260)}])
def test_impossible_answers_are_our_bug(rig: EngineRig, change: dict[str, Any]) -> None:
    with pytest.raises(InvariantError):
        FrameBuilder(rig.core.dims).completion(plan_of(COPY), *completion_of(rig, **change))


# ---- the whole engine over the fake device

METHODS = ["none", "copy", "draft"]


def duration_ns(shape: ProgramShape) -> int:
    """Mixed programs are the cheap ones."""
    return 1_000_000 if shape.kind is ProgramKind.MIXED else 40_000_000


def mixed_rig(method: str = "none", *, mixed: bool = True, **options: Any) -> EngineRig:
    depth = {} if method == "none" else {"num_draft_tokens": 3}
    given = {"max_slots": 4, "max_context": 512, "prefill_chunk": 128, "duration_ns": duration_ns} | depth | options
    return EngineRig(mixed_prefill=mixed, spec_method=method, clock=FakeClock(), **given)


def ran(rig: EngineRig) -> list[FakeFrame]:
    return [frame for frame in rig.core.runner.frames if frame.shape.kind is ProgramKind.MIXED]


@pytest.mark.parametrize("method", METHODS)
def test_outputs_do_not_depend_on_mixed_programs(method: str) -> None:
    texts, reasons = [], []
    for mixed in (True, False):
        with mixed_rig(method, mixed=mixed) as rig:
            names = [
                rig.submit(f"words {i} " * (1 + i % 9 * 4), max_tokens=10 + i, temperature=float(i % 2), seed=i)
                for i in range(20)
            ]
            rig.finish(*names)
            rig.settle()
            assert rig.ledger_problems() == []
            texts.append([rig.text(name) for name in names])
            reasons.append([rig.reason(name) for name in names])
            frames = ran(rig)
            counters = rig.engine.stats().scheduler["programs_by_kind"]
            assert counters.get("mixed", 0) == len(frames)
            if mixed:
                assert len(frames) > 20
                assert {int(frame.parts["prefill_row"][0]) >= 0 for frame in frames} == {True, False}
    assert texts[0] == texts[1]
    assert reasons[0] == reasons[1]


@pytest.mark.parametrize("victim", ["prompt", "stream", "both"])
@pytest.mark.parametrize("method", METHODS)
def test_cancellation_while_a_mixed_frame_runs(method: str, victim: str) -> None:
    """Its tokens are not shown, pages and slots come back with the fence, and the other row is untouched."""
    gate = Gate()
    with mixed_rig(method, gate=gate, max_slots=2) as rig:
        stream = rig.submit("to be or not to be " * 3, max_tokens=400)
        rig.wait_for(lambda: len(rig.text(stream)) > 3)
        gate.close()
        prompt = rig.submit("x" * 300, max_tokens=5)
        while not (ran(rig) and ran(rig)[-1].parts["prefill_row"][0] >= 0):
            assert gate.wait_for_frame()
            gate.step()
        shown = {name: rig.text(name) for name in (prompt, stream)}
        victims = [prompt, stream] if victim == "both" else [{"prompt": prompt, "stream": stream}[victim]]
        for name in victims:
            rig.abort(name)
        gate.open()
        rig.finish(*victims)
        for name in victims:
            assert rig.reason(name) == "abort"
        for name in {prompt, stream} - set(victims):
            rig.finish(name)
            assert rig.reason(name) == "length"
            assert rig.text(name).startswith(shown[name])
        rig.settle()
        assert rig.ledger_problems() == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, row: out["committed_len"].__setitem__(row, out["committed_len"][row] + 1),
        lambda out, row: out["num_tokens"].__setitem__(row, 1 - out["num_tokens"][row]),
        lambda out, row: out["offered"].__setitem__(row, 1),
        lambda out, row: out["slot"].__setitem__(row, 1 - out["slot"][row]),
        lambda out, row: out["accepted"].__setitem__(1 - row, out["offered"][1 - row] + 1),
        lambda out, row: out["confidence"].__setitem__(slice(None), np.nan),
        lambda out, row: out["survival"].__setitem__(slice(None), 7.0),
    ],
    ids=["prompt_length", "prompt_tokens", "prompt_proposals", "slots", "accepted", "confidence", "survival"],
)
def test_a_malformed_completion_stops_the_engine_and_answers_everybody(spoil: Any) -> None:
    done: list[int] = []

    def on_complete(frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        row = int(frame.parts.get("prefill_row", [-1])[0])
        # A prompt beside a lane that was offered proposals: only then is every one of the values above a wrong one.
        both = row >= 0 and frame.shape.proposal_depth and frame.parts["query_len"].astype(bool).sum() == 2
        if both and out["offered"][1 - row] and not done:
            done.append(frame.index)
            spoil(out, row)

    def drafts_are_cheap(shape: ProgramShape) -> int:
        return 1_000_000 if shape.kind is ProgramKind.MIXED and shape.proposal_depth else 40_000_000

    options = {"max_slots": 2, "on_complete": on_complete, "prefill_chunk": 64, "duration_ns": drafts_are_cheap}
    with mixed_rig("draft", **options) as rig:
        names = [rig.submit("to be or not to be " * 3, max_tokens=40) for _ in range(8)]
        rig.finish(*names)
        assert done, "no frame had a prompt beside a lane with proposals"
        assert isinstance(rig.engine.failure, InvariantError)
        assert not rig.engine.health().alive


def test_a_device_error_in_a_mixed_frame_fails_its_requests_only() -> None:
    failed: list[int] = []

    def on_complete(frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        if frame.shape.kind is ProgramKind.MIXED and not failed:
            failed.append(frame.index)
            raise RuntimeError("a fan stopped")

    with mixed_rig(on_complete=on_complete) as rig:
        names = [rig.submit("a" * 90, max_tokens=9) for _ in range(8)]
        ends = rig.finish(*names)
        assert failed
        lost = [end for end in ends if isinstance(end, Exception)]
        assert 0 < len(lost) < 8
        rig.settle()
        assert rig.ledger_problems() == []
        assert rig.engine.health().ready


def test_the_trace_names_the_prompt_row(tmp_path: Path) -> None:
    with mixed_rig("copy", trace=tmp_path / "trace.jsonl") as rig:
        rig.finish(*[rig.submit("again and again " * 6, max_tokens=9) for _ in range(6)])
        rig.settle()
        frames = {frame.index: frame for frame in rig.core.runner.frames}
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert len(lines) == len(frames)
    mixed = 0
    for index, line in enumerate(lines):
        shape = frames[index].shape
        assert (line["b"], line["d"], line["w"], line["p"], line["prompt"]) == (
            shape.batch_capacity, shape.proposal_depth, shape.token_capacity, shape.packed_capacity,
            shape.prefill_capacity,
        )  # fmt: skip
        named = frames[index].parts.get("prefill_row")
        assert line["prompt_row"] == (-1 if named is None else int(named[0]))
        mixed += line["prompt_row"] >= 0
    assert mixed > 2
