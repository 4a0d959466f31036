"""Two frames in the real device runner: the second is taken before the first is over, and their times add up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.abi import Dims, control_layout
from helios_jax.aot.runner import DeviceRunner, InFlight
from helios_jax.errors import DeviceError, InvariantError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape

DIMS = Dims(slots=2, pages_per_slot=4, num_pages=9, page_size=16, vocab_size=32)
INITIALIZE = ProgramShape(ProgramKind.INITIALIZE, 1, 0)
PATIENCE_S = 20.0


class Promise:
    """An output that is there, or has failed, when the test says so."""

    def __init__(self, value: int) -> None:
        self.value, self.go, self.error = value, threading.Event(), ""

    def copy_to_host_async(self) -> None:
        """Nothing to start."""

    def block_until_ready(self) -> Promise:
        assert self.go.wait(PATIENCE_S)
        if self.error:
            raise RuntimeError(self.error)
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray([self.value], np.int32)


class Device:
    """A program that the test finishes, in order; every execution counts in the state."""

    def __init__(self) -> None:
        self.promises: list[Promise] = []

    def __call__(self, params: Any, state: Any, *control: Any) -> Any:
        promise = Promise(int(state[0]) + 1)
        self.promises.append(promise)
        return np.asarray([promise.value]), (promise, promise)

    def finish(self, number: int, error: str = "") -> None:
        self.promises[number].error = error
        self.promises[number].go.set()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def runner(device: Device) -> Iterator[DeviceRunner]:
    runner = DeviceRunner({INITIALIZE: device}, {}, lambda: np.zeros(1, np.int32), DIMS)
    yield runner
    for promise in device.promises:
        promise.go.set()
    runner.close()


def submit(runner: DeviceRunner, first_int: int = 0) -> InFlight:
    ints, floats, _ = control_layout(INITIALIZE, DIMS).new()
    ints[0] = first_int
    return runner.submit(INITIALIZE, ints, floats)


def counted(frame: InFlight) -> int:
    return int(frame.wait(PATIENCE_S)[0][0])


def test_a_compiled_program_takes_a_promise_as_its_donated_state() -> None:
    """The second submission returns while the first program still computes: the host waits for nothing."""

    def program(params: Any, state: jax.Array, ints: jax.Array, floats: jax.Array) -> Any:
        matrix = jnp.full((256, 256), 1e-3) + state[0]
        busy = jax.lax.fori_loop(0, ints[0], lambda _, x: jnp.tanh(x @ matrix), matrix)
        state = state.at[0].add(1 + 0 * busy[0, 0])
        return state, (state[:1].astype(jnp.int32), floats * 2)

    ints, floats, _ = control_layout(INITIALIZE, DIMS).new()
    compiled = jax.jit(program, donate_argnums=1).lower({}, jnp.zeros(4), ints, floats).compile()
    runner = DeviceRunner({INITIALIZE: compiled}, {}, lambda: jnp.zeros(4), DIMS)
    began = time.monotonic_ns()
    counted(submit(runner, 100))
    loops = 100 * 500_000_000 // max(1, time.monotonic_ns() - began)  # half a second, on this machine now
    first = submit(runner, loops)
    second = submit(runner, 1)
    assert not first.is_done()
    assert not second.is_done()
    assert (first.queued, second.queued) == (False, True)
    assert [counted(first), counted(second)] == [2, 3]
    runner.close()


def test_a_third_frame_is_refused_until_the_first_is_complete(device: Device, runner: DeviceRunner) -> None:
    frames = [submit(runner), submit(runner)]
    with pytest.raises(InvariantError, match="2 frames are in flight already"):
        submit(runner)
    device.finish(0)
    assert counted(frames[0]) == 1
    frames.append(submit(runner))
    for number in (1, 2):
        device.finish(number)
    assert [counted(frame) for frame in frames[1:]] == [2, 3]


def test_intervals_of_queued_frames_begin_where_the_frame_before_ends(device: Device, runner: DeviceRunner) -> None:
    before = time.monotonic_ns()
    first, second = submit(runner), submit(runner)
    for number in range(2):
        device.finish(number)
    timings = [frame.wait(PATIENCE_S)[2] for frame in (first, second)]
    assert [timing.queued for timing in timings] == [False, True]
    assert timings[0].device_ns == (first.end_ns - first.dispatch_ns,) == (timings[0].wall_ns,)
    assert timings[1].device_ns == (second.end_ns - first.end_ns,)
    assert timings[1].wall_ns == second.end_ns - second.dispatch_ns
    assert before <= first.dispatch_ns <= second.dispatch_ns < first.end_ns <= second.end_ns
    third = submit(runner)  # nothing else in flight: not queued, from its own dispatch
    device.finish(2)
    timing = third.wait(PATIENCE_S)[2]
    assert (timing.queued, timing.device_ns) == (False, (third.end_ns - third.dispatch_ns,))
    assert third.dispatch_ns >= second.end_ns


def test_both_frames_of_a_failed_device_fail_and_a_reset_starts_anew(device: Device, runner: DeviceRunner) -> None:
    first, second = submit(runner), submit(runner)
    device.finish(0, "device lost")
    device.finish(1, "its state was lost")
    for frame in (first, second):
        with pytest.raises(DeviceError, match="initialize-b1"):
            frame.wait(PATIENCE_S)
    with pytest.raises(DeviceError, match="the device state was lost: device lost; reset the runner"):
        submit(runner)
    runner.reset()
    frame = submit(runner)
    device.finish(2)
    assert counted(frame) == 1


def test_a_reset_waits_for_both_frames(device: Device, runner: DeviceRunner) -> None:
    frames = [submit(runner), submit(runner)]
    resetting = threading.Thread(target=runner.reset)
    resetting.start()
    device.finish(0)
    assert counted(frames[0]) == 1
    assert not frames[1].is_done()
    assert resetting.is_alive()  # it cannot be done: the second frame is not
    device.finish(1)
    resetting.join(PATIENCE_S)
    assert all(frame.is_done() for frame in frames)
    frame = submit(runner)
    device.finish(2)
    assert counted(frame) == 1
