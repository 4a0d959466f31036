"""A device that is a few numpy arrays: same control and completion vectors, no compilation.

It runs what it is given in order of submission, as a real device does, whoever waits for what.
With a `FakeClock` it has a virtual time of its own: a frame begins when it is submitted or when
the one before it is over, and its completion is there when its duration has passed.

Life of a frame: 1. `submit` queues it; 2. `wait`, on it or on a later one, passes the gate, moves
the clock to its end and runs it (`device_programs`, `device_rounds`); 3. the completion is kept for
its own waiter. A failure loses the state, and everything queued behind fails with it until `reset`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from helios_jax.aot.abi import Dims, completion_layout, control_layout
from helios_jax.engine.host_tier import Content
from helios_jax.errors import DeviceError, InvariantError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape, ProposalSource
from helios_jax.scheduler.types import ExecutionTiming
from helios_jax.testing import device_programs, device_rounds
from helios_jax.testing.clock import FakeClock
from helios_jax.testing.device_copies import FakeParcel, write
from helios_jax.testing.device_state import FakeState, Mask, unmasked
from helios_jax.testing.gate import Gate
from helios_jax.testing.model import FakeDraft, NextToken, hashed_text

MAX_IN_FLIGHT = 2  # as the real runner
Completion = tuple[np.ndarray, np.ndarray, ExecutionTiming]


def default_duration_ns(shape: ProgramShape) -> int:
    """Virtual device time: 1 ms, 0.1 ms a row, 0.02 ms a token, 0.15 ms a step of a draft model."""
    tokens = max(shape.token_capacity, shape.packed_capacity)
    drafts = shape.proposal_depth if shape.proposal_source is ProposalSource.LEARNED else 0
    return 1_000_000 + 100_000 * shape.batch_capacity + 20_000 * tokens + 150_000 * drafts


@dataclasses.dataclass
class FakeFrame:
    """One submitted frame; `parts` are the named control fields, `bits` its mask if it came with one."""

    index: int
    shape: ProgramShape
    parts: dict[str, np.ndarray]
    bits: np.ndarray | None = None


class FakeInFlight:
    """A frame on its way; `wait` gives its completion, or raises what went wrong, as often as it is asked."""

    def __init__(self, runner: FakeRunner, frame: FakeFrame, dispatch_ns: int, end_ns: int, queued: bool) -> None:
        self.frame, self.dispatch_ns, self.end_ns, self.queued = frame, dispatch_ns, end_ns, queued
        self.completion: Completion | None = None
        self.error: DeviceError | None = None
        self.behind: list[Callable[[FakeState | None], None]] = []  # copies to be made when it is over
        self._runner = runner

    @property
    def shape(self) -> ProgramShape:
        return self.frame.shape

    @property
    def is_over(self) -> bool:
        return self.completion is not None or self.error is not None

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.is_over or self._runner.may_finish(self)

    def wait(self, timeout: float | None = None) -> Completion:
        """Completion vectors (int32, float32) and times of the frame.

        Args:
            timeout: Seconds, of the clock's time if there is a clock; None waits for ever.

        Raises:
            DeviceError: The frame, or one before it, failed; the device state is lost until `reset`.
            TimeoutError: Not done in time; the frame is still in flight.
        """
        self._runner.run_through(self, timeout)
        if self.error is not None:
            raise self.error
        assert self.completion is not None
        return self.completion


class FakeRunner:
    """Runs control vectors as a device would.

    Args:
        dims: Extents of the core.
        next_token: The model.
        recurrent: It has state outside of pages; see `FakeState`.
        draft: Makes the proposals of learned rounds.
        clock: Moved to each frame's virtual end when given.
        duration_ns: Virtual duration of a shape.
        gate: Holds frames back.
        on_submit: Called with each frame when submitted; what it raises becomes a DeviceError.
        on_complete: Called with frame and completion fields, which it may change; raising as above.
        on_copy: Called with "take_out" or "put_in" before such a copy is submitted; raising as above.
    """

    def __init__(
        self,
        dims: Dims,
        *,
        next_token: NextToken = hashed_text,
        recurrent: bool = True,
        draft: FakeDraft | None = None,
        clock: FakeClock | None = None,
        duration_ns: Callable[[ProgramShape], int] = default_duration_ns,
        gate: Gate | None = None,
        on_submit: Callable[[FakeFrame], None] | None = None,
        on_complete: Callable[[FakeFrame, dict[str, np.ndarray]], None] | None = None,
        on_copy: Callable[[str], None] | None = None,
    ) -> None:
        self.dims, self.next_token, self.clock, self.duration_ns = dims, next_token, clock, duration_ns
        self.recurrent = recurrent
        self.draft, self.gate = draft or FakeDraft(), gate or Gate()
        self.on_submit, self.on_complete, self.on_copy = on_submit, on_complete, on_copy
        self.frames: list[FakeFrame] = []
        self.resets = -1
        self._queue: collections.deque[FakeInFlight] = collections.deque()
        self._end_ns = 0  # when the device is through with all that was submitted
        self.reset()

    def reset(self) -> None:
        """New device state: empty pages and slots. What is in flight is waited for, whatever its outcome."""
        while self._queue:
            self.run_through(self._queue[-1], None)
        self.resets += 1
        self.broken = self._lost = False
        self.state = FakeState(self.dims, self.next_token, recurrent=self.recurrent)

    def submit(
        self, shape: ProgramShape, ints: np.ndarray, floats: np.ndarray, bits: np.ndarray | None = None
    ) -> FakeInFlight:
        """Queue a frame; vectors are copied, as a transfer to a device would.

        Args:
            bits: uint32 [rows, ceil(V / 32)] allowed tokens of each row (`abi.mask_shape`); None allows all.

        Raises:
            DeviceError: An earlier frame failed and nobody called `reset`, or `on_submit` raised.
            InvariantError: The window is full already.
            ValueError: Vectors that are not those of the shape's layout.
        """
        layout = control_layout(shape, self.dims)
        if ints.shape != (layout.int_size,) or floats.shape != (layout.float_size,):
            raise ValueError(f"{shape.name}: control vectors {ints.shape}, {floats.shape} do not match the layout")
        parts = layout.split(ints.copy(), floats.copy())
        frame = FakeFrame(len(self.frames), shape, parts, None if bits is None else bits.copy())
        if self.broken:
            raise DeviceError("the device state was lost; reset the runner")
        if len(self._queue) >= MAX_IN_FLIGHT:
            raise InvariantError(f"{MAX_IN_FLIGHT} frames are in flight already")
        if self.on_submit:
            self._guarded(functools.partial(self.on_submit, frame))  # what is in flight is sound
        self.frames.append(frame)
        now_ns = self.clock() if self.clock else self._end_ns
        start_ns = max(now_ns, self._end_ns)
        self._end_ns = start_ns + self.duration_ns(shape)
        in_flight = FakeInFlight(self, frame, now_ns, self._end_ns, queued=bool(self._queue))
        self._queue.append(in_flight)
        return in_flight

    def take_out(self, row: int, pages: Sequence[int]) -> FakeParcel:
        """Copy a row and pages to the host, as they are behind what was submitted; see `aot.runner.DeviceRunner`."""
        self._begin_copy("take_out")
        parcel, wanted = FakeParcel(), tuple(pages)
        self._behind(lambda state: parcel.arrive(state, row, wanted))
        return parcel

    def put_in(self, row: int, pages: Sequence[int], contents: Sequence[Content], kept: Content) -> None:
        """Copy contents into pages and a row, behind what was submitted; see `aot.runner.DeviceRunner`."""
        self._begin_copy("put_in")
        wanted, given = tuple(pages), tuple(contents)

        def copy(state: FakeState | None) -> None:
            if state is not None:
                write(state, row, wanted, given, kept)

        self._behind(copy)

    def _begin_copy(self, name: str) -> None:
        if self.broken:
            raise DeviceError("the device state was lost; reset the runner")
        if self.on_copy:
            self.on_copy(name)

    def _behind(self, copy: Callable[[FakeState | None], None]) -> None:
        if self._queue:
            self._queue[-1].behind.append(copy)
        else:
            copy(None if self._lost else self.state)

    def may_finish(self, in_flight: FakeInFlight) -> bool:
        """Whether a frame of the queue could be over now."""
        return self.gate.is_free and (self.clock is None or self.clock() >= in_flight.end_ns)

    def run_through(self, in_flight: FakeInFlight, timeout_s: float | None) -> None:
        """Run the queue, in order, up to and including one frame.

        Raises:
            TimeoutError: The gate, or the virtual time, did not let it through in time.
        """
        while not in_flight.is_over:
            head = self._queue[0]
            if self.clock and timeout_s is not None and head.end_ns > self.clock() + timeout_s * 1e9:
                self.clock.advance(int(timeout_s * 1e9))
                raise TimeoutError(f"program {head.shape.name} is not done after {timeout_s} s")
            if not self.gate.pass_through(timeout_s):
                raise TimeoutError(f"program {head.shape.name} is not done after {timeout_s} s")
            if self.clock:
                self.clock.advance(max(0, head.end_ns - self.clock()))
            self._queue.popleft()
            try:
                head.completion = self._execute(head)
            except DeviceError as error:
                head.error = error
            for copy in head.behind:
                copy(None if self._lost else self.state)

    def _execute(self, in_flight: FakeInFlight) -> Completion:
        frame, duration = in_flight.frame, self.duration_ns(in_flight.shape)
        if self._lost:
            raise DeviceError("the device state was lost in a frame before")
        ints, floats, out = completion_layout(frame.shape, self.dims).new()
        out["slot"][:] = frame.parts["slot"]
        self._run(frame, out)
        if self.on_complete:
            try:
                self._guarded(functools.partial(self.on_complete, frame, out))
            except DeviceError:
                self._lost = True  # frames behind it read what it should have written
                raise
        wall = in_flight.end_ns - in_flight.dispatch_ns
        return ints, floats, ExecutionTiming(device_ns=(duration,), wall_ns=wall, queued=in_flight.queued)

    def _run(self, frame: FakeFrame, out: dict[str, np.ndarray]) -> None:
        shape, parts, mask = frame.shape, frame.parts, _mask(frame)
        match shape.kind:
            case ProgramKind.INITIALIZE:
                self.state.initialize(parts)
            case ProgramKind.DECODE:
                device_programs.decode(self.state, parts, out, mask)
            case ProgramKind.PREFILL | ProgramKind.SCORED_PREFILL:
                device_programs.prefill(self.state, parts, out, mask)
            case ProgramKind.SPECULATIVE:
                device_rounds.speculative(self.state, shape, parts, out, self.draft, mask)
            case ProgramKind.SNAPSHOT:
                self.state.snapshot(parts, out)
            case ProgramKind.RESTORE:
                self.state.restore(parts, out)
            case ProgramKind.MIXED:
                device_rounds.mixed(self.state, shape, parts, out, self.draft, mask)
            case kind:
                raise ValueError(f"the fake device has no {kind} program")

    def _guarded(self, hook: Callable[[], object]) -> None:
        """A failure loses the donated state, as on a real device; what was submitted before it is sound."""
        try:
            hook()
        except Exception as error:
            self.broken = True
            raise DeviceError(f"the fake device failed: {error}") from error

    def close(self) -> None:
        """Nothing to free; later frames are refused, and copies behind frames that nobody waits for are lost."""
        self.broken = True
        for in_flight in self._queue:
            for copy in in_flight.behind:
                copy(None)


def _mask(frame: FakeFrame) -> Mask:
    masked: Any = frame.parts.get("masked")
    if masked is None or not masked[0]:
        return unmasked
    if frame.bits is None:
        return unmasked  # the runner's cached array of ones
    bits = frame.bits
    return lambda row: bits[row]
