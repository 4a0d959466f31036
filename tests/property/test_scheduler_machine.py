"""The whole interface as a Hypothesis state machine: every event, every invariant, every time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helios_jax.errors import CapacityError, InvariantError, StalePlanError
from helios_jax.scheduler import (
    ExecutionTiming,
    Fence,
    FinishReason,
    GeneratedToken,
    LaneRole,
    RequestFinished,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
    admit,
    advance_to,
    can_admit,
    cancel,
    check_invariants,
    commit,
    complete,
    finish,
    new_state,
    plan_next,
    preempt,
    published_output,
    state_digest,
)
from helios_jax.scheduler.refresh import credit
from tests.unit.scheduler_toy import measured, records_of, request, small_catalog, small_limits

STOP = 5


class SchedulerMachine(RuleBasedStateMachine):
    """Books beside the scheduler: what each request consumed, produced and how it ended."""

    @initialize(warm=st.sampled_from([0, 1, 1, 2]))
    def start(self, warm: int) -> None:
        """Cold, measured, or measured with both exploration ledgers full."""
        self.state = new_state(small_catalog(), small_limits(slots=3, pages=12, page_size=4, max_context=24))
        if warm:
            self.state = measured(self.state, lambda _: 10**6)
        if warm == 2:
            counters = dataclasses.replace(self.state.counters, execution_ns=(10**10, 0, 0, 0))
            ledgers = credit(self.state.ledgers, 10**10)
            self.state = dataclasses.replace(self.state, counters=counters, ledgers=ledgers)
        self.specs: dict[RequestHandle, RequestSpec] = {}
        self.consumed: dict[RequestHandle, int] = {}
        self.outputs: dict[RequestHandle, list[int]] = {}
        self.ended: set[RequestHandle] = set()
        self.plan: ScheduledPlan | None = None  # made, not yet committed
        self.flying: list[tuple[Fence, ScheduledPlan]] = []
        self.publishable: list[tuple[RequestHandle, Fence]] = []

    @rule(prompt=st.integers(1, 16), output=st.integers(1, 6), scored=st.booleans(), none=st.booleans())
    def admits(self, prompt: int, output: int, scored: bool, none: bool) -> None:
        output = 0 if scored and none else output
        spec = request(prompt, output, scored=scored, stop_token_ids=frozenset({STOP}), message_ends=(prompt // 2,))
        if can_admit(self.state, spec):
            self.state, handle = admit(self.state, spec, self.state.now_ns)
            assert handle not in self.specs
            self.specs[handle], self.consumed[handle], self.outputs[handle] = spec, 0, []
        else:
            with pytest.raises(CapacityError):
                admit(self.state, spec, self.state.now_ns)

    @rule(duration=st.one_of(st.integers(0, 10**6), st.integers(0, 40 * 10**9)))
    def waits(self, duration: int) -> None:
        self.state = advance_to(self.state, self.state.now_ns + duration)

    @rule()
    def plans(self) -> None:
        self.plan = plan_next(self.state)
        running = set(self.specs) - self.ended
        if not self.flying:
            assert (self.plan is None) == (not running)
        if self.plan is not None:
            assert {lane.handle for lane in self.plan.lanes} <= running
            assert len(self.flying) < self.state.limits.frames
            assert not self.flying or not self.plan.required_empty_queue

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commits(self) -> None:
        assert self.plan is not None
        before, fence = state_digest(self.state), self.state.last_fence + 1
        try:
            self.state = commit(self.state, self.plan, fence)
        except StalePlanError:
            assert state_digest(self.state) == before
        else:
            self.flying.append((fence, self.plan))
            assert len(self.flying) <= self.state.limits.frames
            assert not {lane.handle for lane in self.plan.lanes} & self.ended
        self.plan = None

    @rule(times=st.integers(1, 6), token=st.integers(0, 9))
    def serves(self, times: int, token: int) -> None:
        """What an engine does: submit as long as the window takes more, complete the oldest, again."""
        if not set(self.specs) - self.ended:
            self.admits(9, 6, False, False)
        for _ in range(times):
            self._submit()
            if self.flying:
                self.completes(token, 10**6, 10**6, "")
                self.holds()
        self._submit()

    def _submit(self) -> None:
        for _ in range(self.state.limits.frames):
            self.plans()
            if self.plan is not None:
                self.commits()
                self.holds()

    @precondition(lambda self: bool(self.flying))
    @rule(
        token=st.integers(0, 9), device=st.sampled_from([0, 1, 10**6, 10**9]), wall=st.integers(0, 10**9),
        spoil=st.sampled_from(["", "", "", "lane", "count", "time", "order", "logits"]),
    )  # fmt: skip
    def completes(self, token: int, device: int, wall: int, spoil: str) -> None:
        fence, plan = self.flying[0]
        records, timing = list(records_of(plan, token)), ExecutionTiming((device,), wall)
        if spoil == "order" and len(self.flying) > 1:
            before = state_digest(self.state)
            with pytest.raises(InvariantError):
                complete(self.state, self.flying[1][0], records_of(self.flying[1][1], token), timing)
            assert state_digest(self.state) == before
        if spoil in ("lane", "count", "time"):
            broken = [dataclasses.replace(records[0], consumed=records[0].consumed + 1), *records[1:]]
            bad = {"lane": broken, "count": records[1:], "time": records}[spoil]
            times = ExecutionTiming((device,), -1) if spoil == "time" else timing
            before = state_digest(self.state)
            with pytest.raises(InvariantError):
                complete(self.state, fence, bad, times)
            assert state_digest(self.state) == before
        if spoil == "logits":
            records[0] = dataclasses.replace(records[0], valid=False, tokens=())
        self.state, events = complete(self.state, fence, records, timing)
        del self.flying[0]
        self._account(plan, records, events, fence)

    def _account(self, plan: ScheduledPlan, records: list, events: tuple, fence: Fence) -> None:
        self.publishable = []
        alive = {lane.handle for lane in plan.lanes} - self.ended
        for event in events:
            assert event.handle in alive
            if isinstance(event, GeneratedToken):
                assert event.index == len(self.outputs[event.handle])
                self.outputs[event.handle].append(event.token)
                self.publishable.append((event.handle, fence))
            else:
                assert isinstance(event, RequestFinished)
                assert event.handle not in self.ended
                self.ended.add(event.handle)
        for lane, record in zip(plan.lanes, records, strict=True):
            if lane.handle in alive and record.valid and lane.role is LaneRole.PROMPT:
                self.consumed[lane.handle] += lane.length
        for handle in alive:
            spec, output = self.specs[handle], self.outputs[handle]
            assert self.consumed[handle] <= len(spec.prompt)
            over = STOP in output or len(output) >= max(1, spec.max_tokens)
            assert not over or handle in self.ended

    @precondition(lambda self: bool(self.publishable))
    @rule(data=st.data())
    def publishes(self, data: st.DataObject) -> None:
        handle, fence = data.draw(st.sampled_from(self.publishable))
        self.state = published_output(self.state, handle, fence)

    @precondition(lambda self: bool(self.specs))
    @rule(data=st.data(), how=st.sampled_from([cancel, preempt, lambda s, h: finish(s, h, FinishReason.STOP)]))
    def ends(self, data: st.DataObject, how: object) -> None:
        handle = data.draw(st.sampled_from(sorted(self.specs)))
        before = self.state
        self.state = how(self.state, handle)  # type: ignore[operator]
        assert handle not in self.ended or self.state is before
        self.ended.add(handle)

    @rule(fence=st.integers(-1, 100))
    def completes_something_unknown(self, fence: Fence) -> None:
        if fence not in [flying for flying, _ in self.flying]:
            ignored = self.state.counters.ignored_completions
            self.state, events = complete(self.state, fence, (), ExecutionTiming((1,), 1))
            assert events == ()
            assert self.state.counters.ignored_completions == ignored + 1

    @invariant()
    def holds(self) -> None:
        check_invariants(self.state)
        running = set(self.specs) - self.ended
        held = {lane.handle for _, plan in self.flying for lane in plan.lanes}
        if not running and not held:
            assert self.state.pool.num_free == self.state.limits.pages
            assert self.state.requests.reserved_pages.sum() == 0


SchedulerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestScheduler = SchedulerMachine.TestCase
