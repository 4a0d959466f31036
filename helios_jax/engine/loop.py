"""The engine thread: one loop from requests to frames to text.

Life of a step (`Engine.step`), with up to two frames outstanding (`window`):

1. Take submissions and aborts; preempt where a stream has no page for its next token; admit waiting
   sequences while slots and pages last, in order.
2. `plan`, `commit`, pack, submit, until the scheduler has nothing more for now: the device works
   from here on. A second frame is planned from what the first is expected to do; whether there may
   be one is the scheduler's business (`scheduler.queue`).
3. Deliver the outputs of the frame before, while the device is busy.
4. Wait for the oldest frame. Aborts that came meanwhile are applied before its tokens are.
5. `complete`, then text, stop strings, and `published_outputs` for what became visible; all of it
   before another completion is looked at.

The thread waits for the device in one place only, for the oldest frame, once a frame.
Errors: see `recovery`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from helios_jax.config import EngineConfig
from helios_jax.engine.board import Board
from helios_jax.engine.drafting import Drafting
from helios_jax.engine.failure import EventLog
from helios_jax.engine.frames import Fields, FrameBuilder
from helios_jax.engine.heartbeat import DEVICE, HOST, IDLE, EngineHealth, Heartbeat
from helios_jax.engine.host_checkpoints import HostCheckpoints
from helios_jax.engine.host_copying import HostCopying
from helios_jax.engine.prefixes import Prefixes, Scope
from helios_jax.engine.publication import Publisher
from helios_jax.engine.recovery import Recovery
from helios_jax.engine.roster import Roster
from helios_jax.engine.stats import EngineStats, HostTierStats
from helios_jax.engine.trace import TraceWriter
from helios_jax.engine.window import FailedSubmission, HostTimer, Outstanding, Window
from helios_jax.errors import ConfigError, DeviceError, InvariantError, UnavailableError
from helios_jax.scheduler.catalog import ProgramKind
from helios_jax.scheduler.preferences import policy_preset
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.types import CompletionRecord, Event, ExecutionTiming, FinishReason, ScheduledPlan

CLOSE_TIMEOUT_S = 10.0  # for the thread to notice that it is to stop


class Engine:
    """Owns scheduler and device; `start` it, give it requests, `close` it.

    Args:
        core: A prepared core, or a fake one: catalog, dims, limits, source_info, runner, close().
        tokenizer: For the text of single tokens.
        config: Bounds and policy.
        clock: Monotonic time in ns; the scheduler's time.
    """

    def __init__(
        self, core: Any, tokenizer: Any, config: EngineConfig, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.core, self.config, self.clock = core, config, clock
        policy = policy_preset(
            config.policy,
            terminal_value=config.terminal_value,
            terminal_age_price=config.terminal_age_price,
            checkpoint_extra_work_fraction=config.checkpoint_extra_work_fraction,
            adaptive_verification_alpha=config.mtp_adaptive_verification_alpha,
            speculation=config.spec_width,
        )
        frames = core.limits.frames if config.async_scheduling else 1
        rows = core.limits.state_rows if config.enable_prefix_caching else 0
        limits = dataclasses.replace(core.limits, frames=frames, state_rows=rows)
        self.scheduler = Scheduler(core.catalog, limits, policy)
        self.board = Board(core.limits.slots + config.max_queue)
        self.heartbeat = Heartbeat(clock, config.ready_timeout_s)
        self.events = EventLog()
        self.window = Window(frames)
        self._drafting = Drafting(core.catalog)
        self._builder = FrameBuilder(core.dims, self._drafting, core.limits.draft_extent)
        self._publisher = Publisher(tokenizer.decode_token, core.source_info.eos_token_ids)
        scope = Scope(core.source_info.name)
        self.host = self._host_checkpoints(scope) if config.host_checkpoint_bytes else None
        self.prefixes = Prefixes(self.scheduler, scope, self.host)
        self.roster = Roster(self.scheduler, self.board, self._publisher, self._drafting, self.prefixes, self.events)
        self._recovery = Recovery(self.scheduler, self.roster, self.window, self.board, self.events, core.runner)
        self._trace = TraceWriter(config.trace) if config.trace else None
        self._timer = HostTimer()
        self._thread = threading.Thread(target=self._run, name="helios-engine", daemon=True)

    def _host_checkpoints(self, scope: Scope) -> HostCheckpoints:
        if not self.config.enable_prefix_caching:
            raise ConfigError("host_checkpoint_bytes needs prefix caching: leave it on, or the bytes out")
        sizes, core = self.core.enable_host_copies(), self.core
        copying = HostCopying(core.runner, sizes, self.config.host_checkpoint_bytes, core.limits.page_size)
        return HostCheckpoints(self.scheduler, copying, scope)

    # ---- called from other threads

    def start(self) -> None:
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine."""
        return self._recovery.failure

    def health(self) -> EngineHealth:
        """Whether requests are being served, and if not why."""
        if self.failure is not None:
            return EngineHealth(False, False, self.board.refusal + self._recovery.note)
        if not self._thread.is_alive():
            return EngineHealth(False, False, "the engine thread is not running")
        problem = self.board.refusal or self.heartbeat.problem() or self._recovery.rebuilding
        return EngineHealth(True, not problem, problem)

    def stats(self) -> EngineStats:
        """A snapshot of counts and gauges."""
        counters = self.scheduler.snapshot_counters()
        return EngineStats(
            running=len(self.roster.running),
            waiting=len(self.roster.waiting),
            slots_total=self.core.limits.slots,
            pages_total=int(counters["pages_total"]),  # type: ignore[arg-type]
            pages_used=int(counters["pages_used"]),  # type: ignore[arg-type]
            pages_free=int(counters["pages_free"]),  # type: ignore[arg-type]
            requests=self.board.snapshot(),
            scheduler=counters,
            compiles_after_ready=self.core.compiles_after_ready(),
            rounds=self._drafting.snapshot(),
            checkpoints=self.prefixes.snapshot(),
            host_tier=self.host.stats() if self.host else HostTierStats(),
        )

    def drain(self, timeout_s: float | None) -> bool:
        """Accept nothing more and wait for what runs; True when everything ended in time."""
        self.board.refuse("the engine is draining and accepts no new requests")
        return self.board.wait_until_empty(timeout_s)

    def close(self) -> None:
        """Stop the thread, end open requests with an error, free the core. Idempotent.

        A thread that is stuck in a device call is left behind: it cannot be interrupted.
        """
        self.board.refuse("the engine is closed")
        self.board.stop()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self.roster.answer_all(UnavailableError("the engine was closed while a device call hung"))
            return
        try:
            if self._trace:
                self._trace.close()
            if self.host:
                self.host.close()
        finally:
            self.core.close()

    # ---- the engine thread

    def _run(self) -> None:
        try:
            while not self.board.is_stopping:
                if not self.step():
                    self.heartbeat.enter(IDLE)
                    self.board.wait()
            self.roster.answer_all(UnavailableError("the engine was closed"))
        except BaseException as error:  # whatever it was, nobody may be left without an answer
            self._recovery.die(error, self.config)

    def step(self) -> bool:
        """One turn of the loop, by whoever drives the engine: its thread, or a simulation without one.

        Returns:
            Whether a frame was outstanding and has been completed; without one there is nothing
            to do until somebody submits.

        Raises:
            InvariantError: A bug of ours; the engine cannot go on.
            DeviceError: The device cannot go on.
        """
        self.heartbeat.enter(HOST, "planning")
        self._timer.lap()
        self.roster.take_commands()
        self.scheduler.advance_to(self.clock())
        self.roster.make_room()
        self.roster.admit(self.clock)
        while not self.window.is_failed and (plan := self.scheduler.plan()) is not None:
            self._submit(plan)
        self._publisher.flush()
        if not self.window:
            running, waiting = len(self.roster.running), len(self.roster.waiting)
            departed = len(self.roster.departed)
            if running or waiting or departed:
                message = f"nothing is planned for {running} running, {waiting} waiting and {departed} departed"
                raise InvariantError(message)
            self.board.rest()
            return False
        self._complete_oldest()
        return True

    def _submit(self, plan: ScheduledPlan) -> None:
        """Commit a plan and give it to the device; the call does not wait for anything that runs there."""
        scheduler, running = self.scheduler, self.roster.running
        fence = scheduler.state.last_fence + 1
        scheduler.commit(plan, fence)
        self.events.note(scheduler.state.now_ns, "commit", (fence, plan.shape.name, plan.lanes))
        ints, floats = self._builder.control(plan, running, scheduler.page_table)
        bits = self._builder.bits(plan, running)
        requests = []
        for lane in plan.lanes:
            requests.append(self.roster.request_id(lane.handle))
            sequence = running.get(lane.handle)
            if sequence is None:
                continue  # the last snapshot of one that has left
            sequence.on_device = True
            metrics = sequence.request.metrics
            metrics.first_scheduled_ns = metrics.first_scheduled_ns or scheduler.state.now_ns
        self.heartbeat.enter(DEVICE, f"fence {fence}, {plan.shape.name}")
        if self.host:
            self.host.follow()  # ahead of what may overwrite it
        in_flight: Any
        try:
            in_flight = self.core.runner.submit(plan.shape, ints, floats, bits)
        except DeviceError as error:
            in_flight = FailedSubmission(error)
        frame = Outstanding(
            fence=fence,
            plan=plan,
            in_flight=in_flight,
            requests=tuple(requests),
            mapped=self._drafting.calibration(plan.shape.proposal_source),
            copies=self._drafting.supplied(plan),
        )
        self.window.push(frame)
        frame.host_ns += self._timer.lap()
        self.heartbeat.enter(HOST, "planning")

    def _complete_oldest(self) -> None:
        frame = self.window.oldest
        frame.host_ns += self._timer.lap()
        self.heartbeat.enter(DEVICE, f"fence {frame.fence}, {frame.plan.shape.name}")
        try:
            ints, floats, timing = frame.in_flight.wait()
        except DeviceError as error:
            self.heartbeat.enter(DEVICE, "making the device state again")
            self._recovery.after_device_error(frame, error, self.clock)
            if self.host:
                self.host.forget()
            return
        self.board.totals.wait_ns += self._timer.lap()
        self.heartbeat.enter(HOST, f"completing fence {frame.fence}")
        self.window.pop()
        self.roster.take_commands()  # an abort that came before the completion suppresses its tokens
        self.scheduler.advance_to(self.clock())
        records, fields = self._builder.completion(frame.plan, ints, floats)
        events = self._account(frame, records, fields, timing)
        self.events.note(self.scheduler.state.now_ns, "complete", (frame.fence, events))
        self._publish(frame, events, fields)
        self._recovery.succeeded(frame.plan.shape)
        self._count(frame, timing)

    def _account(
        self, frame: Outstanding, records: tuple[CompletionRecord, ...], fields: Fields, timing: ExecutionTiming
    ) -> tuple[Event, ...]:
        """Complete the fence in the way of its program: proposals come with their sidecars."""
        shape = frame.plan.shape
        if shape.proposal_depth:
            confidence, survival = fields["confidence"], fields["survival"]
            events = self.scheduler.complete_packed_round_with_survival(
                frame.fence, records, timing, confidence, survival
            )
            self._drafting.observe(frame, records, confidence[0], self.roster.running)
            return events
        events = self.scheduler.complete(frame.fence, records, timing)
        if shape.kind is ProgramKind.SPECULATIVE:  # of width one
            self._drafting.observe(frame, records, None, self.roster.running)
        return events

    def _publish(self, frame: Outstanding, events: tuple[Event, ...], fields: Fields) -> None:
        """Events into outputs, and back to the scheduler what became visible or ended by it."""
        scheduler, roster = self.scheduler, self.roster
        effects = self._publisher.apply(frame.plan, events, fields, roster.running, scheduler.state.now_ns)
        if effects.published:
            scheduler.published_outputs(effects.published, frame.fence)
        for sequence in effects.stopped:
            assert sequence.handle is not None
            scheduler.finish(sequence.handle, FinishReason.STOP)
        for sequence in effects.ended:
            roster.retire(sequence)
        for sequence in effects.failed:
            roster.fail_grammar(sequence)
        roster.follow(events)
        served = (roster.running.get(lane.handle) for lane in frame.plan.lanes if lane.emits)
        self._drafting.offer((sequence for sequence in served if sequence), scheduler.offer_copy)
        self.board.totals.generation_tokens += effects.tokens

    def _count(self, frame: Outstanding, timing: ExecutionTiming) -> None:
        frame.host_ns += self._timer.lap()
        self.prefixes.ran(frame.plan)
        totals = self.board.totals
        totals.frames += 1
        totals.host_ns += frame.host_ns
        totals.device_ns += max(timing.device_ns, default=0)
        if self._trace:
            now_ns = self.scheduler.state.now_ns
            self._trace.frame(frame.fence, frame.plan, list(frame.requests), timing, frame.host_ns, now_ns)
