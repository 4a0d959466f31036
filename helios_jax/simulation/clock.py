"""Virtual time: a simulation moves it, nothing else does."""

from __future__ import annotations


class VirtualClock:
    """Nanoseconds since the start of a simulation."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def advance_to(self, now_ns: int) -> None:
        """Move forward to `now_ns`; a time already passed changes nothing."""
        self.now_ns = max(self.now_ns, now_ns)
