"""Stop strings in text that arrives in pieces.

The match that is complete first wins, so that generation ends at the earliest token whatever the
pieces are; of several that are complete at the same character, the longest. What has not matched
yet is held back only as far as it begins a stop string, and is released as soon as it no longer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from helios_jax.errors import RequestError


class StopResult(NamedTuple):
    """Text that is safe to show (may be empty), and the stop string that ended the output."""

    text: str
    matched: str | None


class _Matcher:
    """One stop string; how much of it the text's end matches (Knuth, Morris, Pratt)."""

    __slots__ = ("_fallback", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = [0] * (len(stop) + 1)  # longest proper prefix of stop[:i] that also ends it
        for i in range(1, len(stop)):
            self._fallback[i + 1] = self._next(self._fallback[i], stop[i])

    def _next(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._fallback[length]
        return length + (self.stop[length] == character)

    def feed(self, character: str) -> bool:
        """Take one character; True when the whole stop string has been seen."""
        self.length = self._next(self.length, character)
        return self.length == len(self.stop)


class StopBuffer:
    """Holds back what may become a stop string.

    Args:
        stops: Stop strings; none means that all text passes through.
        include_stop: Show the stop string that matched.

    Invariants: what `push` and `flush` gave, put together, never contains any part of the stop that
    matched (all of it with `include_stop`), and without a match is all that was pushed.
    Cost: O(characters x stops) in all.

    Raises:
        RequestError: An empty stop string.
    """

    def __init__(self, stops: Sequence[str] = (), include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise RequestError("stop strings must not be empty", param="stop", code="invalid_value")
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Take new text; after a match nothing more is shown."""
        if self.matched is not None:
            return StopResult("", self.matched)
        if not self._matchers:
            return StopResult(text, None)
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [m.stop for m in self._matchers if m.feed(character)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return StopResult(whole[: end if self._include_stop else end - len(self.matched)], self.matched)
        kept = len(whole) - max(m.length for m in self._matchers)
        self._held = whole[kept:]
        return StopResult(whole[:kept], None)

    def flush(self) -> str:
        """The end of the text: what was held back and did not become a stop string."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.length = 0
        return held
