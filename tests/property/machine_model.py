"""A naive model of the scheduler's life cycle: what every request, page, row and fence must be.

Written from the specification, on plain Python values; the scheduler is only told what happened.
Two choices of the scheduler are free, and the model follows them after checking that they are
legal: whether a state is captured where it may be, and which row a capture gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from helios_jax.scheduler import (
    Catalog,
    CompletionRecord,
    ExecutionTiming,
    FinishReason,
    Lane,
    LaneRole,
    Limits,
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
    SelectionReason,
    State,
)
from helios_jax.scheduler.catalog import ProposalSource
from helios_jax.scheduler.state import Phase
from helios_jax.scheduler.types import CheckpointPublished
from tests.property import machine_books as books
from tests.property import machine_pages as pages
from tests.property.machine_jobs import (
    FEEDBACK,
    PREEMPTED,
    QUEUEABLE,
    UNTYPICAL,
    Flight,
    Job,
    LastInterval,
    Page,
    Table,
    ceil_div,
    lane_rows,
    target_rows,
    token_rows,
)


def _source(shape: ProgramShape) -> str:
    return "copy" if shape.proposal_source is ProposalSource.COPY else "learned"


class Model:
    """The whole world in plain values."""

    def __init__(self, catalog: Catalog, limits: Limits, policy: PolicyConfig) -> None:
        self.catalog, self.limits, self.policy = catalog, limits, policy
        self.costs = {shape: books.Duration() for shape in catalog}
        self.budgets = books.budgets()
        self.now_ns = self.last_fence = self.completed_ns = 0
        self.jobs: list[Job] = []  # that own a slot
        self.flights: list[Flight] = []
        self.interval: LastInterval | None = None
        self.generations, self.epochs = [0] * limits.slots, [0] * limits.slots
        self.admitted = self.rebound = self.ignored = 0
        self.ends: Counter[str] = Counter()
        self.executions: Counter[SelectionReason] = Counter()
        self.execution_ns: Counter[SelectionReason] = Counter()
        self.used: Counter[ProgramKind] = Counter()  # token rows
        self.padded: Counter[ProgramKind] = Counter()
        self.was_empty = False
        self.depth = max(shape.proposal_depth for shape in catalog)
        self.prior = [0.5**d for d in range(1, self.depth + 1)]
        self.population = books.new_population(self.depth)
        self.rows: dict[int, tuple[frozenset[int], int] | None] = {}  # content: jobs with that prefix, tokens
        self.kept: dict[int, list[Page]] = {}  # by row
        self.checkpoints: dict[int, tuple[frozenset[int], int]] = {}
        self.last_checkpoint = 0
        self.captured: list[Job] = []  # published by the completion that is being accounted for
        self.seen: Counter[str] = Counter()  # what has happened, for tests that ask whether everything did

    # Requests.

    def job_of(self, handle: RequestHandle) -> Job | None:
        return next((job for job in self.jobs if job.handle == handle), None)

    def running(self) -> list[Job]:
        return [job for job in self.jobs if job.ended is None]

    def runnable(self) -> list[Job]:
        return [job for job in self.jobs if job.stage not in ("external", "retiring")]

    def needs_private(self, spec: RequestSpec) -> bool:
        features = sum(span.end - span.start for span in spec.image_spans if span.end > spec.restored_len)
        return features > self.limits.feature_tokens

    def window_end(self, spec: RequestSpec, first: int) -> int:
        """Images up to the end of the window that begins with image `first`."""
        room, last = self.limits.feature_tokens, first
        for span in spec.image_spans[first:]:
            room -= span.end - span.start
            if room < 0:
                break
            last += 1
        return last

    def fits(self, spec: RequestSpec, state: State, *, row: bool) -> bool:
        """Whether a request may be admitted now; `row`: a state row could be found for it."""
        room = len(self.jobs) < self.limits.slots and pages.fits(self, spec, state)
        return room and (row or not self.needs_private(spec))

    def admit(self, spec: RequestSpec, handle: RequestHandle, before: State) -> Job:
        taken = {job.handle.slot for job in self.jobs}
        slot = min(set(range(self.limits.slots)) - taken)
        self.generations[slot] += 1
        self.epochs[slot] += 1
        assert handle == RequestHandle(slot, self.generations[slot])
        at = spec.restored_len
        images = sum(span.end <= at for span in spec.image_spans)
        stage = "external" if spec.external else "restore" if at else "initialize"
        job = Job(
            self.admitted, spec, handle, stage, at, at, at, images, self.window_end(spec, images),
            self.needs_private(spec), books.Learned(self.prior, self.population), pages.at_admission(self, spec),
            pages.of_source(self, spec, before),
        )  # fmt: skip
        self.admitted += 1
        job.last_use_ns = self.now_ns
        self.jobs.append(job)
        return job

    def enter(self, job: Job) -> None:
        """No copy is due at this position: what is next?"""
        if job.consumed == len(job.spec.prompt):
            job.stage = "decode"
        else:
            job.stage = "vision" if job.images < job.window else "prompt"

    def end(self, job: Job, reason: str, after: State, *, release: bool = True) -> None:
        """A request ended; the scheduler may let it wait for a snapshot of its last state."""
        assert job.ended is None
        slot, generation = job.handle
        terminal = after.requests.phase[slot] == Phase.TERMINAL and after.requests.generation[slot] == generation
        if terminal:
            assert self.limits.state_rows
            assert reason in (FinishReason.STOP, FinishReason.LENGTH, PREEMPTED)
            assert job.stage in ("prompt", "decode", "snapshot", "vision")
            assert job.committed > 0
            job.copying, job.terminal_ns = "capture", self.now_ns
        self.ends[reason] += 1
        named = any(job in flight.jobs for flight in self.flights)
        self.seen.update([f"{reason}", f"ended in {job.stage}", "ended in flight" if named else "ended between frames"])
        job.ended, job.stage = reason, "terminal" if terminal else "retiring"
        if release:
            self.release()

    def release(self) -> None:
        """Slots of retiring requests that no fence names are free."""
        held = {job.key for flight in self.flights for job in flight.jobs}
        self.jobs = [job for job in self.jobs if job.stage != "retiring" or job.key in held]

    # The queue.

    def expected_end_ns(self) -> int:
        end = self.completed_ns
        for flight in self.flights:
            end = max(end, flight.dispatched_ns) + flight.plan.estimated_duration_ns
        return end

    def planning_ns(self) -> int:
        return max(self.now_ns, self.expected_end_ns()) if self.flights else self.now_ns

    def queued(self, job: Job) -> tuple[int, int]:
        """Tokens that the flights of a stream commit at least, and at most."""
        lanes = [(lane, flight.plan.shape) for flight in self.flights for lane in flight.plan.lanes
                 if lane.handle == job.handle and lane.role is LaneRole.DECODE]  # fmt: skip
        return len(lanes), sum(min(lane.length, target_rows(shape)) for lane, shape in lanes)

    def ahead(self, job: Job) -> int:
        """How far the flights of a stream that still runs afterwards can bring it."""
        return min(self.queued(job)[1], job.spec.max_tokens - len(job.out) - 1)

    def unsure(self, job: Job) -> bool:
        """Whether the flights of a stream may or may not bring it to its output limit."""
        least, most = self.queued(job)
        return bool(most) and least < job.spec.max_tokens - len(job.out) <= most

    def closed(self) -> bool:
        overrun = bool(self.flights) and self.now_ns > self.expected_end_ns()
        return len(self.flights) >= self.limits.frames or overrun or any(flight.alone for flight in self.flights)

    def needs_feedback(self, plan: ScheduledPlan, at_ns: int) -> bool:
        if plan.shape.kind not in QUEUEABLE:
            return True
        if plan.shape.proposal_source is ProposalSource.COPY and plan.shape.proposal_depth:
            return True
        if not self.costs[plan.shape].is_fresh(at_ns, self.policy.estimate_ttl_ns):
            return True
        jobs = [self.job_of(lane.handle) for lane in plan.lanes]
        return any(job is not None and job.spec.constraints & FEEDBACK for job in jobs)

    def funded(self, reason: SelectionReason) -> bool:
        if any(budget.episode for budget in self.budgets.values()):
            return False
        return self.budgets[reason].balance == books.CAP_NS

    def refuses(self, plan: ScheduledPlan, epochs: Sequence[int]) -> bool:
        """Whether a commit must find the plan stale; `epochs` are those of its making."""
        lost = any(self.job_of(lane.handle) is None for lane in plan.lanes)
        changed = [self.epochs[lane.handle.slot] for lane in plan.lanes] != list(epochs)
        unfunded = plan.reason in self.budgets and not self.funded(plan.reason)
        alone = plan.required_empty_queue or self.needs_feedback(plan, self.now_ns)
        named = [job for job in self.jobs if job.handle in {lane.handle for lane in plan.lanes}]
        alone = alone or any(self.unsure(job) for job in named)
        lost |= pages.beyond_promises(self, plan) > pages.spare(self)
        return self.closed() or lost or changed or unfunded or (bool(self.flights) and alone)

    def commit(self, plan: ScheduledPlan, fence: int) -> Flight:
        jobs = [self.job_of(lane.handle) for lane in plan.lanes]
        alone = plan.required_empty_queue or self.needs_feedback(plan, self.now_ns)
        members = [job for job in self.jobs if job.participates]
        flight = Flight(fence, plan, [job for job in jobs if job], members, self.now_ns, alone)
        self.seen.update([plan.shape.name, f"{plan.reason}", f"{len(self.flights) + 1} frames"])
        self.seen.update([f"{lane.role} of {job.stage}" for lane, job in zip(plan.lanes, flight.jobs, strict=True)])
        self.seen[f"{len(plan.lanes)} lanes"] += 1
        for lane, job in zip(plan.lanes, flight.jobs, strict=True):
            self.epochs[lane.handle.slot] += 1
            job.last_use_ns, job.last_fence = self.now_ns, fence
            job.written = self.reach(plan, lane, job)
            job.promised = max(job.promised, ceil_div(job.written, self.limits.page_size))
            while len(job.table) < ceil_div(job.written, self.limits.page_size):
                job.table.append(Page())
        used = min(token_rows(plan.shape), sum(lane.length for lane in plan.lanes))
        self.used[plan.shape.kind] += used
        self.padded[plan.shape.kind] += token_rows(plan.shape) - used
        if plan.reason in self.budgets:
            self.budgets[plan.reason].episode = fence
        self.costs[plan.shape].attempted_ns = self.now_ns
        self.last_fence, self.was_empty = fence, False
        self.flights.append(flight)
        return flight

    def reach(self, plan: ScheduledPlan, lane: Lane, job: Job) -> int:
        """How far the cache of a request may be written once a plan has run, drafts included."""
        if lane.role not in (LaneRole.PROMPT, LaneRole.DECODE):
            return job.written
        wide = lane.role is LaneRole.DECODE and lane_rows(plan.shape) > 1
        return max(job.written, lane.start + lane.length + (self.limits.draft_extent if wide else 0))

    def advance(self, now_ns: int) -> None:
        empty = not self.flights and not self.runnable()
        if empty and self.was_empty:
            for budget in self.budgets.values():
                budget.idle()
        self.now_ns, self.was_empty = now_ns, empty

    # Completions.

    def complete(
        self, records: Sequence[CompletionRecord], timing: ExecutionTiming, after: State,
        joint: Table | None, survival: Table | None,
    ) -> list[tuple]:  # fmt: skip
        """Complete the oldest flight; returns the events that must have come of it.

        Args:
            after: The scheduler's state after it, for the choices that are the scheduler's.
            joint: Joint prefix probabilities of each slot.
            survival: Survival rows of each slot.
        """
        flight = self.flights.pop(0)
        by_handle = {record.handle: record for record in records}
        before = {job.key: job.delivery_r for job in self.jobs}
        events: list[tuple] = []
        served: dict[int, int] = {}
        lessons: list[Sequence[float]] = []
        verdicts: list[Sequence[float]] = []
        for lane, job in zip(flight.plan.lanes, flight.jobs, strict=True):
            record, was_ended = by_handle[lane.handle], job.ended is not None
            consumed, output = job.consumed, len(job.out)
            self._advance(lane, job, record, after, events)
            if was_ended:
                continue
            generated = len(job.out) - output
            served[job.key] = job.consumed - consumed + generated
            if lane.role is LaneRole.DECODE and record.valid and flight.plan.shape.proposal_depth:
                drafted, judged = self._learn(flight.plan.shape, lane, job, record, generated, joint, survival)
                if not job.spec.constraints & UNTYPICAL:
                    lessons += drafted
                    verdicts.append(judged)
            job.learned.age(generated)
        self.prior = books.taught(self.prior, lessons)
        books.teach_population(self.population[_source(flight.plan.shape)], verdicts)
        self._account(flight, timing, served, before)
        self.release()
        return events

    def _advance(self, lane: Lane, job: Job, record: CompletionRecord, after: State, events: list[tuple]) -> None:
        """One lane, as its role says; nothing when its request has ended, but for a terminal snapshot."""
        if lane.role is LaneRole.SNAPSHOT:
            self.rows[lane.row] = (frozenset({job.key}), job.committed) if record.valid else None
            self.kept[lane.row] = pages.shared(self, job.table, job.committed)
        if job.stage == "terminal" and lane.role is LaneRole.DECODE:  # a step behind the end: its token is consumed
            assert lane.length == 1
            job.committed += record.valid
            job.stage = "terminal" if record.valid else "retiring"
            self.seen["a step behind the end"] += 1
        if job.ended is not None and not (job.stage == "terminal" and lane.role is LaneRole.SNAPSHOT):
            return
        self.epochs[job.handle.slot] += 1
        if lane.role is LaneRole.SNAPSHOT and job.copying == "capture":
            if record.valid:
                events.append(("published", job.handle, job.committed))
                self.captured.append(job)
            self._go_on(job)
        elif not record.valid:
            self._finish(job, FinishReason.ERROR, None, after, events)
        elif lane.role is LaneRole.PROMPT:
            self._consume(lane, job, record, after, events)
        elif lane.role is LaneRole.DECODE:
            self._append(job, record.tokens, after, events, committing=True)
        elif lane.role is LaneRole.SNAPSHOT:
            job.stage = "restore"
        elif lane.role is LaneRole.RESTORE and job.window_restore:
            self._rebind(job, events)
        else:
            job.images += lane.role is LaneRole.VISION
            job.restored |= lane.role is LaneRole.RESTORE
            self.enter(job)

    def _go_on(self, job: Job) -> None:
        """A capture is over, whatever came of it; a window may end at the same position."""
        if job.stage == "terminal":
            job.stage = "retiring"
        elif job.consumed == job.next_window() < len(job.spec.prompt):
            job.copying = "window"
        else:
            self.enter(job)

    def _rebind(self, job: Job, events: list[tuple]) -> None:
        slot, old = job.handle.slot, job.handle
        self.generations[slot] += 1
        self.rebound += 1
        self.seen["rebound"] += 1
        job.handle = RequestHandle(slot, self.generations[slot])
        job.window = self.window_end(job.spec, job.images)
        job.private = job.window < len(job.spec.image_spans)
        events.append(("rebound", old, job.handle))
        self.enter(job)

    def _consume(self, lane: Lane, job: Job, record: CompletionRecord, after: State, events: list[tuple]) -> None:
        """A prefill: where it stopped, a capture may be due, and at the end of a window a copy must be made."""
        job.consumed += lane.length
        job.committed += lane.length
        at_window, slot = job.consumed == job.next_window() < len(job.spec.prompt), job.handle.slot
        if job.consumed == len(job.spec.prompt):
            job.visible_ns = self.now_ns
        self.enter(job)
        if at_window or (after.requests.phase[slot] == Phase.SNAPSHOT):
            job.stage = "snapshot"
            job.copying = "capture" if after.requests.state_row[slot] else "window"
            assert job.copying == "capture" or at_window
            assert job.copying == "window" or job.consumed in self.capture_ends(job)
        if job.consumed == len(job.spec.prompt):
            if lane.emits:
                self._append(job, record.tokens, after, events, committing=False)
            else:
                self._finish(job, FinishReason.LENGTH, None, after, events)

    def capture_ends(self, job: Job) -> set[int]:
        """Prompt positions where a capture may be."""
        ends = {end for end in job.spec.message_ends if not any(s.start < end < s.end for s in job.spec.image_spans)}
        ends.add(len(job.spec.prompt))
        return {end for end in ends if end > job.spec.restored_len} if self.limits.state_rows else set()

    def _append(self, job: Job, tokens: Sequence[int], after: State, events: list[tuple], *, committing: bool) -> None:
        """Output up to the first token that ends it."""
        job.copies = 0
        for token in tokens:
            job.committed += committing
            job.out.append(int(token))
            events.append(("token", job.handle, int(token), job.spec.output_len + len(job.out) - 1))
            if token in job.spec.stop_token_ids:
                self._finish(job, FinishReason.STOP, int(token), after, events)
                return
            if len(job.out) >= job.spec.max_tokens:
                self._finish(job, FinishReason.LENGTH, None, after, events)
                return

    def _finish(self, job: Job, reason: FinishReason, token: int | None, after: State, events: list[tuple]) -> None:
        events.append(("finished", job.handle, reason, token))
        self.end(job, reason, after, release=False)

    def _learn(
        self, shape: ProgramShape, lane: Lane, job: Job, record: CompletionRecord, generated: int,
        joint: Table | None, survival: Table | None,
    ) -> tuple[list[Sequence[float]], Sequence[float]]:  # fmt: skip
        """What a round teaches of its request: joint probabilities, if it has any, and verdicts."""
        slot, lessons = job.handle.slot, []
        if joint is not None:
            lessons = [job.learned.drafted(joint[slot], lane.length, shape.proposal_depth)]
        judged = job.learned.judged(
            _source(shape), record.offered, min(record.accepted, generated), censored=generated < 1 + record.accepted,
            survival=None if survival is None else survival[slot],
        )  # fmt: skip
        return lessons, judged

    def _account(
        self, flight: Flight, timing: ExecutionTiming, served: dict[int, int], before: dict[int, float | None]
    ) -> None:
        """Durations, budgets and prices: every participant that still runs has had this interval."""
        raw, charged, reason, tau = books.raw_ns(timing), books.charged_ns(timing), flight.plan.reason, self.policy
        self.costs[flight.plan.shape].observe(timing, self.now_ns, self.policy.estimate_ttl_ns)
        self.executions[reason] += 1
        self.execution_ns[reason] += charged
        if reason in self.budgets:
            self.budgets[reason].pay(charged)
        elif reason is SelectionReason.ORDINARY and raw > 0:
            for budget in self.budgets.values():
                budget.earn(charged)
        duration_ms = charged / 1e6 if raw > 0 else 0.0
        for job in flight.members:
            if job.ended is not None or not duration_ms:
                continue
            start, n = flight.first_r[job.key] if job.token_r is None else job.token_r, flight.token_n[job.key]
            if start is not None and n is not None:
                job.token_r = books.served_r(start, duration_ms, served.get(job.key, 0), n, tau.adaptation_ms)
            n = flight.delivery_n[job.key]
            if job.delivery_r is not None and n is not None:
                job.delivery_r = books.served_r(job.delivery_r, duration_ms, 0, n, tau.adaptation_ms)
        emitted = [job for lane, job in zip(flight.plan.lanes, flight.jobs, strict=True) if lane.emits]
        self.interval = LastInterval(
            flight.fence, duration_ms,
            {job.handle: (job, before[job.key], flight.delivery_n.get(job.key)) for job in emitted
             if served.get(job.key)},
        )  # fmt: skip
        self.completed_ns = self.now_ns

    def may_publish(self, handle: RequestHandle, fence: int) -> bool:
        return self.interval is not None and self.interval.fence == fence and handle in self.interval.before

    def publish(self, handle: RequestHandle) -> None:
        """The first visible output of a burst: one delivery in the last interval."""
        assert self.interval is not None
        job, before, n = self.interval.before[handle]
        if job not in self.jobs or not job.streams or handle in self.interval.published:
            return
        self.interval.published.add(handle)
        self.seen["published a first burst" if before is None else "published a burst"] += 1
        job.visible_ns, duration_ms = self.now_ns, self.interval.duration_ms
        if duration_ms and before is None:
            job.delivery_r = duration_ms
        elif duration_ms and n is not None and before is not None:
            job.delivery_r = books.served_r(before, duration_ms, 1, n, self.policy.adaptation_ms)
        elif duration_ms:
            job.delivery_r = before

    def register(self, published: Sequence[CheckpointPublished]) -> None:
        """Take note of the identities of the captures that were announced."""
        assert len(published) == len(self.captured)
        for event, job in zip(published, self.captured, strict=True):
            assert event.checkpoint > self.last_checkpoint
            self.last_checkpoint = event.checkpoint
            self.checkpoints[event.checkpoint] = (frozenset({job.key}), event.endpoint)
        self.captured = []

    def identify(self, numbers: Sequence[int], after: State) -> None:
        """Checkpoints hold the same prefix: each of them, and a fresh alias, may come from any of these jobs."""
        origins = frozenset().union(*(self.checkpoints[number][0] for number in numbers))
        endpoint = self.checkpoints[numbers[0]][1]
        self.seen["aliases" if len(numbers) > 1 else "identified"] += 1
        fresh = [number for number in after.retention.checkpoints.ids.tolist() if number > self.last_checkpoint]
        for number in (*numbers, *fresh):
            self.checkpoints[number] = (origins, endpoint)
        self.last_checkpoint = max([self.last_checkpoint, *fresh])
