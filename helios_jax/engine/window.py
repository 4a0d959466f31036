"""The frames that the device has and the host has not completed, in the order in which it will.

Life of a frame here:

1. `push` keeps what was submitted, and what the host must remember of that moment: the copies
   that were supplied, the calibration of its proposals, who the lanes were. By the time it
   completes, a later frame may have been built with other ones.
2. `oldest` is the one to wait for; the device is serial, so no other can be done before it.
3. `pop` after its completion, or `clear` once the device has lost its state.

A submission that fails takes its place in the order as a frame whose `wait` raises: what was
submitted before it is sound, and is completed first. Nothing is submitted behind it.

Who may submit, and what: the scheduler decides (`scheduler.queue`). This is only the record.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from helios_jax.engine.copy_index import Copy
from helios_jax.errors import DeviceError, InvariantError
from helios_jax.scheduler.types import CompletionRecord, Fence, LaneRole, RequestHandle, ScheduledPlan


class FailedSubmission:
    """In the place of a frame in flight: the device did not take it."""

    def __init__(self, error: DeviceError) -> None:
        self.error = error

    def wait(self) -> Any:
        raise self.error


@dataclasses.dataclass
class Outstanding:
    """A frame on its way.

    Attributes:
        fence, plan: As committed.
        in_flight: `wait()` gives the completion vectors and the timing, or raises DeviceError.
        requests: Ids of the lanes' requests, in lane order.
        mapped: Scale and shift of the calibration that its proposals were submitted with.
        copies: The copy that each lane of a copy round was supplied with.
        host_ns: Time of the engine thread spent on it so far, waiting not counted.
    """

    fence: Fence
    plan: ScheduledPlan
    in_flight: Any
    requests: tuple[str, ...]
    mapped: tuple[float, float] = (1.0, 0.0)
    copies: Mapping[RequestHandle, Copy] = dataclasses.field(default_factory=dict)
    host_ns: int = 0

    def lost_records(self) -> list[CompletionRecord]:
        """What is reported of its lanes when the device lost them: each failed."""
        progress = {LaneRole.PROMPT, LaneRole.DECODE}
        lengths = [lane.length if lane.role in progress else 0 for lane in self.plan.lanes]
        return [
            CompletionRecord(lane.handle, length, (), lane.start + length, valid=False)
            for lane, length in zip(self.plan.lanes, lengths, strict=True)
        ]


class Window:
    """Outstanding frames, oldest first.

    Args:
        frames: Most that may be outstanding; the scheduler's limit, asserted here.
    """

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self._outstanding: collections.deque[Outstanding] = collections.deque()

    def __len__(self) -> int:
        return len(self._outstanding)

    def __iter__(self) -> Iterator[Outstanding]:
        return iter(self._outstanding)

    @property
    def is_failed(self) -> bool:
        """A submission failed: nothing more may be submitted before the device state is made again."""
        return any(isinstance(frame.in_flight, FailedSubmission) for frame in self._outstanding)

    @property
    def oldest(self) -> Outstanding:
        return self._outstanding[0]

    def push(self, frame: Outstanding) -> None:
        """Raises InvariantError when the window is full or the fence does not follow."""
        if len(self) >= self.frames:
            raise InvariantError(f"fence {frame.fence} is submitted behind {len(self)} frames, at most {self.frames}")
        if self._outstanding and frame.fence <= self._outstanding[-1].fence:
            raise InvariantError(f"fence {frame.fence} is submitted behind fence {self._outstanding[-1].fence}")
        self._outstanding.append(frame)

    def pop(self) -> Outstanding:
        """Take the oldest out: it completed."""
        return self._outstanding.popleft()

    def clear(self) -> list[Outstanding]:
        """Take all of them out, in order: the device lost them."""
        lost = list(self._outstanding)
        self._outstanding.clear()
        return lost


class HostTimer:
    """Splits the engine thread's time into laps, ns: host work and waiting never count twice."""

    def __init__(self) -> None:
        self._since = time.perf_counter_ns()

    def lap(self) -> int:
        """Time since the last call."""
        before, self._since = self._since, time.perf_counter_ns()
        return self._since - before
