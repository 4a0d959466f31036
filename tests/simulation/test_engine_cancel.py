"""Cancellation in every phase: slot and pages back within a step, nothing of it is ever run or shown again."""

from __future__ import annotations

import asyncio

import pytest

from helios_jax.engine.params import SamplingParams
from helios_jax.errors import CapacityError
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.testing import EngineRig, FakeFrame, Gate, fake_async_llm

LONG = 200


def frames_of(rig: EngineRig, kind: ProgramKind) -> list[FakeFrame]:
    return [frame for frame in rig.core.runner.frames if frame.shape.kind is kind]


@pytest.mark.parametrize("streamed_frames", [0, 1, 2, 3, 6])
def test_cancel_between_dispatch_and_completion_of_each_phase(streamed_frames: int) -> None:
    """0 = while initialising, 1 = first chunk, 2 = last chunk, 3 = first decode, 6 = later."""
    gate = Gate()
    gate.close()
    with EngineRig(max_slots=1, gate=gate, prefill_chunk=64) as rig:
        name = rig.submit([97] * 100, max_tokens=LONG)  # two chunks
        assert gate.wait_for_frame()
        for _ in range(streamed_frames):
            gate.step()
            assert gate.wait_for_frame()
        before = rig.text(name)
        submitted = len(rig.core.runner.frames)
        rig.abort(name)
        gate.step()
        rig.finish(name)
        assert rig.reason(name) == "abort"
        assert rig.text(name) == before  # tokens of the frame that was in flight are suppressed
        gate.open()
        rig.settle()
        assert len(rig.core.runner.frames) == submitted  # and no further frame runs for it
        assert rig.ledger_problems() == []
        other = rig.submit([98] * 20, max_tokens=3)
        rig.finish(other)
        assert rig.reason(other) == "length"


def test_cancel_in_the_queue_takes_no_slot() -> None:
    gate = Gate()
    gate.close()
    with EngineRig(max_slots=1, gate=gate) as rig:
        first = rig.submit("a", max_tokens=2)
        queued = rig.submit("b", max_tokens=2)
        assert gate.wait_for_frame()
        rig.abort(queued)
        gate.open()
        rig.finish(first, queued)
        assert rig.reason(queued) == "abort"
        assert rig.text(queued) == ""
        assert len(frames_of(rig, ProgramKind.INITIALIZE)) == 1
        assert rig.ledger_problems() == []


def test_cancel_of_n_outputs_ends_running_and_queued_ones() -> None:
    gate = Gate()
    gate.close()
    with EngineRig(max_slots=2, gate=gate) as rig:
        name = rig.submit("a", n=5, max_tokens=LONG)
        assert gate.wait_for_frame()
        rig.abort(name)
        gate.open()
        rig.finish(name)
        assert [rig.reason(name, i) for i in range(5)] == ["abort"] * 5
        assert rig.ledger_problems() == []
        assert rig.engine.stats().waiting == 0


def test_abort_of_unknown_and_finished_requests_is_ignored() -> None:
    with EngineRig() as rig:
        name = rig.submit("a", max_tokens=1)
        rig.finish(name)
        rig.abort(name)
        rig.abort("never heard of")
        rig.finish(rig.submit("b", max_tokens=1))
        assert rig.engine.board.snapshot().cancelled == 0


def test_closing_the_stream_or_cancelling_its_task_cancels_the_request() -> None:
    async def run() -> None:
        async with fake_async_llm(max_slots=1) as llm:
            stream = llm.generate("a", SamplingParams(max_tokens=LONG))
            await anext(stream)
            await stream.aclose()

            async def read() -> None:
                async for _ in llm.generate("b", SamplingParams(max_tokens=LONG)):
                    pass

            llm.core.runner.gate.close()
            task = asyncio.create_task(read())
            assert await asyncio.to_thread(llm.core.runner.gate.wait_for_frame)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            llm.core.runner.gate.open()
            assert await llm.drain(10)
            stats = llm.stats()
            assert stats.requests_total["cancelled"] == 2
            assert stats.requests_total["active"] == 0
            assert stats.pages_used == 0
            assert stats.requests.reconciles()

    asyncio.run(run())


def test_full_queue_is_a_capacity_error_and_room_comes_back() -> None:
    gate = Gate()
    gate.close()
    with EngineRig(max_slots=2, max_queue=1, gate=gate) as rig:
        names = [rig.submit("a", max_tokens=2) for _ in range(3)]
        with pytest.raises(CapacityError, match="3 outputs are running or waiting, at most 3"):
            rig.submit("b", max_tokens=2)
        gate.open()
        rig.finish(*names)
        rig.finish(rig.submit("b", max_tokens=2))
        totals = rig.engine.board.snapshot()
        assert (totals.arrived, totals.refused) == (5, 1)
        assert totals.reconciles()
