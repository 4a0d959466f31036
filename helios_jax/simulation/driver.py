"""Discrete-event runs of a scheduler against the synthetic device.

1. Arrivals and cancellations are given as times; requests that do not fit wait in order.
   One that gives its pages up to others waits before everybody who was not admitted yet.
2. While the window has room and the scheduler has a plan: commit, submit.
3. Virtual time moves to the next event: an arrival, a cancellation, a completion.
4. A completion is accounted for, and the first token of each burst published.
5. Every change of the state passes the numbered invariants when `check` is set.

Each request's row of `requests` holds what its client saw: when the first output came, and the
gaps between visible outputs (the tokens of one burst are one output).
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from helios_jax.errors import InvariantError, RequestError
from helios_jax.scheduler.invariants import check_invariants
from helios_jax.scheduler.preemption import resumed
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.state import FREE, state_digest
from helios_jax.scheduler.types import (
    CheckpointPublished,
    Event,
    Fence,
    GeneratedToken,
    RequestFinished,
    RequestHandle,
    RequestRebound,
    RequestSpec,
    ScheduledPlan,
)
from helios_jax.simulation.clock import VirtualClock
from helios_jax.simulation.device import Completed, FakeDevice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request that arrives at `at_ns` and is cancelled at `cancel_ns` if it still runs.

    The external state of its spec, if there is any, arrives at `ready_ns` or at its admission.
    """

    at_ns: int
    spec: RequestSpec
    cancel_ns: int | None = None
    ready_ns: int = 0


@dataclasses.dataclass(slots=True)
class Served:
    """What one request experienced; times in ns, 0 until they happened.

    `gaps_ns` are between visible outputs; `tokens` stays empty when the run keeps none. `reused` are the
    tokens of its prompt that it did not compute when it was admitted; after a preemption, the most of both times.
    """

    arrival_ns: int
    first_ns: int = 0
    last_ns: int = 0
    largest_gap_ns: int = 0
    num_tokens: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    reused: int = 0
    gaps_ns: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    reason: str | None = None


class Ran(NamedTuple):
    """One completed frame, as an observer sees it."""

    plan: ScheduledPlan
    start_ns: int
    device_ns: int
    handles: dict[int, RequestHandle]  # of the requests that are admitted, by number


class Admission(Protocol):
    """Order in which waiting requests get slots."""

    def arrived(self, number: int) -> None:
        """A request joined the queue."""

    def choose(self, waiting: Sequence[int]) -> int:
        """Index in `waiting` (in order of arrival) of the request that is next."""

    def left(self, number: int) -> None:
        """It left the queue without a slot: refused or cancelled."""

    def admitted(self, number: int, handle: RequestHandle) -> None:
        """It got its slot."""

    def returned(self, number: int, handle: RequestHandle) -> None:
        """It got a slot again after it gave way."""


class Reuse(Protocol):
    """What a host knows of prefixes: which checkpoint a prompt begins with, and what is in a fresh one."""

    def matched(self, number: int, spec: RequestSpec) -> RequestSpec:
        """The spec of a request that is to be admitted, with the checkpoint that it begins with now."""

    def published(self, number: int, event: CheckpointPublished) -> None:
        """A request left a checkpoint."""


class Submitted(NamedTuple):
    fence: Fence
    plan: ScheduledPlan
    done: Completed


