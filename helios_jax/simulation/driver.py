"""Discrete-event runs of the production scheduler against a synthetic device.

1. Arrivals and cancellations are given as times; requests that do not fit wait in order.
2. Plan, commit, run, let virtual time pass, complete, publish the first token of each burst.
3. Every change of the state passes the numbered invariants when `check` is set.
4. The report holds, for each request, its first output time and the largest output gap.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque

from helios_jax.errors import InvariantError
from helios_jax.scheduler.invariants import check_invariants
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.state import Phase, state_digest
from helios_jax.scheduler.types import (
    Event,
    GeneratedToken,
    RequestFinished,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
)
from helios_jax.simulation.clock import VirtualClock
from helios_jax.simulation.device import FakeDevice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request that arrives at `at_ns` and is cancelled at `cancel_ns` if it still runs."""

    at_ns: int
    spec: RequestSpec
    cancel_ns: int | None = None


@dataclasses.dataclass
class Served:
    """What one request experienced; times in ns, 0 until they happened."""

    arrival_ns: int
    first_ns: int = 0
    last_ns: int = 0
    largest_gap_ns: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str | None = None


class Simulation:
    """One run; `requests` has a row an arrival, in the order given."""

    def __init__(
        self, scheduler: Scheduler, device: FakeDevice, arrivals: list[Arrival], *, check: bool = True
    ) -> None:
        self.scheduler, self.device, self.clock = scheduler, device, VirtualClock(scheduler.state.now_ns)
        self.requests = [Served(arrival.at_ns) for arrival in arrivals]
        self.plans: list[ScheduledPlan] = []
        self._arrivals, self._check = arrivals, check
        self._future = sorted(range(len(arrivals)), key=lambda i: arrivals[i].at_ns, reverse=True)
        self._cancels = [(a.cancel_ns, i) for i, a in enumerate(arrivals) if a.cancel_ns is not None]
        heapq.heapify(self._cancels)
        self._waiting: deque[int] = deque()
        self._handles: dict[int, RequestHandle] = {}
        self._numbers: dict[RequestHandle, int] = {}
        self._owned: set[RequestHandle] = set()
        self._fence = scheduler.state.last_fence

    def run(self, *, until_ns: int | None = None) -> None:
        """Run until nothing is left to do, or until virtual time passes `until_ns`."""
        while until_ns is None or self.clock.now_ns < until_ns:
            self._take_events()
            plan = self.scheduler.plan()
            if plan is not None:
                self._run_frame(plan)
            elif (upcoming := self._next_event_ns()) is not None:
                self.clock.advance_to(upcoming)
            elif self._waiting:
                raise InvariantError(f"{len(self._waiting)} requests wait although nothing runs")
            else:
                return

    def digest(self) -> str:
        """Hash of the scheduler's state."""
        return state_digest(self.scheduler.state)

    def _next_event_ns(self) -> int | None:
        times = [self._cancels[0][0]] if self._cancels else []
        if self._future:
            times.append(self._arrivals[self._future[-1]].at_ns)
        return min(times, default=None)

    def _take_events(self) -> None:
        """Arrivals, cancellations and admissions that are due now."""
        self.scheduler.advance_to(self.clock.now_ns)
        while self._future and self._arrivals[self._future[-1]].at_ns <= self.clock.now_ns:
            self._waiting.append(self._future.pop())
        self._take_cancels()
        while self._waiting and self.scheduler.can_admit(self._arrivals[self._waiting[0]].spec):
            number = self._waiting.popleft()
            handle = self.scheduler.admit(self._arrivals[number].spec, self.clock.now_ns)
            self._handles[number], self._numbers[handle] = handle, number
            self._owned.add(handle)
            self._checked()

    def _take_cancels(self) -> None:
        while self._cancels and self._cancels[0][0] <= self.clock.now_ns:
            _, number = heapq.heappop(self._cancels)
            if self.requests[number].reason is not None:
                continue
            self.requests[number].reason = "cancelled"
            if number in self._handles:
                self.scheduler.cancel(self._handles[number])
                self._checked()
            elif number in self._waiting:
                self._waiting.remove(number)

    def _run_frame(self, plan: ScheduledPlan) -> None:
        self._fence += 1
        self.scheduler.commit(plan, self._fence)
        self._checked()
        self.plans.append(plan)
        tables = {lane.handle: self.scheduler.page_table(lane.handle) for lane in plan.lanes}
        records, timing = self.device.run(plan, tables)
        done_ns = self.clock.now_ns + timing.wall_ns
        while (upcoming := self._next_event_ns()) is not None and upcoming <= done_ns:
            self.clock.advance_to(upcoming)  # arrivals and cancellations while the frame runs
            self._take_events()
        self.clock.advance_to(done_ns)
        self.scheduler.advance_to(done_ns)
        events = self.scheduler.complete(self._fence, records, timing)
        self._checked()
        self._publish(events)

    def _publish(self, events: tuple[Event, ...]) -> None:
        visible: list[RequestHandle] = []
        for event in events:
            served = self.requests[self._numbers[event.handle]]
            if isinstance(event, RequestFinished):
                served.reason = str(event.reason)
                continue
            assert isinstance(event, GeneratedToken)
            served.tokens.append(event.token)
            if served.first_ns == 0:
                served.first_ns = self.clock.now_ns
            else:
                served.largest_gap_ns = max(served.largest_gap_ns, self.clock.now_ns - served.last_ns)
            served.last_ns = self.clock.now_ns
            visible.append(event.handle)
        self.scheduler.published_outputs(visible, self._fence)
        self._checked()

    def _checked(self) -> None:
        """Tell the device of freed slots, and recount the invariants."""
        requests = self.scheduler.state.requests
        for handle in list(self._owned):
            owner = requests.generation[handle.slot] == handle.generation
            if not owner or requests.phase[handle.slot] == Phase.FREE:
                self._owned.remove(handle)
                self.device.forget(handle)
        if self._check:
            check_invariants(self.scheduler.state)
