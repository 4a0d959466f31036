"""Counts XLA compilations in this process.

No program may be compiled after `ready`: a compilation in the token loop stalls every
stream for seconds. jax reports each one (a persistent-cache hit included, which still
traces and lowers) as a duration event in the thread that asked for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # jax 0.10.2 to 0.12


class CompileCounter:
    """Process-wide count of compilations that nobody announced.

    `prepare` announces its own with `expected()`, so preparing a second core in a process
    that already serves does not look like a stall of the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._total = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE_EVENT and not getattr(self._local, "expected", 0):
            with self._lock:
                self._total += 1

    @property
    def total(self) -> int:
        """Unannounced compilations since the counter was made."""
        with self._lock:
            return self._total

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Compilations of this thread inside the block are not counted."""
        self._local.expected = getattr(self._local, "expected", 0) + 1
        try:
            yield
        finally:
            self._local.expected -= 1


_COUNTER_LOCK = threading.Lock()
_counter: CompileCounter | None = None  # one a process: jax keeps listeners for ever, so must we


def compile_counter() -> CompileCounter:
    """The process's counter, registered with jax on first use."""
    global _counter
    with _COUNTER_LOCK:
        if _counter is None:
            _counter = CompileCounter()
        return _counter
