"""A synthetic device: durations from a formula or a table, tokens from a hash, own books.

It stands in for the executables. It keeps the committed length and the pages of every slot by
itself and complains when a frame starts at another position, writes into a page that another
request owns, or runs a lane before its initialisation: an independent check of the scheduler.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from helios_jax.scheduler.resources import pages_for
from helios_jax.scheduler.types import (
    CompletionRecord,
    ExecutionTiming,
    Lane,
    LaneRole,
    RequestHandle,
    ScheduledPlan,
)

DurationOf = Callable[[ProgramShape], int]  # shape -> device time in ns


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCosts:
    """Durations linear in the physical extents: a launch, a part per row, a part per token.

    Attributes:
        launch_ns: Every program.
        row_ns: A request row of a decode or initialise program.
        token_ns: A prompt token of a prefill program.
    """

    launch_ns: int = 2_000_000
    row_ns: int = 30_000
    token_ns: int = 15_000

    def __call__(self, shape: ProgramShape) -> int:
        if shape.kind in (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL):
            return self.launch_ns + self.token_ns * shape.token_capacity
        if shape.kind is ProgramKind.INITIALIZE:
            return self.launch_ns // 10 + self.row_ns * shape.batch_capacity // 10
        return self.launch_ns + self.row_ns * shape.batch_capacity


class FakeDevice:
    """Runs plans in virtual time.

    Args:
        duration_of: Device time of a shape, ns.
        page_size: Tokens a page.
        jitter: Relative half-width of the uniform noise on durations.
        host_ns: Wall time of a frame beyond its device time.
        vocab_size: Tokens are 0 to vocab_size - 1, a function of request and position only.
        seed: Of the noise.
    """

    def __init__(
        self, duration_of: DurationOf, page_size: int, *, jitter: float = 0.0, host_ns: int = 200_000,
        vocab_size: int = 1000, seed: int = 0,
    ) -> None:  # fmt: skip
        self._duration_of, self._page_size, self._jitter = duration_of, page_size, jitter
        self._host_ns, self._vocab_size = host_ns, vocab_size
        self._random = random.Random(seed)
        self._committed: dict[RequestHandle, int] = {}
        self._owner: dict[int, RequestHandle] = {}

    def run(
        self, plan: ScheduledPlan, tables: dict[RequestHandle, np.ndarray]
    ) -> tuple[tuple[CompletionRecord, ...], ExecutionTiming]:
        """Execute a plan with the page table of each lane.

        Raises:
            InvariantError: The plan does not fit what this device did before.
        """
        noise = 1.0 + self._jitter * self._random.uniform(-1.0, 1.0)
        device_ns = max(1, int(self._duration_of(plan.shape) * noise))
        records = tuple(self._run_lane(lane, tables[lane.handle]) for lane in plan.lanes)
        return records, ExecutionTiming((device_ns,), device_ns + self._host_ns)

    def _run_lane(self, lane: Lane, table: np.ndarray) -> CompletionRecord:
        if lane.role is LaneRole.INITIALIZE:
            self._committed[lane.handle] = 0
            return CompletionRecord(lane.handle, 0, (), 0)
        if self._committed.get(lane.handle) != lane.start:
            raise InvariantError(f"{lane} starts elsewhere than {self._committed.get(lane.handle)}")
        end = lane.start + lane.length
        for page in table[lane.start // self._page_size : pages_for(end, self._page_size)].tolist():
            self._claim(page, lane.handle)
        for page in table[: lane.start // self._page_size].tolist():
            if self._owner.get(page) != lane.handle:
                raise InvariantError(f"{lane.handle} lost page {page} to {self._owner.get(page)}")
        if len(table) < pages_for(end, self._page_size):
            raise InvariantError(f"{lane} has pages {table}, it ends at {end}")
        self._committed[lane.handle] = end
        tokens = (self.token(lane.handle, end),) if lane.emits else ()
        return CompletionRecord(lane.handle, lane.length, tokens, end)

    def _claim(self, page: int, handle: RequestHandle) -> None:
        owner = self._owner.get(page)
        if owner is not None and owner != handle and owner in self._committed:
            raise InvariantError(f"page {page} of {owner} is given to {handle}")
        self._owner[page] = handle

    def token(self, handle: RequestHandle, position: int) -> int:
        """The token that the request samples at a position, whatever its neighbours."""
        mixed = (handle.slot * 1_000_003 + handle.generation * 7919 + position * 104_729) * 2_654_435_761
        return (mixed >> 7) % self._vocab_size

    def forget(self, handle: RequestHandle) -> None:
        """The request's resources were freed; its pages may belong to others from now on."""
        self._committed.pop(handle, None)
