"""The whole interface as a Hypothesis state machine: every event, every invariant, every time.

Beside the scheduler runs a naive model (`machine_model`) that is told what happened and says what
must have come of it; `machine_checks` compares plans, frames and whole states. Details of requests
and reports come from a seed, so that a failing example stays short.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helios_jax.errors import CapacityError, ConfigError, InvariantError, RequestError, StalePlanError
from helios_jax.scheduler import (
    Event,
    ExecutionTiming,
    FinishReason,
    GeneratedToken,
    PolicyConfig,
    RequestFinished,
    RequestHandle,
    RequestRebound,
    RequestSpec,
    ScheduledPlan,
    admit,
    advance_to,
    can_admit,
    cancel,
    check_invariants,
    commit,
    complete,
    configure_policy,
    external_ready,
    finish,
    new_state,
    offer_copy,
    plan_next,
    preempt,
    published_output,
    resumed,
    victim,
)
from helios_jax.scheduler.captures import demand_checkpoint, identify_checkpoint
from helios_jax.scheduler.refresh import credit
from helios_jax.scheduler.types import CheckpointPublished, SelectionReason
from tests.property import machine_kit as kit
from tests.property import machine_pages as pages
from tests.property.machine_checks import check_frozen, check_plan, check_state, fingerprint
from tests.property.machine_jobs import CANCELLED, PREEMPTED
from tests.property.machine_model import Model
from tests.unit.every_kind_toy import complete_any
from tests.unit.scheduler_toy import measured

SEEDS = st.integers(0, 2**32 - 1)
PICKS = st.integers(0, 99)
MUCH_NS = 10**10
T = TypeVar("T")


def chosen(options: Sequence[T], pick: int) -> T:
    return options[pick % len(options)]


class SchedulerMachine(RuleBasedStateMachine):
    """Books beside the scheduler: what each request consumed, produced and how it ended."""

    @initialize(seed=SEEDS, warm=st.sampled_from([0, 1, 1, 2, 2]), mixed=st.booleans(), plain=st.booleans())
    def start(self, seed: int, warm: int, mixed: bool, plain: bool) -> None:
        """Cold, measured, or measured with both exploration ledgers full."""
        rng = random.Random(seed)
        catalog, limits, policy = kit.catalogue(mixed=mixed, plain=plain), kit.draw_limits(rng), kit.draw_policy(rng)
        self.state, self.model = new_state(catalog, limits, policy), Model(catalog, limits, policy)
        self.saved: list[ScheduledPlan] = []
        self.published: list[tuple[RequestHandle, int]] = []  # every (handle, fence) with output, the last one last
        self.handles: list[RequestHandle] = []  # ever given out
        self.preempted: list[RequestSpec] = []  # gave way, and wait to be admitted again
        self.events: dict[RequestHandle, list[Event]] = {}
        if warm:
            times = kit.draw_durations(rng, catalog)
            self.state = measured(self.state, times.__getitem__)
            for shape, duration in times.items():
                self.model.costs[shape].samples = [duration]
        if warm == 2:
            counters = dataclasses.replace(self.state.counters, execution_ns=(MUCH_NS, 0, 0, 0))
            ledgers = credit(self.state.ledgers, MUCH_NS)
            self.state = dataclasses.replace(self.state, counters=counters, ledgers=ledgers)
            self.model.execution_ns[SelectionReason.ORDINARY] = MUCH_NS
            for budget in self.model.budgets.values():
                budget.earn(MUCH_NS)

    # Requests come.

    @rule(seed=SEEDS, number=st.integers(1, 4))
    def admits(self, seed: int, number: int) -> None:
        rng = random.Random(seed)
        for _ in range(number):
            self._admit(rng)

    def _admit(self, rng: random.Random) -> None:
        back = bool(self.preempted)
        spec = self.preempted[0] if back else kit.draw_spec(rng, self.model, self.state)
        before = fingerprint(self.state)
        assert not back or kit.possible(self.model, spec, self.state)
        if not kit.possible(self.model, spec, self.state):
            for ask in (lambda: can_admit(self.state, spec), lambda: admit(self.state, spec, self.state.now_ns)):
                with pytest.raises(RequestError):
                    ask()
        elif self.model.fits(spec, self.state, row=self._row_obtainable(spec.restore_from)):
            assert can_admit(self.state, spec)
            source = self.state
            self.state, handle = admit(source, spec, source.now_ns)
            self.model.admit(spec, handle, source)
            self.handles.append(handle)
            if back:
                self.model.seen["admitted again"] += 1
                self.preempted.pop(0)
            return
        else:
            assert not can_admit(self.state, spec)
            self.model.seen["no room"] += 1
            with pytest.raises(CapacityError):
                admit(self.state, spec, self.state.now_ns)
        assert fingerprint(self.state) == before

    def _row_obtainable(self, source: int) -> bool:
        """A row is free, guarded for an anchor that can do without, or published and not about to be restored."""
        kept, rows = self.state.retention.checkpoints, self.state.retention.rows
        pinned = {job.spec.restore_from for job in self.model.jobs if job.waits_for_pin} | {source}
        held = {int(row) for number, row in zip(kept.ids, kept.rows, strict=True) if int(number) in pinned}
        names = [rows.use_of(row).name for row in range(1, len(rows) + 1)]
        return any(
            name in ("FREE", "GUARDED") or (name == "PUBLISHED" and row not in held)
            for row, name in enumerate(names, start=1)
        )

    @precondition(lambda self: self.handles)
    @rule(pick=PICKS, proposals=st.integers(-1, 4))
    def hears(self, pick: int, proposals: int) -> None:
        """The host has proposals for a request, or its state from outside; nothing of it for one that is gone."""
        waiting = [job.handle for job in self.model.jobs if job.stage == "external"]
        handle = chosen(waiting or [job.handle for job in self.model.running()] or self.handles, pick)
        if proposals < 0:
            with pytest.raises(InvariantError):
                offer_copy(self.state, handle, proposals)
        self._hear(handle, max(0, proposals))

    def _hear(self, handle: RequestHandle, proposals: int) -> None:
        job, before = self.model.job_of(handle), self.state
        self.state = external_ready(self.state, handle)
        if job is not None and job.stage == "external":
            job.stage = "restore"
            self.model.epochs[handle.slot] += 1
        else:
            assert self.state is before
        self.state = offer_copy(self.state, handle, proposals)
        if job is not None:
            job.copies = proposals

    @rule(duration=st.sampled_from([0, 3, 10**4, 10**6, 10**8, 40 * 10**9]))
    def waits(self, duration: int) -> None:
        if duration == 3 and self.state.now_ns:
            with pytest.raises(InvariantError):
                advance_to(self.state, self.state.now_ns - 1)
        self.model.advance(self.state.now_ns + duration)
        self.state = advance_to(self.state, self.state.now_ns + duration)

    # Plans are made and submitted.

    @rule()
    def makes_room(self) -> None:
        """Whoever must give way does, and will be admitted again with what it has generated."""
        while True:
            who, expected = victim(self.state), pages.victim(self.model, self.state, drained=True)
            assert who == (expected and expected.handle)
            if expected is None:
                return
            self.model.seen["gave way"] += 1
            spec = resumed(expected.spec, expected.out)
            assert spec.prompt.tolist() == [*expected.spec.prompt.tolist(), *expected.out]
            assert (spec.max_tokens, spec.output_len, spec.preemptions) == (
                expected.spec.max_tokens - len(expected.out), expected.spec.output_len + len(expected.out),
                expected.spec.preemptions + 1)  # fmt: skip
            self.preempted.insert(0, spec)
            self._end(expected.handle, PREEMPTED)
            self.holds()

    @rule()
    def plans(self) -> None:
        before = fingerprint(self.state)
        plan = plan_next(self.state)
        assert fingerprint(self.state) == before
        check_plan(self.model, plan, self.state)
        if plan is not None:
            self.saved = [*self.saved[-5:], plan]

    @precondition(lambda self: self.saved)
    @rule(age=st.sampled_from([1, 1, 1, 1, 2, 4]), skip=st.sampled_from([1, 1, 1, 5, 0]))
    def commits(self, age: int, skip: int) -> None:
        """The last plan, or one that was kept; now and then with a fence that does not grow."""
        plan, fence = self.saved[-min(age, len(self.saved))], self.state.last_fence + skip
        refused = self.model.refuses(plan, plan.epochs)
        if refused or not skip:
            before = fingerprint(self.state)
            self.model.seen["stale plan" if skip else "fence that does not grow"] += 1
            with pytest.raises(StalePlanError if skip else InvariantError):
                commit(self.state, plan, fence)
            assert fingerprint(self.state) == before
            return
        flight = self.model.commit(plan, fence)
        self.state = commit(self.state, plan, fence)
        check_frozen(self.model, flight, self.state)

    @rule(times=st.integers(1, 12), seed=SEEDS, visible=st.booleans())
    def serves(self, times: int, seed: int, visible: bool) -> None:
        """What an engine does: submit as long as the window takes more, complete the oldest, publish, again."""
        self._serve(times, seed, calm=True, visible=visible)

    @rule(times=st.integers(1, 6), seed=SEEDS)
    def serves_wildly(self, times: int, seed: int) -> None:
        """The same with failing lanes, invalid times and a clock of its own."""
        self._serve(times, seed, calm=False, visible=True)

    @rule(times=st.integers(4, 12), seed=SEEDS)
    def serves_many(self, times: int, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(6):
            self._admit(rng)
        self._serve(times, seed, calm=True, visible=True)

    def _serve(self, times: int, seed: int, *, calm: bool, visible: bool) -> None:
        rng = random.Random(seed)
        for _ in range(rng.choice([1, 2, 4, 5]) - len(self.model.running())):
            self._admit(rng)
        for _ in range(times):
            self._submit()
            if not self.model.flights:
                return
            end_ns = max(self.state.now_ns, self.model.expected_end_ns()) if calm else self.state.now_ns + 10**6
            self.waits(end_ns - self.state.now_ns)
            self.completes(rng.randrange(2**32), calm, False)
            self.holds()
            if visible:
                for handle in list(self.model.interval.before) if self.model.interval else []:
                    self._publish(handle, self.model.interval.fence)  # type: ignore[union-attr]
            for job in self.model.running():
                if rng.random() < 0.3:
                    self._hear(job.handle, rng.randint(0, 3))
        self._submit()

    def _submit(self) -> None:
        for _ in range(self.model.limits.frames):
            self.makes_room()
            made = len(self.model.flights)
            self.saved = []
            self.plans()
            if self.saved:
                self.commits(1, 1)
                assert len(self.model.flights) == made + 1
                self.holds()

    # Frames complete.

    @precondition(lambda self: self.model.flights)
    @rule(seed=SEEDS, calm=st.booleans(), spoil=st.booleans())
    def completes(self, seed: int, calm: bool, spoil: bool) -> None:
        rng, flight = random.Random(seed), self.model.flights[0]
        report = kit.draw_report(rng, self.model, flight, calm=calm)
        if spoil:
            self._refuses(rng, report)
        self.state, events = complete_any(self.state, flight.fence, *report)
        joint = None if report.confidence is None else report.confidence[1].tolist()
        survival = None if report.survival is None else report.survival.tolist()
        expected = self.model.complete(report.records, report.timing, self.state, joint, survival)
        assert [plain(event) for event in events] == expected
        self.model.register([event for event in events if isinstance(event, CheckpointPublished)])
        self._note(events, flight.fence)

    def _refuses(self, rng: random.Random, report: kit.Report) -> None:
        """A damaged report, and that of a later frame, change nothing."""
        before, flights = fingerprint(self.state), self.model.flights
        bad = kit.damage(rng, report, flights[0])
        self.model.seen["malformed"] += 1
        with pytest.raises(InvariantError):
            complete_any(self.state, flights[0].fence, *bad)
        if len(flights) > 1:
            later = kit.draw_report(rng, self.model, flights[1], calm=True)
            with pytest.raises(InvariantError):
                complete_any(self.state, flights[1].fence, *later)
        assert fingerprint(self.state) == before

    def _note(self, events: tuple[Event, ...], fence: int) -> None:
        """One terminal event each, nothing but captures after it, and a stream keeps its story when it is rebound."""
        for event in events:
            told = self.events.setdefault(event.handle, [])
            over = any(isinstance(other, RequestFinished) for other in told)
            assert not over or isinstance(event, CheckpointPublished)
            told.append(event)
            if isinstance(event, RequestRebound):
                self.events[event.fresh] = told
                self.handles.append(event.fresh)
            if isinstance(event, GeneratedToken) and (event.handle, fence) not in self.published:
                self.published.append((event.handle, fence))

    @rule(fence=st.integers(-1, 100))
    def misuses(self, fence: int) -> None:
        """A completion that nobody waits for is counted; preferences are fixed once a request was admitted."""
        before = self.state
        if self.model.admitted:
            with pytest.raises(ConfigError):
                configure_policy(self.state, PolicyConfig())
        else:
            self.state = configure_policy(self.state, self.state.policy)
            assert self.state == before
        if fence not in [flight.fence for flight in self.model.flights]:
            self.state, events = complete(self.state, fence, (), ExecutionTiming((1,), 1))
            self.model.ignored += 1
            assert events == ()
            assert dataclasses.replace(self.state, counters=before.counters) == before

    @precondition(lambda self: self.published)
    @rule(pick=PICKS, again=st.booleans())
    def publishes(self, pick: int, again: bool) -> None:
        """In time or too late, once or twice."""
        handle, fence = chosen(self.published[-8:], pick)
        self._publish(handle, fence)
        if again:
            before = self.state
            self._publish(handle, fence)
            assert self.state is before

    def _publish(self, handle: RequestHandle, fence: int) -> None:
        if self.model.may_publish(handle, fence):
            self.state = published_output(self.state, handle, fence)
            self.model.publish(handle)
            return
        self.model.seen["published late"] += 1
        before = fingerprint(self.state)
        with pytest.raises(InvariantError):
            published_output(self.state, handle, fence)
        assert fingerprint(self.state) == before

    # Requests end.

    @precondition(lambda self: self.handles)
    @rule(pick=PICKS, how=st.sampled_from([CANCELLED, PREEMPTED, *FinishReason]), old=st.booleans())
    def ends(self, pick: int, how: str, old: bool) -> None:
        present = [job.handle for job in self.model.jobs]
        self._end(chosen(self.handles if old or not present else present, pick), how)

    def _end(self, handle: RequestHandle, how: str) -> None:
        job, before = self.model.job_of(handle), self.state
        if how == CANCELLED:
            self.state = cancel(self.state, handle)
        elif how == PREEMPTED:
            self.state = preempt(self.state, handle)
        else:
            self.state = finish(self.state, handle, FinishReason(how))
        if job is None or job.ended is not None:
            assert self.state is before
            return
        self.model.epochs[handle.slot] += 1
        self.model.end(job, how, self.state)

    # Checkpoints.

    @precondition(lambda self: len(self.state.retention.checkpoints))
    @rule(pick=PICKS, prefix=st.integers(0, 2))
    def identifies(self, pick: int, prefix: int) -> None:
        """The host tells whose tokens a capture holds; equal prefixes of equal length share a row.

        One that has given way meanwhile changes nothing.
        """
        for gone in set(self.model.checkpoints) - set(self.state.retention.checkpoints.ids.tolist()):
            assert demand_checkpoint(self.state, gone) is self.state
            assert identify_checkpoint(self.state, gone, "anything") is self.state
        known = self.state.retention.checkpoints
        ends = known.endpoints.tolist()
        shared = [n for n, end in zip(known.ids.tolist(), ends, strict=True) if ends.count(end) > 1]
        number = chosen(shared or known.ids.tolist(), pick)
        place = known.ids.tolist().index(number)
        row, key = int(known.rows[place]), ("prefix", prefix, int(known.endpoints[place]))
        other = [i for i, held in enumerate(known.keys) if held == key and int(known.rows[i]) != row]
        pinned = any(pins for pins, held in zip(known.pins.tolist(), known.rows.tolist(), strict=True) if held == row)
        if other and pinned:
            before = fingerprint(self.state)
            with pytest.raises(InvariantError):
                identify_checkpoint(self.state, number, key)
            assert fingerprint(self.state) == before
            return
        self.state = demand_checkpoint(identify_checkpoint(self.state, number, key), number)
        self.model.identify([number, *(int(known.ids[i]) for i in other)], self.state)

    @invariant()
    def holds(self) -> None:
        check_invariants(self.state)
        check_state(self.model, self.state)

    def teardown(self) -> None:
        """Everything ends: all that is left are published checkpoints."""
        if not hasattr(self, "model"):
            return
        for job in self.model.running():
            self._end(job.handle, CANCELLED)
            self.holds()
        for _ in range(40):
            self._submit()
            if not self.model.flights:
                break
            self.waits(0)
            self.completes(0, True, False)
            self.holds()
        state = self.state
        assert self.model.jobs == []
        assert not state.requests.phase.any()
        assert state.pool.num_free + state.pool.num_kept == state.limits.pages
        assert not state.requests.reserved_pages.any()
        assert not state.retention.checkpoints.pins.any()
        assert {state.retention.rows.use_of(row).name for row in range(1, state.limits.state_rows + 1)} <= {
            "FREE", "PUBLISHED"}  # fmt: skip
        for told in self.events.values():
            assert sum(isinstance(event, RequestFinished) for event in told) <= 1


def plain(event: Event) -> tuple:
    """An event as the model names it."""
    match event:
        case GeneratedToken(handle, token, index):
            return ("token", handle, token, index)
        case RequestFinished(handle, reason, token):
            return ("finished", handle, reason, token)
        case RequestRebound(handle, fresh):
            return ("rebound", handle, fresh)
        case CheckpointPublished(handle, _, endpoint, _):
            return ("published", handle, endpoint)


class LongMachine(SchedulerMachine):
    """The same, for longer and with seeds of the day."""


# Steps are slow and few: a failing example is short as it is, and shrinking it would take many minutes.
COMMON = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
SchedulerMachine.TestCase.settings = settings(COMMON, max_examples=16, stateful_step_count=25, derandomize=True)
LongMachine.TestCase.settings = settings(COMMON, max_examples=50, stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase
TestSchedulerLong = pytest.mark.slow(LongMachine.TestCase)
