"""The front desk between callers' threads and the engine thread.

Callers leave requests and aborts here and are told at once whether there is room; the engine
thread takes them between frames. One lock guards it, held for microseconds. Its bound:
sequences accepted and not ended never exceed `capacity` (slots plus queue).
"""

from __future__ import annotations

import dataclasses
import threading

from helios_jax.engine.request import Request
from helios_jax.engine.stats import Totals
from helios_jax.errors import CapacityError, RequestError, UnavailableError

Command = tuple[str, Request | str]  # ("submit", request) or ("abort", request id)
SUBMIT, ABORT = "submit", "abort"


class Board:
    """Accepts commands, counts requests, wakes the engine thread.

    Args:
        capacity: Sequences that may be accepted and not ended.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.totals = Totals()
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._open: dict[str, Request] = {}
        self._open_sequences = 0
        self._refusal: str = ""  # why nothing is accepted any more
        self._stopping = False
        self._resting = True  # the engine thread has nothing to do, and nothing is on the device

    def submit(self, request: Request) -> None:
        """Accept a request.

        Raises:
            CapacityError: Slots and queue are full; try again later.
            UnavailableError: Draining, closed or failed.
            RequestError: Its id is in use.
        """
        count = len(request.sequences)
        with self._changed:
            self.totals.arrived += 1
            try:
                self._check(request, count)
            except Exception:
                self.totals.refused += 1
                raise
            self.totals.active += 1
            self.totals.prompt_tokens += len(request.prompt_token_ids)
            self._open[request.request_id] = request
            self._open_sequences += count
            self._commands.append((SUBMIT, request))
            self._resting = False
            self._changed.notify_all()

    def _check(self, request: Request, count: int) -> None:
        if self._refusal:
            raise UnavailableError(self._refusal)
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id", code="invalid_value")
        if self._open_sequences + count > self.capacity:
            raise CapacityError(
                f"the queue is full: {self._open_sequences} outputs are running or waiting, at most {self.capacity}"
                f" are accepted and this request has {count}; try again later"
            )

    def count_refused(self) -> None:
        """A request was refused before it got here."""
        with self._changed:
            self.totals.arrived += 1
            self.totals.refused += 1

    def abort(self, request_id: str) -> None:
        """End a request; an unknown id (it may just have ended) is ignored."""
        with self._changed:
            if request_id in self._open:
                self._commands.append((ABORT, request_id))
                self._changed.notify_all()

    def take(self) -> list[Command]:
        """Everything left since the last call; does not wait."""
        with self._changed:
            commands, self._commands = self._commands, []
            return commands

    def rest(self) -> None:
        """The engine has nothing to do: no frame is outstanding, or none will ever be completed."""
        with self._changed:
            self._resting = not self._commands
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when there is a command or the engine is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._stopping)

    def closed(self, request: Request, outcome: str) -> None:
        """A request ended: `outcome` is a finish reason, "cancelled" or "failed"."""
        with self._changed:
            if self._open.pop(request.request_id, None) is None:
                return
            self._open_sequences -= len(request.sequences)
            totals = self.totals
            totals.active -= 1
            if outcome == "cancelled":
                totals.cancelled += 1
            elif outcome == "failed":
                totals.failed += 1
            else:
                totals.finished[outcome] = totals.finished.get(outcome, 0) + 1
            self._changed.notify_all()

    def refuse(self, why: str) -> None:
        """Accept nothing more; `why` is the error's message."""
        with self._changed:
            self._refusal = self._refusal or why

    @property
    def refusal(self) -> str:
        return self._refusal

    def stop(self) -> None:
        """Tell the engine thread to return."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def open_requests(self) -> list[Request]:
        """Accepted and not ended."""
        with self._changed:
            return list(self._open.values())

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        """True once no request is open and no frame outstanding; False when `timeout_s` passed first.

        A request can end while a frame that names it is still on the device, which has its pages until then.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._open and (self._resting or self._stopping), timeout_s)

    def snapshot(self) -> Totals:
        """A copy of the totals, consistent with one another."""
        with self._changed:
            return dataclasses.replace(self.totals, finished=dict(self.totals.finished))
