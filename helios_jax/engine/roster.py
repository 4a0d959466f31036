"""Who waits, who runs, who has ended: the engine thread's book of requests and their sequences.

Life of a sequence in it:

1. `take_commands` brings in its request; it waits, in order of arrival.
2. `make_room` takes slots back, for lack of pages, from those that lose the least by it; they wait
   again, in the place that they came in. `admit` gives slots while slots and pages last; nobody overtakes.
3. It runs under its handle (`running`). It may leave at any moment, also while frames that name
   it are outstanding: those who look up a lane must be ready not to find it.
4. `retire` at its end, `abort` when the caller gave up, `fail` after an error: out of the slot
   at once for everybody here; the scheduler keeps slot and pages until its last fence.
5. One that ended well, or gave way, may have a last snapshot to come (`departed`); its tokens are kept to name the
   checkpoint, and readers hear of its end when `follow` sees that it is over, whatever came of it.

It knows the scheduler, the board, the publisher and prefixes; it does not know frames or the device.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from helios_jax.engine.board import ABORT, Board
from helios_jax.engine.drafting import Drafting
from helios_jax.engine.failure import EventLog
from helios_jax.engine.prefixes import Prefixes
from helios_jax.engine.publication import Publisher
from helios_jax.engine.request import Request, Sequence
from helios_jax.errors import CapacityError, RequestError
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.types import CheckpointPublished, Event, FinishReason, RequestHandle, RequestRebound


@dataclasses.dataclass
class Departed:
    """Who has left a slot that waits for its last snapshot.

    Attributes:
        tokens: int32, those of its state and perhaps a pending one.
        request_id: Whose they are.
        sequence: Whose end readers are to be told then; None if nobody waits for that.
    """

    tokens: np.ndarray
    request_id: str
    sequence: Sequence | None = None


class Roster:
    """Requests of one engine; used by the engine thread only.

    Attributes:
        waiting: Sequences without a slot, in order of arrival.
        running: Sequences in slots by handle.
        departed: Who has left a slot whose last state is still to be captured.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        board: Board,
        publisher: Publisher,
        drafting: Drafting,
        prefixes: Prefixes,
        events: EventLog,
    ) -> None:
        self._scheduler, self._board, self._publisher = scheduler, board, publisher
        self._drafting, self._prefixes, self._events = drafting, prefixes, events
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: dict[RequestHandle, Sequence] = {}
        self.departed: dict[RequestHandle, Departed] = {}
        self._requests: dict[str, Request] = {}
        self._accepted = 0  # sequences ever

    # ---- in

    def take_commands(self) -> None:
        """Everything that callers left since the last call."""
        for what, item in self._board.take():
            if what == ABORT:
                request = self._requests.get(str(item))
                if request is not None:
                    self.abort(request)
                continue
            assert isinstance(item, Request)
            self._accept(item)

    def _accept(self, request: Request) -> None:
        self._requests[request.request_id] = request
        for sequence in request.sequences:
            if sequence.spec.max_tokens == 0 and not sequence.spec.scored:
                sequence.close("length")  # nothing to generate: no slot, no frame
            else:
                self._accepted += 1
                sequence.number = self._accepted
                self._prefixes.accept(sequence)
                self.waiting.append(sequence)
        if request.is_finished:
            self._end(request, "length")

    def admit(self, clock: Callable[[], int]) -> None:
        """Give slots to those that wait, in order."""
        while self.waiting:
            sequence = self.waiting[0]
            sequence.spec = self._prefixes.matched(sequence)
            try:
                sequence.handle = self._scheduler.admit(sequence.spec, clock())
            except CapacityError:
                return  # in order: nobody overtakes the one that waits for pages
            except RequestError as error:  # intake refuses first; what it missed costs one request only
                self.fail(sequence.request, error)
                continue
            self.waiting.popleft()
            self.running[sequence.handle] = sequence
            self._prefixes.admitted(sequence, self.running.values())

    def make_room(self) -> None:
        """Preempt as long as a stream has no page for its next token and somebody else can give way."""
        while (handle := self._scheduler.victim()) is not None:
            self.preempt(handle)

    def preempt(self, handle: RequestHandle) -> None:
        """The sequence of a handle gives way: it goes on with the same tokens once it is admitted again.

        What outstanding frames still bring for it is dropped; it will be computed again.
        """
        sequence = self.running.pop(handle)
        self._events.note(self._scheduler.state.now_ns, "preempt", (handle, sequence.request.request_id))
        self._drafting.forget(handle)
        self._scheduler.preempt(handle)
        if self._scheduler.awaits_capture(handle):
            self.departed[handle] = Departed(sequence.tokens, sequence.request.request_id)
        sequence.give_way()
        self._wait_again(sequence)

    def restart(self, sequence: Sequence) -> None:
        """What it was to be restored from is lost, and nothing of it has run: it is admitted anew."""
        assert sequence.handle is not None
        del self.running[sequence.handle]
        self._drafting.forget(sequence.handle)
        self._scheduler.preempt(sequence.handle)
        sequence.spec = dataclasses.replace(sequence.spec, restore_from=0, restored_len=0)
        sequence.handle = None
        self._wait_again(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        """Back into the queue, in the place that it came in."""
        place = next((i for i, other in enumerate(self.waiting) if other.number > sequence.number), len(self.waiting))
        self.waiting.insert(place, sequence)

    # ---- out

    def retire(self, sequence: Sequence) -> None:
        """The sequence has a finish reason; its request ends with its last sequence."""
        handle = sequence.handle
        assert handle is not None
        del self.running[handle]
        self._drafting.forget(handle)
        if self._scheduler.awaits_capture(handle):
            sequence.awaits_capture = True
            self.departed[handle] = Departed(sequence.tokens, sequence.request.request_id, sequence)
        else:
            self._end_if_finished(sequence.request)

    def _end_if_finished(self, request: Request) -> None:
        if request.is_finished:
            reason = request.sequences[0].finish_reason or ""
            failed = any(s.finish_reason == FinishReason.ERROR for s in request.sequences)
            self._end(request, "failed" if failed else reason)

    def abort(self, request: Request) -> None:
        """The caller gave up, whatever the request was doing."""
        self._events.note(self._scheduler.state.now_ns, "abort", request.request_id)
        self._release(request)
        for sequence in request.sequences:
            sequence.close(FinishReason.ABORT)
        self._end(request, "cancelled")

    def fail(self, request: Request, error: Exception) -> None:
        """The request ends with an error instead of an output."""
        self._release(request)
        self._publisher.fail(request, error)
        self._requests.pop(request.request_id, None)
        self._board.closed(request, "failed")

    def fail_grammar(self, sequence: Sequence) -> None:
        """A grammar cannot go on: its request ends, and nobody else's."""
        if sequence.handle not in self.running:
            return  # another output of the request failed first
        reason = sequence.matcher.error if sequence.matcher is not None else None
        message = f"the output cannot be continued by its grammar: {reason}"
        self.fail(sequence.request, RequestError(message, code="grammar_failed"))

    def answer_all(self, error: Exception) -> None:
        """The end of the engine: everybody who is open gets `error`. Does not raise."""
        requests = self._board.open_requests()
        self._publisher.answer_all(requests, error)
        for request in requests:
            self._board.closed(request, "failed")

    def _end(self, request: Request, outcome: str) -> None:
        self._publisher.touch(request)
        self._requests.pop(request.request_id, None)
        self._board.closed(request, outcome)

    def _release(self, request: Request) -> None:
        """Take all sequences of a request out of queue and slots."""
        for sequence in request.sequences:
            sequence.awaits_capture = False
            if sequence.handle in self.departed:
                self.departed[sequence.handle].sequence = None  # nobody waits for it any more
            if sequence.handle in self.running:
                self._scheduler.cancel(sequence.handle)
                del self.running[sequence.handle]
                self._drafting.forget(sequence.handle)
        if any(sequence.request is request for sequence in self.waiting):
            self.waiting = collections.deque(s for s in self.waiting if s.request is not request)

    # ---- while it runs

    def follow(self, events: Iterable[Event]) -> None:
        """Keep up with what a frame did to slots beside output: fresh generations, checkpoints, last snapshots."""
        for event in events:
            if isinstance(event, RequestRebound) and event.handle in self.running:
                sequence = self.running.pop(event.handle)
                sequence.handle = event.fresh
                self.running[event.fresh] = sequence
                self._drafting.rebind(event.handle, event.fresh)
            elif isinstance(event, CheckpointPublished):
                owner = self.running.get(event.handle) or self.departed[event.handle]
                self._prefixes.published(event, owner.tokens)
        self.settle()

    def settle(self) -> None:
        """Tell the ends of those whose last snapshot is over, done or given up."""
        over = [handle for handle in self.departed if not self._scheduler.awaits_capture(handle)]
        for handle in over:
            sequence = self.departed.pop(handle).sequence
            if sequence is not None:
                sequence.awaits_capture = False
                self._publisher.touch(sequence.request)
                self._end_if_finished(sequence.request)

    def request_id(self, handle: RequestHandle) -> str:
        """Whose frames name the handle."""
        sequence = self.running.get(handle)
        return sequence.request.request_id if sequence is not None else self.departed[handle].request_id

    def summary(self) -> dict[str, object]:
        """Who runs and who waits, for a dump."""
        return {
            "running": [(str(handle), s.request.request_id) for handle, s in self.running.items()],
            "waiting": [s.request.request_id for s in self.waiting],
            "departed": [(str(handle), d.request_id) for handle, d in self.departed.items()],
        }
