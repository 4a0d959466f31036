"""What the engine thread is doing and since when, readable from any thread without a lock.

The thread writes one tuple at each change of phase. Idle is a phase of its own: an engine
without work is healthy however long it waits, one that is stuck in any other phase is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

IDLE = "idle"
HOST = "host"
DEVICE = "device"


@dataclasses.dataclass(frozen=True)
class EngineHealth:
    """Liveness and readiness.

    Attributes:
        alive: The engine can still serve, now or after loading; False needs a restart.
        ready: A request submitted now would be served.
        reason: Why not, in one line; empty when ready.
    """

    alive: bool
    ready: bool
    reason: str = ""


class Heartbeat:
    """The phase of the engine thread and when it began.

    Args:
        clock: Monotonic time, ns.
        timeout_s: A phase other than idle that lasts longer counts as stuck.
    """

    def __init__(self, clock: Callable[[], int], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._now: tuple[str, str, int] = (IDLE, "", clock())

    def enter(self, phase: str, detail: str = "") -> None:
        """The engine thread begins `phase`; one assignment, so readers see all of it or nothing."""
        self._now = (phase, detail, self._clock())

    @property
    def phase(self) -> str:
        """IDLE, HOST or DEVICE."""
        return self._now[0]

    def problem(self) -> str:
        """Why the engine makes no progress, or an empty string."""
        phase, detail, since_ns = self._now
        seconds = (self._clock() - since_ns) / 1e9
        if phase == IDLE or seconds <= self._timeout_s:
            return ""
        what = "a device call has not returned" if phase == DEVICE else "the engine thread has made no progress"
        where = f" ({detail})" if detail else ""
        return f"{what} for {seconds:.1f} s{where}; the limit is {self._timeout_s:g} s"
