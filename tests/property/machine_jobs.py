"""Requests, frames and intervals as the naive model of the scheduler keeps them, and what programs hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from helios_jax.scheduler import (
    Constraint,
    ProgramKind,
    ProgramShape,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
)
from tests.property import machine_books as books

FEEDBACK = Constraint.GRAMMAR | Constraint.HOST_STOPS | Constraint.HOST_FED | Constraint.HISTORY
UNTYPICAL = Constraint.GRAMMAR | Constraint.TARGET_ONLY
QUEUEABLE = (ProgramKind.DECODE, ProgramKind.SPECULATIVE)
WAITING = ("initialize", "restore", "vision", "snapshot", "prompt", "decode")  # stages that take part in service
Table = Sequence[Sequence[float]]
PREEMPTED, CANCELLED = "preempted", "cancelled"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def lane_rows(shape: ProgramShape) -> int:
    """Target rows of one decoding lane, its pending token included."""
    if shape.kind is ProgramKind.DECODE:
        return 1
    return min(shape.proposal_depth + 1, shape.token_capacity)


def target_rows(shape: ProgramShape) -> int:
    """P; a mixed program has its width for every request row."""
    if shape.kind is ProgramKind.SPECULATIVE:
        return shape.packed_capacity
    return shape.batch_capacity * lane_rows(shape)


def prompt_tokens(shape: ProgramShape) -> int:
    if shape.kind is ProgramKind.MIXED:
        return shape.prefill_capacity
    return shape.token_capacity if shape.kind in (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL) else 0


def token_rows(shape: ProgramShape) -> int:
    """Token rows that one execution computes, used or not."""
    if shape.kind is ProgramKind.MIXED:
        return shape.prefill_capacity + (shape.batch_capacity - 1) * shape.token_capacity
    if shape.kind is ProgramKind.VISION:
        return shape.batch_capacity * shape.token_capacity
    if shape.kind in (ProgramKind.DECODE, ProgramKind.SPECULATIVE):
        return target_rows(shape)
    return prompt_tokens(shape)


class Page:
    """A page, whatever its number."""


@dataclasses.dataclass
class Job:
    """One logical request; it keeps its identity when a window restore gives it a fresh handle.

    Keys count admissions, so the older of two has the smaller one.
    """

    key: int
    spec: RequestSpec
    handle: RequestHandle
    stage: str
    consumed: int
    committed: int
    written: int
    images: int  # encoded or consumed
    window: int  # end of the active window
    private: bool
    learned: books.Learned
    promised: int = 0  # pages
    table: list[Page] = dataclasses.field(default_factory=list)
    out: list[int] = dataclasses.field(default_factory=list)
    copies: int = 0
    restored: bool = False  # the first restore is over
    token_r: float | None = None
    delivery_r: float | None = None
    visible_ns: int = 0
    ended: str | None = None
    copying: str = ""  # what the snapshot that is due writes: "capture" or "window"
    terminal_ns: int = 0
    last_use_ns: int = 0
    last_fence: int = 0

    @property
    def window_restore(self) -> bool:
        """The restore that is due begins the next window of images."""
        return self.restored or not self.spec.restored_len

    @property
    def streams(self) -> bool:
        return self.ended is None and self.stage in ("decode", "snapshot") and self.consumed == len(self.spec.prompt)

    @property
    def participates(self) -> bool:
        return self.ended is None and self.stage in WAITING

    @property
    def waits_for_pin(self) -> bool:
        return bool(self.spec.restore_from) and not self.restored

    def next_window(self) -> int:
        """Where the first image behind the active window begins; the prompt end without one."""
        spans = self.spec.image_spans
        return spans[self.window].start if self.window < len(spans) else len(self.spec.prompt)

    def stop(self) -> int:
        """The latest position where the next prefill must end."""
        ends = (self.spec.system_end, self.next_window(), len(self.spec.prompt))
        return min(end for end in ends if end > self.consumed)


@dataclasses.dataclass
class Flight:
    fence: int
    plan: ScheduledPlan
    jobs: list[Job]  # of the lanes
    members: list[Job]  # participants of the interval
    dispatched_ns: int
    alone: bool
    first_r: dict[int, float | None] = dataclasses.field(default_factory=dict)  # by job key, as frozen
    token_n: dict[int, float | None] = dataclasses.field(default_factory=dict)
    delivery_n: dict[int, float | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class LastInterval:
    """What a publication may still correct."""

    fence: int
    duration_ms: float
    before: dict[RequestHandle, tuple[Job, float | None, float | None]]  # served: job, delivery r, n
    published: set[RequestHandle] = dataclasses.field(default_factory=set)
