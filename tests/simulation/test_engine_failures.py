"""Device errors, our own bugs, hung devices: everybody is answered, and health tells the truth."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from helios_jax.engine.heartbeat import IDLE, EngineHealth
from helios_jax.engine.loop import MAX_DEVICE_ERRORS
from helios_jax.errors import DeviceError, UnavailableError
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.testing import EngineRig, FakeClock, FakeFrame, Gate, expected_tokens, hashed_text


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

    with EngineRig(max_slots=2, on_complete=poison) as rig:
        bad, good = rig.submit("abc", max_tokens=5), rig.submit("xyz", max_tokens=5)
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
