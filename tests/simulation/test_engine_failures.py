"""Device errors, our own bugs, hung devices: everybody is answered, and health tells the truth."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from helios_jax.engine import recovery
from helios_jax.engine.heartbeat import IDLE, EngineHealth
from helios_jax.engine.params import SamplingParams
from helios_jax.engine.recovery import MAX_DEVICE_ERRORS
from helios_jax.engine.request import Request
from helios_jax.engine.trace import TraceWriter
from helios_jax.errors import DeviceError, UnavailableError
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.testing import EngineRig, FakeClock, FakeFrame, Gate, expected_tokens, hashed_text, scripted


def test_device_error_fails_what_was_on_the_device_and_the_queue_goes_on() -> None:
    def fail_once(frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        if frame.shape.kind is ProgramKind.DECODE and rig.core.runner.resets == 0:
            raise RuntimeError("out of memory")

    gate = Gate()
    gate.close()
    with EngineRig(max_slots=1, gate=gate, on_complete=fail_once) as rig:
        lost = rig.submit("abc", max_tokens=5)
        queued = rig.submit("xyz", max_tokens=5)
        gate.open()
        error, _ = rig.finish(lost, queued)
        assert isinstance(error, DeviceError)
        assert rig.text(queued) == bytes(expected_tokens(hashed_text, list(b"xyz"), 5)).decode()
        assert rig.core.runner.resets == 1
        assert rig.engine.health() == EngineHealth(True, True)
        assert rig.ledger_problems() == []
        totals = rig.engine.board.snapshot()
        assert (totals.failed, totals.device_errors, totals.finished["length"]) == (1, 1, 1)
        assert totals.reconciles()


def test_request_admitted_but_not_yet_on_the_device_survives_a_device_error() -> None:
    """Only sequences with device state are lost; one that is admitted meanwhile has none."""

    def fail_first(frame: FakeFrame) -> None:
        if frame.shape.kind is ProgramKind.PREFILL and rig.core.runner.resets == 0:
            rig.submit("late", "late", max_tokens=3)
            raise RuntimeError("device lost")

    with EngineRig(max_slots=2, on_submit=fail_first) as rig:
        rig.submit("early", "early", max_tokens=3)
        early, _ = rig.finish("early", "late")
        assert isinstance(early, DeviceError)
        assert rig.reason("late") == "length"


def test_repeated_device_errors_stop_the_engine(tmp_path: Path) -> None:
    def always(frame: FakeFrame) -> None:
        raise RuntimeError("device lost")

    gate = Gate()
    with EngineRig(start=False, max_slots=1, gate=gate, on_submit=always, dump_dir=tmp_path) as rig:
        names = [rig.submit("a", max_tokens=5) for _ in range(MAX_DEVICE_ERRORS + 2)]
        rig.engine.start()
        answers = rig.finish(*names)
        assert all(isinstance(answer, (DeviceError, UnavailableError)) for answer in answers)
        assert not rig.engine.health().alive
        assert "device error" in rig.engine.health().reason


def test_invariant_error_stops_dumps_and_answers_everybody(tmp_path: Path) -> None:
    def lie(frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        if frame.shape.kind is ProgramKind.DECODE:
            out["slot"][0] = 3  # answers for somebody else

    with EngineRig(start=False, max_slots=2, on_complete=lie, dump_dir=tmp_path) as rig:
        names = [rig.submit("abc", max_tokens=9) for _ in range(5)]  # running and queued
        rig.engine.start()
        answers = rig.finish(*names)
        assert all(isinstance(answer, UnavailableError) for answer in answers)
        health = rig.engine.health()
        assert (health.alive, health.ready) == (False, False)
        assert "InvariantError" in health.reason
        with pytest.raises(UnavailableError, match="stopped after an internal error"):
            rig.submit("abc", max_tokens=1)
        totals = rig.engine.board.snapshot()
        assert (totals.failed, totals.refused, totals.active) == (5, 1, 0)
        assert totals.reconciles()
    (report,) = tmp_path.glob("*.json")
    record = json.loads(report.read_text())
    assert "answers for slot 3" in record["error"]
    assert any(" commit " in line for line in record["events"])
    assert report.stat().st_mode & 0o077 == 0
    (state,) = tmp_path.glob("*.pickle")
    assert pickle.loads(state.read_bytes()).last_fence == record["summary"]["fence"]


def test_nan_logits_fail_one_request_and_spare_the_others() -> None:
    def poison(frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        if "status" in out and frame.shape.kind is ProgramKind.DECODE:
            out["status"][frame.parts["slot"] == 0] = 1

    with EngineRig(start=False, max_slots=2, on_complete=poison) as rig:
        bad, good = rig.submit("abc", max_tokens=5), rig.submit("xyz", max_tokens=5)
        rig.engine.start()  # both wait by now, so the good one cannot get the slot of the bad one
        rig.finish(bad, good)
        assert rig.reason(bad) == "error"
        assert rig.text(good) == bytes(expected_tokens(hashed_text, list(b"xyz"), 5)).decode()
        assert rig.engine.board.snapshot().failed == 1
        assert rig.ledger_problems() == []


def test_hung_device_call_is_not_ready_but_alive_and_recovers() -> None:
    clock, gate = FakeClock(), Gate()
    gate.close()
    with EngineRig(clock=clock, gate=gate, ready_timeout_s=5.0) as rig:
        name = rig.submit("abc", max_tokens=1)
        assert gate.wait_for_frame()
        assert rig.engine.health() == EngineHealth(True, True)
        clock.advance(5_100_000_000)
        health = rig.engine.health()
        assert (health.alive, health.ready) == (True, False)
        assert "a device call has not returned for 5.1 s (fence 1, initialize-b1)" in health.reason
        gate.open()
        rig.finish(name)
        assert rig.engine.board.wait_until_empty(10)


def test_long_idle_is_healthy() -> None:
    clock = FakeClock()
    with EngineRig(clock=clock, ready_timeout_s=5.0) as rig:
        rig.finish(rig.submit("abc", max_tokens=1))
        rig.finish(rig.submit("abc", max_tokens=1))  # the thread has been idle once in between
        deadline = time.monotonic() + 10
        while rig.engine.heartbeat.phase != IDLE and time.monotonic() < deadline:
            pass
        clock.advance(10**15)
        assert rig.engine.health() == EngineHealth(True, True)


def test_frozen_host_thread_is_not_ready() -> None:
    clock, gate = FakeClock(), Gate()
    frozen = Gate()
    frozen.close()
    with EngineRig(clock=clock, gate=gate, ready_timeout_s=5.0) as rig:
        plan = rig.engine.scheduler.plan

        def stuck() -> object:
            frozen.pass_through()
            return plan()

        rig.engine.scheduler.plan = stuck  # type: ignore[method-assign]
        rig.submit("abc", max_tokens=1)
        assert frozen.wait_for_frame()
        clock.advance(6_000_000_000)
        assert "the engine thread has made no progress for 6.0 s (planning)" in rig.engine.health().reason
        frozen.open()


def test_closing_answers_running_and_queued_requests() -> None:
    gate = Gate()
    gate.close()
    rig = EngineRig(max_slots=1, gate=gate)
    names = [rig.submit("abc", max_tokens=100) for _ in range(3)]
    assert gate.wait_for_frame()
    rig.engine.board.stop()
    rig.close()
    assert all(isinstance(answer, UnavailableError) for answer in rig.finish(*names))
    assert not rig.engine.health().ready
    rig.close()


@pytest.mark.parametrize(
    ("said", "stop"),
    [(b"abcSTO", ["STOP"]), ("é".encode()[:1] * 9, None)],
    ids=["part of a stop string", "half a character"],
)
def test_failed_lane_that_releases_held_text_spares_the_others(said: bytes, stop: list[str] | None) -> None:
    """The failing frame served the sequence no token, so the released text is no publication of it."""
    decodes = iter(range(100))

    def poison(frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        if frame.shape.kind is ProgramKind.DECODE and next(decodes) == len(said) - 1:
            out["status"][:] = 1

    with EngineRig(max_slots=1, next_token=scripted(said), on_complete=poison) as rig:
        bad, good = rig.submit("abc", stop=stop, max_tokens=20), rig.submit("xyz", max_tokens=2)
        rig.finish(bad, good)
        assert rig.reason(bad) == "error"
        assert rig.reason(good) == "length"
        assert rig.engine.health() == EngineHealth(True, True)
        assert rig.text(bad) == said.decode(errors="replace")


def test_program_that_always_fails_stops_the_engine_though_others_succeed(tmp_path: Path) -> None:
    def no_decode(frame: FakeFrame) -> None:
        if frame.shape.kind is ProgramKind.DECODE:
            raise RuntimeError("illegal instruction")

    with EngineRig(start=False, max_slots=1, on_submit=no_decode, dump_dir=tmp_path) as rig:
        names = [rig.submit("a", max_tokens=5) for _ in range(MAX_DEVICE_ERRORS + 1)]
        rig.engine.start()
        answers = rig.finish(*names)
        assert [type(answer) for answer in answers] == [DeviceError] * MAX_DEVICE_ERRORS + [UnavailableError]
        rig.engine._thread.join(10)
        health = rig.engine.health()
        assert (health.alive, health.ready) == (False, False)
        assert rig.core.runner.resets == MAX_DEVICE_ERRORS - 1


def test_program_that_recovers_is_forgiven() -> None:
    decodes = iter(range(1000))

    def every_other(frame: FakeFrame) -> None:
        if frame.shape.kind is ProgramKind.DECODE and next(decodes) % 2:
            raise RuntimeError("a hiccup")

    with EngineRig(max_slots=1, on_submit=every_other) as rig:
        answers = rig.finish(*[rig.submit("a", max_tokens=3) for _ in range(2 * MAX_DEVICE_ERRORS)])
        assert all(isinstance(answer, DeviceError) for answer in answers)
        assert rig.engine.health() == EngineHealth(True, True)


def test_full_disk_ends_the_trace_but_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with EngineRig(trace="/dev/full") as rig:
        name = rig.submit("abc", max_tokens=5)
        rig.finish(name)
        assert rig.reason(name) == "length"
        assert rig.engine.health() == EngineHealth(True, True)
    (record,) = caplog.records
    assert record.getMessage() == "the trace /dev/full ends at frame 1, serving goes on: No space left on device"
    assert rig.core.runner.broken  # the core was closed


def test_core_is_freed_though_the_trace_cannot_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = EngineRig(trace=tmp_path / "trace.jsonl")

    def explode(self: TraceWriter) -> None:
        raise ValueError("no")

    monkeypatch.setattr(TraceWriter, "close", explode)
    with pytest.raises(ValueError, match="no"):
        rig.close()
    assert rig.core.runner.broken


@pytest.mark.parametrize("broken", ["cache_dir", "dump", "take_output"])
def test_everybody_is_answered_though_dying_goes_wrong(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: object) -> None:
        raise ValueError(broken)

    def lie(frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        if frame.shape.kind is ProgramKind.DECODE:
            out["slot"][0] = 3

    monkeypatch.setattr(recovery, "cache_dir", explode)
    if broken == "dump":
        monkeypatch.setattr(recovery, "cache_dir", lambda: Path("/nonexistent"))
        monkeypatch.setattr(recovery, "dump", explode)
    if broken == "take_output":  # the flush that failed must not fail the answer
        monkeypatch.setattr(Request, "take_output", explode)
    with EngineRig(start=False, max_slots=2, on_complete=lie) as rig:
        names = [rig.submit("abc", max_tokens=9) for _ in range(4)]
        ended = rig.submit("abc", max_tokens=0)  # no longer open when its last output is made
        rig.engine.start()
        answers = rig.finish(*names)
        assert all(isinstance(answer, UnavailableError) for answer in answers)
        assert isinstance(rig.finish(ended)[0], UnavailableError) is (broken == "take_output")
        rig.engine._thread.join(10)
        assert rig.engine.failure is not None
        assert "the engine stopped after an internal error" in rig.engine.health().reason
        assert rig.engine.board.snapshot().reconciles()


def test_sink_that_breaks_costs_only_its_reader() -> None:
    class Broken:
        def deliver(self, batch: object) -> None:
            raise RuntimeError("closed")

    with EngineRig(start=False, dump_dir="/dev/null/none") as rig:
        rig.submit("abc", max_tokens=9)
        request = rig.assembly.intake.request("a", SamplingParams(), request_id="x", sink=Broken(), arrival_ns=0)
        rig.engine.board.submit(request)
        other = rig.submit("abc", max_tokens=9)
        rig.engine.start()
        assert isinstance(rig.finish(other)[0], UnavailableError)
