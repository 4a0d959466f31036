"""Virtual time of a simulated world: it moves when the device works and a little whenever it is read.

What the world does (clients, jumps) lies on a heap of times and happens on the way, in whatever the
engine is doing at that moment; so nothing needs a second thread, and a seed is a whole history.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from helios_jax.testing import FakeClock

Deed = Callable[[], object]
HOST_NS = (0, 0, 500, 4_000, 30_000, 400_000)  # what passes between two readings


class WorldClock(FakeClock):
    """A `FakeClock` with deeds on the way."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._deeds: list[tuple[int, int, Deed]] = []
        self._order = itertools.count()
        self._is_busy = self._went_back = False

    def __call__(self) -> int:
        self.tick()
        return self._now_ns

    @property
    def now_ns(self) -> int:
        """Now, without time passing."""
        return self._now_ns

    @property
    def has_deeds(self) -> bool:
        return bool(self._deeds)

    def after(self, delay_ns: int, deed: Deed) -> None:
        """Do something once `delay_ns` have passed."""
        heapq.heappush(self._deeds, (self._now_ns + delay_ns, next(self._order), deed))

    def tick(self) -> None:
        """The host takes a moment."""
        if not self._is_busy:
            self._move(self._now_ns + self._rng.choice(HOST_NS))

    def advance(self, duration_ns: int) -> None:
        if duration_ns < 0:
            raise ValueError(f"a clock cannot go back by {-duration_ns} ns")
        if self._is_busy:
            self._now_ns += duration_ns  # a deed jumps
        else:
            self._move(self._now_ns + duration_ns)

    def step_back(self, duration_ns: int) -> None:
        """What no monotonic clock does."""
        self._now_ns -= duration_ns
        self._went_back = True

    def to_next_deed(self) -> None:
        """Nothing happens until the next deed: be there."""
        self._move(max(self._now_ns, self._deeds[0][0]))

    def _move(self, target_ns: int) -> None:
        while self._deeds and self._deeds[0][0] <= target_ns:
            when, _, deed = heapq.heappop(self._deeds)
            self._now_ns = max(self._now_ns, when)
            self._is_busy = True
            try:
                deed()
            finally:
                self._is_busy = False
            if self._went_back:
                self._went_back = False
                return
        self._now_ns = max(self._now_ns, target_ns)