class Simulation:
    """One run; `requests` has a row an arrival, in the order given.

    Args:
        scheduler: Plans; the policy under test.
        device: Runs the plans.
        arrivals: The workload.
        check: Check the invariants after every event.
        keep: Keep every plan and token (a long run has millions).
        refuse: Count requests that can never fit as refused instead of raising.
        max_queue: Requests that may wait for a slot once everyone who can has one; later ones are refused.
            None = no bound.
        admission: Order of the waiting requests; first come, first served without one.
        copies: (request number, output tokens so far) -> copy proposals that the host offers next.
        observe: Called after every completion.
        reuse: Matches prompts to checkpoints; without it every prompt is computed whole.
    """

    def __init__(
        self, scheduler: Scheduler, device: FakeDevice, arrivals: Sequence[Arrival], *, check: bool = True,
        keep: bool = True, refuse: bool = False, max_queue: int | None = None, admission: Admission | None = None,
        copies: Callable[[int, int], int] | None = None, observe: Callable[[Ran], None] | None = None,
        reuse: Reuse | None = None,
    ) -> None:  # fmt: skip
        self.scheduler, self.device, self.clock = scheduler, device, VirtualClock(scheduler.state.now_ns)
        self.requests = [Served(arrival.at_ns) for arrival in arrivals]
        self.plans: list[ScheduledPlan] = []
        self.checkpoints: list[CheckpointPublished] = []
        self._arrivals, self._check, self._keep, self._refuse = arrivals, check, keep, refuse
        self._max_queue, self._admission, self._copies, self._observe = max_queue, admission, copies, observe
        self._reuse = reuse
        self._future = sorted(range(len(arrivals)), key=lambda i: (arrivals[i].at_ns, i), reverse=True)
        self._cancels = [(a.cancel_ns, i) for i, a in enumerate(arrivals) if a.cancel_ns is not None]
        heapq.heapify(self._cancels)
        self._external: list[tuple[int, int]] = []  # (arrival of the state, number) of admitted requests
        self._waiting: deque[int] = deque()
        self._preempted: list[int] = []  # they wait too, the oldest first
        self._specs: dict[int, RequestSpec] = {}  # of those that gave way, as they are admitted again
        self._handles: dict[int, RequestHandle] = {}
        self._numbers: dict[RequestHandle, int] = {}
        self._leaving: list[RequestHandle] = []  # ended, and perhaps still owned by a frame in flight
        self._frames: deque[Submitted] = deque()
        self._fence = scheduler.state.last_fence

    def run(self, *, until_ns: int | None = None) -> bool:
        """Run until nothing is left to do, or until virtual time passes `until_ns`.

        Returns:
            Whether anything is left to do.

        Raises:
            InvariantError: Requests wait or are runnable although nothing will ever happen.
        """
        while until_ns is None or self.clock.now_ns < until_ns:
            self._take_events()
            plan = self.scheduler.plan()
            if plan is not None:
                self._submit(plan)
            elif not self._advance():
                return False
        return True

    def digest(self) -> str:
        """Hash of the scheduler's state."""
        return state_digest(self.scheduler.state)

    def _advance(self) -> bool:
        """Move to the next event; a completion that is due then is taken after the events before it."""
        upcoming = self._next_event_ns()
        if self._frames and (upcoming is None or self._frames[0].done.at_ns < upcoming):
            self.clock.advance_to(self._frames[0].done.at_ns)
            self._complete(self._frames.popleft())
            return True
        if upcoming is not None:
            self.clock.advance_to(upcoming)
            return True
        if self._waiting or self._preempted:
            waiting = len(self._waiting) + len(self._preempted)
            raise InvariantError(f"{waiting} requests wait although nothing runs")
        if self.scheduler.state.requests.runnable.any():
            raise InvariantError(f"slots {self.scheduler.state.requests.runnable.nonzero()[0]} wait for ever: no plan")
        return False

    def _next_event_ns(self) -> int | None:
        times = [heap[0][0] for heap in (self._cancels, self._external) if heap]
        if self._future:
            times.append(self._arrivals[self._future[-1]].at_ns)
        return min(times, default=None)

    def _take_events(self) -> None:
        """Arrivals, cancellations and admissions that are due now."""
        now_ns = self.clock.now_ns
        if not self._frames or now_ns > self.scheduler.state.now_ns:  # a call that finds nothing to do means idleness
            self.scheduler.advance_to(now_ns)
        while self._future and self._arrivals[self._future[-1]].at_ns <= now_ns:
            self._arrive(self._future.pop())
        if self._cancels:
            self._take_cancels()
        while self._external and self._external[0][0] <= now_ns:
            _, number = heapq.heappop(self._external)
            if number in self._handles:
                self.scheduler.external_ready(self._handles[number])
                self._checked()
        self._make_room()
        self._admit_waiting()
        while self._max_queue is not None and len(self._waiting) > self._max_queue:
            self._refuse_waiting(len(self._waiting) - 1)  # the latest: those before it were within the bound

    def _arrive(self, number: int) -> None:
        self._waiting.append(number)
        if self._admission:
            self._admission.arrived(number)

    def _make_room(self) -> None:
        """Preempt as long as a stream has no page for its next token."""
        while (handle := self.scheduler.victim()) is not None:
            number = self._numbers[handle]
            spec, served = self._spec(number), self.requests[number]
            count = served.num_tokens - (spec.output_len - self._arrivals[number].spec.output_len)
            output = served.tokens[-count:] if self._keep and count else [0] * count
            self._specs[number] = resumed(spec, output)
            self.scheduler.preempt(handle)
            served.preemptions += 1
            del self._handles[number]
            bisect.insort(self._preempted, number, key=lambda n: (self._arrivals[n].at_ns, n))
            self._leaving.append(handle)
            self._forget()
            self._checked()

    def _spec(self, number: int) -> RequestSpec:
        """What the request is admitted as: what arrived, or with its output so far."""
        return self._specs.get(number) or self._arrivals[number].spec

    def _matched(self, number: int) -> RequestSpec:
        spec = self._spec(number)
        return self._reuse.matched(number, spec) if self._reuse else spec

    def _admit_waiting(self) -> None:
        while self._preempted:
            if not self.scheduler.can_admit(self._matched(self._preempted[0])):
                return
            self._admit(self._preempted.pop(0))
        while self._waiting:
            index = self._admission.choose(self._waiting) if self._admission else 0
            number = self._waiting[index]
            if not self._can_admit(number, index):
                if number in self._waiting:
                    break
                continue
            del self._waiting[index]
            self._admit(number)

    def _can_admit(self, number: int, index: int) -> bool:
        """Whether the request gets a slot now; one that never can leaves the queue as refused."""
        try:
            return self.scheduler.can_admit(self._matched(number))
        except RequestError:
            if not self._refuse:
                raise
            self._refuse_waiting(index)
            return False

    def _refuse_waiting(self, index: int) -> None:
        number = self._waiting[index]
        self.requests[number].reason = "refused"
        del self._waiting[index]
        if self._admission:
            self._admission.left(number)

    def _admit(self, number: int) -> None:
        spec = self._matched(number)
        handle = self.scheduler.admit(spec, self.clock.now_ns)
        self.requests[number].reused = max(self.requests[number].reused, spec.restored_len)
        self._handles[number], self._numbers[handle] = handle, number
        self.device.admit(handle, spec, number)
        if self._admission:
            (self._admission.returned if spec.preemptions else self._admission.admitted)(number, handle)
        if spec.external:
            heapq.heappush(self._external, (max(self._arrivals[number].ready_ns, self.clock.now_ns + 1), number))
        self._checked()

    def _take_cancels(self) -> None:
        while self._cancels and self._cancels[0][0] <= self.clock.now_ns:
            _, number = heapq.heappop(self._cancels)
            if self.requests[number].reason is not None:
                continue
            self.requests[number].reason = "cancelled"
            if number in self._handles:
                self.scheduler.cancel(self._handles[number])
                self._leaving.append(self._handles[number])
                self._forget()
                self._checked()
            elif number in self._preempted:
                self._preempted.remove(number)
            elif number in self._waiting:
                self._waiting.remove(number)
                if self._admission:
                    self._admission.left(number)

    def _submit(self, plan: ScheduledPlan) -> None:
        self._fence += 1
        self.scheduler.commit(plan, self._fence)
        self._checked()
        if self._keep:
            self.plans.append(plan)
        wanted = plan.lanes if self.device.check_pages else ()
        tables = {lane.handle: self.scheduler.page_table(lane.handle) for lane in wanted}
        done = self.device.submit(plan, tables, self.clock.now_ns)
        self._frames.append(Submitted(self._fence, plan, done))

    def _complete(self, frame: Submitted) -> None:
        scheduler, done = self.scheduler, frame.done
        scheduler.advance_to(done.at_ns)
        basic, confidence, survival = (frame.fence, done.records, done.timing), done.confidence, done.survival
        if confidence is None:
            events = (
                scheduler.complete(*basic) if survival is None else scheduler.complete_with_survival(*basic, survival)
            )
        elif survival is None:
            events = scheduler.complete_packed_round(*basic, confidence)
        else:
            events = scheduler.complete_packed_round_with_survival(*basic, confidence, survival)
        self._checked()
        self._publish(events, frame.fence)
        if self._leaving:
            self._forget()
        if self._observe:
            self._observe(Ran(frame.plan, done.started_ns, done.device_ns, self._handles))

    def _publish(self, events: tuple[Event, ...], fence: Fence) -> None:
        visible: dict[RequestHandle, None] = {}
        now_ns, keep = self.clock.now_ns, self._keep
        for event in events:
            number = self._numbers[event.handle]
            served = self.requests[number]
            if type(event) is GeneratedToken:
                served.num_tokens += 1
                if keep:
                    served.tokens.append(event.token)
                if event.handle not in visible:
                    visible[event.handle] = None
                    _saw_output(served, now_ns)
            elif type(event) is RequestRebound:
                self._handles[number], self._numbers[event.fresh] = event.fresh, number
                del self._numbers[event.handle]
                self.device.rebind(event.handle, event.fresh)
            elif type(event) is RequestFinished:
                served.reason = str(event.reason)
                self._leaving.append(event.handle)
            else:
                assert type(event) is CheckpointPublished
                if self._reuse:
                    self._reuse.published(number, event)
                else:
                    self.checkpoints.append(event)
        if visible:
            self.scheduler.published_outputs(tuple(visible), fence)
            self._checked()
        if self._copies:
            for handle in visible:
                number = self._numbers[handle]
                self.scheduler.offer_copy(handle, self._copies(number, self.requests[number].num_tokens))
                self._checked()

    def _forget(self) -> None:
        """Tell the device of ended requests whose slots are free by now."""
        requests, still = self.scheduler.state.requests, []
        for handle in self._leaving:
            owned = requests.generation[handle.slot] == handle.generation and requests.phase[handle.slot] != FREE
            if owned:
                still.append(handle)
                continue
            self.device.forget(handle)
            number = self._numbers.pop(handle, None)
            if number is not None and self._handles.get(number) == handle:
                del self._handles[number]
        self._leaving = still

    def _checked(self) -> None:
        if self._check:
            check_invariants(self.scheduler.state)


def _saw_output(served: Served, now_ns: int) -> None:
    if served.first_ns == 0:
        served.first_ns = now_ns
    else:
        gap = now_ns - served.last_ns
        served.gaps_ns.append(gap)
        served.largest_gap_ns = max(served.largest_gap_ns, gap)
    served.last_ns = now_ns
