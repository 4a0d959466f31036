"""Runs the programs of a core on its device, one after the other, without blocking.

1. `submit` passes (params, state, control) to an executable; the call returns before the
   device is done, with the new state and completion as promises. The next frame may be given
   such a promise as its state: it is queued on the device, and the host waits for nothing.
2. The completion watcher, a thread, waits for each frame in turn, takes its end time and
   copies the completion to the host.
3. `InFlight.wait` hands the completion over, or raises what went wrong.
4. A failure loses the donated state; the runner refuses frames until `reset`.

It does not know requests: what a control vector means is the business of programs and engine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from helios_jax.aot.abi import Dims, Layout, control_layout, mask_shape
from helios_jax.aot.host_copies import Content, HostCopies, Parcel
from helios_jax.errors import DeviceError, InvariantError
from helios_jax.scheduler.catalog import ProgramShape
from helios_jax.scheduler.types import ExecutionTiming

MAX_IN_FLIGHT = 2  # frames; the architecture's bound on the submission window


class InFlight:
    """One submitted frame, until its completion is on the host.

    Attributes:
        dispatch_ns: When it was submitted, `time.monotonic_ns`.
        end_ns: When the watcher saw its end; 0 before.
        queued: Whether another frame was in flight at its submission.
    """

    def __init__(self, shape: ProgramShape, outputs: tuple[jax.Array, jax.Array], dispatch_ns: int, queued: bool):
        self.shape, self.dispatch_ns, self.end_ns, self.queued = shape, dispatch_ns, 0, queued
        self._outputs: tuple[Any, Any] = outputs
        self._done = threading.Event()
        self._timing: ExecutionTiming | None = None
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> tuple[np.ndarray, np.ndarray, ExecutionTiming]:
        """The completion vectors (int32, float32; read-only) and the frame's timing.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            DeviceError: The execution failed; the device state is lost until `reset`.
            TimeoutError: Not done in time; the frame is still in flight.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"program {self.shape.name} is not done after {timeout} s")
        if self._error is not None:
            raise DeviceError(f"program {self.shape.name} failed: {self._error}") from self._error
        assert self._timing is not None
        return self._outputs[0], self._outputs[1], self._timing

    def _observe(self, previous_end_ns: int) -> int:
        """Waits for the device, in the watcher; returns the end time, ns."""
        try:
            jax.block_until_ready(self._outputs)
            end = time.monotonic_ns()
            self._outputs = (np.asarray(self._outputs[0]), np.asarray(self._outputs[1]))
        except BaseException as error:  # whatever it is, the waiter must hear of it
            end = time.monotonic_ns()
            self._error = error
        self.end_ns, start = end, max(self.dispatch_ns, previous_end_ns)
        wall = end - self.dispatch_ns
        self._timing = ExecutionTiming(device_ns=(end - start,), wall_ns=wall, queued=self.queued)
        return end


