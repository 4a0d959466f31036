"""FakeClock: time that moves only when a test, or a fake device, says so."""

from __future__ import annotations

import threading


class FakeClock:
    """A monotonic clock in ns that never runs by itself; safe to share between threads."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self._now_ns = start_ns
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """Now, ns; the engine takes the clock as a plain callable."""
        return self._now_ns

    def advance(self, duration_ns: int) -> None:
        """Move on by `duration_ns` >= 0."""
        if duration_ns < 0:
            raise ValueError(f"a clock cannot go back by {-duration_ns} ns")
        with self._lock:
            self._now_ns += duration_ns
