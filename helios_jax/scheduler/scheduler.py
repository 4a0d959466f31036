"""Scheduler: a thin holder of the current state with the specification's method names.

The engine uses this class; tests and the simulator use the functions. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler import (
    admission,
    adoption,
    captures,
    completion,
    lifecycle,
    policy,
    preemption,
    publication,
    retirement,
)
from helios_jax.scheduler.catalog import Catalog
from helios_jax.scheduler.counters import snapshot_counters
from helios_jax.scheduler.preferences import PolicyConfig
from helios_jax.scheduler.state import State, configure_policy, new_state
from helios_jax.scheduler.types import (
    CompletionRecord,
    Event,
    ExecutionTiming,
    Fence,
    FinishReason,
    Limits,
    RequestHandle,
    RequestSpec,
    ScheduledPlan,
)


class Scheduler:
    """Holds a `State` and replaces it by the pure functions; a raised error leaves it as it was."""

    def __init__(self, catalog: Catalog, limits: Limits, policy: PolicyConfig | None = None) -> None:
        self._state = new_state(catalog, limits, policy)

    @classmethod
    def from_state(cls, state: State) -> Scheduler:
        """A scheduler that continues from a state, for replay."""
        self = cls.__new__(cls)
        self._state = state
        return self

    @property
    def state(self) -> State:
        """The current state, a value."""
        return self._state

    def configure_policy(self, policy: PolicyConfig) -> None:
        self._state = configure_policy(self._state, policy)

    def can_admit(self, spec: RequestSpec) -> bool:
        """Whether `admit` would succeed now. Raises RequestError when it never can."""
        return admission.can_admit(self._state, spec)

    def admit(self, spec: RequestSpec, now_ns: int) -> RequestHandle:
        self._state, handle = admission.admit(self._state, spec, now_ns)
        return handle

    def advance_to(self, now_ns: int) -> None:
        self._state = lifecycle.advance_to(self._state, now_ns)

    def victim(self) -> RequestHandle | None:
        """Who must be preempted before the next plan, because a stream has no page for its next token."""
        return preemption.victim(self._state)

    def plan(self) -> ScheduledPlan | None:
        return policy.plan_next(self._state)

    def commit(self, plan: ScheduledPlan, fence: Fence) -> None:
        self._state = lifecycle.commit(self._state, plan, fence)

    def complete(self, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming) -> tuple[Event, ...]:
        self._state, events = completion.complete(self._state, fence, records, timing)
        return events

    def complete_with_survival(
        self, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming, survival: np.ndarray
    ) -> tuple[Event, ...]:
        self._state, events = completion.complete_with_survival(self._state, fence, records, timing, survival)
        return events

    def complete_packed_round(
        self, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming, confidence: np.ndarray
    ) -> tuple[Event, ...]:
        self._state, events = completion.complete_packed_round(self._state, fence, records, timing, confidence)
        return events

    def complete_packed_round_with_survival(
        self, fence: Fence, records: Sequence[CompletionRecord], timing: ExecutionTiming,
        confidence: np.ndarray, survival: np.ndarray,
    ) -> tuple[Event, ...]:  # fmt: skip
        self._state, events = completion.complete_packed_round_with_survival(
            self._state, fence, records, timing, confidence, survival
        )
        return events

    def published_output(self, handle: RequestHandle, fence: Fence) -> None:
        self._state = publication.published_output(self._state, handle, fence)

    def published_outputs(self, handles: Sequence[RequestHandle], fence: Fence) -> None:
        """All publications of a fence at once: one pass over the columns instead of one a handle."""
        self._state = publication.published_outputs(self._state, handles, fence)

    def cancel(self, handle: RequestHandle) -> None:
        self._state = lifecycle.cancel(self._state, handle)

    def finish(self, handle: RequestHandle, reason: FinishReason) -> None:
        self._state = lifecycle.finish(self._state, handle, reason)

    def preempt(self, handle: RequestHandle) -> None:
        self._state = lifecycle.preempt(self._state, handle)

    def external_ready(self, handle: RequestHandle) -> None:
        self._state = lifecycle.external_ready(self._state, handle)

    def offer_copy(self, handle: RequestHandle, proposals: int) -> None:
        self._state = lifecycle.offer_copy(self._state, handle, proposals)

    def awaits_capture(self, handle: RequestHandle) -> bool:
        """Whether the completion of an ended request's response waits for its terminal snapshot."""
        return retirement.awaits_capture(self._state, handle)

    def identify_checkpoint(self, checkpoint: int, key: Hashable) -> None:
        self._state = captures.identify_checkpoint(self._state, checkpoint, key)

    def demand_checkpoint(self, checkpoint: int) -> None:
        self._state = captures.demand_checkpoint(self._state, checkpoint)

    def adopt_checkpoint(self, key: Hashable, endpoint: int, shared: Sequence[int] = ()) -> adoption.Place | None:
        self._state, place = adoption.adopt_checkpoint(self._state, key, endpoint, shared)
        return place

    def withdraw_checkpoint(self, checkpoint: int) -> None:
        self._state = adoption.withdraw_checkpoint(self._state, checkpoint)

    def drop_checkpoints(self) -> None:
        self._state = captures.drop_checkpoints(self._state)

    def page_table(self, handle: RequestHandle) -> np.ndarray:
        """int32 [used pages] of a request that owns its slot, in position order, read-only.

        Raises:
            InvariantError: The handle no longer owns its slot.
        """
        slot, generation = handle
        if not 0 <= slot < self._state.limits.slots or self._state.requests.generation[slot] != generation:
            raise InvariantError(f"{handle} does not own its slot")
        return self._state.pool.tables[slot]

    def snapshot_counters(self) -> dict[str, int | dict[str, int]]:
        """Counters and gauges under the specification's names; labelled ones are mappings."""
        return snapshot_counters(self._state)