class DeviceRunner:
    """Owns the weights and the donated state of one device and runs programs on them."""

    def __init__(
        self,
        calls: Mapping[ProgramShape, Callable[..., Any]],
        params: Any,
        new_state: Callable[[], Any],
        dims: Dims,
    ) -> None:
        self._calls = dict(calls)
        self._params = params
        self._new_state = new_state
        self._dims = dims
        self.host_copies: HostCopies | None = None  # compiled for cores that are to have them, before `ready`
        self._layouts: dict[ProgramShape, Layout] = {shape: control_layout(shape, dims) for shape in calls}
        self._masks = {shape: mask_shape(shape, dims) for shape in calls}
        self._everything: dict[tuple[int, int], jax.Array] = {}  # masks of all ones on the device, by extents
        self._lock = threading.Lock()  # orders submissions; the watcher never takes it
        self._in_flight: queue.SimpleQueue[InFlight | None] = queue.SimpleQueue()
        self._submitted = 0
        self._observed = 0  # written by the watcher only
        self._broken: BaseException | None = None
        self._closed = False
        self._last: InFlight | None = None
        self._state = self._fresh_state()
        self._watcher = threading.Thread(target=self._watch, name="helios-completion-watcher", daemon=True)
        self._watcher.start()

    def submit(
        self, shape: ProgramShape, ints: np.ndarray, floats: np.ndarray, bits: np.ndarray | None = None
    ) -> InFlight:
        """Starts one program and returns at once (tens of microseconds, plus 1 us a weight leaf).

        Args:
            shape: A shape of the core's catalogue.
            ints, floats: Flat control vectors of the shape's layout; copied, so the caller
                may reuse them.
            bits: The packed mask of `mask_shape`, copied; None = everything is allowed, nothing is sent.

        Raises:
            DeviceError: An earlier frame failed and nobody called `reset`, or closed.
            InvariantError: A shape or vector that the core does not have: our bug.
        """
        self._validate(shape, ints, floats, bits)
        with self._lock:
            self._check_open()
            queued = self._submitted != self._observed
            if self._submitted - self._observed >= MAX_IN_FLIGHT:
                raise InvariantError(f"{MAX_IN_FLIGHT} frames are in flight already")
            dispatch_ns = time.monotonic_ns()
            try:
                # Copies: on CPU jax may read a numpy argument in place after the call returned.
                control = (ints.copy(), floats.copy(), *self._mask(shape, bits))
                state, outputs = self._calls[shape](self._params, self._state, *control)
                self._state = state
                for output in outputs:
                    output.copy_to_host_async()
            except Exception as error:  # the state was donated: nothing can run before a reset
                self._broken = error
                raise DeviceError(f"program {shape.name} failed: {error}") from error
            frame = InFlight(shape, outputs, dispatch_ns, queued)
            self._submitted += 1
            self._last = frame
            self._in_flight.put(frame)
            return frame

    def take_out(self, row: int, pages: Sequence[int]) -> Parcel:
        """Starts the copies of a state row and of pages to the host, behind what was submitted, and returns at once.

        Raises:
            DeviceError: The state is lost, or closed; or the copies cannot be started, which costs nothing else.
        """
        with self._lock:
            self._check_open()
            assert self.host_copies is not None
            try:
                return self.host_copies.take_out(self._state, row, pages)
            except Exception as error:  # no memory for the transient copy: XLA's own types
                raise DeviceError(f"a checkpoint cannot be copied to the host: {error}") from error

    def put_in(self, row: int, pages: Sequence[int], contents: Sequence[Content], kept: Content) -> None:
        """Copies contents from the host into pages and a state row, ahead of the frames to come.

        Raises:
            DeviceError: The state is lost, or closed; or was donated in the attempt, until `reset`.
            RuntimeError: XLA's, most often for memory; the state is as it was.
        """
        with self._lock:
            self._check_open()
            assert self.host_copies is not None
            try:
                self._state = self.host_copies.put_in(self._state, row, pages, contents, kept)
            except Exception as error:
                if not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
                    raise
                self._broken = error
                raise DeviceError(f"a checkpoint from the host could not be written: {error}") from error

    def reset(self) -> None:
        """Waits for what is in flight, whatever its outcome, and makes a fresh device state.

        Raises:
            DeviceError: The device cannot make one, or the runner was closed.
        """
        with self._lock:
            self._drain()
            if self._closed:
                raise DeviceError("the core is closed")
            self._state = None  # free the old pool before the new one is made
            self._state = self._fresh_state()
            self._broken = None

    def close(self) -> None:
        """Waits for what is in flight, stops the watcher and drops weights and state. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._drain()
            self._closed = True
            self._in_flight.put(None)
            self._params = self._state = None
            self._everything.clear()
        self._watcher.join()

    def _fresh_state(self) -> Any:
        try:
            return jax.block_until_ready(self._new_state())
        except Exception as error:  # XLA's own types; most often out of memory
            self._broken = error
            raise DeviceError(f"the device state cannot be made: {error}") from error

    def _drain(self) -> None:
        if self._last is not None:
            self._last._done.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("the core is closed")
        if self._broken is not None:
            raise DeviceError(f"the device state was lost: {self._broken}; reset the runner") from self._broken

    def _mask(self, shape: ProgramShape, bits: np.ndarray | None) -> tuple[np.ndarray | jax.Array, ...]:
        extents = self._masks[shape]
        if extents is None:
            return ()
        if bits is not None:
            return (bits.copy(),)
        if extents not in self._everything:
            self._everything[extents] = jax.device_put(np.full(extents, 0xFFFFFFFF, np.uint32))
        return (self._everything[extents],)

    def _validate(self, shape: ProgramShape, ints: np.ndarray, floats: np.ndarray, bits: np.ndarray | None) -> None:
        layout = self._layouts.get(shape)
        if layout is None:
            raise InvariantError(f"program {shape.name} is not in the core's catalogue")
        if ints.shape != (layout.int_size,) or ints.dtype != np.int32:
            raise InvariantError(f"{shape.name}: ints are {ints.dtype}{ints.shape}, need int32({layout.int_size},)")
        if floats.shape != (layout.float_size,) or floats.dtype != np.float32:
            raise InvariantError(
                f"{shape.name}: floats are {floats.dtype}{floats.shape}, need float32({layout.float_size},)"
            )
        extents = self._masks[shape]
        if bits is not None and (bits.shape != extents or bits.dtype != np.uint32):
            raise InvariantError(f"{shape.name}: bits are {bits.dtype}{bits.shape}, need uint32{extents}")

    def _watch(self) -> None:
        end_ns = 0
        while (frame := self._in_flight.get()) is not None:
            end_ns = frame._observe(end_ns)
            if frame._error is not None and self._broken is None:
                self._broken = frame._error
            self._observed += 1
            frame._done.set()  # last: a waiter may submit the next frame at once
