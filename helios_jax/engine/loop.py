"""The engine thread: one loop from requests to frames to text.

Life of a step:

1. Take submissions and aborts; admit waiting sequences while slots and pages last, in order.
2. `advance_to`, `plan`, `commit`, pack, submit: the device works from here on.
3. Deliver the outputs of the frame before, while the device is busy.
4. Wait for the completion. Aborts that came meanwhile are applied before its tokens are.
5. `complete`, then text, stop strings, and `published_output` for what became visible.

Policy of failure: a `DeviceError` fails the sequences whose state on the device is lost and
the runner is reset, unless one program keeps failing; that, and anything else unexpected (a bug of
ours), stops the engine: it answers every request and then dumps its state.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helios_jax.config import EngineConfig, cache_dir
from helios_jax.engine.board import ABORT, Board
from helios_jax.engine.drafting import Drafting
from helios_jax.engine.failure import EventLog, dump
from helios_jax.engine.frames import Fields, FrameBuilder
from helios_jax.engine.heartbeat import DEVICE, HOST, IDLE, EngineHealth, Heartbeat
from helios_jax.engine.publication import Publisher
from helios_jax.engine.request import Request, Sequence
from helios_jax.engine.stats import EngineStats
from helios_jax.engine.trace import TraceWriter
from helios_jax.errors import CapacityError, DeviceError, InvariantError, RequestError, UnavailableError
from helios_jax.scheduler.catalog import ProgramShape
from helios_jax.scheduler.preferences import policy_preset
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.types import (
    CompletionRecord,
    Event,
    ExecutionTiming,
    FinishReason,
    RequestHandle,
    ScheduledPlan,
)

log = logging.getLogger("helios_jax.engine")

MAX_DEVICE_ERRORS = 3  # of one program without a success; then the engine stops instead of trying again
CLOSE_TIMEOUT_S = 10.0  # for the thread to notice that it is to stop


@dataclasses.dataclass
class _Submitted:
    """A frame on its way."""

    fence: int
    plan: ScheduledPlan
    in_flight: Any
    host_ns: int
    mapped: tuple[float, float]  # the calibration of its proposals


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
        self.scheduler = Scheduler(core.catalog, core.limits, policy)
        self.board = Board(core.limits.slots + config.max_queue)
        self.heartbeat = Heartbeat(clock, config.ready_timeout_s)
        self.events = EventLog()
        self.failure: BaseException | None = None
        self._drafting = Drafting(core.catalog)
        self._builder = FrameBuilder(core.dims, self._drafting)
        self._publisher = Publisher(tokenizer.decode_token, core.source_info.eos_token_ids)
        self._trace = TraceWriter(config.trace) if config.trace else None
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: dict[RequestHandle, Sequence] = {}
        self._requests: dict[str, Request] = {}
        self._fence = 0
        self._device_errors: collections.Counter[ProgramShape] = collections.Counter()
        self._dump_note = ""  # where the dump is, once there is one
        self._host_since = 0  # perf counter, ns: when the host part of this step began
        self._thread = threading.Thread(target=self._run, name="helios-engine", daemon=True)

    # ---- called from other threads

    def start(self) -> None:
        self._thread.start()

    def health(self) -> EngineHealth:
        """Whether requests are being served, and if not why."""
        if self.failure is not None:
            return EngineHealth(False, False, self.board.refusal + self._dump_note)
        if not self._thread.is_alive():
            return EngineHealth(False, False, "the engine thread is not running")
        if self.board.refusal:
            return EngineHealth(True, False, self.board.refusal)
        problem = self.heartbeat.problem()
        return EngineHealth(True, not problem, problem)

    def stats(self) -> EngineStats:
        """A snapshot of counts and gauges."""
        counters = self.scheduler.snapshot_counters()
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            slots_total=self.core.limits.slots,
            pages_total=int(counters["pages_total"]),  # type: ignore[arg-type]
            pages_used=int(counters["pages_used"]),  # type: ignore[arg-type]
            pages_free=int(counters["pages_free"]),  # type: ignore[arg-type]
            requests=self.board.snapshot(),
            scheduler=counters,
            compiles_after_ready=self.core.compiles_after_ready(),
            rounds=self._drafting.snapshot(),
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
            self._answer_all(UnavailableError("the engine was closed while a device call hung"))
            return
        try:
            if self._trace:
                self._trace.close()
        finally:
            self.core.close()

    # ---- the engine thread

    def _run(self) -> None:
        try:
            while not self.board.is_stopping:
                self._step()
            self._answer_all(UnavailableError("the engine was closed"))
        except BaseException as error:  # whatever it was, nobody may be left without an answer
            self._die(error)

    def _step(self) -> None:
        self.heartbeat.enter(HOST, "planning")
        self._host_since = time.perf_counter_ns()
        self._take_commands()
        self.scheduler.advance_to(self.clock())
        self._admit_waiting()
        plan = self.scheduler.plan()
        if plan is None:
            self._publisher.flush()
            self._be_idle()
            return
        try:
            frame = self._submit(plan)
            self._publisher.flush()
            self._complete(frame)
            self._device_errors.pop(plan.shape, None)  # others' success says nothing of a broken program
        except DeviceError as error:
            self._recover(plan, error)

    def _be_idle(self) -> None:
        if self._running or self._waiting:
            raise InvariantError(f"nothing is planned for {len(self._running)} running, {len(self._waiting)} waiting")
        self.heartbeat.enter(IDLE)
        self.board.wait()

    def _take_commands(self) -> None:
        for what, item in self.board.take():
            if what == ABORT:
                request = self._requests.get(str(item))
                if request is not None:
                    self._abort(request)
                continue
            assert isinstance(item, Request)
            self._requests[item.request_id] = item
            for sequence in item.sequences:
                if sequence.spec.max_tokens == 0 and not sequence.spec.scored:
                    sequence.close("length")  # nothing to generate: no slot, no frame
                else:
                    self._waiting.append(sequence)
            if item.is_finished:
                self._end(item, "length")

    def _admit_waiting(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            try:
                now_ns = self.clock()
                sequence.handle = self.scheduler.admit(sequence.spec, now_ns)
            except CapacityError:
                return  # in order: nobody overtakes the one that waits for pages
            except RequestError as error:  # intake refuses first; what it missed costs one request only
                self._fail(sequence.request, error)
                continue
            self._waiting.popleft()
            self._running[sequence.handle] = sequence

    def _submit(self, plan: ScheduledPlan) -> _Submitted:
        self._fence += 1
        self.scheduler.commit(plan, self._fence)
        self.events.note(self.scheduler.state.now_ns, "commit", (self._fence, plan.shape.name, plan.lanes))
        ints, floats = self._builder.control(plan, self._running, self.scheduler.page_table)
        for lane in plan.lanes:
            sequence = self._running[lane.handle]
            sequence.on_device = True
            metrics = sequence.request.metrics
            metrics.first_scheduled_ns = metrics.first_scheduled_ns or self.scheduler.state.now_ns
        self.heartbeat.enter(DEVICE, f"fence {self._fence}, {plan.shape.name}")
        in_flight = self.core.runner.submit(plan.shape, ints, floats)
        mapped = self._drafting.calibration(plan.shape.proposal_source)
        return _Submitted(self._fence, plan, in_flight, time.perf_counter_ns() - self._host_since, mapped)

    def _complete(self, frame: _Submitted) -> None:
        waited_from = time.perf_counter_ns()
        ints, floats, timing = frame.in_flight.wait()
        host_from = time.perf_counter_ns()
        self.heartbeat.enter(HOST, f"completing fence {frame.fence}")
        requests = [self._running[lane.handle].request.request_id for lane in frame.plan.lanes]
        self._take_commands()  # an abort that came before the completion suppresses its tokens
        self.scheduler.advance_to(self.clock())
        records, fields = self._builder.completion(frame.plan, ints, floats)
        events = self._account_records(frame, records, fields, timing)
        self.events.note(self.scheduler.state.now_ns, "complete", (frame.fence, events))
        effects = self._publisher.apply(frame.plan, events, fields, self._running, self.scheduler.state.now_ns)
        if effects.published:
            self.scheduler.published_outputs(effects.published, frame.fence)
        for sequence in effects.stopped:
            assert sequence.handle is not None
            self.scheduler.finish(sequence.handle, FinishReason.STOP)
        for sequence in effects.ended:
            self._retire(sequence)
        served = (self._running.get(lane.handle) for lane in frame.plan.lanes if lane.emits)
        self._drafting.offer((sequence for sequence in served if sequence), self.scheduler.offer_copy)
        frame.host_ns += time.perf_counter_ns() - host_from
        self.board.totals.generation_tokens += effects.tokens
        self._account(frame, timing, requests, host_from - waited_from)

    def _account_records(
        self, frame: _Submitted, records: tuple[CompletionRecord, ...], fields: Fields, timing: ExecutionTiming
    ) -> tuple[Event, ...]:
        """Complete the fence in the way of its program: proposals come with their sidecars."""
        if not frame.plan.shape.proposal_depth:
            return self.scheduler.complete(frame.fence, records, timing)
        confidence, survival = fields["confidence"], fields["survival"]
        events = self.scheduler.complete_packed_round_with_survival(frame.fence, records, timing, confidence, survival)
        self._drafting.observe(frame.plan, records, confidence[0], frame.mapped)
        return events

    def _account(self, frame: _Submitted, timing: ExecutionTiming, requests: list[str], wait_ns: int) -> None:
        totals = self.board.totals
        totals.frames += 1
        totals.host_ns += frame.host_ns
        totals.wait_ns += wait_ns
        totals.device_ns += max(timing.device_ns, default=0)
        if self._trace:
            now_ns = self.scheduler.state.now_ns
            self._trace.frame(frame.fence, frame.plan, requests, timing, frame.host_ns, now_ns)

    def _retire(self, sequence: Sequence) -> None:
        assert sequence.handle is not None
        del self._running[sequence.handle]
        self._drafting.forget(sequence.handle)
        request = sequence.request
        if request.is_finished:
            reason = request.sequences[0].finish_reason or ""
            failed = any(s.finish_reason == FinishReason.ERROR for s in request.sequences)
            self._end(request, "failed" if failed else reason)

    def _end(self, request: Request, outcome: str) -> None:
        self._publisher.touch(request)
        self._requests.pop(request.request_id, None)
        self.board.closed(request, outcome)

    def _abort(self, request: Request) -> None:
        self.events.note(self.scheduler.state.now_ns, "abort", request.request_id)
        self._release(request)
        for sequence in request.sequences:
            sequence.close(FinishReason.ABORT)
        self._end(request, "cancelled")

    def _release(self, request: Request) -> None:
        """Take all sequences of a request out of queue and slots."""
        for sequence in request.sequences:
            if sequence.handle in self._running:
                self.scheduler.cancel(sequence.handle)
                del self._running[sequence.handle]
                self._drafting.forget(sequence.handle)
        if any(sequence.request is request for sequence in self._waiting):
            self._waiting = collections.deque(s for s in self._waiting if s.request is not request)

    # ---- failures

    def _recover(self, plan: ScheduledPlan, error: DeviceError) -> None:
        """Fail what the device lost, reset it, go on with the rest.

        The donated state is gone, so every sequence that has state there fails; one that was
        admitted but never ran has none, and goes on, as do those that wait.
        """
        self._device_errors[plan.shape] += 1
        self.board.totals.device_errors += 1
        self.events.note(self.scheduler.state.now_ns, "device error", str(error))
        lost = {s.request: None for s in self._running.values() if s.on_device}
        records = [
            CompletionRecord(lane.handle, lane.length, (), lane.start + lane.length, valid=False) for lane in plan.lanes
        ]
        self.scheduler.advance_to(self.clock())
        self.scheduler.complete(self._fence, records, ExecutionTiming(device_ns=(0,), wall_ns=0))
        for request in lost:
            self._fail(request, error)
        if self._device_errors[plan.shape] >= MAX_DEVICE_ERRORS:
            raise error
        self.heartbeat.enter(DEVICE, "resetting the device state")
        self.core.runner.reset()

    def _fail(self, request: Request, error: Exception) -> None:
        self._release(request)
        self._publisher.fail(request, error)
        self._requests.pop(request.request_id, None)
        self.board.closed(request, "failed")

    def _answer_all(self, error: Exception) -> None:
        requests = self.board.open_requests()
        self._publisher.answer_all(requests, error)
        for request in requests:
            self.board.closed(request, "failed")

    def _die(self, error: BaseException) -> None:
        """Say so and answer everybody; only then what may fail itself, the dump."""
        self.failure = error
        kind = "a device error" if isinstance(error, DeviceError) else "an internal error"
        message = f"the engine stopped after {kind}: {type(error).__name__}: {error}"
        self.board.refuse(message)
        self._answer_all(UnavailableError(message))
        log.error("%s", message)
        try:
            path = self._dump(error)
        except Exception:
            log.exception("the engine's state could not be dumped")
            return
        if path is not None:
            self._dump_note = f"; state and recent events are in {path}"
            log.error("state and recent events are in %s", path)

    def _dump(self, error: BaseException) -> Path | None:
        directory = Path(self.config.dump_dir) if self.config.dump_dir else cache_dir() / "dumps"
        summary = {
            "fence": self._fence,
            "running": [(str(handle), s.request.request_id) for handle, s in self._running.items()],
            "waiting": [s.request.request_id for s in self._waiting],
            "totals": dataclasses.asdict(self.board.snapshot()),
        }
        return dump(directory, error, self.events, self.scheduler.state, summary)
