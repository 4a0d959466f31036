"""What happens after an error that is not a request's own.

- `DeviceError`: the state that the device held is lost. Every outstanding frame is accounted as
  failed, oldest first; the requests that had state there are answered; a fresh state is made, and
  everybody else goes on. A program that fails again and again ends the engine instead.
- Anything else is a bug of ours: the engine says so, answers everybody, and dumps its state.

A frame behind the failed one may still come back from the device afterwards. Its fence is no
longer outstanding: the scheduler counts it and ignores it.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helios_jax.config import EngineConfig, cache_dir
from helios_jax.engine.board import Board
from helios_jax.engine.failure import EventLog, dump
from helios_jax.engine.roster import Roster
from helios_jax.engine.window import Outstanding, Window
from helios_jax.errors import DeviceError, UnavailableError
from helios_jax.scheduler.catalog import ProgramShape
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.types import ExecutionTiming

log = logging.getLogger("helios_jax.engine")

MAX_DEVICE_ERRORS = 3  # of one program without a success; then the engine stops instead of trying again
NO_TIME = ExecutionTiming(device_ns=(0,), wall_ns=0)


class Recovery:
    """Answers errors for one engine; used by the engine thread, `rebuilding` and `note` read by others.

    Attributes:
        failure: The error that ended the engine.
        rebuilding: Why the device state is being made again right now; else empty.
        note: Where the dump is, once there is one.
    """

    def __init__(
        self, scheduler: Scheduler, roster: Roster, window: Window, board: Board, events: EventLog, runner: Any
    ) -> None:
        self._scheduler, self._roster, self._window = scheduler, roster, window
        self._board, self._events, self._runner = board, events, runner
        self._errors: collections.Counter[ProgramShape] = collections.Counter()
        self.failure: BaseException | None = None
        self.rebuilding = ""
        self.note = ""

    def succeeded(self, shape: ProgramShape) -> None:
        """A program completed: its failures are forgiven. Others' success says nothing of a broken program."""
        self._errors.pop(shape, None)

    def after_device_error(self, failed: Outstanding, error: DeviceError, clock: Callable[[], int]) -> None:
        """Fail what the device lost, make a fresh state, go on with the rest.

        The donated state is gone, so every sequence that has state there fails; one that was
        admitted but never ran has none, and goes on, as do those that wait. Checkpoints are gone too: who was to
        be restored from one is admitted anew.

        Raises:
            DeviceError: The program failed too often, or no fresh state can be made.
        """
        shape = failed.plan.shape
        self._errors[shape] += 1
        self._board.totals.device_errors += 1
        self.rebuilding = f"the device state is being made again after a device error: {error}"
        self._scheduler.advance_to(clock())
        self._events.note(self._scheduler.state.now_ns, "device error", str(error))
        lost = {s.request: None for s in self._roster.running.values() if s.on_device}
        frames = self._window.clear()
        for frame in frames:
            self._scheduler.complete(frame.fence, frame.lost_records(), NO_TIME)
        for request in lost:
            self._roster.fail(request, error)
        for sequence in [s for s in self._roster.running.values() if s.spec.restore_from]:
            self._roster.restart(sequence)
        self._scheduler.drop_checkpoints()
        self._roster.settle()
        if self._errors[shape] >= MAX_DEVICE_ERRORS:
            raise error
        for frame in frames:
            if frame is not failed:
                self._ignore(frame)
        self._runner.reset()
        self.rebuilding = ""

    def _ignore(self, frame: Outstanding) -> None:
        """Wait for a frame that was given up; what it brings, if anything, is of no use."""
        try:
            _, _, timing = frame.in_flight.wait()
        except DeviceError:
            return
        self._scheduler.complete(frame.fence, (), timing)

    def die(self, error: BaseException, config: EngineConfig) -> None:
        """Say so and answer everybody; only then what may fail itself, the dump."""
        self.failure = error
        kind = "a device error" if isinstance(error, DeviceError) else "an internal error"
        message = f"the engine stopped after {kind}: {type(error).__name__}: {error}"
        self._board.refuse(message)
        self._roster.answer_all(UnavailableError(message))
        self._board.rest()
        log.error("%s", message)
        try:
            path = self._dump(error, config)
        except Exception:
            log.exception("the engine's state could not be dumped")
            return
        if path is not None:
            self.note = f"; state and recent events are in {path}"
            log.error("state and recent events are in %s", path)

    def _dump(self, error: BaseException, config: EngineConfig) -> Path | None:
        directory = Path(config.dump_dir) if config.dump_dir else cache_dir() / "dumps"
        state = self._scheduler.state
        summary = self._roster.summary() | {
            "fence": state.last_fence,
            "outstanding": [frame.fence for frame in state.frames],
            "totals": dataclasses.asdict(self._board.snapshot()),
        }
        return dump(directory, error, self._events, state, summary)
