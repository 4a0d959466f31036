"""A synthetic device: durations from a formula or a profile, tokens from a hash, own books.

It stands in for the executables of every program kind. It keeps positions, pages, state rows
and image features by itself (`books`) and complains when a frame contradicts what ran before:
an independent check of the scheduler. The life of a frame:

1. `submit` runs its lanes at once, in order of submission, as a serial device would.
2. Its start is the submission, or the end of the frame before it; then it was queued.
3. The completion carries its records and sidecars; the driver delivers it at `at_ns`.

Speculative lanes accept a prefix of their proposals: all of them without a
`Sampler`, else by its draws. A program that allocates its own target rows admits the
causal frontier with the largest joint confidence until P rows are used (specification,
"Speculative graph coverage").
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

import numpy as np

from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, packed_rows
from helios_jax.scheduler.types import (
    CompletionRecord,
    ExecutionTiming,
    Lane,
    LaneRole,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
)
from helios_jax.simulation.acceptance import Sampler
from helios_jax.simulation.books import Books
from helios_jax.simulation.profiles import Work

DurationOf = Callable[[ProgramShape, Work], int]  # (shape, work) -> device time in ns
_DECODE, _PROMPT = LaneRole.DECODE, LaneRole.PROMPT


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCosts:
    """Durations linear in the physical extents: a launch, a part per row, a part per token.

    Attributes:
        launch_ns: Every program.
        row_ns: A request row of a generating or state program; a target row counts a quarter.
        token_ns: A prompt token, an image feature.
        draft_ns: A proposal position.
    """

    launch_ns: int = 2_000_000
    row_ns: int = 30_000
    token_ns: int = 15_000
    draft_ns: int = 100_000

    def __call__(self, shape: ProgramShape, work: Work = Work()) -> int:
        rows = self.row_ns * shape.batch_capacity
        if shape.kind in (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL, ProgramKind.VISION):
            return self.launch_ns + self.token_ns * shape.token_capacity
        if shape.kind in (ProgramKind.INITIALIZE, ProgramKind.SNAPSHOT, ProgramKind.RESTORE):
            return self.launch_ns // 10 + rows // 10
        extra = packed_rows(shape) - shape.batch_capacity
        speculation = self.row_ns * extra // 4 + self.draft_ns * shape.proposal_depth
        return self.launch_ns + rows + speculation + self.token_ns * shape.prefill_capacity


@dataclasses.dataclass(frozen=True, eq=False)
class Completed:
    """What a frame reports.

    Attributes:
        started_ns: When the device began it.
        at_ns: When the host observes it.
        device_ns: How long it ran.
        records, timing: For `complete`.
        confidence: float32 [2, slots, D] of a program that allocates its own rows, else None.
        survival: float64 [slots, D] acceptance probabilities of evaluated prefixes, else None.
    """

    started_ns: int
    at_ns: int
    device_ns: int
    records: tuple[CompletionRecord, ...]
    timing: ExecutionTiming
    confidence: np.ndarray | None = None
    survival: np.ndarray | None = None


class FakeDevice:
    """Runs plans in virtual time.

    Args:
        duration_of: Device time of a shape and its work, ns.
        page_size: Tokens a page.
        jitter: Relative half-width of the uniform noise on durations.
        host_ns: Wall time of a frame beyond its device time.
        vocab_size: Tokens are 0 to vocab_size - 1, a function of request and position only.
        seed: Of the noise.
        slots: Request slots, for the sidecars.
        sampler: Decides which proposals are accepted; without one all of them are.
        survival: Report acceptance probabilities beside the verdicts.
        check_pages: Keep the ownership of pages too; costs a scan of each lane's table.
    """

    def __init__(
        self, duration_of: DurationOf, page_size: int, *, jitter: float = 0.0, host_ns: int = 200_000,
        vocab_size: int = 1000, seed: int = 0, slots: int = 64, sampler: Sampler | None = None,
        survival: bool = False, check_pages: bool = True,
    ) -> None:  # fmt: skip
        self._duration_of, self._jitter = duration_of, jitter
        self._host_ns, self._vocab_size, self._slots = host_ns, vocab_size, slots
        self._random, self._sampler, self._survival = random.Random(seed), sampler, survival
        self.books = Books(page_size, pages=check_pages)
        self.check_pages = check_pages
        self._free_ns = 0  # when the last submitted frame ends
        self._keys: dict[RequestHandle, int] = {}  # what draws and tokens of a request are made of

    def admit(self, handle: RequestHandle, spec: RequestSpec, key: int) -> None:
        """Learn of a request. Its draws are a function of `key`, the same in every run of a workload."""
        self.books.admit(handle, spec)
        self._keys[handle] = key

    def forget(self, handle: RequestHandle) -> None:
        """The request's resources were freed; its pages may belong to others from now on."""
        self.books.forget(handle)
        self._keys.pop(handle, None)

    def rebind(self, old: RequestHandle, fresh: RequestHandle) -> None:
        """A restore between image windows bound the request to a fresh generation of its slot."""
        self.books.rebind(old, fresh)
        if old in self._keys:
            self._keys[fresh] = self._keys.pop(old)

    def run(
        self, plan: ScheduledPlan, tables: Mapping[RequestHandle, np.ndarray]
    ) -> tuple[tuple[CompletionRecord, ...], ExecutionTiming]:
        """Execute a plan alone, with the page table of each lane.

        Raises:
            InvariantError: The plan does not fit what this device did before.
        """
        done = self.submit(plan, tables, self._free_ns)
        return done.records, done.timing

    def submit(self, plan: ScheduledPlan, tables: Mapping[RequestHandle, np.ndarray], now_ns: int) -> Completed:
        """Execute a plan after whatever was submitted before it.

        Raises:
            InvariantError: The plan does not fit what this device did before.
        """
        noise = 1.0 + self._jitter * self._random.uniform(-1.0, 1.0) if self._jitter else 1.0
        device_ns = max(1, int(self._duration_of(plan.shape, self._work(plan)) * noise))
        queued, started_ns = self._free_ns > now_ns, max(self._free_ns, now_ns)
        self._free_ns = started_ns + device_ns
        at_ns = self._free_ns + self._host_ns
        timing = ExecutionTiming((device_ns,), at_ns - now_ns, queued=queued)
        if plan.shape.proposal_depth and plan.shape.kind in (ProgramKind.SPECULATIVE, ProgramKind.MIXED):
            return self._speculate(plan, tables, Completed(started_ns, at_ns, device_ns, (), timing), queued)
        records = tuple(self._run_lane(lane, tables.get(lane.handle), queued) for lane in plan.lanes)
        return Completed(started_ns, at_ns, device_ns, records, timing)

    def _work(self, plan: ScheduledPlan) -> Work:
        prompts = tuple((lane.length, lane.start) for lane in plan.lanes if lane.role is _PROMPT)
        position = self.books.position
        return Work(prompts, tuple(position(lane.handle) + 1 for lane in plan.lanes if lane.role is _DECODE))

    def _run_lane(self, lane: Lane, table: np.ndarray | None, queued: bool) -> CompletionRecord:
        """One lane of a program without proposals."""
        handle = lane.handle
        match lane.role:
            case LaneRole.DECODE:
                end = self.books.decode(lane, table, 1, uncertain=queued)
                return CompletionRecord(handle, 1, (self.token(handle, end),), end)
            case LaneRole.PROMPT:
                end = self.books.prefill(lane, table)
                tokens = (self.token(handle, end),) if lane.emits else ()
                return CompletionRecord(handle, lane.length, tokens, end)
            case LaneRole.INITIALIZE:
                self.books.initialize(lane, table)
            case LaneRole.SNAPSHOT:
                self.books.snapshot(lane, table)
            case LaneRole.RESTORE:
                self.books.restore(lane, table)
            case LaneRole.VISION:
                self.books.encode(lane)
        return CompletionRecord(handle, 0, (), lane.start)

    def _speculate(
        self, plan: ScheduledPlan, tables: Mapping[RequestHandle, np.ndarray], done: Completed, queued: bool
    ) -> Completed:
        """A round: propose, allocate rows, verify, commit; the prompt row of a mixed program beside it."""
        shape, rounds = plan.shape, [lane for lane in plan.lanes if lane.role is _DECODE]
        depth = shape.proposal_depth
        confidence, verdicts = self._propose([lane.handle for lane in rounds], depth)
        if shape.allocation is Allocation.PREFIX_LIMIT:
            widths = allocate_rows(confidence, [lane.length for lane in rounds], packed_rows(shape))
        else:
            widths = np.array([lane.length for lane in rounds], np.int64)
        judged = np.arange(depth) < widths[:, None] - 1
        accepted = np.minimum.accumulate(verdicts & judged, axis=1).sum(axis=1) if len(rounds) else widths
        numbers = {lane.handle: row for row, lane in enumerate(rounds)}
        records = []
        for lane in plan.lanes:
            if lane.role is not _DECODE:
                records.append(self._run_lane(lane, tables.get(lane.handle), queued))
                continue
            row = numbers[lane.handle]
            tokens = self._emitted(lane.handle, 1 + int(accepted[row]))
            end = self.books.decode(lane, tables.get(lane.handle), len(tokens), uncertain=queued)
            judged_rows, kept = int(widths[row]) - 1, int(accepted[row])
            records.append(CompletionRecord(lane.handle, len(tokens), tokens, end, offered=judged_rows, accepted=kept))
        slots = [lane.handle.slot for lane in rounds]
        planes = survival = None
        if shape.allocation is Allocation.PREFIX_LIMIT:
            planes = np.zeros((2, self._slots, depth), np.float32)
            planes[0, slots], planes[1, slots] = confidence, np.cumprod(confidence, axis=1)
        if self._survival:
            survival = np.full((self._slots, depth), np.nan)
            survival[slots] = np.where(judged, np.cumprod(confidence, axis=1), np.nan)
        return dataclasses.replace(done, records=tuple(records), confidence=planes, survival=survival)

    def _emitted(self, handle: RequestHandle, count: int) -> tuple[int, ...]:
        """The next `count` tokens of a request, cut after the first one that ends its output."""
        at, stops = self.books.position(handle), self.books.stops(handle)
        tokens = [self.token(handle, position) for position in range(at + 1, at + count + 1)]
        last = next((index for index, token in enumerate(tokens) if token in stops), count - 1)
        return tuple(tokens[: last + 1])

    def _propose(self, handles: list[RequestHandle], depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Confidence float64 [lanes, depth] and the verdict that each proposal would get."""
        if self._sampler is None:
            return np.ones((len(handles), depth)), np.ones((len(handles), depth), np.bool_)
        keys = np.array([self._key(handle) for handle in handles], np.int64)
        positions = np.array([self.books.position(handle) for handle in handles], np.int64)
        return self._sampler.draw(keys, positions, depth)

    def _key(self, handle: RequestHandle) -> int:
        return self._keys.get(handle, handle.slot * 1_000_003 + handle.generation * 7919)

    def token(self, handle: RequestHandle, position: int) -> int:
        """The token that the request samples at a position, whatever its neighbours."""
        return (((self._key(handle) + position * 104_729) * 2_654_435_761) >> 7) % self._vocab_size


def allocate_rows(confidence: np.ndarray, ceilings: list[int], packed: int) -> np.ndarray:
    """Target rows of each lane: every pending token, then the likeliest next proposal while rows last.

    Joint probabilities do not rise along a lane, so taking the best frontier again and again is taking
    the best proposals; equal ones prefer shorter prefixes, then the order of the lanes.

    Args:
        confidence: float64 [lanes, D] of each proposal.
        ceilings: Most rows of each lane, its pending token included.
        packed: P, rows over all lanes; at least one a lane.

    Returns:
        int64 [lanes].
    """
    lanes, depth = confidence.shape
    joint = np.cumprod(confidence, axis=1)
    allowed = np.arange(depth) < np.array(ceilings, np.int64)[:, None] - 1
    lane, position = np.nonzero(allowed)
    order = np.lexsort((lane, position, -joint[lane, position]))[: max(0, packed - lanes)]
    return 1 + np.bincount(lane[order], minlength=lanes)
