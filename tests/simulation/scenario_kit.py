"""A small driver over the scheduler's pure functions, for proofs of its behaviour in virtual time.

Independent of the simulator on purpose: it keeps its own positions, judges proposals by its own
rule and computes its own gaps. One `World` is one serial device with up to two frames in flight:

1. `arrive` admits a request at the present moment.
2. `step` submits while the scheduler has a plan, then completes the oldest frame and reports the
   first token of every burst as published.
3. `streams` hold what each client saw: (time, number of tokens) of every visible burst.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable

import numpy as np

from helios_jax.scheduler import (
    Catalog,
    CompletionRecord,
    ExecutionTiming,
    GeneratedToken,
    Lane,
    LaneRole,
    Limits,
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    RequestFinished,
    RequestHandle,
    RequestRebound,
    RequestSpec,
    ScheduledPlan,
    State,
    admit,
    advance_to,
    check_invariants,
    commit,
    complete,
    completion,
    new_state,
    plan_next,
    published_outputs,
)
from helios_jax.scheduler.catalog import Allocation, ProposalSource, packed_rows
from helios_jax.scheduler.speculation import LEARNED
from helios_jax.scheduler.state import Phase
from helios_jax.simulation.profiles import Work
from tests.unit.scheduler_toy import measured

MS = 1_000_000
NEVER_STALE_NS = 2**61
Durations = Callable[[ProgramShape, Work], float]  # (shape, work in it) -> ms


@dataclasses.dataclass
class Stream:
    """What one client saw; `finished` is the time of its end."""

    spec: RequestSpec
    arrived_ns: int
    bursts: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    finished_ns: int | None = None

    @property
    def first_ms(self) -> float:
        """Time from arrival to the first visible output; infinite without one."""
        return (self.bursts[0][0] - self.arrived_ns) / MS if self.bursts else float("inf")

    @property
    def gaps_ms(self) -> list[float]:
        return [(later - earlier) / MS for (earlier, _), (later, _) in itertools.pairwise(self.bursts)]

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.bursts)


@dataclasses.dataclass(frozen=True)
class Ran:
    """One completed frame."""

    plan: ScheduledPlan
    start_ns: int
    end_ns: int


class World:
    """A scheduler and its device.

    Args:
        catalog: Programs.
        durations: Device time of a program with the work in it.
        accepts: Proposals that the target would accept next, of a request; unlimited ones are cut
            by the round.
        known: Programs with an observation at the start; all by default.
        frames: Frames in flight.
        host_ms: Wall time of a frame beyond its device time.
    """

    def __init__(
        self, catalog: Catalog, durations: Durations, *, policy: PolicyConfig | None = None, slots: int = 8,
        accepts: Callable[[RequestHandle], int] = lambda _: 0, known: Callable[[ProgramShape], bool] = lambda _: True,
        frames: int = 1, host_ms: float = 0.0, max_context: int = 2**30, check: bool = False, **limits: int,
    ) -> None:  # fmt: skip
        # One page holds a whole request: pages are no part of these proofs.
        sizes = Limits(
            slots=slots, pages=slots, page_size=max_context, max_context=max_context, frames=frames, **limits
        )
        self.state: State = new_state(catalog, sizes, policy)
        self.state = measured(self.state, lambda s: round(durations(s, Work()) * MS) if known(s) else 0)
        self.durations, self.accepts, self.host_ns, self.check = durations, accepts, round(host_ms * MS), check
        self.streams: dict[RequestHandle, Stream] = {}
        self.ran: list[Ran] = []
        self._flying: deque[tuple[ScheduledPlan, int]] = deque()  # (plan, submitted)
        self._free_ns = 0
        self._positions: dict[RequestHandle, int] = {}

    def arrive(self, *specs: RequestSpec) -> list[RequestHandle]:
        """Admit requests now."""
        handles = []
        for spec in specs:
            self.state, handle = admit(self.state, spec, self.state.now_ns)
            self.streams[handle] = Stream(spec, self.state.now_ns)
            self._positions[handle] = spec.restored_len
            handles.append(handle)
        return handles

    def step(self) -> Ran | None:
        """Submit what may be submitted, complete the oldest frame; None when there is nothing to do."""
        while (plan := plan_next(self.state)) is not None:
            self.state = commit(self.state, plan, self.state.last_fence + 1)
            self._flying.append((plan, self.state.now_ns))
        return self._complete_oldest() if self._flying else None

    def drain(self) -> None:
        """Complete what is in flight and submit nothing."""
        while self._flying:
            self._complete_oldest()

    def _complete_oldest(self) -> Ran:
        plan, submitted_ns = self._flying.popleft()
        fence = self.state.last_fence - len(self._flying)
        start_ns = max(self._free_ns, submitted_ns)
        device_ns = max(1, round(self.durations(plan.shape, self._work(plan)) * MS))
        self._free_ns = start_ns + device_ns
        self.state = advance_to(self.state, self._free_ns + self.host_ns)
        timing = ExecutionTiming((device_ns,), self.state.now_ns - submitted_ns, queued=start_ns > submitted_ns)
        self._complete(plan, fence, timing)
        self.ran.append(Ran(plan, start_ns, self._free_ns))
        if self.check:
            check_invariants(self.state)
        return self.ran[-1]

    def run(self, *, until: Callable[[World], bool], most: int = 100_000) -> list[Ran]:
        """Step until the condition holds or nothing is left; the frames of this call."""
        first = len(self.ran)
        while not until(self) and self.step() is not None:
            assert len(self.ran) - first < most, f"{most} frames and the condition does not hold"
        return self.ran[first:]

    def run_ms(self, milliseconds: float) -> list[Ran]:
        end_ns = self.state.now_ns + round(milliseconds * MS)
        return self.run(until=lambda world: world.state.now_ns >= end_ns)

    def run_frames(self, count: int) -> list[Ran]:
        end = len(self.ran) + count
        return self.run(until=lambda world: len(world.ran) >= end)

    def idle_until(self, now_ns: int) -> None:
        """Nothing is submitted until then."""
        self.drain()
        self.state = advance_to(self.state, now_ns)

    @property
    def now_ms(self) -> float:
        return self.state.now_ns / MS

    def _work(self, plan: ScheduledPlan) -> Work:
        prompts = tuple((lane.length, lane.start) for lane in plan.lanes if lane.role is LaneRole.PROMPT)
        decoding = (lane for lane in plan.lanes if lane.role is LaneRole.DECODE)
        return Work(prompts, tuple(self._positions[lane.handle] + 1 for lane in decoding))

    def _complete(self, plan: ScheduledPlan, fence: int, timing: ExecutionTiming) -> None:
        rows, confidence = self._allocated(plan)
        records = tuple(self._record(lane, count) for lane, count in zip(plan.lanes, rows, strict=True))
        if confidence is None:
            self.state, events = complete(self.state, fence, records, timing)
        else:
            self.state, events = completion.complete_packed_round(self.state, fence, records, timing, confidence)
        for lane in plan.lanes:
            self.streams[lane.handle].prompt_tokens += lane.length if lane.role is LaneRole.PROMPT else 0
        visible: dict[RequestHandle, int] = {}
        for event in events:
            if isinstance(event, GeneratedToken):
                visible[event.handle] = visible.get(event.handle, 0) + 1
            elif isinstance(event, RequestFinished):
                self.streams[event.handle].finished_ns = self.state.now_ns
            elif isinstance(event, RequestRebound):
                self.streams[event.fresh] = self.streams[event.handle]
                self._positions[event.fresh] = self._positions[event.handle]
        for handle, count in visible.items():
            self.streams[handle].bursts.append((self.state.now_ns, count))
        self.state = published_outputs(self.state, tuple(visible), fence)

    def _record(self, lane: Lane, rows: int) -> CompletionRecord:
        if lane.role is LaneRole.PROMPT:
            self._positions[lane.handle] = end = lane.start + lane.length
            return CompletionRecord(lane.handle, lane.length, (7,) if lane.emits else (), end)
        if lane.role is not LaneRole.DECODE:
            return CompletionRecord(lane.handle, 0, (), lane.start)
        stream = self.streams[lane.handle]
        accepted = min(self.accepts(lane.handle), rows - 1)
        left = max(1, stream.spec.max_tokens - stream.num_tokens)  # an ended request still runs what was queued
        count = min(1 + accepted, left)
        self._positions[lane.handle] += count
        return CompletionRecord(
            lane.handle, count, (7,) * count, self._positions[lane.handle], offered=rows - 1, accepted=accepted
        )

    def _allocated(self, plan: ScheduledPlan) -> tuple[list[int], np.ndarray | None]:
        """Target rows of each lane; with the confidence sidecar of a learned round, whoever allocates.

        The toy draft is sure of the proposals that will be accepted (0.95 each) and doubts the others (0.05).
        """
        rows, shape = [lane.length for lane in plan.lanes], plan.shape
        if shape.proposal_source is not ProposalSource.LEARNED or shape.proposal_depth == 0:
            return rows, None
        depth, rounds = shape.proposal_depth, [lane for lane in plan.lanes if lane.role is LaneRole.DECODE]
        confidence = np.zeros((2, self.state.limits.slots, depth), np.float32)
        for lane in rounds:
            sure = np.arange(depth) < self.accepts(lane.handle)
            confidence[0, lane.handle.slot] = np.where(sure, 0.95, 0.05)
        confidence[1] = np.cumprod(confidence[0], axis=1)
        if shape.allocation is not Allocation.PREFIX_LIMIT:
            return rows, confidence
        free = packed_rows(shape) - len(rounds)
        offers = sorted(
            (-confidence[1, lane.handle.slot, d], d, i)
            for i, lane in enumerate(rounds)
            for d in range(min(lane.length - 1, depth))
        )
        granted = dict.fromkeys((lane.handle for lane in rounds), 1)
        for _, _, i in offers[: max(0, free)]:
            granted[rounds[i].handle] += 1
        return [granted.get(lane.handle, lane.length) for lane in plan.lanes], confidence


def preseed(world: World, handle: RequestHandle, accepted: int) -> None:
    """An acceptance history as after long service: exactly `accepted` drafts, full weight."""
    old = world.state.acceptance
    mean, weight = old.accept_mean.copy(), old.accept_weight.copy()
    mean[handle.slot, LEARNED] = np.arange(old.depth) < accepted
    weight[handle.slot, LEARNED] = 128.0
    for column in (mean, weight):
        column.setflags(write=False)
    acceptance = dataclasses.replace(old, accept_mean=mean, accept_weight=weight)
    world.state = dataclasses.replace(world.state, acceptance=acceptance)


def decode(*rows: int) -> list[ProgramShape]:
    return [ProgramShape(ProgramKind.DECODE, b, 1) for b in rows]


def prefill(*extents: tuple[int, int]) -> list[ProgramShape]:
    """Prefill programs of (rows, tokens)."""
    return [ProgramShape(ProgramKind.PREFILL, b, t) for b, t in extents]


def initialize(*rows: int) -> list[ProgramShape]:
    return [ProgramShape(ProgramKind.INITIALIZE, b, 0) for b in rows]


def rounds(
    *extents: tuple[int, int], packed: int | None = None, allocation: Allocation = Allocation.QUERY_LENGTH
) -> list[ProgramShape]:
    """Learned speculative programs of (rows, width), rectangular unless `packed` target rows are given."""
    return [
        ProgramShape(
            ProgramKind.SPECULATIVE, b, w, w - 1, packed or b * w, proposal_source=ProposalSource.LEARNED,
            allocation=allocation,
        )
        for b, w in extents
    ]  # fmt: skip


def mixed(*extents: tuple[int, int, int]) -> list[ProgramShape]:
    """Mixed programs of (rows, decode width, prompt tokens)."""
    return [
        ProgramShape(
            ProgramKind.MIXED, b, w, w - 1, p + (b - 1) * w, p, ProposalSource.LEARNED if w > 1 else ProposalSource.NONE
        )
        for b, w, p in extents
    ]  # fmt: skip


def catalog(*groups: list[ProgramShape]) -> Catalog:
    return Catalog(tuple(itertools.chain.from_iterable(groups)), aligned=False)


def spec(prompt_len: int, max_tokens: int = 10**6, **rest: object) -> RequestSpec:
    return RequestSpec(prompt=np.zeros(prompt_len, np.int32), max_tokens=max_tokens, **rest)  # type: ignore[arg-type]


def decoding(world: World) -> bool:
    """Whether every resident request decodes."""
    phase = world.state.requests.phase
    return bool(((phase == Phase.FREE) | (phase == Phase.DECODE)).all())
