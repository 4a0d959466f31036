"""Counts of the engine, kept so that they reconcile: every request that arrived is somewhere.

arrived = finished + cancelled + refused + failed + active
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from helios_jax.engine.drafting import RoundCounts


@dataclasses.dataclass
class Totals:
    """Running totals; changed under the engine's lock.

    Attributes:
        arrived: Requests given to the engine, refused ones included.
        finished: Requests that ended by themselves, by the reason of their first output.
        cancelled: Aborted by the caller, or whose stream was closed.
        refused: Not accepted: wrong parameters, queue full, not ready.
        failed: Ended by an error of ours or of the device.
        active: Accepted and not ended.
        prompt_tokens, generation_tokens: Tokens of accepted requests; tokens generated.
        frames: Frames completed.
        host_ns: Host time of the engine thread between frames, waiting for the device not counted.
        device_ns, wait_ns: Measured device time; time blocked on the device.
    """

    arrived: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=lambda: {"stop": 0, "length": 0})
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    active: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    frames: int = 0
    host_ns: int = 0
    device_ns: int = 0
    wait_ns: int = 0
    device_errors: int = 0

    def reconciles(self) -> bool:
        """Whether every request that arrived is accounted for."""
        ended = sum(self.finished.values()) + self.cancelled + self.refused + self.failed
        return self.arrived == ended + self.active


# Why less than what could have been shared was restored; see `engine.prefixes`.
CUT_REASONS = ("no_state", "evicted", "too_short")


@dataclasses.dataclass
class CheckpointStats:
    """Reuse of prefixes; totals but for the gauges at the end. All 0 in an engine without state rows.

    Attributes:
        hits, misses: Admissions that restored a checkpoint, and that found none. Those of preempted requests
            that come back are not counted.
        queried_tokens: Prompt tokens of those admissions. `hit_tokens`: of them, those that were restored.
        cuts: Admissions that restored less than the prompt shares with earlier ones, by reason: "no_state", no
            state was taken at that point; "evicted", it was, and gave way since; "too_short", the shared
            part beyond the state is less than a page.
        cut_tokens: Shared prompt tokens that were computed again therefore, by the same reasons.
        snapshots, restores: Copies that completed.
        evictions: Checkpoints that gave way: their rows or pages were needed, or the device state was lost.
        rows_total, rows_used: State rows of the device, and those that hold a checkpoint or wait for one.
        published: Checkpoints that could be restored now.
        pages_held: Pages of the pool that checkpoints alone keep.
    """

    hits: int = 0
    misses: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    cuts: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(CUT_REASONS, 0))
    cut_tokens: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(CUT_REASONS, 0))
    snapshots: int = 0
    restores: int = 0
    evictions: int = 0
    rows_total: int = 0
    rows_used: int = 0
    published: int = 0
    pages_held: int = 0


@dataclasses.dataclass
class HostTierStats:
    """Checkpoints in host memory; all 0 without a host tier. Totals but for the gauges at the end.

    Attributes:
        saved: Checkpoints that arrived on the host. `lost`: whose copy was not begun, failed, or did not fit.
        evicted: Those that gave way on the host.
        restored: Those that were copied back to the device. `restored_tokens`: prompt tokens that these covered
            beyond what the device had itself.
        checkpoints, bytes_used, bytes_total: What is there, and the budget.
    """

    saved: int = 0
    lost: int = 0
    evicted: int = 0
    restored: int = 0
    restored_tokens: int = 0
    checkpoints: int = 0
    bytes_used: int = 0
    bytes_total: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot for metrics.

    Attributes:
        running: Sequences in slots. `waiting`: sequences without a slot yet.
        slots_total, pages_total, pages_used, pages_free: Resources; a page is used once assigned.
        requests: The request counts, see `Totals`.
        scheduler: The scheduler's counters, under the specification's names.
        compiles_after_ready: XLA compilations since the core was ready; must stay 0.
        rounds: Totals of speculative programs by (source, lane width).
        checkpoints: Reuse of prefixes.
        host_tier: Checkpoints in host memory.
    """

    running: int
    waiting: int
    slots_total: int
    pages_total: int
    pages_used: int
    pages_free: int
    requests: Totals
    scheduler: Any
    compiles_after_ready: int
    rounds: Mapping[tuple[str, int], RoundCounts] = dataclasses.field(default_factory=dict)
    checkpoints: CheckpointStats = dataclasses.field(default_factory=CheckpointStats)
    host_tier: HostTierStats = dataclasses.field(default_factory=HostTierStats)

    @property
    def requests_total(self) -> dict[str, int]:
        """Requests by outcome: arrived, finished_<reason>, cancelled, refused, failed, active."""
        totals = self.requests
        outcome = {"arrived": totals.arrived} | {f"finished_{k}": v for k, v in totals.finished.items()}
        names = ("cancelled", "refused", "failed", "active")
        return outcome | {name: getattr(totals, name) for name in names}

    @property
    def prompt_tokens_total(self) -> int:
        return self.requests.prompt_tokens

    @property
    def generation_tokens_total(self) -> int:
        return self.requests.generation_tokens

    @property
    def frames_total(self) -> int:
        return self.requests.frames

    @property
    def host_overhead_ns(self) -> float:
        """Mean host time a frame, ns; 0 before the first."""
        return self.requests.host_ns / self.requests.frames if self.requests.frames else 0.0
