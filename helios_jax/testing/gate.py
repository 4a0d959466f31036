"""Gate: lets the frames of a fake device finish when a test says so."""

from __future__ import annotations

import threading


class Gate:
    """Lets frames finish freely, not at all, or one at a time, under a test's control."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._permits: int | None = None  # None = open
        self.waiting = 0

    def close(self) -> None:
        """Hold every frame that reaches the gate."""
        with self._condition:
            self._permits = 0

    def open(self) -> None:
        """Let everything through."""
        with self._condition:
            self._permits = None
            self._condition.notify_all()

    def step(self, frames: int = 1) -> None:
        """Let `frames` more through a closed gate."""
        with self._condition:
            self._permits = (self._permits or 0) + frames
            self._condition.notify_all()

    @property
    def is_free(self) -> bool:
        """Whether a frame that came now would pass at once."""
        return self._permits is None or self._permits > 0

    def pass_through(self, timeout_s: float | None = None) -> bool:
        """Called by the device: return when one frame may finish; False when none may after `timeout_s`."""
        with self._condition:
            self.waiting += 1
            self._condition.notify_all()
            passed = self._condition.wait_for(lambda: self.is_free, timeout_s)
            self.waiting -= 1
            if passed and self._permits is not None:
                self._permits -= 1
            return passed

    def wait_for_frame(self, timeout_s: float = 10.0) -> bool:
        """Return once a frame is held at the gate; False when none came in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self.waiting > 0 and self._permits == 0, timeout_s)
